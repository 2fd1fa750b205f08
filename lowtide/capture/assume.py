"""From what a step's lines loaded to what its program assumes: the entries of the caller's objects, as they were."""

from __future__ import annotations

import array
import collections
import enum
import weakref
from types import FunctionType, ModuleType
from typing import Any

import numpy
import torch

from lowtide.capture.caches import Cache
from lowtide.capture.follow import Follower
from lowtide.capture.lines import Use
from lowtide.capture.world import (
    ATOMS,
    OPTIMIZER_HOOKS,
    REGISTRIES,
    World,
    generator_state,
    library,
    own_names,
    parts_of,
)
from lowtide.errors import CaptureError
from lowtide.guards import MISSING, Content, Entry, Guards, Names, Place

READ: frozenset[Use] = frozenset(("read",))
ADD: frozenset[Use] = frozenset(("add",))
# What a module keeps beside its hooks, and which buffers it does not save: none of it changes a step by itself.
FOLLOWING = (
    *("_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs"),
    *("_non_persistent_buffers_set", "_is_full_backward_hook"),
)
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
        self.opaque: dict[str, None] = {}
        self._done: set[int] = set()
        self._waiting: collections.deque[tuple[Any, str, frozenset[Use]]] = collections.deque()

    def of(self, step: Any, model: Any, optimizers: tuple[Any, ...]) -> Guards:
        """All that the step assumes."""
        self._wait(step, "the step")
        self._wait(model, "model")
        for number, optimizer in enumerate(optimizers):
            self._wait(optimizer, "optimizer" if len(optimizers) == 1 else f"optimizers[{number}]")
        for imported, module in self.follower.imported.items():
            self._wait(module, imported)
        for found in self.follower.globals.values():
            self._global(found.home, found.name, found.value, found.source, frozenset(found.uses), found.attributes)
        while self._waiting:
            value, name, uses = self._waiting.popleft()
            if id(value) not in self._done and not isinstance(value, ATOMS):
                self._done.add(id(value))
                self._look(value, name, uses)
        return Guards(
            tuple(self.entries),
            tuple(self.names),
            tuple(self.contents),
            tuple(self.kinds),
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
        if isinstance(value, ModuleType):
            for attribute in attributes & value.__dict__.keys():
                self._entry(value.__dict__, attribute, value.__dict__[attribute], f"{name}.{attribute}")

    def _look(self, value: Any, name: str, uses: frozenset[Use]) -> None:
        if (parts := parts_of(value, name)) is not None:
            for part, path in parts:
                self._wait(part, path, uses if isinstance(value, (tuple, frozenset)) else READ)
            return
        if (cache := self.world.caches.get(id(value))) is not None:
            self._cache(cache)
            return
        held = self.world.held.get(id(value))
        match value:
            case ModuleType():
                if id(value.__dict__) in self.world.held:
                    self._attributes(value.__dict__, name)
            case weakref.ref():
                self._wait(value(), name, uses)
            case enum.Enum():
                self._wait(value.value, f"{name}.value", uses)
            case torch.nn.Module():
                self._module(value, name)
            case torch.optim.Optimizer():
                self._attributes(value.__dict__, name, without=("param_groups", "state", "defaults", *OPTIMIZER_HOOKS))
                for key in OPTIMIZER_HOOKS:
                    self._mapping(value.__dict__[key], f"{name}.{key}")
                self._mapping(value.defaults, f"{name}.defaults")
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

    def _module(self, module: torch.nn.Module, name: str) -> None:
        attributes = self._attributes(module.__dict__, name, without=(*REGISTRIES, *FOLLOWING))
        for key in REGISTRIES:
            if key in attributes:
                shown = name if key in ("_modules", "_parameters", "_buffers") else f"{name}.{key}"
                self.entries.append(Entry(Place(module.__dict__, key, shown), attributes[key]))
                self._mapping(attributes[key], shown)
        self.kinds.append((module, type(module)))
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
        if library(function.__module__ or ""):
            return
        for key, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            held = self.world.held.get(id(cell))
            uses = frozenset(self.follower.cells.get(key, ()))
            if held is not None and uses:
                self._entry(cell, None, held.before, held.name, uses)
        self.entries.append(Entry(Place(function, "__code__", f"the code of {name}"), function.__code__))
        self._attributes(function.__dict__, name)
        for key in ("__defaults__", "__kwdefaults__"):
            if getattr(function, key) is not None:
                self._entry(function, key, getattr(function, key), f"{name}.{key}")

    def _class(self, kind: type) -> None:
        if library(kind.__module__):
            return
        for base in [*kind.__mro__, *type.mro(type(kind))]:
            held = self.world.held.get(id(base))
            for key, item in (own_names(base) if held is None else held.before).items():
                if key in self.asked and not library(base.__module__):
                    self._entry(base, key, item, f"{base.__name__}.{key}")

    def _other(self, value: Any, name: str, uses: frozenset[Use]) -> None:
        if hasattr(type(value), "__next__") and "read" in uses:
            raise CaptureError(
                f"the step takes items from {name}, a {type(value).__name__}, which has others at every step.",
                hint="take them before the step, and pass them to it as part of its batch.",
            )
        held = self.world.held.get(id(value))
        if held is not None:  # an object with slots
            for key, item in held.before.items():
                if key in self.asked:
                    self._entry(value, key, item, f"{name}.{key}")
        attributes = getattr(value, "__dict__", None)
        if isinstance(attributes, dict) and id(attributes) in self.world.held:
            self._attributes(attributes, name)
            self.kinds.append((value, type(value)))
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
