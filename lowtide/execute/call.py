"""One call of a program: what it holds while it runs, and what is said where it fails."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from lowtide.allocator.arena import Stepping
from lowtide.execute.arrangement import Arrangement
from lowtide.execute.away import Away
from lowtide.execute.binding import Binding
from lowtide.execute.failure import failed, let_go
from lowtide.execute.lessons import Lessons
from lowtide.execute.timings import Stopwatch
from lowtide.program import Program


class Call:
    """One call. Whoever makes it closes it, or hands it the error that ended it."""

    def __init__(self, binding: Binding, program: Program, arrangement: Arrangement, away: Away) -> None:
        self._graph, self._program = binding.captured.graph, program
        self._binding, self._arrangement, self._away = binding, arrangement, away
        self._stack = ExitStack()
        self.cursor = array("q", [len(program.instructions)])  # the instruction that runs; so far, none
        self._state: bytes | None = None  # of the generator before the step
        self._stepping: Stepping | None = None

    def begin(self, function: Callable[..., Any], inputs: list[Any], watch: Stopwatch | None = None) -> Any:
        """Call the program's function; what it makes goes where it is arranged. A watch is told what begins when."""
        self._stepping = self._arrangement.begin(self._stack, self.cursor)
        generator = self._arrangement.device.generator()
        if self._graph.random:
            self._state = generator.get_state().numpy().tobytes()  # as Python's own, for the tensor has gone by then
        stored = self._away.begin(self._stack, inputs)
        self._binding.take_gradients()
        if self._stepping is not None:
            self._stepping.expect(self._arrangement.eager[0])
        return function(inputs, generator, stored, watch or self.cursor)

    def hand_over(self) -> bytes | None:
        """Let the caller's code go on: what it allocates is not the step's, and what was drawn is not put back.

        Returns the state of the generator before the step; None where the step draws nothing.
        """
        if self._stepping is not None:
            self._stepping.pause()
        state, self._state = self._state, None
        return state

    def take_back(self, nbytes: int) -> None:
        """Go on, with so many more bytes that the caller's code made."""
        if self._stepping is not None:
            self._stepping.resume(nbytes, eager=self._arrangement.eager[1] if nbytes else 0)

    @property
    def holds(self) -> int:
        """The bytes of what it made that it holds while others go on; 0 where nobody counts."""
        return 0 if self._stepping is None else self._stepping.holds

    def close(self) -> None:
        """Let go of all that it holds."""
        self._stack.close()

    def fail(self, error: BaseException) -> None:
        """Let go of all that it holds, and raise an error that says how far it came, unless this one says it."""
        let_go(error)
        self.close()
        reached = self.cursor[0] if self.cursor[0] < len(self._program.instructions) else -1
        failed(self._graph, self._program, reached, error, self._state)

    def teach(self, lessons: Lessons) -> None:
        """After its end: let others learn from what it allocated."""
        if self._stepping is not None:
            lessons.learn(self._stepping.step)
