"""A device as data: what it has, and how to ask it."""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from lowtide.allocator import AllocatorUnavailable, Meter
from lowtide.allocator.arena import Arena, Pool, Stepping, Tape
from lowtide.graph import Place

CALM = 0.02  # of the time something took: where its threads wait longer for their cores, others had these
WAKING = 1e-3  # seconds: threads that wake up wait a little on a calm machine, too


class Flight(Protocol):
    """A copy that runs beside the computation."""

    @property
    def seconds(self) -> float | None:
        """What a copy took since it was asked for and the one before it was done; None: not known."""

    def wait(self) -> None:
        """Return when the copy is done; one that failed raises a PlaceError."""


class Store(Protocol):
    """So many bytes in another place than the device, and the copies from and to it."""

    nbytes: int
    staging: int  # bytes of the device's memory that its copies go through

    def grow(self, nbytes: int) -> None:
        """Take room for so many bytes in all, now; a PlaceError says where there is none."""

    def write(self, offset: int, source: torch.Tensor) -> Flight:
        """Start to copy a tensor of bytes to an offset."""

    def read(self, offset: int, target: torch.Tensor) -> Flight:
        """Start to fill a tensor of bytes from an offset."""

    def settle(self) -> None:
        """Give up copies that have not begun, and return when none runs: nothing touches the device's bytes then."""

    def resident(self) -> int:
        """The bytes of it that are in the device's memory now, beside what is copied there."""

    def close(self) -> None:
        """Let go of everything."""


class Open(Protocol):
    """Opens a store of so many bytes; where it is a file, in this folder."""

    def __call__(self, nbytes: int, folder: str | os.PathLike[str] | None, /) -> Store:
        """The store."""


class Homes(Protocol):
    """Where the caller's tensors live that are not on the device between steps."""

    def locate(self, tensors: Sequence[torch.Tensor]) -> Sequence[tuple[Store, int]]:
        """The store and the offset of each tensor, for a step; those that are not there yet move, and stay objects."""

    def forget(self, tensors: Sequence[torch.Tensor]) -> None:
        """Give up tensors that came last: others get their room, and nobody may look at them again."""

    def resident(self) -> int:
        """The bytes of them that are in the device's memory now."""


@dataclass(frozen=True)
class Device:
    """What a device is, for everybody who plans, runs or measures on it."""

    name: str  # as torch names its kind
    alignment: int  # bytes: every offset in an arena is a multiple of it
    model: Callable[[], str]  # which of its kind this one is, with all that the seconds of an op depend on
    free_bytes: Callable[[], int]  # that this process can still get
    arenas: Pool  # the memory that planned steps run in
    missing: Callable[[], AllocatorUnavailable | None]  # why steps can run in no arena here, if they can't
    stepping: Callable[[array[int], Tape | None, Arena | None], Stepping]  # lets a step's allocations go to their place
    meter: Callable[[], AbstractContextManager[Meter]]  # counts bytes
    generator: Callable[[], torch.Generator]  # that ops draw from
    clock: Callable[[], float]  # seconds
    delay: Callable[[], float]  # seconds in all that threads of this process stood still while others had their core
    synchronise: Callable[[], None]  # returns when all that was asked of the device is done
    stores: Mapping[Place, Open]  # the places that values can go to from here, the nearest first
    homes: Mapping[Place, Callable[[str | os.PathLike[str] | None], Homes]]  # places that inputs can live in
    room: Mapping[Place, Callable[[str | os.PathLike[str] | None], int]]  # bytes that are free in these places
    staging: int  # bytes of its memory that copies to them and back go through
    own_kernel: Callable[[str], Callable[..., Any] | None]  # for a target, ours that gives torch's bits sooner

    def calm(self, seconds: float, delay: float) -> bool:
        """Whether what took so long had its cores for itself, by what `delay` has grown meanwhile."""
        return delay <= max(WAKING, CALM * seconds)
