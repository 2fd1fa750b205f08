"""The steps that are kept, found by what the batch is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Generic, TypeVar

from lowtide.execute import Key

KEPT = 64  # at most

Item = TypeVar("Item")


class Kept(Generic[Item]):
    """Things with keys, the latest first; of more than are kept the one goes that was used the longest ago."""

    def __init__(self) -> None:
        self._all: list[tuple[Key, Item]] = []
        self._alike: dict[Key, list[Item]] = {}

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[Item]:
        return (item for _, item in self._all)

    @property
    def latest(self) -> Item:
        """The one that was used last."""
        return self._all[0][1]

    def candidates(self, key: Key) -> Sequence[Item]:
        """Those of this key or, where there is none, the latest: it can say what is different."""
        return self._alike.get(key) or [self.latest]

    def use(self, key: Key, item: Item) -> None:
        """Put one before all others; it may be new."""
        if self._all and self._all[0][1] is item:
            return
        self._all = [(key, item), *(pair for pair in self._all if pair[1] is not item)]
        self._alike[key] = [item, *(one for one in self._alike.get(key, ()) if one is not item)]
        for old, gone in self._all[KEPT:]:
            self._alike[old] = [one for one in self._alike[old] if one is not gone]
            if not self._alike[old]:
                del self._alike[old]
        del self._all[KEPT:]
