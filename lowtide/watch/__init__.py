"""Answers whether the world around a program is as it was when the program was captured, or what changed.

Before each step every object is compared by its identity, which is quick; only where that differs it is looked at
whether the new one means the same.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Iterable, Sequence
from operator import is_
from types import CodeType, FunctionType, MethodType
from typing import Any

import numpy
import torch

from lowtide.guards import (
    MISSING,
    Change,
    Content,
    Entry,
    Guards,
    Names,
    Place,
    attributes_of,
    content_of,
    keys_of,
    slots_of,
)
from lowtide.watch.around import NAMES, surroundings
from lowtide.watch.quick import Quick
from lowtide.watch.tensors import Rows, kind_of, library

__all__ = ["NAMES", "Watcher", "same", "surroundings"]

SCHEDULED = "_wrapped_by_lr_sched"  # schedulers wrap the optimizer's step to count its calls


class Watcher:
    """Compares the caller's objects with what a program assumes about them.

    `written` are the places that its steps write to: a container that holds one can't be another, however equal.
    """

    def __init__(self, guards: Guards, written: Iterable[Place] = ()) -> None:
        self.guards = guards
        self._fixed = {id(place.holder): place.name for place in (*written, *guards.numbers)}
        self._entries = list(guards.entries)
        self._names = list(guards.names)
        self._contents = list(guards.contents)
        self._around = guards.around
        self._rows: Rows | None = None  # of tensors, as they were when they were last looked at
        self._arrange()

    def changed(self) -> Change | None:
        """What is not as it was; None where everything is."""
        around = surroundings()
        if around != self._around:
            for name, now, then in zip(NAMES, around, self._around, strict=True):
                if now != then:
                    return Change(name, f"{name} is {now!r}, at capture {then!r}")
        for reference, name in self.guards.weak:
            if reference() is None:
                return Change(name, f"{name} leads to nothing any more")
        while not self._quick.same():
            change = self._look()
            if change is not None:
                return change
            self._arrange()
        if self.guards.tensors and (self._rows is None or not self._rows.same()):
            for one in self.guards.tensors:
                if kind_of(one.tensor) != one.kind:
                    return Change(one.name, f"{one.name} has other sizes, strides or dtype than at capture")
            tensors = [one.tensor for one in self.guards.tensors]
            self._rows = None if (found := library()) is None else Rows(found, tensors, [False] * len(tensors))
        for content in self._contents:
            if not _same_content(content):
                return Change(content.name, f"the content of {content.name} changed")
        return None

    def _arrange(self) -> None:
        self._quick = Quick(self._entries, self._names, self.guards.kinds)

    def _look(self) -> Change | None:
        """Compare by meaning; where all is the same, what is there now is what is expected from now on."""
        for thing, kind in self.guards.kinds:
            if type(thing) is not kind:
                what = f"a {kind.__name__} has become a {type(thing).__name__}"
                return Change(f"the class of a {kind.__name__}", what)
        moved: dict[int, Any] = {}
        entries, names_now = list(self._entries), list(self._names)
        for number, entry in enumerate(self._entries):
            now = entry.place.get()
            if now is entry.value:
                continue
            if not same(entry.value, now, moved) and not _scheduled(entry, now):
                return _changed(entry, now)
            entries[number] = Entry(entry.place, now)
        for number, names in enumerate(self._names):
            keys = keys_of(names.holder)
            if keys != names.keys and (difference := _other_names(names, keys)) is not None:
                return Change(names.name, difference)
            names_now[number] = Names(names.holder, keys, names.asked, names.name)
        if fixed := self._fixed.keys() & moved.keys():
            name = self._fixed[min(fixed)]
            return Change(name, f"what holds {name} was replaced")
        self._entries, self._names = entries, names_now
        if moved:
            self._move(moved)
        return None

    def _move(self, moved: dict[int, Any]) -> None:
        """Where a container was replaced by an equal one, that one is watched from now on."""
        for number, entry in enumerate(self._entries):
            if id(entry.place.holder) in moved:
                place = Place(moved[id(entry.place.holder)], entry.place.key, entry.place.name)
                self._entries[number] = Entry(place, place.get())
        for number, names in enumerate(self._names):
            if id(names.holder) in moved:
                holder = moved[id(names.holder)]
                self._names[number] = Names(holder, keys_of(holder), names.asked, names.name)
        for number, content in enumerate(self._contents):
            if id(content.holder) in moved:
                self._contents[number] = Content(moved[id(content.holder)], content.content, content.name)


def same(one: Any, other: Any, moved: dict[int, Any] | None = None) -> bool:
    """Whether an object may stand for another one, so that no step can tell them apart by their values."""
    if one is other:
        return True
    if type(one) is not type(other) or not _alike_beside(one, other, moved):
        return False
    match one:
        case float():
            return (one == other and math.copysign(1, one) == math.copysign(1, other)) or (
                one != one and other != other
            )
        case complex():
            return repr(one) == repr(other)
        case bool() | int() | str() | bytes() | torch.dtype() | torch.device() | range() | slice():
            return bool(one == other)
        case MethodType():
            return one.__self__ is other.__self__ and one.__func__ is other.__func__
        case tuple() | list() | collections.deque():
            alike = len(one) == len(other) and all(same(*pair, moved) for pair in zip(one, other, strict=True))
        case dict():
            before, after = content_of(one), content_of(other)
            alike = list(before) == list(after) and all(same(before[key], after[key], moved) for key in before)
        case set() | frozenset():
            alike = one == other
        case numpy.ndarray():
            alike = _same_array(one, other)
        case _:
            return False
    if alike and moved is not None:
        moved[id(one)] = other
    return alike


def _alike_beside(one: Any, other: Any, moved: dict[int, Any] | None) -> bool:
    """Whether two objects of one class keep the same beside their content; where they have slots, only they know."""
    if isinstance(one, MethodType):
        return True
    attributes = attributes_of(one)
    return not slots_of(type(one)) and (attributes is None or same(attributes, attributes_of(other), moved))


def _same_content(content: Content) -> bool:
    holder, before = content.holder, content.content
    if isinstance(holder, (list, collections.deque)):
        return len(holder) == len(before) and (all(map(is_, before, holder)) or all(map(same, before, holder)))
    if isinstance(holder, numpy.ndarray):
        return _same_array(holder, before)
    return bool(holder == before)


def _same_array(one: Any, other: Any) -> bool:
    return bool(one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes())


def _scheduled(entry: Entry, now: Any) -> bool:
    return entry.place.key == "step" and getattr(now, SCHEDULED, False)


def _changed(entry: Entry, now: Any) -> Change:
    was, place = entry.value, entry.place
    if isinstance(was, (FunctionType, CodeType)) or callable(was):
        return Change(place.name, f"{place.name} was replaced")
    if now is MISSING:
        return Change(place.name, f"{place.name} was deleted")
    numbers = all(isinstance(item, (int, float)) and not isinstance(item, bool) for item in (was, now))
    plain = all(item is None or item is MISSING or isinstance(item, (bool, int, float, str)) for item in (was, now))
    kind = type(now).__name__
    other = "one" if kind.startswith("_") else kind
    what = f"is {now!r}, at capture {was!r}" if plain else f"is another {other} than at capture"
    return Change(place.name, f"{place.name} {what}", place if numbers else None)


def _other_names(names: Names, keys: Sequence[Any]) -> str | None:
    """What was added or deleted; None where nothing that counts was."""
    added, deleted = (
        [key for key in one if key not in other] for one, other in ((keys, names.keys), (names.keys, keys))
    )
    if names.asked is None:
        if not added and not deleted:
            return f"the order in {names.name} changed"
    else:
        added = [key for key in added if key in names.asked and not getattr(names.holder[key], SCHEDULED, False)]
        deleted = [key for key in deleted if key in names.asked]
    verb = "added to" if added else "deleted from"
    which = ", ".join(map(str, (added or deleted)[:4]))
    return f"{which} was {verb} {names.name}" if which else None
