"""A second device: the CPU whose copies happen as late as they may, and whose freed bytes are poisoned.

A copy is only noted when it starts; it happens when it is waited for, after some of the others that are under way, in a
random order. What a copy will fill is poisoned until then, and so is what is freed. A program that reads too early or
frees too soon computes with poison.
"""

from __future__ import annotations

import dataclasses
import os
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from lowtide import device
from lowtide.errors import PlaceError
from lowtide.execute import source

POISON = 0xFF  # a byte: NaN as a float of any width, -1 as an integer


@dataclasses.dataclass(eq=False)
class Late:
    """A copy that has not happened yet."""

    store: LateStore
    source: torch.Tensor
    target: torch.Tensor
    seconds: float | None = None

    def wait(self) -> None:
        """Let it happen now, after some others."""
        self.store.happen(self)


class LateStore:
    """Bytes elsewhere."""

    staging = 0
    early = 0.3  # of the copies under way, those that happen when another is waited for

    def __init__(self, nbytes: int, _: str | os.PathLike[str] | None = None) -> None:
        self.nbytes = nbytes
        self.bytes = _elsewhere(nbytes)
        self.under_way: list[Late] = []
        self.random = random.Random(nbytes)
        self.copies = 0

    def grow(self, nbytes: int) -> None:
        larger = _elsewhere(nbytes)
        larger[: self.nbytes] = self.bytes
        self.bytes, self.nbytes = larger, nbytes

    def write(self, offset: int, source: torch.Tensor) -> Late:
        target = self.bytes[offset : offset + len(source)]
        return self._start(source, target)

    def read(self, offset: int, target: torch.Tensor) -> Late:
        return self._start(self.bytes[offset : offset + len(target)], target)

    def _start(self, source: torch.Tensor, target: torch.Tensor) -> Late:
        if len(source) != len(target):
            raise PlaceError(f"{len(source)} bytes to {len(target)}")
        target.fill_(POISON)
        self.under_way.append(Late(self, source, target))
        return self.under_way[-1]

    def happen(self, waited: Late) -> None:
        others = [copy for copy in self.under_way if copy is not waited and self.random.random() < self.early]
        self.random.shuffle(others)
        for copy in (*others, waited):
            if copy in self.under_way:
                self.under_way.remove(copy)
                copy.target.copy_(copy.source)
                self.copies += 1

    def settle(self) -> None:
        self.under_way.clear()

    def resident(self) -> int:
        return 0

    def close(self) -> None:
        self.under_way.clear()


def _elsewhere(nbytes: int) -> torch.Tensor:
    """Poisoned bytes of Python, which no meter of torch's memory counts."""
    return torch.frombuffer(bytearray([POISON]) * max(1, nbytes), dtype=torch.uint8)[:nbytes]


class LateHomes:
    """The caller's tensors where they are, as bytes elsewhere."""

    def __init__(self, _: str | os.PathLike[str] | None = None) -> None:
        self.stores: list[LateStore] = []

    def locate(self, tensors: Sequence[torch.Tensor]) -> list[tuple[LateStore, int]]:
        self.stores = [LateStore(0) for _ in tensors]
        for store, tensor in zip(self.stores, tensors, strict=True):
            store.bytes = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
        starts = [tensor.storage_offset() * tensor.element_size() for tensor in tensors]
        return list(zip(self.stores, starts, strict=True))

    def forget(self, tensors: Sequence[torch.Tensor]) -> None:
        """They are where they were."""

    def resident(self) -> int:
        return 0


LATE = dataclasses.replace(
    device.CPU,
    stores={"host": LateStore, "disk": LateStore},
    homes={"host": LateHomes, "disk": LateHomes},
    room=dict.fromkeys(("host", "disk"), lambda _: 2**40),
    staging=0,
)


@contextmanager
def poisoned() -> Iterator[None]:
    """Let programs that are generated inside the `with` poison what they free, but for what the caller holds."""
    usual = source._Writer.drop

    def drop(self: Any, value: int, now: int) -> None:
        tensor, home = self.held[value], self.homes.get(self.graph.values[value].storage)
        callers = home is not None and home.name == tensor.name
        if self.graph.values[value].kind != "scalar" and not callers:
            self.emit(f"{self.constant(poison)}({tensor.name})")
        usual(self, value, now)

    with mock.patch.object(source._Writer, "drop", drop):
        yield


def poison(tensor: Any) -> None:
    """Fill all bytes of a tensor's storage."""
    if isinstance(tensor, torch.Tensor):
        flat = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
        flat.fill_(POISON)
