"""What the steps of a program taught: the tape of what they allocate, and how many bytes they held."""

from __future__ import annotations

from collections.abc import Sequence

from lowtide.allocator.arena import ArenaError, Step, Tape
from lowtide.execute.tape import places, temporaries
from lowtide.graph import Graph
from lowtide.program import Program

LESSONS = 3  # steps at most that learn: the first one may allocate for good, as a warm-up does


class Lessons:
    """Learns from each step of one program."""

    def __init__(self, graph: Graph, program: Program, nbytes: Sequence[int], staging: int = 0) -> None:
        self.tape: Tape | None = None  # of what a step allocates and where it goes; None: the next step learns it
        self.left = LESSONS
        self.peak: int | None = None  # bytes of the whole step, metered: the most of all steps
        self.most: int | None = None  # bytes: the metered ones or, after a step that learned, what the next will hold
        self.mismatches = 0  # allocations of all steps that did not follow the plan
        self.temporaries: dict[int, tuple[int, int]] = {}  # op -> bytes: one piece, and here and there in the heap
        self._graph, self._program, self._nbytes = graph, program, nbytes
        here = [item.value for item in graph.inputs if item.home == "device"]
        self._before = staging + sum(nbytes[value] for value in here)  # bytes, as the plan counts them

    def forget(self) -> None:
        """Let the next steps learn as the first ones did."""
        self.tape, self.left = None, LESSONS

    def learn(self, step: Step) -> None:
        """After a step: note its peak, or make the tape of what it allocated."""
        if self.tape is not None:
            self.mismatches += step.mismatches
            peak = self._before + (0 if step.placeless else self._program.arena) + step.outside
            if step.mismatches and self.left:
                self.tape = None  # the next step learns again, and shows whether the plan is to blame
                self.peak = max(self.peak or 0, peak)
            else:
                self._note(peak)
            return
        self.left = max(0, self.left - 1)
        found = places(self._graph, self._program, self._nbytes, step.events)
        self.temporaries = temporaries(self._graph, self._program, self._nbytes, step.events)
        try:
            self.tape = Tape(found.start, found.nbytes, found.offset)
        except ArenaError:  # the step is done all the same; the next one learns again
            return
        if all(item.persistent for item in self._graph.inputs):  # else something went that we did not see come
            self._note(self._before + step.outside)
            self.most = max(self.most or 0, self._before + self._program.arena + found.outside)

    def _note(self, peak: int) -> None:
        self.peak = max(self.peak or 0, peak)
        self.most = max(self.most or 0, peak)
