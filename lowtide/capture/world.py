"""The Python objects around a step: what they contained before it was traced, what it read and what it changed.

Every object that the step's code can reach from what it names is looked at before that code runs; afterwards a
difference is an effect of the step, and is undone. What the step assumes are the entries that its lines loaded.
"""

from __future__ import annotations

import array
import collections
import copy
import enum
import functools
import gc
import operator
import random
import sys
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import (
    BuiltinFunctionType,
    CellType,
    FunctionType,
    MappingProxyType,
    MethodType,
    ModuleType,
)
from typing import Any

import numpy
import torch

from lowtide.capture.caches import CACHED, Cache
from lowtide.guards import MISSING, Attributes, Effect, Place, attributes_of, content_of, slots_of
from lowtide.private import FakeTensor

MANY = 1000  # items of a container that are looked into
MOST = 30_000  # objects that are looked at from one name
ATOMS = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, range, slice)
CONTAINERS = (dict, list, tuple, set, frozenset, collections.deque, bytearray, array.array, numpy.ndarray)
# Objects of classes of the user's that are one of these have attributes beside their content.
BASES = (*ATOMS, *CONTAINERS, functools.partial, property, staticmethod, classmethod)
# Modules of the standard library whose objects are plain data.
STRUCTURES = (
    *("types", "_thread", "argparse", "collections", "dataclasses", "configparser", "weakref", "_weakrefset", "queue"),
    *("fractions", "string", "pathlib", "contextlib", "functools", "enum", "threading"),
)
LARGE = 65_536  # bytes of an array that are compared
# What Python itself asks a class for, without a line that says so.
SPECIAL = frozenset(name for name in vars(operator) if name.startswith("__")) | frozenset(
    f"__{name}__"
    for name in (
        *("call", "get", "set", "delete", "getattr", "getattribute", "setattr", "len", "bool", "iter", "next", "float"),
        *("int", "index", "complex", "hash", "str", "repr", "format", "enter", "exit", "round", "missing", "reversed"),
        *("radd", "rsub", "rmul", "rtruediv", "rfloordiv", "rmod", "rpow", "rmatmul", "torch_function", "new", "init"),
        *("instancecheck", "subclasscheck", "class_getitem"),
    )
)
LIBRARIES = frozenset(sys.stdlib_module_names) | {"torch", "numpy", "builtins"}
REGISTRIES = (
    "_modules",
    "_parameters",
    "_buffers",
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
)
OPTIMIZER_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


def library(name: str) -> bool:
    """Whether a module of this name is torch's, numpy's, the standard library's or our own, and not the user's."""
    root = name.partition(".")[0]
    ours = root == "lowtide" and not name.startswith(("lowtide.models", "lowtide.bench"))
    return root in LIBRARIES or ours


def is_atom(value: Any) -> bool:
    """Whether an object is plain data with nothing inside; of a class of the user's it may have attributes."""
    return isinstance(value, ATOMS) and library(type(value).__module__)


@dataclass
class Held:
    """One object that can change, and what was in it before the step."""

    holder: Any
    before: Any  # a copy
    name: str
    attributes: bool = False  # of an object: only those that the step asks for matter
    ignored: tuple[str, ...] = ()  # attributes that others look after


@dataclass
class _Weak:
    """On the way to an object by a weak reference."""

    target: Any


