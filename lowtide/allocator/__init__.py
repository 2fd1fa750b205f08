"""How much memory torch asks for on the CPU, exactly: every block, of every thread, in plain eager code.

    with allocator.meter() as meter:
        loss = step(model, optimizer, x, y)
    print(meter.peak)

Counted are the bytes that torch requests from its current CPU allocator. A block made while no meter ran is
unknown, also when it is freed. Some memory never passes there and is not seen: a storage from before that
grows, an `UntypedStorage` made by hand (`copy.deepcopy` of a tensor makes one), shared memory, arrays of
numpy, and the buffers that MKL and OpenMP keep for themselves.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal, NamedTuple

from lowtide.allocator import build
from lowtide.allocator.build import AllocatorUnavailable
from lowtide.errors import LowtideError, UsageError

__all__ = ["AllocatorUnavailable", "Event", "Meter", "Recording", "available", "hold", "installed", "meter", "record"]

_KINDS: tuple[Literal["alloc"], Literal["free"]] = ("alloc", "free")
_REFUSED = -1  # kRefused in allocator.cpp


class Event(NamedTuple):
    """A block of memory was made or given back."""

    kind: Literal["alloc", "free"]
    block: int  # the blocks made in the recording count from 0; a block made before it has a negative number
    nbytes: int  # as requested


class _Counters(NamedTuple):
    current: int
    peak: int
    allocations: int


class Meter:
    """Bytes that torch holds on the CPU beyond those it held when the meter started."""

    def __init__(self, library: ctypes.CDLL, slot: int) -> None:
        self._library = library
        self._slot = slot
        self._last: _Counters | None = None

    @property
    def current(self) -> int:
        """Bytes allocated minus bytes freed; negative when more was freed, of what an earlier meter saw."""
        return self._counters().current

    @property
    def peak(self) -> int:
        """The largest value that `current` has had, since the start or the last reset."""
        return self._counters().peak

    @property
    def allocations(self) -> int:
        """How many blocks were allocated; a tensor of no elements has none."""
        return self._counters().allocations

    def reset(self) -> None:
        """Let the peak start again from the current level."""
        if self._last is not None:
            raise UsageError("a meter that has stopped can't be reset.", hint="start another with meter().")
        self._library.lowtide_meter_reset(self._slot)

    def __repr__(self) -> str:
        counters = self._counters()
        return f"Meter(current={counters.current}, peak={counters.peak}, allocations={counters.allocations})"

    def _counters(self) -> _Counters:
        if self._last is not None:
            return self._last
        numbers = (ctypes.c_int64 * 3)()
        self._library.lowtide_meter_read(self._slot, numbers)
        return _Counters(*numbers)

    def _stop(self) -> None:
        numbers = (ctypes.c_int64 * 3)()
        self._library.lowtide_meter_stop(self._slot, numbers)
        self._last = _Counters(*numbers)


class Recording:
    """What one recording saw; `events` is filled when it ends."""

    def __init__(self) -> None:
        self.events: list[Event] = []


@contextmanager
def meter() -> Iterator[Meter]:
    """Count torch's CPU memory inside the `with`; meters may be nested and overlap, each for itself."""
    library = build.load()
    slot = library.lowtide_meter_start()
    _check(slot, busy="64 meters run already, and there can't be more.")
    running = Meter(library, slot)
    try:
        yield running
    finally:
        running._stop()


@contextmanager
def record(*, limit: int = 1_000_000) -> Iterator[Recording]:
    """Write down up to `limit` allocations and frees of all threads, in order; one recording at a time."""
    library = build.load()
    _check(library.lowtide_record_start(limit), busy="a recording runs already, and there can be only one.")
    recording = Recording()
    counts = (ctypes.c_int64 * 2)()
    try:
        yield recording
    finally:
        library.lowtide_record_stop(counts)
        length, lost = counts
        numbers = (ctypes.c_int64 * (3 * length))()
        library.lowtide_record_take(numbers)
        triples = zip(numbers[0::3], numbers[1::3], numbers[2::3], strict=True)
        recording.events = [Event(_KINDS[kind], block, nbytes) for kind, block, nbytes in triples]
    if lost:
        raise LowtideError(
            f"the recording is full: {lost} events came after the {limit} that it holds.",
            hint="record less, or pass a larger limit.",
        )


def available() -> bool:
    """Whether memory can be metered here; compiles the allocator if that was not done yet."""
    try:
        build.load()
    except AllocatorUnavailable:
        return False
    return True


def installed() -> bool:
    """Whether torch allocates through lowtide's allocator now."""
    library = build.loaded()
    return library is not None and bool(library.lowtide_installed())


def hold() -> Callable[[], None] | None:
    """Keep lowtide's allocator in place, where it is, until the answer is called; None: another one is in place.

    A library that gives its memory back to torch's allocator of that moment, rather than to the one that made it, would
    give ours to another.
    """
    library = build.loaded()
    if library is None or not library.lowtide_hold():
        return None
    let_go: Callable[[], None] = library.lowtide_let_go
    return let_go


def _check(answer: int, *, busy: str) -> None:
    if answer == _REFUSED:
        raise AllocatorUnavailable(
            "torch's CPU allocator can't be metered: another library has put its own in place.",
            hint="end what that library does before metering.",
        )
    if answer < 0:
        raise UsageError(busy)
