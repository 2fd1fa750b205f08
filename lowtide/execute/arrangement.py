"""Where the allocations of a step go: into the arena, by the tape of earlier steps, or wherever torch puts them."""

from __future__ import annotations

import warnings
from array import array
from contextlib import ExitStack
from functools import cache

from lowtide.allocator import AllocatorUnavailable
from lowtide.allocator.arena import ArenaError, Stepping, waiting
from lowtide.budget import allowance
from lowtide.device import Device
from lowtide.errors import LowtideWarning
from lowtide.execute.lessons import Lessons


class Arrangement:
    """Arranges the steps of one program; a step without a tape allocates as eager does, and learns.

    Nor does a step have an arena that begins while another one waits: each would hold all of its own.
    """

    def __init__(self, device: Device, arena: int, lessons: Lessons) -> None:
        self.beside: int | None = None  # bytes that must be there beside the arena, or a step raises an ArenaError and
        # has run nothing; None: it makes do with what there is
        self.eager = (arena, arena)  # bytes that eager's step adds to what is there, before its handover and after it
        self.device, self._arena, self._lessons = device, arena, lessons
        if self.nbytes:
            device.arenas.expect(self, self.nbytes)
        elif arena and (error := device.missing()) is not None:
            _without_arena(error.message, error.hint)

    @property
    def nbytes(self) -> int:
        """The bytes of the arena that the steps run in; 0 where there is none."""
        return self._arena if self._possible() else 0

    def begin(self, stack: ExitStack, cursor: array[int]) -> Stepping | None:
        """Let what this thread allocates go where it is planned, until the stack ends; None where that can't be."""
        if not self._possible():
            return None
        lessons, arena = self._lessons, None
        if lessons.tape is not None and self._arena and not waiting():
            try:
                arena = stack.enter_context(self.device.arenas.borrow(self._arena))
            except ArenaError as error:
                if self.beside is not None:
                    raise
                # What is alive at a time, which is less, may still fit.
                _without_arena(error.message, error.hint, metered=True)
                lessons.tape = None
        if lessons.tape is None:
            self.device.arenas.empty()  # a step that learns needs the memory
            if self.beside is not None:
                self._look_for_room(self.beside)
        context = self.device.stepping(cursor, lessons.tape, arena)
        stack.callback(context.end)  # an interruption may come before the next line is done
        try:
            stack.enter_context(context)
        except AllocatorUnavailable as error:
            _without_arena(error.message, error.hint)
            return None
        return context

    def _possible(self) -> bool:
        return self.device.missing() is None

    def _look_for_room(self, beside: int) -> None:
        """Raise an ArenaError where the limits of this process leave too little for the step."""
        left, adds = allowance(), self._arena
        if left is not None and left < adds + beside:
            raise ArenaError(
                f"the limits of this process leave it {left:,} bytes; the step takes {adds:,} of them, and libraries "
                f"may take {beside:,} beside it.",
                hint="give a smaller budget, or a larger limit.",
                short=adds + beside - left,
            )


@cache
def _without_arena(why: str, hint: str | None, *, metered: bool = False) -> None:
    """Say, once, that steps run without an arena."""
    how = "" if metered else ", and unmetered"
    warnings.warn(
        f"steps run without an arena{how}: {why} They hold no more at a time than planned, but the heap may need more, "
        f"and they are slower.\nhint: {hint}",
        LowtideWarning,
        stacklevel=2,
    )