class World:
    """What was looked at, from the objects that a step was given and from the names that its code loaded."""

    def __init__(self) -> None:
        self.held: dict[int, Held] = {}
        self.slotted: dict[int, Held] = {}  # slots of objects with other content, too
        self.seen: dict[int, Any] = {}  # every object that was looked at, kept alive so that its identity stays its own
        self.names: dict[tuple[int, str], tuple[Place, Any]] = {}  # global names, and what they stood for
        self.opaque: dict[int, str] = {}
        self.marks: dict[int, dict[str, Any]] = {}  # of tensors: what users put on them
        self.weak: dict[int, str] = {}  # objects that only weak references led to
        self.caches: dict[int, Cache] = {}  # of functions
        self.generators: list[tuple[Any, Any, str]] = []  # of random numbers: their state before the step, and name

    def hold_name(self, home: dict[str, Any], name: str, file: str) -> Any:
        """Note what a global name stands for now, if that was not done before; returns what it stood for then."""
        if (id(home), name) not in self.names:
            self.names[id(home), name] = (Place(home, name, f"{name} ({file})"), home.get(name, MISSING))
        return self.names[id(home), name][1]

    def see(self, value: Any, name: str) -> None:
        """Note what this object and all that is reachable from it contain now."""
        waiting, count = collections.deque(((value, name),)), 0
        while waiting:
            value, name = waiting.popleft()
            if is_atom(value):
                continue
            if isinstance(value, _Weak):
                value = value.target
                if id(value) not in self.seen and not isinstance(value, type):
                    self.weak[id(value)] = name
            else:
                self.weak.pop(id(value), None)
            if id(value) in self.seen:
                continue
            count += 1
            if count > MOST:
                self.opaque[id(value)] = name
                continue
            self.seen[id(value)] = value
            waiting.extend(self._inside(value, name))

    def _inside(self, value: Any, name: str) -> Iterator[tuple[Any, str]]:
        """What is in an object, after it was written down."""
        if isinstance(value, BASES) and not isinstance(value, enum.Enum):
            yield from self._beside(value, name)
        if (parts := parts_of(value, name)) is not None:
            yield from parts
            return
        if is_cached(value):
            cache = self.caches[id(value)] = Cache(value, name)
            yield from ((answer, f"what {name} keeps") for answer in cache.answers.values())
            yield value.__wrapped__, name
            return
        match value:
            case ModuleType():
                yield from self._data_of(value)
            case torch.Tensor():
                if (attributes := getattr(value, "__dict__", None)) and not isinstance(value, FakeTensor):
                    self.marks[id(value)] = attributes
                    yield from self._object(None, attributes, name)
            case weakref.ref():
                if (target := value()) is not None:
                    yield _Weak(target), name
            case enum.Enum():
                yield from self._object(value, value.__dict__, name)
            case random.Random() | numpy.random.Generator() | numpy.random.RandomState():
                self.generators.append((value, generator_state(value), name))
            case torch.nn.Module():
                yield from self._object(value, value.__dict__, name)
            case torch.optim.Optimizer():
                yield from self._object(value, value.__dict__, name, without=("param_groups", "state", "defaults"))
            case dict():
                before = content_of(value)
                if isinstance(value, collections.defaultdict):
                    yield value.default_factory, f"{name}.default_factory"
                yield from self._hold(value, before, name, ((item, f"{name}[{key!r}]") for key, item in before.items()))
            case list() | collections.deque():
                yield from self._hold(value, list(value), name, _numbered(value, name))
            case set() | bytearray() | array.array():
                yield from self._hold(value, copy.copy(value), name, ())
            case numpy.ndarray():
                if value.nbytes <= LARGE:
                    self.held[id(value)] = Held(value, value.copy(), name)
                else:
                    self.opaque[id(value)] = name
            case FunctionType():
                yield from self._function(value, name)
            case type():
                if not library(value.__module__):
                    self.held[id(value)] = Held(value, own_names(value), value.__name__, attributes=True)
                    yield from ((item, f"{value.__name__}.{key}") for key, item in own_names(value).items())
                    yield from ((base, base.__name__) for base in value.__mro__[1:])
                    yield type(value), type(value).__name__
            case _:
                yield from self._other(value, name)

    def _data_of(self, module: ModuleType) -> Iterator[tuple[Any, str]]:
        """The data in a module of the user's; the names that its own functions load are noted when they run."""
        if library(module.__name__):
            return
        before = dict(module.__dict__)
        self.held[id(module.__dict__)] = Held(module.__dict__, before, module.__name__, attributes=True)
        for key, item in before.items():
            data = not isinstance(item, (type, ModuleType)) and not callable(item)
            if not key.startswith("__") and (data or is_cached(item)):
                yield item, f"{module.__name__}.{key}"

    def _hold(
        self, holder: Any, before: Any, name: str, inside: Iterable[tuple[Any, str]]
    ) -> Iterator[tuple[Any, str]]:
        self.held[id(holder)] = Held(holder, before, name)
        if len(before) > MANY:
            self.opaque[id(holder)] = name
        else:
            yield from inside

    def _object(
        self, value: Any, attributes: dict[str, Any], name: str, *, without: tuple[str, ...] = ()
    ) -> Iterator[tuple[Any, str]]:
        """An object by its attributes, and its class."""
        self.held[id(attributes)] = Held(attributes, dict(attributes), name, attributes=True, ignored=without)
        self.seen[id(attributes)] = attributes
        for key, item in attributes.items():
            if key not in without:
                yield item, f"{name}.{key}"
        if isinstance(value, torch.nn.Module):
            yield from ((child, f"{name}.{key}") for key, child in value.named_children())
        if value is not None:
            yield type(value), type(value).__name__

    def _function(self, function: FunctionType, name: str) -> Iterator[tuple[Any, str]]:
        if is_foreign(function):
            return
        for key, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            self.seen[id(cell)] = cell
            content = _content(cell)
            self.held[id(cell)] = Held(cell, content, f"{key} (closure of {function.__qualname__})")
            if content is not MISSING:
                yield content, key
        yield function.__defaults__, f"{name}.__defaults__"
        yield function.__kwdefaults__, f"{name}.__kwdefaults__"
        yield from self._object(None, function.__dict__, name)

    def _beside(self, value: Any, name: str) -> Iterator[tuple[Any, str]]:
        """What a container or plain data has by name: attributes, slots, and a class of the user's."""
        kind = type(value)
        own = not library(kind.__module__)
        if own and (slots := slots_of(kind)):
            held = {key: getattr(value, key, MISSING) for key in slots}
            self.slotted[id(value)] = Held(Attributes(value), held, name, attributes=True)
            yield from ((item, f"{name}.{key}") for key, item in held.items())
        attributes = attributes_of(value)
        if attributes or (own and attributes is not None):
            yield from self._object(None, attributes, name)
        if own:
            yield kind, kind.__name__

    def _other(self, value: Any, name: str) -> Iterator[tuple[Any, str]]:
        kind = type(value)
        plain = not library(kind.__module__) or kind.__module__.partition(".")[0] in (*STRUCTURES, "torch")
        attributes = getattr(value, "__dict__", None) if plain else None
        slots = slots_of(kind) if plain else ()
        if not isinstance(attributes, dict) and not slots:
            self.opaque[id(value)] = name
            return
        if slots:
            held = {key: getattr(value, key, MISSING) for key in slots}
            self.held[id(value)] = Held(value, held, name, attributes=True)
            yield from ((item, f"{name}.{key}") for key, item in held.items())
        if isinstance(attributes, dict):
            yield from self._object(value, attributes, name)

    # What the step did

    def effects(self) -> list[tuple[Effect, Any]]:
        """What is not as it was, and what is there now."""
        found: list[tuple[Effect, Any]] = []
        for held in (*self.held.values(), *self.slotted.values()):
            found += _differences(held)
        for place, before in self.names.values():
            if place.get() is not before:
                found.append((Effect("put", place), place.get()))
        return found

    def undo(self) -> None:
        """Put everything back."""
        for cache in self.caches.values():
            cache.undo()
        for held in (*self.held.values(), *self.slotted.values()):
            if any(_differences(held)):
                _restore(held)
        for place, before in self.names.values():
            if place.get() is not before:
                place.set(before) if before is not MISSING else place.delete()


