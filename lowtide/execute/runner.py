"""A captured step that runs by its program, in one arena."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

from lowtide import device as devices
from lowtide import private
from lowtide.captured import Captured
from lowtide.device import Device
from lowtide.execute.arrangement import Arrangement
from lowtide.execute.away import Away
from lowtide.execute.batch import Batch
from lowtide.execute.binding import Binding
from lowtide.execute.call import Call
from lowtide.execute.departures import departures, dismissals
from lowtide.execute.lessons import Lessons
from lowtide.execute.source import generate
from lowtide.execute.timings import Timings
from lowtide.kernels import collectives
from lowtide.program import Program


class Runner:
    """A captured step that runs by its program: call it with a batch.

    The first call allocates as eager does, no more at a time than the plan says, and learns what each op allocates;
    the others run in the arena. Without our allocator all of them are like the first.
    """

    def __init__(
        self,
        captured: Captured,
        program: Program,
        nbytes: Sequence[int] | None = None,
        *,
        folder: str | os.PathLike[str] | None = None,
        device: Device | None = None,
    ) -> None:
        graph = captured.graph
        self.captured = captured
        self.program = program
        self.device = device or devices.of(graph.device)
        self.stops = departures(graph, program, captured.leaving)  # where results leave before the end
        dismissed = dismissals(graph, program, captured.leaving)
        self.function, self.source = generate(graph, program, self.device, self.stops, dismissed)
        counted = nbytes if nbytes is not None else [value.nbytes for value in graph.values]
        self.away = Away(graph, program, counted, self.device, folder)  # what its steps have in other places
        self.binding = Binding(captured, self.away.settle)  # between the caller's objects and the function
        self.lessons = Lessons(graph, program, counted, self.away.staging)  # what its steps taught
        self.arrangement = Arrangement(self.device, program.arena, self.lessons)  # where its steps allocate
        self.timings = Timings(program, self.device)  # what its steps and ops take
        self.gate: Callable[[], None] = _open  # passed once it is known that a step can run, and before it does

    def __call__(self, *batch: Any) -> Any:
        """One training step on this batch; returns what the step returns, detached."""
        return self.run(Batch.of(batch))

    def run(self, batch: Batch) -> Any:
        """The same, on a batch that is taken apart already."""
        settled, begun = self.lessons.tape is not None, self.device.clock()
        inputs = self.binding.take(batch)
        self.gate()
        call = self.call()
        watch = self.timings.watch(call.cursor) if settled else None
        try:
            with private.below_autograd():
                outputs = call.begin(self.function, inputs, watch)
            call.close()
            result = self.binding.leave(outputs)
        except BaseException as error:
            inputs.clear()
            collectives.drain()
            call.fail(error)
            raise
        call.teach(self.lessons)
        if settled:
            self.device.synchronise()
            self.timings.note(self.device.clock() - begun, watch)
        return result

    def call(self) -> Call:
        """One call of the program, for whoever takes it in steps of its own."""
        return Call(self.binding, self.program, self.arrangement, self.away)

    @property
    def staging(self) -> int:
        """The bytes of the device's memory that copies to other places and back go through; 0 without copies."""
        return self.away.staging

    @property
    def arena_bytes(self) -> int:
        """The bytes of the arena that the steps run in; 0 where there is none."""
        return self.arrangement.nbytes

    @property
    def peak(self) -> int | None:
        """The most bytes that any step held, metered."""
        return self.lessons.peak

    @property
    def mismatches(self) -> int:
        """How many allocations of all steps did not come as they were planned; they went outside the arena."""
        return self.lessons.mismatches


def _open() -> None:
    """Where nobody else takes the step, nobody has to be asked."""


def execute(
    captured: Captured,
    program: Program,
    nbytes: Sequence[int] | None = None,
    *,
    folder: str | os.PathLike[str] | None = None,
    device: Device | None = None,
) -> Runner:
    """Make a callable of a captured step and a program for its graph.

    `nbytes` is for each value what the plan counted with, where that is not what the graph declares; `folder` is where
    the file is made for what the program copies to the disk; `device` stands in for the one that the graph names.
    """
    return Runner(captured, program, nbytes, folder=folder, device=device)
