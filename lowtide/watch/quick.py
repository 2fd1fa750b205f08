"""The quick comparison: whether every entry still is the very object that was there."""

from __future__ import annotations

import ctypes
import gc
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from functools import cache
from itertools import repeat
from operator import is_
from pathlib import Path
from types import CellType
from typing import Any

from lowtide import native
from lowtide.guards import MISSING, Entry, Names, keys_of

SOURCE = Path(__file__).with_name("watch.cpp")
SIGNATURES: native.Signatures = {"lowtide_same": ([ctypes.c_void_p], ctypes.c_int64)}


class Quick:
    """Entries, mappings, lists and classes, arranged to be compared by identity; it keeps all of them alive."""

    def __init__(
        self,
        entries: Sequence[Entry],
        names: Sequence[Names] = (),
        kinds: Sequence[tuple[Any, type]] = (),
        lists: Sequence[tuple[list[Any], Sequence[Any]]] = (),
    ) -> None:
        """`kinds` are objects and their classes, `lists` are lists and the items that they have."""
        mapped = [entry for entry in entries if isinstance(_home(entry), dict)]
        self._holders: list[dict[Any, Any]] = [_home(entry) for entry in mapped]
        self._keys, self._values = [entry.place.key for entry in mapped], [entry.value for entry in mapped]
        self._places = [entry for entry in entries if not isinstance(_home(entry), dict | list | tuple)]
        self._others = [entry for entry in entries if isinstance(_home(entry), list | tuple)]
        self._names, self._kinds, self._lists = names, kinds, [(one, tuple(items)) for one, items in lists]
        counts = [item.asked is None and len(item.keys) > 1 for item in names]  # whether the order counts
        self._linked = [item for item, yes in zip(names, counts, strict=True) if yes and _is_linked(item)]
        orders = [item.keys if yes and not _is_linked(item) else () for item, yes in zip(names, counts, strict=True)]
        self._orders = [(item.holder, keys) for item, keys in zip(names, orders, strict=True) if keys]
        self._block = _Block(
            (
                [*map(id, self._holders)],
                [*map(id, self._keys)],
                [*map(_address, self._values)],
            ),
            (
                [id(entry.place.holder) for entry in self._places],
                [0 if isinstance(entry.place.holder, CellType) else id(entry.place.key) for entry in self._places],
                [_address(entry.value) for entry in self._places],
            ),
            (
                [id(item.holder) for item in names],
                [len(item.keys) for item in names],
                [len(keys) for keys in orders],
                [id(key) for keys in orders for key in keys],
            ),
            (
                [id(one) for one, _ in self._lists],
                [len(items) for _, items in self._lists],
                [id(item) for _, items in self._lists for item in items],
            ),
            ([id(thing) for thing, _ in kinds], [id(kind) for _, kind in kinds]),
        )
        self._library = _library()

    def same(self) -> bool:
        """Whether nothing moved."""
        if self._library is not None:
            quick = bool(self._library.lowtide_same(self._block.address))
        else:
            quick = (
                all(map(is_, map(dict.get, self._holders, self._keys, repeat(MISSING)), self._values))
                and all(dict.__len__(item.holder) == len(item.keys) for item in self._names)
                and all(keys_of(holder) == keys for holder, keys in self._orders)
                and all(len(one) == len(items) and all(map(is_, one, items)) for one, items in self._lists)
                and all(type(thing) is kind for thing, kind in self._kinds)
                and all(entry.place.get() is entry.value for entry in self._places)
            )
        return (
            quick
            and all(entry.place.get() is entry.value for entry in self._others)
            and all(keys_of(item.holder) == item.keys for item in self._linked)
        )


class _Block:
    """Rows of numbers for C++, in groups: of each group how many there are, and where its rows begin."""

    def __init__(self, *groups: Sequence[Sequence[int]]) -> None:
        self._rows = [[array("q", row) for row in group] for group in groups]
        numbers = ((len(group[0]), *(row.buffer_info()[0] for row in group)) for group in self._rows)
        self._numbers = array("q", (number for group in numbers for number in group))
        self.address = self._numbers.buffer_info()[0]


def _home(entry: Entry) -> Any:
    """Where an entry is looked up: of a class, its own mapping."""
    holder = entry.place.holder
    return gc.get_referents(holder.__dict__)[0] if isinstance(holder, type) else holder


def _address(value: Any) -> int:
    return 0 if value is MISSING else id(value)


def _is_linked(names: Names) -> bool:
    """Whether the mapping keeps its order beside the interpreter's own."""
    return isinstance(names.holder, OrderedDict)


@cache
def _library() -> ctypes.PyDLL | None:
    try:
        return native.interpreted(native.library(SOURCE, SIGNATURES, what="lowtide's watch"), SIGNATURES)
    except native.NativeUnavailable:  # the arena has said so
        return None
