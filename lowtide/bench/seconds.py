"""Is the predicted time of a step the real one? Fitted steps within several budgets, timed by turns.

Two predictions are held against the clock: by prices of ops alone, as for a step that never ran here, and by those that
the first steps within another budget have corrected, as for every later plan.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any

from lowtide.bench.race import steps_of_a_turn
from lowtide.errors import BudgetError
from lowtide.execute.timings import PATIENCE
from lowtide.fit import Fitted, fit
from lowtide.measure import measure
from lowtide.simulate import simulate

BUDGETS = (100.0, 50.0, 30.0)  # percent of the step's own part
LESSON = 70.0  # percent: a budget whose first steps correct the prices
LIMIT = 0.05  # of the measured time; what the prediction may be off by
ROUNDS = 7
WARM_UPS = 6  # steps of each before the clock starts: the first ones learn
LESSONS = PATIENCE + 2  # of these steps at the most, where others have the cores in some of them
TIME_LIMIT = 2.0  # seconds of search for each budget: how good the plan is does not matter here

Build = Callable[[], tuple[Any, Any, Any, tuple[Any, ...]]]


@dataclass(frozen=True)
class Timed:
    """The time of a step within one budget; nothing is known where nothing fits it."""

    percent: float  # of the step's own part
    budget: int | None = None  # bytes
    alone: float | None = None  # seconds of a step, predicted by prices of ops alone
    predicted: float | None = None  # seconds of a step, predicted by prices that steps have corrected
    rounds: tuple[float, ...] = ()  # seconds of a step in each round

    @property
    def measured(self) -> float | None:
        """The seconds of a step, the median of all rounds."""
        return median(self.rounds) if self.rounds else None

    @property
    def error(self) -> float | None:
        """How much the prediction is off, as a signed fraction of what was measured."""
        return None if self.predicted is None or not self.rounds else self.predicted / median(self.rounds) - 1

    @property
    def error_alone(self) -> float | None:
        """The same of the prediction by prices of ops alone."""
        return None if self.alone is None or not self.rounds else self.alone / median(self.rounds) - 1

    @property
    def ok(self) -> bool:
        """Whether the prediction is within the limit."""
        return self.error is None or abs(self.error) <= LIMIT


def time_budgets(
    build: Build, *, rounds: int = ROUNDS, budgets: Sequence[float] = BUDGETS, time_limit: float = TIME_LIMIT
) -> list[Timed]:
    """Fit the step within each budget, each on a model of its own, then take turns; one more round goes ahead."""
    _Turn(build, LESSON, time_limit).warm_up()
    entered = [_Turn(build, percent, time_limit) for percent in budgets]
    running = [turn for turn in entered if turn.train is not None]
    for turn in running:
        turn.warm_up()
    for number in range(rounds + 1):
        first = number % len(running) if running else 0
        for turn in (*running[first:], *running[:first]):
            seconds = turn.take()
            if number:
                turn.rounds.append(seconds)
    return [Timed(turn.percent, turn.budget, turn.alone, turn.predicted, tuple(turn.rounds)) for turn in entered]


class _Turn:
    """A fitted step that is timed."""

    def __init__(self, build: Build, percent: float, time_limit: float) -> None:
        self.percent = percent
        self.rounds: list[float] = []  # seconds of a step
        self.budget: int | None = None  # bytes
        self.alone: float | None = None  # seconds
        self.predicted: float | None = None  # seconds
        self.train: Fitted | None = None  # None: nothing fits
        step, model, optimizer, self.example = build()
        try:
            train = fit(step, model, optimizer, example=self.example, budget=f"{percent}%", time_limit=time_limit)
        except BudgetError:
            return
        graph = train.captured.graph
        self.train, self.budget, self.predicted = train, train.plan.budget, train.plan.seconds
        self.alone = simulate(graph, measure(graph, corrected=False), train.program).seconds

    def warm_up(self) -> None:
        """Take the first steps, which learn."""
        for number in range(LESSONS):
            if number < WARM_UPS or self._learns():
                self._step()

    def take(self) -> float:
        """The seconds of a step; of one that is short, by several in a row, after one that nobody counts."""
        assert self.predicted is not None
        gc.collect()
        self._step()
        steps = steps_of_a_turn(self.predicted)
        begun = perf_counter()
        for _ in range(steps):
            self._step()
        return (perf_counter() - begun) / steps

    def _learns(self) -> bool:
        """Whether the ops of the next step are timed."""
        return self.train is not None and any(one.runner.timings.left for one in self.train._fits)

    def _step(self) -> None:
        if self.train is not None:
            self.train(*self.example)
