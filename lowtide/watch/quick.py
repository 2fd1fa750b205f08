"""The quick comparison: whether every entry still is the very object that was there."""

from __future__ import annotations

import ctypes
import gc
from array import array
from collections.abc import Sequence
from functools import cache
from itertools import repeat
from operator import is_
from pathlib import Path
from typing import Any

from lowtide import native
from lowtide.guards import MISSING, Entry, Names

SOURCE = Path(__file__).with_name("watch.cpp")
_ADDRESS, _INT = ctypes.c_void_p, ctypes.c_int64
SIGNATURES: native.Signatures = {
    "lowtide_same": ([*[_ADDRESS] * 3, _INT, *[_ADDRESS] * 2, _INT, *[_ADDRESS] * 2, _INT], _INT)
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
        self._arrays = [
            array("q", map(id, self._holders)),
            array("q", map(id, self._keys)),
            array("q", (0 if value is MISSING else id(value) for value in self._values)),
            array("q", map(id, self._mappings)),
            array("q", self._sizes),
            array("q", map(id, self._objects)),
            array("q", map(id, self._kinds)),
        ]
        holders, keys, values, mappings, sizes, *pairs = (one.buffer_info()[0] for one in self._arrays)
        entries_and_sizes = (holders, keys, values, len(self._holders), mappings, sizes, len(self._mappings))
        self._arguments = (*entries_and_sizes, *pairs, len(self._objects))
        self._library = _library()

    def same(self) -> bool:
        """Whether nothing moved."""
        if self._library is not None:
            quick = bool(self._library.lowtide_same(*self._arguments))
        else:
            quick = (
                all(map(is_, map(dict.get, self._holders, self._keys, repeat(MISSING)), self._values))
                and list(map(len, self._mappings)) == self._sizes
                and list(map(type, self._objects)) == self._kinds
            )
        return quick and all(entry.place.get() is entry.value for entry in self._others)


@cache
def _library() -> ctypes.PyDLL | None:
    try:
        return native.interpreted(native.library(SOURCE, SIGNATURES, what="lowtide's watch"), SIGNATURES)
    except native.NativeUnavailable:  # the arena has said so
        return None
