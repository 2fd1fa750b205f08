"""One block of memory for a planned step: the k-th allocation of each instruction gets its planned offset.

    with stepping(cursor, tape, arena) as step:
        cursor[0] = 0  # the instruction that runs
        ...
    print(step.outside, step.mismatches)

Only the thread that steps is given places; all others allocate as ever. A step without a tape learns what it allocates:
its `events` are what a tape is made of. A step with a tape and without an arena allocates as others do.

Between steps, and while a step waits, an arena holds its pages only as long as nobody wants the memory: where all that
is there would be more than the program would have held without arenas, pages that no tensor is in go back.
"""

from __future__ import annotations

import collections
import ctypes
import gc
import mmap
import os
import threading
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import NamedTuple

from lowtide.allocator import build
from lowtide.allocator.build import AllocatorUnavailable
from lowtide.ending import Ending
from lowtide.errors import LowtideError

NO_MEMORY = -3  # kNoMemory in allocator.cpp
SPARE = 8 * 2**20  # bytes that must be there beside an arena: ops allocate outside it too


class ArenaError(LowtideError):
    """The system has not the memory that an arena needs, or a step that learns how to use one."""

    def __init__(self, message: str, *, hint: str | None = None, short: int = 0) -> None:
        super().__init__(message, hint=hint)
        self.short = short  # bytes that are missing; 0: that is not known


class Event(NamedTuple):
    """A block of memory was made or given back while an instruction ran, or right after it."""

    instruction: int
    freed: int  # 0: made, 1: freed
    block: int
    nbytes: int


@dataclass
class Step:
    """What one step of a thread did; filled when it ends."""

    outside: int = 0  # bytes: the most that it had outside the arena, beyond what was there when it began
    placed: int = 0  # allocations that had a place in the arena
    mismatches: int = 0  # allocations that did not follow the tape
    placeless: bool = False  # it had no arena
    events: list[Event] = field(default_factory=list)  # of a step that learns


class Tape:
    """The places of a program's allocations: instruction k has the entries from start[k] to start[k + 1]."""

    def __init__(self, start: Sequence[int], nbytes: Sequence[int], offset: Sequence[int]) -> None:
        library, entries = build.load(), min(len(nbytes), len(offset))
        self.handle = library.lowtide_tape_make(
            len(start) - 1, _numbers(start), entries, _numbers(nbytes), _numbers(offset)
        )
        if not self.handle:
            raise ArenaError(
                f"there is no memory for the places of {entries:,} allocations.", hint="end what else uses the memory."
            )
        Ending(self, partial(library.lowtide_tape_drop, self.handle))


class Arena:
    """A block of memory; it is given back when nobody holds it and the last tensor in it is gone."""

    def __init__(self, nbytes: int) -> None:
        library = build.load()
        self.nbytes = nbytes
        there = _there(nbytes + SPARE) or (give_back() and _there(nbytes + SPARE))
        mapped: list[int | None] = []
        self.close = Ending(self, partial(_unmap, mapped))  # where who made it is interrupted
        mapped.append(library.lowtide_arena_map(nbytes) if there else None)
        self.handle = mapped[0]
        if not self.handle:
            raise ArenaError(
                f"the system has no {nbytes:,} bytes for the arena of this step.",
                hint="give a smaller budget, or end what else uses the memory.",
            )

    @property
    def held(self) -> int:
        """The bytes of its tensors, and of the pages that it holds beside them."""
        return int(build.load().lowtide_arena_held(self.handle)) if self.close.alive else 0

    @property
    def blocks(self) -> int:
        """How many tensors are in it."""
        return int(build.load().lowtide_arena_blocks(self.handle)) if self.close.alive else 0


def _unmap(mapped: list[int | None]) -> None:
    """Unmap an arena that was mapped."""
    for handle in filter(None, mapped):
        build.load().lowtide_arena_unmap(handle)


def _there(nbytes: int) -> bool:
    """Whether the system would give so many bytes; no page of them is touched."""
    try:
        mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE).close()
    except (OSError, OverflowError):
        return False
    return True


