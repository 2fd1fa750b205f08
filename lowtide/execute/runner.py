"""A captured step that runs by its program, in one arena."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lowtide import private
from lowtide.captured import Captured
from lowtide.execute.arrangement import Arrangement
from lowtide.execute.binding import Binding
from lowtide.execute.call import Call
from lowtide.execute.lessons import Lessons
from lowtide.execute.source import generate
from lowtide.program import Program


class Runner:
    """A captured step that runs by its program: call it with a batch.

    The first call allocates as eager does, no more at a time than the plan says, and learns what each op allocates;
    the others run in the arena. Without our allocator all of them are like the first.
    """

    def __init__(self, captured: Captured, program: Program, nbytes: Sequence[int] | None = None) -> None:
        graph = captured.graph
        self.captured = captured
        self.program = program
        self.function, self.source = generate(graph, program)
        self.binding = Binding(captured)  # between the caller's objects and the function
        counted = nbytes if nbytes is not None else [value.nbytes for value in graph.values]
        self.lessons = Lessons(graph, program, counted)  # what its steps taught
        self.arrangement = Arrangement(graph.device, program.arena, self.lessons)  # where its steps allocate

    def __call__(self, *batch: Any) -> Any:
        """One training step on this batch; returns what the step returns, detached."""
        inputs = self.binding.take(batch)
        call = self.call()
        try:
            with private.below_autograd():
                outputs = call.begin(self.function, inputs)
            call.close()
            result = self.binding.leave(outputs)
        except BaseException as error:
            inputs.clear()
            call.fail(error)
            raise
        call.teach(self.lessons)
        return result

    def call(self) -> Call:
        """One call of the program, for whoever takes it in steps of its own."""
        return Call(self.binding, self.program, self.arrangement)

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


def execute(captured: Captured, program: Program, nbytes: Sequence[int] | None = None) -> Runner:
    """Make a callable of a captured step and a program for its graph.

    `nbytes` is for each value what the plan counted with, where that is not what the graph declares.
    """
    return Runner(captured, program, nbytes)
