"""From what a step's lines loaded to what its program assumes: the entries of the caller's objects, as they were."""

from __future__ import annotations

import array
import builtins
import collections
import ctypes
import enum
import mmap
import os
import sys
import weakref
from types import FunctionType, ModuleType
from typing import Any

import numpy
import torch

from lowtide import private
from lowtide.capture.caches import Cache
from lowtide.capture.follow import Follower, is_user_file
from lowtide.capture.lines import Use
from lowtide.capture.world import (
    BASES,
    OPTIMIZER_HOOKS,
    REGISTRIES,
    SPECIAL,
    World,
    entries_of,
    generator_state,
    is_atom,
    is_foreign,
    library,
    own_names,
    parts_of,
)
from lowtide.errors import CaptureError
from lowtide.guards import MISSING, Attributes, Content, Entry, Guards, Kind, Names, Place, attributes_of
from lowtide.private import FakeTensor
from lowtide.watch.tensors import kind_of

READ: frozenset[Use] = frozenset(("read",))
ADD: frozenset[Use] = frozenset(("add",))
# What a module keeps beside its hooks, and which buffers it does not save: none of it changes a step by itself.
FOLLOWING = (
    *("_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs"),
    *("_non_persistent_buffers_set", "_is_full_backward_hook"),
)
FOREIGN_MEMORY = (memoryview, mmap.mmap, ctypes.Structure, ctypes.Union, ctypes.Array, *ctypes.c_int.__bases__)
SCHEDULED = "_wrapped_by_lr_sched"  # schedulers count the optimizer's steps by wrapping it