def give_back() -> bool:
    """Let the heap give the system what nobody uses; whether it gave anything."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # only glibc's heap has it
    gc.collect()
    return trim is not None and bool(trim(ctypes.c_size_t(0)))


class Pool:
    """The arenas of a process: steps that run one after the other share one, which is as large as the largest needs."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # it may be held when a finalizer asks for it
        self._idle: list[Arena] = []
        self._needs: dict[int, int] = {}  # of each step that may come again: bytes
        self._gone: collections.deque[int] = collections.deque()  # steps that will not, and are still among the needs

    def expect(self, user: object, nbytes: int) -> None:
        """Keep an arena of this size as long as the user lives."""
        key = id(user)
        with self._lock:
            self._let_go()  # one of them may have had this key
            known = key in self._needs
            self._needs[key] = nbytes
        if not known:
            Ending(user, partial(self._forget, key))

    @contextmanager
    def borrow(self, nbytes: int) -> Iterator[Arena]:
        """An arena of at least this size, which nobody else uses inside the `with`."""
        with self._lock:
            arena = self._idle.pop() if self._idle else None
        if arena is not None and arena.nbytes < nbytes:
            arena.close()  # before the larger one is there
            arena = None
        if arena is None:
            arena = Arena(nbytes)
        try:
            yield arena
        finally:
            with self._lock:
                self._idle = sorted([*self._idle, arena], key=lambda one: one.nbytes)
            self._trim()

    def empty(self) -> None:
        """Give the idle arenas back, for somebody who needs the memory and has no use for them."""
        with self._lock:
            idle, self._idle = self._idle, []
        for arena in idle:
            arena.close()

    def held(self) -> int:
        """The bytes that all idle arenas hold now."""
        with self._lock:
            return sum(arena.held for arena in self._idle)

    def reserved(self) -> int:
        """The bytes that all idle arenas would hold if steps ran in them."""
        with self._lock:
            return sum(arena.nbytes for arena in self._idle)

    def before_fork(self) -> None:
        """Leave a child no idle arena: it would keep the pages that this process writes to from then on."""
        self._lock.acquire()
        self.empty()

    def after_fork(self) -> None:
        """Let others in again, in both processes."""
        self._lock.release()

    def _forget(self, key: int) -> None:
        """Let a step go. This runs wherever garbage is collected, in any thread: it must not wait for anybody."""
        self._gone.append(key)
        if self._lock.acquire(blocking=False):
            try:
                self._trim()
            finally:
                self._lock.release()

    def _let_go(self) -> None:
        while self._gone:
            self._needs.pop(self._gone.popleft(), None)

    def _trim(self) -> None:
        """Let go of arenas that are larger than what any step needs, and of more arenas than there are steps."""
        with self._lock:
            self._let_go()
            most, count = max(self._needs.values(), default=0), len(self._needs)
            self._idle = [arena for arena in self._idle if arena.nbytes <= most][-count:]


POOL = Pool()
os.register_at_fork(before=POOL.before_fork, after_in_parent=POOL.after_fork, after_in_child=POOL.after_fork)


_NUMBERS = count()
_waiting: set[int] = set()  # the numbers of steps that are paused


def waiting() -> bool:
    """Whether a step of this process waits to go on, with what it holds."""
    return bool(_waiting)


def stepping(cursor: array[int], tape: Tape | None = None, arena: Arena | None = None) -> Stepping:
    """Give this thread's allocations inside the `with` the places of the tape, or learn them."""
    return Stepping(cursor, tape, arena)


class Stepping:
    """The `with` of a step."""

    def __init__(self, cursor: array[int], tape: Tape | None, arena: Arena | None) -> None:
        self.step = Step(placeless=arena is None)
        self._number = next(_NUMBERS)
        self._used = (cursor, tape, arena)  # alive as long as the step
        self._ending: Ending | None = None  # of a step that may be running

    def __enter__(self) -> Step:
        cursor, tape, arena = self._used
        address, _ = cursor.buffer_info()
        library = build.load()
        self._ending = Ending(self, partial(_end, self._number, Step()))  # where who should end it is interrupted
        answer = library.lowtide_step_begin(self._number, arena and arena.handle, tape and tape.handle, address)
        if answer == NO_MEMORY:
            raise ArenaError("there is no memory to begin a step.", hint="end what else uses the memory.")
        if answer:
            raise AllocatorUnavailable(
                "torch's CPU allocator can't be replaced: another library has put its own in place.",
                hint="end what that library does before the step.",
            )
        return self.step

    def __exit__(self, *_: object) -> None:
        self.end()

    def expect(self, nbytes: int) -> None:
        """Let it be known how many bytes eager's step would add to what is there now."""
        build.load().lowtide_step_expect(nbytes)

    def pause(self) -> None:
        """What the thread allocates from here on, until the step goes on, is not the step's."""
        _waiting.add(self._number)
        build.load().lowtide_step_pause(self._number)

    def resume(self, nbytes: int = 0, *, eager: int = 0) -> None:
        """Go on with the step, maybe in another thread; it has so many more bytes now, which others made.

        `eager` is how many bytes eager's would have from here on, with those that both have by now.
        """
        build.load().lowtide_step_resume(self._number, nbytes, eager)
        _waiting.discard(self._number)

    @property
    def holds(self) -> int:
        """The bytes that it holds while it is paused."""
        return int(build.load().lowtide_step_holds(self._number))

    def end(self) -> None:
        """End the step if it runs; where an interruption may come between, call this after the `with` as well."""
        _end(self._number, self.step)
        if self._ending is not None:
            self._ending.call_off()


def _end(number: int, step: Step) -> None:
    """End the step of this number if it runs, and fill in what it did."""
    library = build.load()
    handle = library.lowtide_step_end(number)
    _waiting.discard(number)
    if not handle:
        return
    counters = (ctypes.c_int64 * 4)()
    library.lowtide_step_read(handle, counters)
    step.outside, step.placed, step.mismatches, length = counters
    numbers = (ctypes.c_int64 * (4 * length))()
    library.lowtide_step_take(handle, numbers)
    rows = zip(*(numbers[column::4] for column in range(4)), strict=True)
    step.events = [Event(*row) for row in rows]


def _numbers(items: Sequence[int]) -> ctypes.Array[ctypes.c_int64]:
    return (ctypes.c_int64 * len(items))(*items)
