"""Recompute: shave the peak, delete what the budget has room for, then ruin a part and recreate it, time permitting.

The shaving follows the greedy eviction of Kirisame et al. 2021 (DTR), offline and with the area above the budget in
place of staleness; ruin and recreate is Schrimpf et al. 2000. Nothing here proves anything; `bound` does. Where there
is no compiler, nothing is ruined: the starts, shaved and tidied by `plain`, are all there is.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product

import numpy as np

from lowtide.plan import plain
from lowtide.plan.compiled import answered
from lowtide.plan.problem import Floats, Ints, Problem, ints, library, reals
from lowtide.plan.settings import (
    COPY_PRICES,
    LOWERINGS,
    LOWEST_PLACES,
    LOWEST_POOL,
    LOWEST_TRIES,
    MANNERS,
    PLACES_A_SECOND,
    RACE_SLICES,
    RACE_STAGES,
    SHAVING_GROWTH,
    SHAVING_PATIENCE,
    SHAVING_ROUNDS,
    SMALLEST_VALUE,
    START_PLACES,
    STARTS_SHARE,
    STRETCH_LEAD,
    STRETCH_RACE,
    TEMPERATURE,
)

Lead = Callable[[float], Ints | None]  # the quickest seconds so far -> a start, None: it is not worth it
Prove = Callable[[float], float]  # the quickest seconds so far -> the seconds with which a search may end


def shave(
    problem: Problem,
    sequence: Ints,
    budget: int,
    *,
    batch: int = 1,
    penalty: float = 0.0,
    rate: float = 0.0,
    weight: Floats | None = None,
    smallest: int = 0,
    work: Ints | None = None,
) -> tuple[Ints, int]:
    """Repeat runs until the peak is within the budget, or nothing helps, or the work is done; and the peak."""
    weight = np.ones(len(problem.nbytes)) if weight is None else weight
    work = np.array([START_PLACES]) if work is None else work
    most_seconds = SHAVING_PATIENCE * float(problem.seconds.sum())
    inner = library()
    if inner is None:
        shaved = plain.shave(
            problem,
            sequence,
            budget - problem.persistent,
            batch=batch,
            penalty=penalty,
            weight=weight,
            smallest=smallest,
            most_seconds=most_seconds,
            work=work,
        )
        return shaved, problem.peak(shaved)
    room = max(len(sequence) * SHAVING_GROWTH, 4000)
    longer = np.zeros(room, np.int64)
    longer[: len(sequence)] = sequence
    reached = np.zeros(1, np.int64)
    length = answered(
        inner.lowtide_shave(
            problem.struct,
            ints(longer),
            len(sequence),
            room,
            budget - problem.persistent,
            batch,
            penalty,
            rate,
            reals(weight, len(problem.nbytes)),
            SHAVING_ROUNDS,
            most_seconds,
            smallest,
            ints(work),
            ints(reached),
        )
    )
    if length < 0:
        return sequence, problem.peak(sequence)
    return longer[:length].copy(), problem.persistent + int(reached[0])


def tidy(problem: Problem, sequence: Ints, budget: int, *, passes: int = 4, work: Ints | None = None) -> Ints:
    """Drop repeated runs, the slowest for their bytes first, while the peak stays within the budget.

    It is a matter of milliseconds, and counts as work only where there is no compiler.
    """
    inner = library()
    if inner is None:
        work = np.zeros(1, np.int64) if work is None else work
        return plain.tidy(problem, sequence, budget - problem.persistent, passes=passes, work=work)
    left = sequence.copy()
    length = answered(inner.lowtide_tidy(problem.struct, ints(left), len(left), budget - problem.persistent, passes))
    return left[:length].copy()


def recompute(
    problem: Problem,
    starts: list[Ints],
    budget: int,
    *,
    limit: float,
    until: float,
    enough: float = 0.0,
    seed: int = 0,
    progress: Callable[[float], None] | None = None,
    lead: Lead | None = None,
    prove: Prove | None = None,
) -> Ints | None:
    """The quickest sequence within the budget that is found from these starts with `limit` seconds' worth of search.

    It stops early where a sequence takes `enough` seconds or less; before the race, `prove` may find that more seconds
    than it was told are enough. What `lead` makes joins the race only where it is
    ahead of all others; elsewhere nothing changes.
    """
    smallest = int(problem.nbytes.max(initial=0) * SMALLEST_VALUE)
    field: list[_Runner] = []
    fitting = {family for family, start in enumerate(starts) if problem.peak(start) <= budget}  # without shaving
    left = limit * PLACES_A_SECOND * STARTS_SHARE
    hopeless = -max(3 * left, 4.0 * START_PLACES)
    rates = COPY_PRICES if len(problem.copies.latency) else (0.0,)
    for (batch, penalty), rate, (family, start) in product(MANNERS, rates, enumerate(starts)):
        if left < (0 if field else hopeless) or (field and library() is not None and time.monotonic() > until):
            break
        if family in fitting and (batch, penalty, rate) != (*MANNERS[0], rates[0]):
            continue
        work = np.array([START_PLACES])
        tried, peak = shave(
            problem, start, budget, batch=batch, penalty=penalty, rate=rate, smallest=smallest, work=work
        )
        if peak <= budget:
            tried = tidy(problem, tried, budget, work=work)
            field.append(_Runner(problem.retimed(tried, budget)[1], family, tried))
        left -= START_PLACES - int(work[0])
    if lead is not None and (ahead := _leading(problem, lead, field, len(starts), budget)) is not None:
        field.append(ahead)
        limit *= STRETCH_RACE
    if not field:
        return None
    race = _Race(problem, budget, smallest, limit, until, seed, progress)
    if library() is not None and prove is not None and (quickest := min(one.seconds for one in field)) > enough:
        enough = prove(quickest)
    for number, (among, share) in enumerate(RACE_STAGES if library() is not None else ()):
        if min(runner.seconds for runner in field) > enough:
            field = race.run(_ahead(field, among), share, number)
    return min(field, key=lambda runner: runner.seconds).sequence


@dataclass(frozen=True)
class _Runner:
    """A sequence in the race."""

    seconds: float
    family: int  # the start that it comes from
    sequence: Ints


def _leading(problem: Problem, lead: Lead, field: list[_Runner], family: int, budget: int) -> _Runner | None:
    """What the lead makes of the quickest seconds so far, tidied, if it fits and is clearly quicker.

    What is only a little ahead may end behind: the race changes its runners by more than that.
    """
    quickest = min((runner.seconds for runner in field), default=math.inf)
    start = lead(quickest)
    if start is None or problem.peak(start) > budget:
        return None
    tried = tidy(problem, start, budget)
    seconds = problem.retimed(tried, budget)[1]
    ahead = STRETCH_LEAD * float(problem.seconds[problem.optional == 0].sum())
    return _Runner(seconds, family, tried) if seconds < quickest - ahead else None


def _ahead(field: list[_Runner], among: int) -> list[_Runner]:
    """Those that go on: the quickest of each family, then the others; no two alike."""
    ranked = sorted({runner.seconds: runner for runner in reversed(field)}.values(), key=lambda one: one.seconds)
    first = {runner.family: runner for runner in reversed(ranked)}
    return sorted(ranked, key=lambda one: (first[one.family] is not one, one.seconds))[:among]


def lowest(problem: Problem, starts: list[Ints]) -> Ints:
    """The sequence with the least peak that shaving finds, whatever time it takes."""
    pool = sorted(starts, key=problem.peak)
    left = LOWEST_PLACES
    chance = np.random.default_rng(0)
    systematic = product(LOWERINGS, MANNERS, range(1 + len(starts)))
    for _ in range(LOWEST_TRIES):
        if left < 0:
            break
        if (orderly := next(systematic, None)) is not None:
            part, (batch, penalty), number = orderly
            start, target, weight = [pool[0], *starts][number], int(problem.peak(pool[0]) * part), None
        else:
            start, batch = pool[int(chance.integers(len(pool)))], int(chance.choice((1, 2, 4, 16)))
            target, penalty = (
                int(problem.peak(start) * (1 - 0.1 * chance.random() ** 2)),
                chance.choice((0.0, 1.0, 10.0)),
            )
            weight = np.exp(chance.standard_normal(len(problem.nbytes)))
        work = np.array([START_PLACES // 5])
        tried, reached = shave(problem, start, target, batch=batch, penalty=float(penalty), weight=weight, work=work)
        if reached < problem.peak(pool[-1]) or len(pool) < LOWEST_POOL:
            pool = sorted([*pool, tidy(problem, tried, reached, work=work)], key=problem.peak)[:LOWEST_POOL]
        left -= max(START_PLACES // 5 - int(work[0]), len(start))
    return pool[0]


@dataclass(frozen=True)
class _Race:
    """Searches side by side, of which the better ones go on."""

    problem: Problem
    budget: int
    smallest: int
    limit: float
    until: float
    seed: int
    progress: Callable[[float], None] | None

    def run(self, runners: list[_Runner], share: float, number: int) -> list[_Runner]:
        """Search from each of these with its part of this share of the work."""
        work = int(self.limit * PLACES_A_SECOND * share / len(runners))
        lanes = range(number * len(runners), (number + 1) * len(runners))
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            found = list(pool.map(lambda one, lane: self._search(one.sequence, work, lane), runners, lanes))
        seconds = [self.problem.retimed(one, self.budget)[1] for one in found]
        after = [_Runner(took, old.family, one) for took, old, one in zip(seconds, runners, found, strict=True)]
        if self.progress is not None:
            self.progress(min(runner.seconds for runner in after))
        return after

    def _search(self, start: Ints, work: int, lane: int) -> Ints:
        """Search at a falling temperature, in slices; all of the work, unless the clock stops it."""
        problem, inner, room = self.problem, library(), max(len(start) * SHAVING_GROWTH, 4000)
        assert inner is not None
        now, best = np.zeros(room, np.int64), np.zeros(room, np.int64)
        now[: len(start)] = best[: len(start)] = start
        lengths = np.array([len(start), len(start)], np.int64)
        for part in range(RACE_SLICES):
            if time.monotonic() > self.until:
                break
            answered(
                inner.lowtide_search(
                    problem.struct,
                    ints(now),
                    ints(best),
                    ints(lengths),
                    room,
                    self.budget - problem.persistent,
                    self.smallest,
                    (self.seed * 1000 + lane) * RACE_SLICES + part,
                    work // RACE_SLICES,
                    TEMPERATURE * (1 - part / RACE_SLICES),
                    TEMPERATURE * (1 - (part + 1) / RACE_SLICES),
                )
            )
        return best[: lengths[1]].copy()