def _differences(held: Held) -> Iterator[tuple[Effect, Any]]:
    """The effects on one object."""
    holder, before, name = held.holder, held.before, held.name

    def dot(key: Any) -> str:
        return f"{name}.{key}" if held.attributes else f"{name}[{key!r}]"

    match holder:
        case dict() | type():
            now = own_names(holder) if isinstance(holder, type) else content_of(holder)
            for key, item in now.items():
                if before.get(key, MISSING) is not item and key not in held.ignored:
                    yield Effect("put", Place(holder, key, dot(key))), item
            for key in before:
                if key not in now:
                    yield Effect("delete", Place(holder, key, dot(key))), None
        case list() | collections.deque():
            items = list(holder)
            alike = sum(1 for one, other in zip(before, items, strict=False) if one is other)
            if alike == len(before) < len(items):
                yield Effect("append", Place(holder, None, name)), items[len(before) :]
            elif not alike == len(before) == len(items):
                yield Effect("replace", Place(holder, None, name)), items
        case set() | bytearray() | array.array():
            if holder != before:
                yield Effect("replace", Place(holder, None, name)), copy.copy(holder)
        case numpy.ndarray():
            if not same_array(holder, before):
                yield Effect("replace", Place(holder, None, name)), holder.copy()
        case CellType():
            now = _content(holder)
            if now is not before:
                yield Effect("put", Place(holder, None, name)), now
        case _:
            for key, item in before.items():
                now = getattr(holder, key, MISSING)
                if now is not item:
                    yield Effect("put", Place(holder, key, dot(key))), now


