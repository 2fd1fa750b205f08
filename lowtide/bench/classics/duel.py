"""Eager PyTorch against lowtide within a budget: two processes, by turns, both metered."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from statistics import median
from typing import Any

from lowtide.bench.peers import EAGER, Contestant
from lowtide.bench.race import Racer, run_rounds, started, steps_of_a_turn
from lowtide.plan import TIME_LIMIT


@dataclass(frozen=True)
class Metered:
    """The memory of a step."""

    before: int  # bytes: parameters, buffers, optimizer state and the batch
    peak: int  # bytes of the whole step

    @property
    def own(self) -> int:
        """Bytes that the step adds to what was there before it."""
        return self.peak - self.before


@dataclass(frozen=True)
class Duel:
    """What both reached."""

    eager: Metered
    lowtide: Metered
    budget: int  # bytes of the whole step
    equal: bool  # whether all that five steps change is eager's, bit for bit
    overhead: float  # that was planned, as a fraction of the step without recomputation
    planning_seconds: float
    seconds: float  # of a step, the median of all rounds; 0: not timed
    eager_seconds: float
    time_ratio: float  # to eager's step of the same round, the median of all rounds; 0: not timed

    @property
    def less(self) -> float:
        """How many times less the step's own part is than eager's."""
        return self.eager.own / self.lowtide.own


def duel(
    target: str, budget: Callable[[Metered], int], *, rounds: int, time_limit: float = TIME_LIMIT, apart: bool = False
) -> Duel:
    """Meter eager, give lowtide a budget that may depend on it, and let both take turns; without rounds no clock runs.

    With `apart` eager's process ends before lowtide's begins, for steps that do not fit into the machine together.
    """
    with ExitStack() as stack:
        eager = stack.enter_context(started(target, EAGER, time_limit=0.0))
        first = eager.ask("warm-up")
        usual = metered(eager)
        if apart:
            eager.end()
        nbytes = budget(usual)
        contestant = Contestant("lowtide", "lowtide", budget=nbytes)
        lowtide = stack.enter_context(started(target, contestant, time_limit=time_limit))
        second = lowtide.ask("warm-up")
        ours = metered(lowtide)
        seconds: dict[str, list[float]] = {"eager": [0.0], "lowtide": [0.0]}
        ratio = 0.0
        if rounds and not apart:
            steps = steps_of_a_turn(median(first["warm_up_seconds"]))
            seconds, reasons = run_rounds([eager, lowtide], rounds=rounds, steps=steps, say=lambda _: None)
            assert not reasons, reasons
            pairs = zip(seconds["lowtide"], seconds["eager"], strict=True)
            ratio = median(one / other for one, other in pairs)
    return Duel(
        eager=usual,
        lowtide=ours,
        budget=nbytes,
        equal=first["digest"] == second["digest"],
        overhead=second["overhead"],
        planning_seconds=second["planning_seconds"],
        seconds=median(seconds["lowtide"]),
        eager_seconds=median(seconds["eager"]),
        time_ratio=ratio,
    )


def metered(racer: Racer) -> Metered:
    """The memory of a step of a process that has warmed up."""
    found: dict[str, Any] = racer.ask("meter")
    return Metered(found["before"], found["metered_peak"])


def eager_memory(target: str) -> Metered:
    """What a step of eager PyTorch needs."""
    with started(target, EAGER, time_limit=0.0) as racer:
        racer.ask("warm-up")
        return metered(racer)
