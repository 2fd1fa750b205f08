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
from typing import Any

from lowtide import native
from lowtide.guards import MISSING, Entry, Names, keys_of

SOURCE = Path(__file__).with_name("watch.cpp")
_ADDRESS, _INT = ctypes.c_void_p, ctypes.c_int64
SIGNATURES: native.Signatures = {
    "lowtide_same": ([*[_ADDRESS] * 3, _INT, *[_ADDRESS] * 2, _INT, *[_ADDRESS] * 4, _INT], _INT)
}


class Quick:
    """Entries, sizes of mappings and classes, arranged to be compared by identity; it keeps all of them alive."""

    def __init__(
        self, entries: Sequence[Entry], names: Sequence[Names], kinds: Sequence[tuple[Any, type]] = ()
    ) -> None:
        self._holders: list[dict[Any, Any]] = []
        self._keys: list[Any] = []
        self._values: list[Any] = []
        self._others: list[Entry] = []
        for entry in entries:
            holder = entry.place.holder
            if isinstance(holder, type):
                holder = gc.get_referents(holder.__dict__)[0]
            if isinstance(holder, dict):
                self._holders.append(holder)
                self._keys.append(entry.place.key)
                self._values.append(entry.value)
            else:
                self._others.append(entry)
        self._mappings = [item.holder for item in names]
        self._sizes = [len(item.keys) for item in names]
        self._objects, self._kinds = ([pair[place] for pair in kinds] for place in (0, 1))
        counts = [item.asked is None and len(item.keys) > 1 for item in names]  # whether the order counts
        self._linked = [item for item, yes in zip(names, counts, strict=True) if yes and _is_linked(item)]
        orders = [item.keys if yes and not _is_linked(item) else () for item, yes in zip(names, counts, strict=True)]
        self._orders = [(item.holder, keys) for item, keys in zip(names, orders, strict=True) if keys]
        self._arrays = [
            array("q", map(id, self._holders)),
            array("q", map(id, self._keys)),
            array("q", (0 if value is MISSING else id(value) for value in self._values)),
            array("q", map(id, self._mappings)),
            array("q", self._sizes),
            array("q", (id(key) for keys in orders for key in keys)),
            array("q", map(len, orders)),
            array("q", map(id, self._objects)),
            array("q", map(id, self._kinds)),
        ]
        holders, keys, values, mappings, sizes, *rest = (one.buffer_info()[0] for one in self._arrays)
        entries_and_sizes = (holders, keys, values, len(self._holders), mappings, sizes, len(self._mappings))
        self._arguments = (*entries_and_sizes, *rest, len(self._objects))
        self._library = _library()

    def same(self) -> bool:
        """Whether nothing moved."""
        if self._library is not None:
            quick = bool(self._library.lowtide_same(*self._arguments))
        else:
            quick = (
                all(map(is_, map(dict.get, self._holders, self._keys, repeat(MISSING)), self._values))
                and list(map(dict.__len__, self._mappings)) == self._sizes
                and all(keys_of(holder) == keys for holder, keys in self._orders)
                and list(map(type, self._objects)) == self._kinds
            )
        return (
            quick
            and all(entry.place.get() is entry.value for entry in self._others)
            and all(keys_of(item.holder) == item.keys for item in self._linked)
        )


def _is_linked(names: Names) -> bool:
    """Whether the mapping keeps its order beside the interpreter's own."""
    return isinstance(names.holder, OrderedDict)


@cache
def _library() -> ctypes.PyDLL | None:
    try:
        return native.interpreted(native.library(SOURCE, SIGNATURES, what="lowtide's watch"), SIGNATURES)
    except native.NativeUnavailable:  # the arena has said so
        return None
