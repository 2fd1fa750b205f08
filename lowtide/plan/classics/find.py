"""From a budget to a sequence: a classic has at most one knob, and the memory profile says how far to turn it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from lowtide.plan.classics import chen
from lowtide.plan.classics.chain import Action
from lowtide.plan.classics.measured import measured_chain
from lowtide.plan.classics.rotor import Chain, Rotor
from lowtide.plan.classics.segments import Menus, Segments, segments
from lowtide.plan.problem import Ints, Problem
from lowtide.plan.settings import FINEST, GROUPINGS, HEADROOM, LEVELLED, MEMORY_UNITS, REPLAYED

Find = Callable[[int | None], Ints | None]  # bytes of the whole step -> sequence, None: no fit; None -> natural plan
Prepare = Callable[[Problem, Ints], Find]  # for one order of the ops


@dataclass(frozen=True)
class Knob:
    """Schedules for a chain: the higher the setting, the quicker, and the more memory it takes."""

    schedule: Callable[[int], list[Action] | None]  # None: the setting is too low
    natural: int
    most: int


def fixed(make: Callable[[Problem, Ints], Ints]) -> Prepare:
    """A classic without a knob."""

    def prepare(problem: Problem, order: Ints) -> Find:
        return partial(quickest, problem, [make(problem, order)])

    return prepare


def turning(knob_of: Callable[[Segments], Knob], *, most: int = FINEST) -> Prepare:
    """A classic with a knob, for chains of at most so many segments."""

    def prepare(problem: Problem, order: Ints) -> Find:
        chain = segments(problem, order, most=most)
        knob = knob_of(chain)

        def make(setting: int) -> Ints | None:
            schedule = knob.schedule(setting)
            return None if schedule is None else chain.replay(schedule)

        def find(budget: int | None) -> Ints | None:
            return make(knob.natural) if budget is None else highest(problem, budget, knob.most, make)

        return find

    return prepare


def chen_search(problem: Problem, order: Ints) -> Find:
    """Chen's search: groups that make about so many bytes, for many numbers of bytes; by nature the least peak."""
    chain = segments(problem, order)
    steps = len(chain.parts)
    sizes = [int(problem.nbytes[list(part.made)].sum()) for part in chain.parts]
    tries = min(GROUPINGS, max(6, REPLAYED // len(order)))
    limits = np.geomspace(max(1, sum(sizes) / steps), max(1, sum(sizes)), tries)
    groupings = dict.fromkeys(tuple(chen.by_bytes(sizes, limit)) for limit in limits)
    return partial(quickest, problem, [chain.replay(chen.grouped(steps, starts)) for starts in groupings])


def rotor(*, most: Sequence[int], menus: bool) -> Prepare:
    """The heterogeneous chain, cut into at most so many segments; by nature everything is kept."""

    def prepare(problem: Problem, order: Ints) -> Find:
        levels = most[: max(1, LEVELLED // max(1, len(order)))]
        chains = {len(chain.parts): chain for chain in (segments(problem, order, most=number) for number in levels)}
        measured = [(chain, *measured_chain(chain, menus=menus)) for chain in chains.values()]

        def find(budget: int | None) -> Ints | None:
            if budget is None or problem.peak(order) <= budget:
                return order
            found = (solve(problem, budget, *chain) for chain in measured)
            return quickest(problem, (sequence for sequence in found if sequence is not None), budget)

        return find

    return prepare


def solve(problem: Problem, budget: int, chain: Segments, sizes: Chain, menus: Menus) -> Ints | None:
    """The quickest sequence of the chain within the budget."""
    unit = max(1.0, (budget - problem.persistent) / MEMORY_UNITS)
    table = Rotor(sizes.in_units(unit), int(HEADROOM * MEMORY_UNITS))

    def make(memory: int) -> Ints | None:
        schedule = table.schedule(memory)
        return None if schedule is None else chain.replay(schedule, menus)

    return highest(problem, budget, table.memory, make)


def quickest(problem: Problem, sequences: Iterable[Ints], budget: int | None) -> Ints | None:
    """The quickest of the sequences that fit; without a budget the one with the least peak."""
    if budget is None:
        return min(sequences, key=problem.peak)
    return min((sequence for sequence in sequences if problem.peak(sequence) <= budget), key=problem.time, default=None)


def highest(problem: Problem, budget: int, most: int, make: Callable[[int], Ints | None]) -> Ints | None:
    """The quickest sequence met on the way to the highest setting that fits."""
    low, high, found = 0, most, list[Ints]()
    while low < high:
        middle = (low + high + 1) // 2
        sequence = make(middle)
        if sequence is not None and problem.peak(sequence) > budget:
            high = middle - 1
            continue
        low = middle
        found += [] if sequence is None else [sequence]
    return quickest(problem, found, budget)
