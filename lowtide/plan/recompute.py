"""Recompute: shave the peak, delete what the budget has room for, then ruin a part and recreate it, time permitting.

The shaving follows the greedy eviction of Kirisame et al. 2021 (DTR), offline and with the area above the budget in
place of staleness; ruin and recreate is Schrimpf et al. 2000. Nothing here proves anything; `bound` does.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product

import numpy as np

from lowtide.plan.problem import REALS, Ints, Problem, ints

GROWTH = 8  # a sequence may become this many times as long as the graph
PATIENCE = 4.0  # and take this many times its seconds, before a start is given up
ROUNDS = 20_000  # of shaving
MANNERS = ((4, 0.0), (16, 1.0), (1, 1.0), (16, 0.0), (4, 1.0), (1, 0.0))  # values let go at a time, penalty for width
STARTS = 0.2  # of the work: for the starts
PATIENT = 50_000_000  # places that are looked at before one start is given up
RATE = 100_000_000  # places that a search looks at for each second that it is given
SLICES = 10  # between which the clock is looked at
LOWERINGS = (0.5, 0.8, 0.95, 0.99)  # parts of the peak to aim for, when the least is looked for
HEATS = ((12, 0.2), (4, 0.2), (2, 0.4))  # of a race: how many run, and their share of the work
HEAT = 0.004  # of the step: how much slower a sequence may become at first


def shave(
    problem: Problem,
    sequence: Ints,
    budget: int,
    *,
    batch: int = 1,
    penalty: float = 0.0,
    smallest: int = 0,
    work: Ints | None = None,
) -> tuple[Ints, int]:
    """Repeat runs until the peak is within the budget, or nothing helps, or the work is done; and the peak."""
    room = max(len(sequence) * GROWTH, 4000)
    longer = np.zeros(room, np.int64)
    longer[: len(sequence)] = sequence
    weight = np.ones(len(problem.nbytes))
    reached = np.zeros(1, np.int64)
    length = problem.library.lowtide_shave(
        problem.struct,
        ints(longer),
        len(sequence),
        room,
        budget - problem.stays,
        batch,
        penalty,
        weight.ctypes.data_as(REALS),
        ROUNDS,
        PATIENCE * float(problem.seconds.sum()),
        smallest,
        ints(np.array([PATIENT]) if work is None else work),
        ints(reached),
    )
    if length < 0:
        return sequence, problem.peak(sequence)
    return longer[:length].copy(), problem.stays + int(reached[0])


def tidy(problem: Problem, sequence: Ints, budget: int, *, passes: int = 4) -> Ints:
    """Drop repeated runs, the slowest for their bytes first, while the peak stays within the budget."""
    work = sequence.copy()
    length = problem.library.lowtide_tidy(problem.struct, ints(work), len(work), budget - problem.stays, passes)
    return work[:length].copy()


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
) -> Ints | None:
    """The quickest sequence within the budget that is found from these starts with `limit` seconds' worth of search.

    It stops early where a sequence takes `enough` seconds or less.
    """
    smallest = int(problem.nbytes.max(initial=0) * 1e-4)
    field: dict[float, Ints] = {}  # by their seconds, so that no two are the same
    left = limit * RATE * STARTS
    for (batch, penalty), start in product(MANNERS, starts):
        if field and (left < 0 or time.monotonic() > until):
            break
        work = np.array([PATIENT])
        tried, peak = shave(problem, start, budget, batch=batch, penalty=penalty, smallest=smallest, work=work)
        left -= PATIENT - int(work[0])
        if peak <= budget:
            tried = tidy(problem, tried, budget)
            field.setdefault(problem.time(tried), tried)
    if not field:
        return None
    race = _Race(problem, budget, smallest, limit, until, seed, progress)
    runners = [field[took] for took in sorted(field)]
    for number, (among, share) in enumerate(HEATS):
        if problem.time(runners[0]) > enough:
            runners = race.run(runners[:among], share, number)
    return runners[0]


def lowest(problem: Problem, starts: list[Ints]) -> Ints:
    """The sequence with the least peak that shaving finds, whatever time it takes."""
    best = min(starts, key=problem.peak)
    for part, (batch, penalty), start in product(LOWERINGS, MANNERS, [None, *starts]):
        peak = problem.peak(best)
        work = np.array([PATIENT // 5])
        tried, reached = shave(
            problem, best if start is None else start, int(peak * part), batch=batch, penalty=penalty, work=work
        )
        if reached < peak:
            best = tried
    return best


@dataclass(frozen=True)
class _Race:
    """Searches side by side, of which the better half goes on."""

    problem: Problem
    budget: int
    smallest: int
    limit: float
    until: float
    seed: int
    progress: Callable[[float], None] | None

    def run(self, runners: list[Ints], share: float, number: int) -> list[Ints]:
        """Search from each of these with its part of this share of the work; the quickest first."""
        work = int(self.limit * RATE * share / len(runners))
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            found = list(
                pool.map(lambda k: self._search(runners[k], work, number * len(runners) + k), range(len(runners)))
            )
        ranked = {self.problem.time(one): one for one in found}
        if self.progress is not None:
            self.progress(min(ranked))
        return [ranked[took] for took in sorted(ranked)]

    def _search(self, start: Ints, work: int, lane: int) -> Ints:
        """Search with a cooling heat, in slices; all of the work, unless the clock stops it."""
        problem, room = self.problem, max(len(start) * GROWTH, 4000)
        now, best = np.zeros(room, np.int64), np.zeros(room, np.int64)
        now[: len(start)] = best[: len(start)] = start
        lengths = np.array([len(start), len(start)], np.int64)
        for part in range(SLICES):
            if time.monotonic() > self.until:
                break
            problem.library.lowtide_search(
                problem.struct,
                ints(now),
                ints(best),
                ints(lengths),
                room,
                self.budget - problem.stays,
                self.smallest,
                (self.seed * 1000 + lane) * SLICES + part,
                work // SLICES,
                HEAT * (1 - part / SLICES),
                HEAT * (1 - (part + 1) / SLICES),
            )
        return best[: lengths[1]].copy()
