"""A place of any speed: bytes of this machine's memory, and copies that take as long as they would there."""

from __future__ import annotations

import ctypes
import mmap
import os
import queue
import threading
import time
import weakref
from dataclasses import dataclass, field, replace

import torch

from lowtide.costs import Direction
from lowtide.device import CPU, Device
from lowtide.errors import PlaceError

PIECE = 2**18  # bytes that are copied at once
SHORTEST = 2e-4  # seconds: shorter sleeps are no shorter than this


@dataclass(eq=False)
class Flight:
    """A copy that runs, or is to."""

    target: int  # address
    source: int
    nbytes: int
    held: dict[Flight, torch.Tensor]  # of all copies: what is read or filled, until it was waited for
    wanted: bool = True
    asked: float = field(default_factory=time.perf_counter)  # when, in seconds
    seconds: float | None = None  # that it took
    done: threading.Event = field(default_factory=threading.Event)

    def wait(self) -> None:
        """Return when the copy is done; the step may free its tensor then, and nobody else holds it."""
        self.done.wait()
        self.held.pop(self, None)


class Throttled:
    """So many bytes, from and to which copies go at no more than a rate, in bytes a second."""

    staging = 0

    def __init__(self, nbytes: int, rate: float) -> None:
        self.nbytes, self.rate = nbytes, rate
        self._memory = mmap.mmap(-1, max(1, nbytes))
        self._start = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._queues: dict[Direction, queue.SimpleQueue[Flight | None]] = {}
        self._flights: dict[Flight, torch.Tensor] = {}

    def grow(self, nbytes: int) -> None:
        """No copy here needs more than was planned."""
        raise PlaceError(f"{nbytes:,} bytes are not within the {self.nbytes:,} of this place.")

    def write(self, offset: int, source: torch.Tensor) -> Flight:
        """Start to copy a tensor of bytes to an offset."""
        return self._fly("out", self._start + offset, source.data_ptr(), source)

    def read(self, offset: int, target: torch.Tensor) -> Flight:
        """Start to fill a tensor of bytes from an offset."""
        return self._fly("in", target.data_ptr(), self._start + offset, target)

    def settle(self) -> None:
        """Give up copies that have not begun, and return when none runs."""
        for flight in self._flights:
            flight.wanted = False
        for flight in list(self._flights):
            flight.wait()

    def resident(self) -> int:
        """It stands in for a disk: what it holds in memory does not count."""
        return 0

    def close(self) -> None:
        """Let the threads end."""
        for jobs in self._queues.values():
            jobs.put(None)

    def _fly(self, direction: Direction, target: int, source: int, tensor: torch.Tensor) -> Flight:
        if direction not in self._queues:
            jobs: queue.SimpleQueue[Flight | None] = queue.SimpleQueue()
            self._queues[direction] = jobs
            threading.Thread(target=_work, args=(jobs, self.rate), daemon=True).start()
            weakref.finalize(self, jobs.put, None)
        flight = Flight(target, source, len(tensor), self._flights)
        self._flights[flight] = tensor
        self._queues[direction].put(flight)
        return flight


def throttled(rate: float) -> Device:
    """The CPU with such a place for its disk."""

    def opened(nbytes: int, _: str | os.PathLike[str] | None = None) -> Throttled:
        return Throttled(nbytes, rate)

    return replace(CPU, stores={"disk": opened}, homes={}, staging=0)


def _work(jobs: queue.SimpleQueue[Flight | None], rate: float) -> None:
    """Copy what is asked for, one after the other, none sooner than the rate allows."""
    ended = 0.0
    while (flight := jobs.get()) is not None:
        begun = time.perf_counter()
        for at in range(0, flight.nbytes, PIECE):
            if not flight.wanted:
                break
            length = min(PIECE, flight.nbytes - at)
            ctypes.memmove(flight.target + at, flight.source + at, length)
            early = begun + (at + length) / rate - time.perf_counter()
            if early > SHORTEST or at + length == flight.nbytes:
                time.sleep(max(0.0, early))
        since, ended = max(flight.asked, ended), time.perf_counter()
        flight.seconds = ended - since if flight.wanted else None
        flight.done.set()
        del flight