class Assumptions:
    """Collects what the program assumes; each object once."""

    def __init__(self, world: World, follower: Follower) -> None:
        self.world, self.follower = world, follower
        self.asked = frozenset(follower.asked)
        self.entries: list[Entry] = []
        self.names: list[Names] = []
        self.contents: list[Content] = []
        self.kinds: list[tuple[Any, type]] = []
        self.tensors: list[Kind] = []
        self.weak: list[tuple[weakref.ref[Any], str]] = []
        self.opaque: dict[str, None] = {}
        self._done: set[int] = set()
        self._classes: set[int] = set()
        self._fragile: set[int] = set()
        self._waiting: collections.deque[tuple[Any, str, frozenset[Use]]] = collections.deque()

    def of(self, step: Any, model: Any, optimizers: tuple[Any, ...], objects: list[tuple[Any, str]]) -> Guards:
        """All that the step assumes; `objects` are those of its batch, with their names."""
        for thing, name in objects:
            self._wait(thing, name)
        self._torch()
        self._wait(step, "the step")
        self._wait(model, "model")
        for number, optimizer in enumerate(optimizers):
            self._wait(optimizer, "optimizer" if len(optimizers) == 1 else f"optimizers[{number}]")
        for imported, module in self.follower.imported.items():
            self.entries.append(Entry(Place(sys.modules, imported, f"the module {imported}"), module))
            self._wait(module, imported)
        for (imported, attribute), module in self.follower.borrowed.items():
            self._entry(module.__dict__, attribute, module.__dict__[attribute], f"{imported}.{attribute}")
        for key, value in self.follower.environment.items():
            name = f"os.environ[{os.fsdecode(key)!r}]"
            self.entries.append(Entry(Place(private.environment(), key, name), value))
        for found in self.follower.globals.values():
            self._global(found.home, found.name, found.value, found.source, frozenset(found.uses), found.attributes)
        while self._waiting:
            value, name, uses = self._waiting.popleft()
            if id(value) not in self._done and not is_atom(value) and value is not os.environ:
                self._done.add(id(value))
                self._look(value, name, uses)
        return Guards(
            tuple(self.entries),
            tuple(self.names),
            tuple(self.contents),
            tuple(self.kinds),
            tuple(self.tensors),
            tuple(self.weak),
            opaque=tuple(self.opaque),
        )

    def _wait(self, value: Any, name: str, uses: frozenset[Use] = READ) -> None:
        self._waiting.append((value, name, uses))

    def _entry(self, holder: Any, key: Any, value: Any, name: str, uses: frozenset[Use] = READ) -> None:
        if isinstance(value, torch.SymFloat):
            return  # an input of the program
        self.entries.append(Entry(Place(holder, key, name), value))
        if value is not MISSING:
            self._wait(value, name, uses)

    def _global(
        self, home: dict[str, Any], name: str, value: Any, source: str, uses: frozenset[Use], attributes: set[str]
    ) -> None:
        where = f"{name} ({source.rpartition(':')[0]})"
        self._entry(home, name, value, where, uses)
        if value is MISSING and name in builtins.__dict__:
            self.entries.append(Entry(Place(builtins.__dict__, name, f"builtins.{name}"), builtins.__dict__[name]))
        if isinstance(value, ModuleType):
            for attribute in attributes & value.__dict__.keys():
                self._entry(value.__dict__, attribute, value.__dict__[attribute], f"{name}.{attribute}")

    def _look(self, value: Any, name: str, uses: frozenset[Use]) -> None:
        if isinstance(value, BASES) and not isinstance(value, enum.Enum):
            self._beside(value, name)
        if (parts := parts_of(value, name)) is not None:
            for part, path in parts:
                self._wait(part, path, uses if isinstance(value, (tuple, frozenset)) else READ)
            return
        if (cache := self.world.caches.get(id(value))) is not None:
            self._cache(cache)
            return
        held = self.world.held.get(id(value))
        match value:
            case torch.Tensor():
                self._tensor(value, name)
            case ModuleType():
                if id(value.__dict__) in self.world.held:
                    self._attributes(value.__dict__, name)
            case weakref.ref():
                self._weak(value, name, uses)
            case enum.Enum():
                self._entry(value.__dict__, "_value_", value.value, f"{name}.value", uses)
                self._attributes(value.__dict__, name)
            case torch.nn.Module():
                self._module(value, name)
            case torch.optim.Optimizer():
                self._attributes(value.__dict__, name, without=("param_groups", "state", "defaults", *OPTIMIZER_HOOKS))
                for key in OPTIMIZER_HOOKS:
                    self._mapping(value.__dict__[key], f"{name}.{key}")
                self._mapping(value.defaults, f"{name}.defaults")
                self._kind(value)
                self._wait(type(value), type(value).__name__)
            case dict() if held is not None:
                self._container(held.before, value, name, uses)
            case list() | set() | collections.deque() | bytearray() | array.array() | numpy.ndarray():
                if held is not None and uses != ADD:
                    self._container(held.before, value, name, uses)
            case FunctionType():
                self._function(value, name)
            case type():
                self._class(value)
            case _:
                self._other(value, name, uses)

    def _beside(self, value: Any, name: str) -> None:
        """What a container or plain data has by name, as `World` has seen it."""
        if (held := self.world.slotted.get(id(value))) is not None:
            for key, item in held.before.items():
                if key in self.asked:
                    self._entry(held.holder, key, item, f"{name}.{key}")
        attributes = attributes_of(value)
        if attributes is not None and id(attributes) in self.world.held:
            self._attributes(attributes, name)
        if not library(type(value).__module__):
            self._kind(value)
            self._wait(type(value), type(value).__name__)

    def _cache(self, cache: Cache) -> None:
        """A cached function by what it knew, if the step calls it, and by what it reads."""
        self._wait(cache.function.__wrapped__, cache.name)
        for entry in cache.entries():
            self.entries.append(entry)
            if entry.value is not MISSING:
                self._wait(cache.answers[entry.place.key], entry.place.name)

    def _container(self, before: Any, value: Any, name: str, uses: frozenset[Use]) -> None:
        """A container of the user's by its content, unless it is only added to."""
        if uses == ADD:
            return
        if id(value) in self.world.opaque:
            self.opaque[name] = None
            return
        inside = ADD if "read" not in uses else READ  # "add inside": the items are only added to
        if isinstance(value, collections.defaultdict):
            factory = f"{name}.default_factory"
            self._entry(Attributes(value), "default_factory", value.default_factory, factory)
        if isinstance(value, dict):
            self.names.append(Names(value, tuple(before), None, name))
            for key, item in before.items():
                self._entry(value, key, item, f"{name}[{key!r}]", inside)
            return
        self.contents.append(Content(value, before, name))
        if isinstance(before, list):
            for number, item in enumerate(before):
                self._wait(item, f"{name}[{number}]", inside)

    def _mapping(self, mapping: dict[Any, Any], name: str) -> None:
        """A mapping that torch keeps: all of it counts."""
        held = self.world.held.get(id(mapping))
        before = mapping if held is None else held.before
        if id(mapping) in self._done:
            return
        self._done.add(id(mapping))
        if not isinstance(mapping, dict):
            self.contents.append(Content(mapping, before, name))
            return
        self.names.append(Names(mapping, tuple(before), None, name))
        for key, item in before.items():
            self._entry(mapping, key, item, f"{name}.{key}")

    def _tensor(self, tensor: torch.Tensor, name: str) -> None:
        """A tensor that is no parameter and no buffer: as it is, and by what the user put on it."""
        if not isinstance(tensor, FakeTensor):
            if "_version" in self.follower.attributes:
                raise CaptureError(
                    f"the step asks how often a tensor was written to (_version), as it may of {name}.",
                    hint="ask before the step, and pass the number to the step as part of its batch.",
                )
            self.tensors.append(Kind(tensor, kind_of(tensor), name))
        if (attributes := self.world.marks.get(id(tensor))) is not None:
            self._attributes(attributes, name)

    def _weak(self, reference: weakref.ref[Any], name: str, uses: frozenset[Use]) -> None:
        """What a weak reference leads to. Where nothing else of the step does, the guards must not keep it alive."""
        target = reference()
        if id(target) in self.world.weak:
            self._fragile.add(id(target))
            self.weak.append((reference, name))
        self._wait(target, name, uses)

    def _kind(self, thing: Any) -> None:
        if id(thing) not in self._fragile:
            self.kinds.append((thing, type(thing)))

    def _module(self, module: torch.nn.Module, name: str) -> None:
        attributes = self._attributes(module.__dict__, name, without=(*REGISTRIES, *FOLLOWING))
        for key in REGISTRIES:
            if key in attributes:
                shown = name if key in ("_modules", "_parameters", "_buffers") else f"{name}.{key}"
                self.entries.append(Entry(Place(module.__dict__, key, shown), attributes[key]))
                self._mapping(attributes[key], shown)
        self._kind(module)
        self._wait(type(module), type(module).__name__)

    def _attributes(self, attributes: dict[str, Any], name: str, *, without: tuple[str, ...] = ()) -> dict[str, Any]:
        """Those attributes of an object that the step may have asked for; returns all, as they were."""
        held = self.world.held.get(id(attributes))
        before: dict[str, Any] = attributes if held is None else held.before
        asked = None if self.follower.everything else self.asked
        self.names.append(Names(attributes, tuple(before), asked, name))
        for key, item in before.items():
            if key in without or not (asked is None or key in asked):
                continue
            if key == "step" and getattr(item, SCHEDULED, False):
                continue
            self._entry(attributes, key, item, f"{name}.{key}", frozenset(self.follower.attributes.get(key, READ)))
        return before

    def _function(self, function: FunctionType, name: str) -> None:
        if is_foreign(function):
            return
        for key, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            held = self.world.held.get(id(cell))
            uses = frozenset(self.follower.cells.get(key, ()))
            if not is_user_file(function.__code__.co_filename):  # of a decorator of a library's: no line of it is known
                uses = READ
            if held is not None and uses:
                self._entry(cell, None, held.before, held.name, uses)
        self.entries.append(Entry(Place(function, "__code__", f"the code of {name}"), function.__code__))
        self._attributes(function.__dict__, name)
        for key in ("__defaults__", "__kwdefaults__"):
            if getattr(function, key) is not None:
                self._entry(function, key, getattr(function, key), f"{name}.{key}")

    def _torch(self) -> None:
        """Functions and methods of torch by name, which users replace by their own."""
        for home, name in ((torch, "torch"), (torch.nn.functional, "torch.nn.functional")):
            for key in self.asked & home.__dict__.keys():
                if callable(item := home.__dict__[key]):
                    self.entries.append(Entry(Place(home.__dict__, key, f"{name}.{key}"), item))
        self._methods(torch.Tensor)

    def _methods(self, kind: type) -> None:
        """The methods of a class of torch."""
        for base in kind.__mro__:
            if base.__module__.partition(".")[0] != "torch" or id(base) in self._classes:
                continue
            self._classes.add(id(base))
            entries, asked = entries_of(base), self.asked | SPECIAL
            for key, item in entries.items():
                if key in asked and isinstance(item, FunctionType):
                    self.entries.append(Entry(Place(base, key, f"{base.__name__}.{key}"), item))
            self.names.append(Names(entries, (*entries,), asked, base.__name__))

    def _class(self, kind: type) -> None:
        if issubclass(kind, torch.nn.Module | torch.optim.Optimizer):
            self._methods(kind)
        if library(kind.__module__):
            return
        self.entries.append(Entry(Place(Attributes(kind), "__mro__", f"the bases of {kind.__name__}"), kind.__mro__))
        for base in [*kind.__mro__, *type.mro(type(kind))]:
            if library(base.__module__) or id(base) in self._classes:
                continue
            self._classes.add(id(base))
            held = self.world.held.get(id(base))
            before = own_names(base) if held is None else held.before
            for key, item in before.items():
                if key in self.asked or key in SPECIAL:
                    self._entry(base, key, item, f"{base.__name__}.{key}")
            self.names.append(Names(entries_of(base), (*entries_of(base),), self.asked | SPECIAL, base.__name__))

    def _other(self, value: Any, name: str, uses: frozenset[Use]) -> None:
        if hasattr(type(value), "__next__") and "read" in uses:
            raise CaptureError(
                f"the step takes items from {name}, a {type(value).__name__}, which has others at every step.",
                hint="take them before the step, and pass them to it as part of its batch.",
            )
        if isinstance(value, FOREIGN_MEMORY) and "read" in uses:
            raise CaptureError(
                f"the step looks at {name}, a {type(value).__name__}: memory that others may write to, unseen.",
                hint="take what is in it before the step, and pass it to the step as part of its batch.",
            )
        held = self.world.held.get(id(value))
        if held is not None and id(value) in self._fragile:
            raise CaptureError(
                f"the step looks by a weak reference at {name}, a {type(value).__name__} with slots that nothing else "
                "of the step leads to.",
                hint="refer to it by a name, or pass it to the step.",
            )
        if held is not None:  # an object with slots
            for key, item in held.before.items():
                if key in self.asked:
                    self._entry(value, key, item, f"{name}.{key}")
        attributes = getattr(value, "__dict__", None)
        if isinstance(attributes, dict) and id(attributes) in self.world.held:
            self._attributes(attributes, name)
            self._kind(value)
            self._wait(type(value), type(value).__name__)
        elif held is None and id(value) in self.world.opaque:
            self.opaque[name] = None


def refuse_generators(world: World) -> None:
    """Refuse generators of random numbers of the user's own, where the step drew from them."""
    for generator, state, name in world.generators:
        if generator_state(generator) != state:
            raise CaptureError(
                f"the step draws from {name}, a {type(generator).__name__} of its own, which can't be followed.",
                hint="draw from random or numpy.random, or draw before the step and pass the numbers in the batch.",
            )