def _restore(held: Held) -> None:
    holder, before = held.holder, held.before
    match holder:
        case dict():
            kept = {key: holder[key] for key in held.ignored if key in holder}
            holder.clear()
            holder.update({**before, **kept})
        case list() | bytearray() | array.array():
            holder[:] = before
        case collections.deque() | set():
            holder.clear()
            holder.extend(before) if isinstance(holder, collections.deque) else holder.update(before)
        case numpy.ndarray():
            holder[...] = before
        case CellType():
            if before is MISSING:
                del holder.cell_contents
            else:
                holder.cell_contents = before
        case _:
            added = set(own_names(holder)) - set(before) if isinstance(holder, type) else ()
            for key, item in (*before.items(), *((key, MISSING) for key in added)):
                if item is not MISSING:
                    setattr(holder, key, item)
                elif hasattr(holder, key):
                    delattr(holder, key)


def is_foreign(function: FunctionType) -> bool:
    """Whether a function is a library's, and holds nothing of the user's, as those around decorated functions do."""
    home = function.__module__ or ""
    return library(home) and not (function.__closure__ and home in STRUCTURES)


def is_cached(value: Any) -> bool:
    """Whether this is a function with a cache; those of libraries are theirs, unless the user made one of theirs."""
    if not isinstance(value, CACHED):
        return False
    home = sys.modules.get(value.__module__ or "")
    return home is None or getattr(home, value.__name__, None) is not value or not library(value.__module__)


def parts_of(value: Any, name: str) -> Iterable[tuple[Any, str]] | None:
    """What is in an object that always has the same parts, or none that we look at; None for all others."""
    match value:
        case BuiltinFunctionType():
            return ()
        case MappingProxyType():
            return ((gc.get_referents(value)[0], name),)
        case tuple() | frozenset():
            return _numbered(value, name)
        case MethodType():
            return (value.__self__, f"{name}.__self__"), (value.__func__, name)
        case functools.partial():
            return tuple((getattr(value, key), f"{name}.{key}") for key in ("func", "args", "keywords"))
        case staticmethod() | classmethod():
            return ((value.__func__, name),)
        case property():
            return ((value.fget, name),)
    return None


def same_array(one: Any, other: Any) -> bool:
    """Whether two arrays have the same bytes."""
    return bool(one.shape == other.shape and one.dtype == other.dtype and one.tobytes() == other.tobytes())


def generator_state(generator: Any) -> Any:
    """The state of a generator of random numbers, of Python's or of numpy's, to compare."""
    if isinstance(generator, random.Random):
        return generator.getstate()
    legacy = isinstance(generator, numpy.random.RandomState)
    return repr(generator.get_state(legacy=False) if legacy else generator.bit_generator.state)


def entries_of(kind: type) -> dict[str, Any]:
    """The mapping itself in which a class keeps what it defines."""
    found: dict[str, Any] = gc.get_referents(kind.__dict__)[0]
    return found


def own_names(kind: type) -> dict[str, Any]:
    """What a class itself defines, but for what Python and abstract classes keep there."""
    return {
        key: item
        for key, item in kind.__dict__.items()
        if not key.startswith(("__", "_abc_")) or (key in SPECIAL and isinstance(item, FunctionType))
    }


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return MISSING


def _numbered(items: Iterable[Any], name: str) -> Iterator[tuple[Any, str]]:
    return ((item, f"{name}[{number}]") for number, item in enumerate(items))
