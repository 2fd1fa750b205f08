"""Chen et al. 2016, "Training deep nets with sublinear memory cost": schedules for a chain of n steps.

The chain is cut into groups. The forward keeps what enters each group; its backward runs the group again, keeps all of
it, and goes back over it. The last group need not run twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import isqrt

from lowtide.plan.classics.chain import Action, Backward, Forward, advance


def grouped(steps: int, starts: Sequence[int]) -> list[Action]:
    """The schedule of groups that begin at these steps, the first of which is 0."""
    groups = list(pairwise((*starts, steps)))
    actions: list[Action] = []
    for start, stop in groups[:-1]:
        actions += advance(start, stop)
    for start, stop in reversed(groups):
        actions += [Forward(step, "internals") for step in range(start, stop)]
        actions += [Backward(step) for step in reversed(range(start, stop))]
    return actions


def square_root(steps: int) -> list[Action]:
    """About sqrt(n) groups of about sqrt(n) steps."""
    count = isqrt(steps - 1) + 1
    return grouped(steps, sorted({number * steps // count for number in range(count)}))


def by_bytes(sizes: Sequence[int], limit: float) -> list[int]:
    """Where groups begin when each is closed as soon as its steps make more than `limit` bytes (algorithm 3)."""
    starts, total = [0], 0
    for step, size in enumerate(sizes):
        if total > limit:
            starts.append(step)
            total = 0
        total += size
    return starts


def recursive(steps: int, kept: int) -> list[Action]:
    """Cut the chain into `kept` + 1 parts, keep what enters each, and do the same in every part, from the last on."""
    actions: list[Action] = []
    waiting = [(0, steps)]
    while waiting:
        start, stop = waiting.pop()
        if stop - start == 1:
            actions += [Forward(start, "internals"), Backward(start)]
            continue
        count = min(kept + 1, stop - start)
        parts = list(pairwise(start + number * (stop - start) // count for number in range(count + 1)))
        for begin, end in parts[:-1]:
            actions += advance(begin, end)
        waiting += parts
    return actions
