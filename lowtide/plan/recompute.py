"""Recompute: shave the peak, delete what the budget has room for, then ruin a part and recreate it, time permitting.

The shaving follows the greedy eviction of Kirisame et al. 2021 (DTR), offline and with the area above the budget in
place of staleness; ruin and recreate is Schrimpf et al. 2000. Nothing here proves anything; `bound` does.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from lowtide.plan.problem import REALS, Floats, Ints, Problem, ints

GROWTH = 8  # a sequence may become this many times as long as the graph
PATIENCE = 4.0  # and take this many times its seconds, before a start is given up
BATCHES = (1, 4, 16)
PENALTIES = (0.0, 1.0)


@dataclass(frozen=True)
class Found:
    """A sequence within the budget, or the lowest peak that was reached."""

    sequence: Ints | None
    least_peak: int  # bytes, with those that stay


def shave(
    problem: Problem,
    sequence: Ints,
    budget: int,
    *,
    batch: int = 1,
    penalty: float = 0.0,
    weight: Floats | None = None,
    rounds: int = 20_000,
    smallest: int = 0,
) -> tuple[Ints, int]:
    """Repeat runs until the peak is within the budget, or nothing helps; the sequence and its peak."""
    room = max(len(sequence) * GROWTH, 4000)
    work = np.zeros(room, np.int64)
    work[: len(sequence)] = sequence
    weight = np.ones(len(problem.nbytes)) if weight is None else weight
    reached = np.zeros(1, np.int64)
    length = problem.library.lowtide_shave(
        problem.struct,
        ints(work),
        len(sequence),
        room,
        budget - problem.stays,
        batch,
        penalty,
        weight.ctypes.data_as(REALS),
        rounds,
        PATIENCE * float(problem.seconds.sum()),
        smallest,
        ints(reached),
    )
    if length < 0:
        return sequence, problem.peak(sequence)
    return work[:length].copy(), problem.stays + int(reached[0])


def delete(problem: Problem, sequence: Ints, budget: int, *, noise: Floats | None = None, passes: int = 4) -> Ints:
    """Drop repeated runs, the slowest for their bytes first, while the peak stays within the budget."""
    largest = _largest_made(problem)
    for _ in range(passes):
        _, first = np.unique(sequence, return_index=True)
        repeated = np.setdiff1d(np.arange(len(sequence)), first)
        if not len(repeated):
            break
        gain = problem.seconds[sequence[repeated]] / largest[sequence[repeated]]
        if noise is not None:
            gain = gain * noise[sequence[repeated]]
        candidates = np.ascontiguousarray(repeated[np.argsort(-gain, kind="stable")])
        work = sequence.copy()
        length = problem.library.lowtide_delete(
            problem.struct, ints(work), len(work), ints(candidates), len(candidates), budget - problem.stays
        )
        if length == len(sequence):
            break
        sequence = work[:length].copy()
    return sequence


def recompute(
    problem: Problem,
    starts: list[Ints],
    budget: int,
    *,
    until: float,
    seed: int = 0,
    progress: Callable[[float], None] | None = None,
) -> Found:
    """The quickest sequence within the budget that is found from these starts until the clock says `until`."""
    smallest = int(problem.nbytes.max(initial=0) * 1e-4)
    best: Ints | None = None
    least = min(problem.peak(start) for start in starts)
    for start in starts:
        for batch in BATCHES:
            for penalty in PENALTIES:
                if best is not None and time.monotonic() > until:
                    break
                tried, peak = shave(problem, start, budget, batch=batch, penalty=penalty, smallest=smallest)
                least = min(least, peak)
                if peak <= budget:
                    best = _better(problem, best, delete(problem, tried, budget))
    if best is None:
        return Found(None, least)
    base = problem.time(starts[0])
    best = _ruin_and_recreate(problem, best, budget, smallest, until, seed, base, progress)
    return Found(best, problem.peak(best))


def _better(problem: Problem, one: Ints | None, other: Ints) -> Ints:
    return other if one is None or problem.time(other) < problem.time(one) else one


def _ruin_and_recreate(
    problem: Problem,
    best: Ints,
    budget: int,
    smallest: int,
    until: float,
    seed: int,
    base: float,
    progress: Callable[[float], None] | None,
) -> Ints:
    """Change a part of the sequence at random, mend it, and keep it if it is no slower than a cooling margin allows."""
    chance = np.random.default_rng(seed)
    now, now_time, best_time = best, problem.time(best), problem.time(best)
    begun, span = time.monotonic(), max(1e-9, until - time.monotonic())
    while time.monotonic() < until:
        weight = np.exp(0.5 * chance.standard_normal(len(problem.nbytes)))
        target, tried = budget, now
        kind = chance.integers(3)
        if kind == 0:
            _, first = np.unique(now, return_index=True)
            repeated = np.setdiff1d(np.arange(len(now)), first)
            if not len(repeated):
                break
            count = min(len(repeated), int(chance.integers(1, 3 + len(repeated) // 50)))
            middle = int(chance.integers(len(repeated)))
            near = repeated[max(0, middle - count // 2) : middle - count // 2 + count]
            gone = near if chance.random() < 0.5 else chance.choice(repeated, count, replace=False)
            for place in gone:
                op = now[place]
                weight[problem.makes[problem.make_start[op] : problem.make_start[op + 1]]] = 1e6
            tried = np.delete(now, gone)
        elif kind == 1:
            target = int(budget - (budget - problem.stays) * 0.15 * chance.random() ** 2)
        else:
            target = int(budget - (budget - problem.stays) * 0.03 * chance.random())
            weight = weight * weight
        if problem.peak(tried) > target:
            batch, penalty = int(chance.choice((1, 2, 4))), float(chance.choice((0.0, 0.0, 1.0, 10.0)))
            tried, peak = shave(
                problem, tried, target, batch=batch, penalty=penalty, weight=weight, rounds=300, smallest=smallest
            )
            if peak > budget:
                continue
        noise = np.exp(float(chance.choice((0.0, 0.2, 0.5))) * chance.standard_normal(len(problem.seconds)))
        tried = delete(problem, tried, budget, noise=noise, passes=2)
        took = problem.time(tried)
        margin = 0.002 * base * (1 - (time.monotonic() - begun) / span)
        if took <= now_time or chance.random() < np.exp(-(took - now_time) / max(margin, 1e-12)):
            now, now_time = tried, took
            if took < best_time:
                best, best_time = tried, took
                if progress is not None:
                    progress(best_time / base - 1)
    return best


def _largest_made(problem: Problem) -> Floats:
    """For each op the bytes of the largest value that it makes, at least one."""
    largest = np.ones(len(problem.seconds))
    for op in range(len(largest)):
        made = problem.makes[problem.make_start[op] : problem.make_start[op + 1]]
        largest[op] = max(1, problem.nbytes[made].max(initial=0))
    return largest
