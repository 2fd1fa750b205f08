"""Batches and results as trees: tuples, lists, mappings, dataclasses and objects around tensors, with other leaves."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections import UserDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from lowtide.errors import UsageError

Path = tuple[str | int, ...]


@dataclass(frozen=True)
class Tree:
    """The shape of a tree: what it takes to rebuild the object from its leaves."""

    form: Literal["leaf", "sequence", "mapping", "dataclass", "object", "attributed"]
    type: type = object
    keys: tuple[Any, ...] = ()
    children: tuple[Tree, ...] = ()
    left: tuple[str, ...] = ()  # attributes that have no content to be compared: they are not there when it is rebuilt
    template: Any = dataclasses.field(
        default=None, compare=False, repr=False
    )  # an empty mapping, or an object, to copy; None for a mapping: it is made of a dict

    @functools.cached_property
    def _hash(self) -> int:
        return hash((self.form, self.type, self.keys, self.children, self.left))

    def __hash__(self) -> int:
        """Known after the first time: trees are looked up at every step."""
        return self._hash

    def paths(self) -> Iterator[Path]:
        """The path of each leaf, in order."""
        if self.form == "leaf":
            yield ()
        for key, child in zip(self.keys, self.children, strict=True):
            for path in child.paths():
                yield (key if isinstance(key, int) else str(key), *path)

    def left_out(self) -> Iterator[tuple[Any, str]]:
        """The attributes that are not among the leaves, with the class of what has them."""
        yield from ((self.type, name) for name in self.left)
        for child in self.children:
            yield from child.left_out()

    def kinds(self) -> frozenset[Any]:
        """The classes of all that is around the leaves."""
        return frozenset((self.type,)).union(*[child.kinds() for child in self.children])

    def build(self, leaves: Sequence[Any]) -> Any:
        """The object with these leaves."""
        return self._take(iter(leaves))

    def _take(self, leaves: Iterator[Any]) -> Any:
        if self.form == "leaf":
            return next(leaves)
        parts = [child._take(leaves) for child in self.children]
        if self.form == "dataclass":
            return _dataclass_of(self.type, dict(zip(self.keys, parts, strict=True)))
        if self.form == "attributed":
            made, *attributes = parts
            made.__dict__.update(dict.fromkeys(self.left))
            made.__dict__.update(zip(self.keys[1:], attributes, strict=True))
            return made
        if self.form == "object":
            made = copy.copy(self.template)
            made.__dict__.update(zip(self.keys, parts, strict=True))
            return made
        if self.form == "mapping" and self.template is None:
            return self.type(dict(zip(self.keys, parts, strict=True)))
        if self.form == "mapping":
            made = _like(self.template)
            for key, part in zip(self.keys, parts, strict=True):
                made[key] = part
            return made
        return self.type(*parts) if hasattr(self.type, "_fields") else self.type(parts)

    def __str__(self) -> str:
        if self.form == "leaf":
            return "*"
        inside = ", ".join(
            str(child) if self.form == "sequence" else f"{key}: {child}"
            for key, child in zip(self.keys, self.children, strict=True)
        )
        return f"{self.type.__name__}({inside})"


LEAF = Tree("leaf")


def flatten(thing: Any) -> tuple[list[Any], Tree]:
    """The leaves of a nested object, and the tree that puts them back."""
    leaves: list[Any] = []
    try:
        return leaves, _flatten(thing, leaves)
    except RecursionError:
        raise UsageError(
            f"a {type(thing).__name__} contains itself, or is nested too deeply to be taken apart.",
            hint="pass to the step, and return from it, what it needs of it.",
        ) from None


def _flatten(thing: Any, leaves: list[Any]) -> Tree:
    kind: Any = type(thing)
    if is_leaf(kind):
        leaves.append(thing)
        return LEAF
    if kind is tuple or kind is list:
        children = tuple([_flatten(part, leaves) for part in thing])
        plain = children.count(LEAF) == len(children)
        return _of_leaves(kind, len(children)) if plain else _sequence(kind, children)
    if dataclasses.is_dataclass(thing) and not isinstance(thing, type):
        return _of_dataclass(thing, leaves)
    if isinstance(thing, Mapping):
        return _of_mapping(thing, leaves)
    if isinstance(thing, (tuple, list)):
        return _attributed(thing, _sequence(kind, tuple(_flatten(part, leaves) for part in thing)), leaves)
    if _around_tensors(thing):
        return _of_object(thing, leaves)
    leaves.append(thing)
    return LEAF


def _of_dataclass(thing: Any, leaves: list[Any]) -> Tree:
    """With all that it has, given or not, unless its class makes its objects in a way of its own."""
    kind: Any = type(thing)
    fields = dataclasses.fields(thing)
    keys = [field.name for field in fields if field.init or (_made_plainly(kind) and hasattr(thing, field.name))]
    if _made_plainly(kind):
        keys = [*dict.fromkeys([*keys, *getattr(thing, "__dict__", ())])]
    children = tuple(_flatten(getattr(thing, key), leaves) for key in keys)
    return Tree("dataclass", kind, tuple(keys), children)


def _dataclass_of(kind: Any, parts: dict[str, Any]) -> Any:
    """What was done when the original was made is done: `__post_init__` is not run again."""
    if not _made_plainly(kind):
        return kind(**parts)
    made = object.__new__(kind)
    for key, part in parts.items():
        object.__setattr__(made, key, part)  # frozen ones, too
    return made


@functools.lru_cache(maxsize=1024)
def _made_plainly(kind: Any) -> bool:
    return kind.__new__ is object.__new__ and not issubclass(kind, Mapping)


def _of_mapping(thing: Any, leaves: list[Any]) -> Tree:
    """A mapping that is no dict has its items among its attributes, or can be made of a dict."""
    is_dict = isinstance(thing, (dict, UserDict))
    if not is_dict and getattr(thing, "__dict__", None):
        return _of_object(thing, leaves)
    keys = tuple(thing)
    children = tuple(_flatten(thing[key], leaves) for key in keys)
    if not is_dict:
        return Tree("mapping", type(thing), keys, children)
    template = _like(thing)
    for key in keys:
        del template[key]
    return _attributed(thing, Tree("mapping", type(thing), keys, children, template=template), leaves)


def _like(thing: Any) -> Any:
    """A copy; a dict whose attributes are its items stays one."""
    made = copy.copy(thing)
    if getattr(thing, "__dict__", None) is thing:
        made.__dict__ = made
    return made


def _attributed(thing: Any, items: Tree, leaves: list[Any]) -> Tree:
    """A container with the attributes that the caller has given it: tensors and what has a content to be compared."""
    attributes = getattr(thing, "__dict__", None)
    if not attributes or attributes is thing:
        return items
    inside = "data" if isinstance(thing, UserDict) else None
    plain = {name: _plain(part) for name, part in attributes.items() if name != inside}
    if not plain:
        return items
    names = tuple(name for name in plain if plain[name])
    left = tuple(name for name in plain if not plain[name])
    children = tuple(_flatten(attributes[name], leaves) for name in names)
    return Tree("attributed", type(thing), ("items", *names), (items, *children), left)


def _plain(thing: Any) -> bool:
    """Whether all that is in it are leaves by their class, as tensors and numbers are."""
    kinds: list[Any] = [type(leaf) for leaf in flatten(thing)[0]]
    return all(map(is_leaf, kinds))


def _of_object(thing: Any, leaves: list[Any]) -> Tree:
    keys = tuple(vars(thing))
    children = tuple(_flatten(vars(thing)[key], leaves) for key in keys)
    return Tree("object", type(thing), keys, children, template=thing)


@functools.lru_cache(maxsize=1024)
def is_leaf(kind: type) -> bool:
    """Whether objects of this class are leaves, whatever is in them: tensors, numbers and text, above all."""
    if dataclasses.is_dataclass(kind) or issubclass(kind, (Mapping, tuple, list)):
        return False
    return _of_library(kind) or _tensor(kind)


def _sequence(kind: type, children: tuple[Tree, ...]) -> Tree:
    return Tree("sequence", kind, tuple(range(len(children))), children)


@functools.lru_cache(maxsize=1024)
def _of_leaves(kind: type, count: int) -> Tree:
    """A sequence of so many leaves, as most batches are."""
    return _sequence(kind, (LEAF,) * count)


def _around_tensors(thing: Any) -> bool:
    """Whether an object of a class of the user's has tensors, or numbers of a running step, among its attributes."""
    attributes = getattr(thing, "__dict__", None)
    if not isinstance(attributes, dict) or callable(thing) or _tensor(type(thing)) or _of_library(type(thing)):
        return False
    return any(_tensor(type(part)) or _around_tensors(part) for part in attributes.values())


def _of_library(kind: type) -> bool:
    return kind.__module__.partition(".")[0] in ("torch", "numpy", "builtins")


def _tensor(kind: type) -> bool:
    return hasattr(kind, "__torch_function__") or kind.__name__ == "SymFloat"
