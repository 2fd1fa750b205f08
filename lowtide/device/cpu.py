"""The CPU as a device: its memory is the machine's."""

from __future__ import annotations

import platform
import time
from contextlib import suppress
from functools import cache
from pathlib import Path

import torch

from lowtide import allocator
from lowtide.allocator import AllocatorUnavailable
from lowtide.allocator.arena import POOL, stepping
from lowtide.budget import free_memory
from lowtide.costs import ALIGNMENT
from lowtide.device.disk import STAGING, Disk, choose_folder, free_bytes
from lowtide.device.homes import FileHomes
from lowtide.device.record import Device
from lowtide.kernels.own import quicker


def _model() -> str:
    """The processor, the threads, and torch."""
    processor = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        processor = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), processor)
    except OSError:
        pass
    return f"{processor}, {torch.get_num_threads()} threads, torch {torch.__version__}"


@cache
def _missing() -> AllocatorUnavailable | None:
    try:
        allocator.build.load()
    except AllocatorUnavailable as error:
        return error
    return None


def _generator() -> torch.Generator:
    return torch.default_generator


def _delay() -> float:
    """What the kernel counts for the threads that are alive; 0 where it does not tell."""
    nanoseconds = 0
    for thread in Path("/proc/self/task").glob("*/schedstat"):
        with suppress(OSError, ValueError, IndexError):  # a thread that is gone by now
            nanoseconds += int(thread.read_text(encoding="ascii").split()[1])
    return nanoseconds / 1e9


def _synchronise() -> None:
    """Calls on the CPU are done when they return."""


CPU = Device(
    name="cpu",
    alignment=ALIGNMENT,
    model=_model,
    free_bytes=free_memory,
    arenas=POOL,
    missing=_missing,
    stepping=stepping,
    meter=allocator.meter,
    generator=_generator,
    clock=time.perf_counter,
    delay=_delay,
    synchronise=_synchronise,
    stores={"disk": Disk},
    homes={"disk": FileHomes},
    room={"disk": lambda folder: free_bytes(choose_folder(folder))},
    staging=STAGING,
    own_kernel=quicker,
)
