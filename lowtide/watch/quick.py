"""The quick comparison: whether every entry still is the very object that was there."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from itertools import repeat
from operator import is_
from typing import Any

from lowtide.guards import MISSING, Entry, Names


class Quick:
    """Entries and sizes of mappings, arranged to be compared by identity."""

    def __init__(self, entries: Sequence[Entry], names: Sequence[Names]) -> None:
        holders, self._keys, self._values = [], [], []
        self._others: list[Entry] = []
        for entry in entries:
            holder = entry.place.holder
            if isinstance(holder, type):
                holder = gc.get_referents(holder.__dict__)[0]
            if isinstance(holder, dict):
                holders.append(holder)
                self._keys.append(entry.place.key)
                self._values.append(entry.value)
            else:
                self._others.append(entry)
        self._holders: list[dict[Any, Any]] = holders
        self._mappings = [item.holder for item in names]
        self._sizes = [len(item.keys) for item in names]

    def same(self) -> bool:
        """Whether nothing moved."""
        return (
            all(map(is_, map(dict.get, self._holders, self._keys, repeat(MISSING)), self._values))
            and list(map(len, self._mappings)) == self._sizes
            and all(entry.place.get() is entry.value for entry in self._others)
        )
