"""What a program assumes about the Python objects around it, and what it leaves in them.

A captured step is frozen: whatever Python knew when it was captured is in the program. *Guards* say what that was, so
that it can be compared before each step; *effects* say what the step does to Python objects, so that it can be done
after each step, with the numbers of that step.
"""

from __future__ import annotations

import operator
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from types import CellType
from typing import Any, Literal

APPLY: Mapping[str, Callable[..., Any]] = {
    name: getattr(operator, name) for name in ("add", "sub", "mul", "truediv", "floordiv", "pow", "mod", "neg", "pos")
} | {"max": max, "min": min}  # what programs do with numbers
MISSING: Any = type("Missing", (), {"__repr__": lambda _: "nothing", "__slots__": ()})()


@dataclass(frozen=True, eq=False, slots=True)
class Place:
    """Somewhere in the caller's objects: an entry of a mapping, an item of a list, a cell's content or an attribute."""

    holder: Any
    key: Any  # None for a cell
    name: str  # as a person finds it: "model.encoder.0.p", "GAIN (train.py)"

    def get(self) -> Any:
        """What is there now, or MISSING."""
        holder, key = self.holder, self.key
        if isinstance(holder, dict):
            return dict.get(holder, key, MISSING)  # as it is there: a subclass may answer otherwise
        try:
            if isinstance(holder, CellType):
                return holder.cell_contents
            if isinstance(holder, type):
                return holder.__dict__.get(key, MISSING)
            return holder[key] if isinstance(holder, (list, tuple)) else getattr(holder, key)
        except (ValueError, IndexError, AttributeError):
            return MISSING

    def set(self, value: Any) -> None:
        """Put something there."""
        if isinstance(self.holder, CellType):
            self.holder.cell_contents = value
        elif isinstance(self.holder, (dict, list)):
            self.holder[self.key] = value
        else:
            setattr(self.holder, self.key, value)

    def delete(self) -> None:
        """Leave nothing there."""
        if isinstance(self.holder, CellType):
            del self.holder.cell_contents
        elif isinstance(self.holder, (dict, list)):
            del self.holder[self.key]
        else:
            delattr(self.holder, self.key)


def keys_of(mapping: dict[Any, Any]) -> tuple[Any, ...]:
    """The keys of a mapping in their order, whatever methods its class has."""
    return tuple(OrderedDict.keys(mapping) if isinstance(mapping, OrderedDict) else dict.keys(mapping))


def content_of(mapping: dict[Any, Any]) -> dict[Any, Any]:
    """What is in a mapping, whatever methods its class has."""
    return {key: dict.get(mapping, key) for key in keys_of(mapping)}


class Attributes:
    """The attributes of a thing whose entries are others: of a class its order of bases, of a mapping its factory."""

    __slots__ = ("_thing",)

    _thing: Any

    def __init__(self, thing: Any) -> None:
        object.__setattr__(self, "_thing", thing)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._thing, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._thing, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._thing, name)


def attributes_of(thing: Any) -> dict[str, Any] | None:
    """What an object keeps by name beside its items; None where it keeps nothing so, or they are the same."""
    found = getattr(thing, "__dict__", None)
    return found if isinstance(found, dict) and found is not thing else None


def slots_of(kind: type) -> tuple[str, ...]:
    """The names of what objects of a class keep without a mapping."""
    found: list[str] = []
    for base in kind.__mro__:
        own = base.__dict__.get("__slots__", ())
        found += [own] if isinstance(own, str) else list(own)
    return tuple(key for key in found if key not in ("__dict__", "__weakref__"))


@dataclass(frozen=True, eq=False, slots=True)
class Entry:
    """This object is there, or one that means the same."""

    place: Place
    value: Any


@dataclass(frozen=True, eq=False, slots=True)
class Names:
    """A mapping has these keys; of attributes only those count that the step asks for."""

    holder: dict[Any, Any]
    keys: tuple[Any, ...]
    asked: frozenset[str] | None  # None: all of them, and in this order
    name: str


@dataclass(frozen=True, eq=False, slots=True)
class Content:
    """A list, set, queue or array has this content."""

    holder: Any
    content: Any  # a copy
    name: str


@dataclass(frozen=True, eq=False, slots=True)
class Kind:
    """A tensor that the step was not given has these sizes, strides and type; what is in it may change."""

    tensor: Any
    kind: tuple[Any, ...]
    name: str


