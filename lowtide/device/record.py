"""A device as data: what it has, and how to ask it."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from lowtide.allocator import AllocatorUnavailable, Meter
from lowtide.allocator.arena import Arena, Pool, Stepping, Tape


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
    synchronise: Callable[[], None]  # returns when all that was asked of the device is done
    own_kernel: Callable[[str], Callable[..., Any] | None]  # for a target, ours that gives torch's bits sooner
