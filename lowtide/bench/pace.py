"""How far the best step of a model is from what the machine needs for it."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from lowtide.cli.target import Built
from lowtide.errors import BudgetError
from lowtide.pace import ROUNDS, Shown, pace
from lowtide.report import Paced

BUDGETS = ("100%", "50%")


@dataclass(frozen=True)
class Distance:
    """The time of a model's step, within the budget at which it is quickest."""

    budget: str
    seconds: float  # of a step
    needed: float  # seconds that the machine needs for it
    distance: float  # the one divided by the other
    arithmetic: float  # of the time in ops, held by arithmetic, as a fraction
    uncounted: float  # in ops whose operations no rule counts, as a fraction
    time_ratio: float  # to eager's step
    ratios: tuple[float, ...]  # of each round
    eager_distance: float  # of eager's step


def distance(
    build: Callable[[], Built], budgets: Sequence[str], *, rounds: int = ROUNDS, time_limit: float, shown: Shown
) -> Distance:
    """The quickest step within any of these budgets; what does not fit one is left out."""
    found: list[Distance] = []
    refused: BudgetError | None = None
    for budget in budgets:
        gc.collect()
        try:
            paced = pace(*build(), budget=budget, rounds=rounds, fitting={"time_limit": time_limit}, shown=shown)
        except BudgetError as error:
            refused = error
            continue
        found.append(_of(budget, paced.time))
    if not found:
        assert refused is not None
        raise refused
    return min(found, key=lambda one: one.time_ratio)


def _of(budget: str, time: Paced) -> Distance:
    arithmetic, _ = time.held["arithmetic"]
    return Distance(
        budget=budget,
        seconds=time.seconds,
        needed=time.needed,
        distance=time.distance,
        arithmetic=arithmetic / time.in_ops,
        uncounted=time.uncounted / time.in_ops,
        time_ratio=median(time.ratios),
        ratios=time.ratios,
        eager_distance=time.eager_seconds / time.needed,
    )