@dataclass(frozen=True, slots=True)
class Comparison:
    """A comparison that the step's own code made of a number that may change, and its answer then."""

    expression: Expression
    comparison: str  # "ne"
    other: Expression
    answer: bool

    @property
    def draws(self) -> bool:
        """Whether it depends on a number that is drawn."""
        return any(path[0] == "draw" for path in self.expression.paths() | self.other.paths())

    def show(self, numbers: Sequence[str]) -> str:
        """The numbers that it depends on, by their names."""
        paths = sorted(self.expression.paths() | self.other.paths(), key=str)
        names = [numbers[int(path[1])] if path[0] == "number" else f"{path[1]!r} of group {path[0]}" for path in paths]
        return " and ".join(names)


@dataclass(frozen=True, slots=True)
class Expression:
    """A number of the step, from those that are given to it; with no operator it is one of them, or a constant."""

    operator: str | None  # "add"
    operands: tuple[Expression, ...] = ()
    path: tuple[str | int, ...] | None = None  # of the number that is given
    constant: float | int | None = None

    def value(self, given: Callable[[tuple[str | int, ...]], float], apply: Mapping[str, Callable[..., Any]]) -> Any:
        """The number, where those that are given are these."""
        if self.path is not None:
            return given(self.path)
        if self.operator is None:
            return self.constant
        return apply[self.operator](*(operand.value(given, apply) for operand in self.operands))

    def paths(self) -> frozenset[tuple[str | int, ...]]:
        """The numbers that it depends on."""
        own = frozenset((self.path,)) if self.path is not None else frozenset()
        return own.union(*(operand.paths() for operand in self.operands))


@dataclass(frozen=True, eq=False, slots=True)
class Effect:
    """What a step does to one of the caller's objects; what it puts there is known when the step has run."""

    how: Literal["put", "delete", "append", "replace", "call"]
    place: Place  # for "append" and "replace" its holder is the container, for "call" the function


@dataclass(frozen=True)
class Draw:
    """A number that the step draws from a generator of Python's or numpy's."""

    generator: str  # "random" or "numpy.random"
    method: str  # "random", "getrandbits", "uniform"
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    value: Any  # that the program was captured with; MISSING where it is an input of the program
    source: str  # "train.py:42"


@dataclass(frozen=True)
class Guards:
    """All that a program assumes about the world around it."""

    entries: tuple[Entry, ...] = ()
    names: tuple[Names, ...] = ()
    contents: tuple[Content, ...] = ()
    kinds: tuple[tuple[Any, type], ...] = ()  # objects, and their classes
    tensors: tuple[Kind, ...] = ()
    weak: tuple[tuple[Callable[[], Any], str], ...] = ()  # weak references that must lead somewhere, and their names
    around: tuple[Any, ...] = ()  # settings of torch, in the order of `watch.NAMES`
    comparisons: tuple[Comparison, ...] = ()  # of numbers that are inputs
    numbers: tuple[Place, ...] = ()  # Python numbers that are inputs of the program
    draws: tuple[Draw, ...] = ()
    opaque: tuple[str, ...] = ()  # known by their identity only: what is inside of them may change unseen

    def without(self, places: Collection[tuple[int, Any]]) -> Guards:
        """The same without what is assumed of some places, each the identity of its holder and its key."""
        if not places:
            return self
        kept = (item for item in self.entries if (id(item.place.holder), item.place.key) not in places)
        return replace(self, entries=tuple(kept))

    def explain(self) -> list[str]:
        """One line for each thing that is assumed."""
        lines = [f"{entry.place.name} is {_show(entry.value)}" for entry in self.entries if _telling(entry.value)]
        lines += [f"{item.name} contains {_show(item.content)}" for item in self.contents]
        lines += [f"{place.name} is a number, whatever it is" for place in self.numbers]
        lines += [f"{draw.generator}.{draw.method} is drawn at {draw.source}" for draw in self.draws]
        lines += [f"{name} is the same object; changes inside of it are not seen" for name in self.opaque]
        objects = sum(not _telling(entry.value) for entry in self.entries)
        lines.append(f"{objects} modules, functions, parameters and other objects are the same, and so are their parts")
        return lines


@dataclass(frozen=True)
class Change:
    """What is not as it was when the program was captured."""

    name: str
    what: str  # a sentence about it
    place: Place | None = None  # of a number that changed
    expected: bool = False  # as new batches and draws are: it may ask for as many captures as it likes


def _telling(value: Any) -> bool:
    return value is None or isinstance(value, (bool, int, float, complex, str, bytes))


def _show(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
