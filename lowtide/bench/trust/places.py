"""Where a value of a program is kept: paths that mean the same in both twins, found by walking what the program has."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass
from types import FunctionType, MethodType, ModuleType
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lowtide.bench.trust.twins import FOREIGN, Twin

Form = Literal["attribute", "item", "cell", "default"]
Root = str  # "model", "net", "optimizer", "batch", "step", or the name of a module

PARTS = frozenset(vars(nn.Module())) - {"training"}  # of every module; other edits are for them
DEPTH = 5
DATA = {"builtins", "types", "collections", "enum"}  # of the standard library, whose objects may be a program's data


@dataclass(frozen=True)
class Link:
    """One link of a path."""

    form: Form
    key: Any

    def __str__(self) -> str:
        match self.form:
            case "attribute":
                return f".{self.key}"
            case "item":
                return f'["{self.key}"]' if isinstance(self.key, str) else f"[{self.key!r}]"
            case _:
                return f"<{self.form} {self.key}>"


@dataclass(frozen=True)
class Place:
    """Where something is kept, as a path from a root of the twin."""

    root: Root
    links: tuple[Link, ...]

    def __str__(self) -> str:
        return self.root + "".join(map(str, self.links))

    def below(self, form: Form, key: Any) -> Place:
        """A place in what is kept here."""
        return Place(self.root, (*self.links, Link(form, key)))

    @property
    def above(self) -> Place:
        """Where the holder is kept."""
        return Place(self.root, self.links[:-1])

    def get(self, twin: Twin) -> Any:
        """What is kept here."""
        thing = root(twin, self.root)
        for link in self.links:
            thing = _get(thing, link)
        return thing

    def put(self, twin: Twin, value: Any) -> None:
        """Keep something else here; a holder that cannot be changed is made anew."""
        holder, link = self.above.get(twin), self.links[-1]
        key = link.key
        if link.form == "cell":
            _cell(holder, key).cell_contents = value
        elif link.form == "default":
            old = holder.__defaults__
            holder.__defaults__ = (*old[:key], value, *old[key + 1 :])
        elif link.form == "item":
            if isinstance(holder, tuple):
                parts = [*holder[:key], value, *holder[key + 1 :]]
                self.above.put(twin, type(holder)(*parts) if hasattr(holder, "_fields") else type(holder)(parts))
            else:
                holder[key] = value
        elif getattr(getattr(holder, "__dataclass_params__", None), "frozen", False):
            self.above.put(twin, dataclasses.replace(holder, **{key: value}))
        elif isinstance(holder, ModuleType):
            vars(holder)[key] = value
        else:
            setattr(holder, key, value)

    def delete(self, twin: Twin) -> None:
        """Keep nothing here any more."""
        holder, link = self.above.get(twin), self.links[-1]
        if link.form == "item":
            del holder[link.key]
        else:
            delattr(holder, link.key)


def root(twin: Twin, name: Root) -> Any:
    """What a path begins with."""
    match name:
        case "model":
            return twin.model
        case "net":
            return twin.handle
        case "optimizer":
            return twin.optimizer
        case "batch":
            return twin.batch
        case "step":
            return twin.step
        case _:
            return twin.modules[name]


def _get(holder: Any, link: Link) -> Any:
    match link.form:
        case "cell":
            return _cell(holder, link.key).cell_contents
        case "default":
            return holder.__defaults__[link.key]
        case "item":
            return holder[link.key]
        case _:
            return getattr(holder, link.key)


def _cell(function: Any, name: str) -> Any:
    function = function.__func__ if isinstance(function, MethodType) else function
    return function.__closure__[function.__code__.co_freevars.index(name)]


def module_place(name: str) -> Place:
    """The place of a module of the model, by its name there."""
    links = tuple(Link("attribute", part) for part in name.split(".")) if name else ()
    return Place("model", links)


def places(twin: Twin) -> Iterator[Place]:
    """Every place of a value in a program, in an order that both twins share."""
    walk = _Walk(twin)
    for name, module in twin.model.named_modules():
        for key in vars(module):
            if key not in PARTS:
                yield from walk.at(module_place(name).below("attribute", key))
    if isinstance(twin.optimizer, tuple):
        for number in range(len(twin.optimizer)):
            yield from walk.optimizer(Place("optimizer", (Link("item", number),)))
    elif twin.optimizer is not None:
        yield from walk.optimizer(Place("optimizer", ()))
    yield from walk.inside(Place("step", ()), twin.step, 0)
    for name, module in twin.modules.items():
        for key in list(vars(module)):
            if not key.startswith("__"):
                yield from walk.at(Place(name, (Link("attribute", key),)))


class _Walk:
    """A walk that looks into each object once."""

    def __init__(self, twin: Twin) -> None:
        self._twin = twin
        self._seen: set[int] = set()
        self._alive: list[Any] = []

    def at(self, place: Place, depth: int = 0) -> Iterator[Place]:
        """A place and those in what it keeps."""
        try:
            thing = place.get(self._twin)
        except (AttributeError, KeyError, IndexError, ValueError, TypeError):
            return
        if isinstance(thing, ModuleType | nn.Module) or _of_the_library(thing):
            return
        if not isinstance(thing, type):
            yield place
        if depth < DEPTH:
            yield from self.inside(place, thing, depth)

    def inside(self, place: Place, thing: Any, depth: int) -> Iterator[Place]:
        """The places in an object."""
        if id(thing) in self._seen or isinstance(thing, str | bytes | Tensor | int | float | None):
            return
        self._seen.add(id(thing))
        self._alive.append(thing)
        for below in self._below(place, thing):
            yield from self.at(below, depth + 1)

    def optimizer(self, place: Place) -> Iterator[Place]:
        """The options of an optimizer, of each group and by default."""
        optimizer = place.get(self._twin)
        if id(optimizer) in self._seen:
            return
        self._seen.add(id(optimizer))
        for number, group in enumerate(optimizer.param_groups):
            for key in group:
                if key != "params":
                    yield from self.at(
                        place.below("attribute", "param_groups").below("item", number).below("item", key)
                    )
        for key in optimizer.defaults:
            yield place.below("attribute", "defaults").below("item", key)

    def _below(self, place: Place, thing: Any) -> Iterator[Place]:
        if isinstance(thing, MethodType):
            yield from self._attributes(place.below("attribute", "__self__"), thing.__self__)
        elif isinstance(thing, torch.optim.Optimizer):
            yield from self.optimizer(place)
        elif isinstance(thing, FunctionType):
            if thing.__module__ not in {module.__name__ for module in self._twin.modules.values()}:
                return
            yield from (place.below("cell", name) for name in thing.__code__.co_freevars)
            yield from (place.below("default", number) for number in range(len(thing.__defaults__ or ())))
        elif isinstance(thing, MutableMapping):
            yield from (place.below("item", key) for key in list(thing) if isinstance(key, str | int))
        elif isinstance(thing, list | tuple):
            yield from (place.below("item", number) for number in range(len(thing)))
        else:
            yield from self._attributes(place, thing)

    def _attributes(self, place: Place, thing: Any) -> Iterator[Place]:
        kind = thing if isinstance(thing, type) else type(thing)
        if not isinstance(kind.__module__, str) or kind.__module__.partition(".")[0] in FOREIGN or not _plain(kind):
            return
        for key, value in list(getattr(thing, "__dict__", {}).items()):
            if not key.startswith("__") and not isinstance(value, property | classmethod | staticmethod):
                yield place.below("attribute", key)


def _of_the_library(thing: Any) -> bool:
    """Whether a class, a function or a tool is the standard library's."""
    named = thing if isinstance(thing, type | FunctionType) else type(thing)
    where = getattr(named, "__module__", None)
    return isinstance(where, str) and where.partition(".")[0] in sys.stdlib_module_names - DATA


def _plain(kind: type) -> bool:
    """Whether objects of a class are a program's data, and no enums."""
    return "_member_map_" not in vars(kind)
