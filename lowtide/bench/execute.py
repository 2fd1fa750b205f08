"""Does a program take longer than eager PyTorch?"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any

from lowtide.capture import capture
from lowtide.execute import execute
from lowtide.plan import keep_everything

LIMIT = 1.05  # of eager's time
WARM_UPS = 2  # steps of each before the clock starts

Build = Callable[[], tuple[Any, Any, Any, tuple[Any, ...]]]


@dataclass(frozen=True)
class Times:
    """Seconds of single steps, eager's and the program's, taken by turns."""

    eager: tuple[float, ...]
    program: tuple[float, ...]

    @property
    def time_ratio(self) -> float:
        """The median of the program's steps over the median of eager's."""
        return median(self.program) / median(self.eager)

    @property
    def ok(self) -> bool:
        """Whether the program is within the limit."""
        return self.time_ratio <= LIMIT


def time_steps(build: Build, *, rounds: int) -> Times:
    """Time eager steps and steps of the program, each on a model of its own, by turns."""
    step, model, optimizer, example = build()
    captured = capture(*build())
    runner = execute(captured, keep_everything(captured.graph))

    def eager() -> None:
        step(model, optimizer, *example)

    def program() -> None:
        runner(*example)

    for _ in range(WARM_UPS):
        eager()
        program()
    times = [(_seconds(eager), _seconds(program)) for _ in range(rounds)]
    return Times(tuple(pair[0] for pair in times), tuple(pair[1] for pair in times))


def _seconds(run: Callable[[], None]) -> float:
    start = perf_counter()
    run()
    return perf_counter() - start
