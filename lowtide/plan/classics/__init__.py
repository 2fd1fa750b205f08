"""The classics by name: what others have published, as baselines to beat and as starts for the search.

Each finds a sequence of ops within a budget for the whole step. Chains are solved in plain numbers (`chain`, `chen`,
`rotor`); `segments` sees a chain in any step; `find` asks the memory profile what really fits.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isqrt

import numpy as np

from lowtide.plan.classics import chen
from lowtide.plan.classics.chain import Gruslys, hidden, internal, mixed, revolve
from lowtide.plan.classics.find import Knob, Prepare, chen_search, fixed, rotor, turning
from lowtide.plan.classics.saved import drop_cheap, minimum_cut
from lowtide.plan.classics.segments import Segments, segments
from lowtide.plan.problem import Ints, Problem
from lowtide.plan.settings import LARGEST_ALPHA, LONG_CHAIN_SLOTS, MENU_LEVELS, ROTOR_STAGES, TABLELESS_SEGMENTS

__all__ = ["CLASSICS", "Classic"]


@dataclass(frozen=True)
class Classic:
    """A published way to save memory."""

    summary: str  # one line, for people
    paper: str
    prepare: Prepare  # for one order of the ops; what it returns may be asked for many budgets

    def __call__(self, problem: Problem, order: Ints, budget: int | None = None) -> Ints | None:
        """A sequence within the budget (bytes of the whole step), None if it has none; without a budget its own."""
        return self.prepare(problem, order)(budget)


def _root(steps: int) -> int:
    return isqrt(steps - 1) + 1


def _square_root(problem: Problem, order: Ints) -> Ints:
    chain = segments(problem, order)
    return chain.replay(chen.square_root(len(chain.parts)))


def _recursive(chain: Segments) -> Knob:
    steps = len(chain.parts)
    return Knob(lambda kept: chen.recursive(steps, kept), 1, steps)


def _revolve(chain: Segments) -> Knob:
    steps = len(chain.parts)
    return Knob(lambda slots: revolve(steps, slots), _root(steps), steps)


def _hidden(chain: Segments) -> Knob:
    steps = len(chain.parts)
    return _of_table(hidden(steps, _slots(steps)), _root(steps))


def _internal(chain: Segments) -> Knob:
    steps = len(chain.parts)
    return _of_table(internal(steps, _slots(steps)), _root(steps))


def _mixed(chain: Segments) -> Knob:
    """Alpha is what the internals of a segment take, for what enters one."""
    steps, nbytes = len(chain.parts), chain.links.problem.nbytes
    internals = sum(int(nbytes[list(part.internals | part.leaving)].sum()) for part in chain.parts)
    entering = sum(int(nbytes[list(part.entering)].sum()) for part in chain.parts)
    alpha = int(np.clip(round(internals / max(1, entering)), 1, LARGEST_ALPHA))
    return _of_table(mixed(steps, alpha * _slots(steps), alpha), alpha * _root(steps))


def _slots(steps: int) -> int:
    """As many as there are steps; for long chains no more than what saves most of the memory."""
    return steps if steps <= ROTOR_STAGES else min(steps, LONG_CHAIN_SLOTS)


def _of_table(table: Gruslys, natural: int) -> Knob:
    return Knob(table.schedule, natural, table.slots)


CHEN = "Chen et al. 2016, Training deep nets with sublinear memory cost"
GRUSLYS = "Gruslys et al. 2016, Memory-efficient backpropagation through time"

CLASSICS: dict[str, Classic] = {
    "keep": Classic("keep everything that the backward reads", "", fixed(lambda problem, order: order)),
    "chen-sqrt": Classic("keep what enters each of about sqrt(n) equal groups", CHEN, fixed(_square_root)),
    "chen-budget": Classic("keep what enters groups of equal bytes, the best of many sizes", CHEN, chen_search),
    "chen-recursive": Classic("groups within groups: log(n) memory where it must be", CHEN, turning(_recursive)),
    "drop-cheap": Classic("make again what activations, norms and elementwise ops make", "", fixed(drop_cheap)),
    "torch-min-cut": Classic(
        "save the fewest bytes from which cheap ops can make the rest",
        "He and Yu 2023, Transcending runtime-memory tradeoffs in checkpointing by being fusion aware",
        fixed(minimum_cut),
    ),
    "revolve": Classic(
        "keep states in slots at binomial distances",
        "Griewank and Walther 2000, Algorithm 799: Revolve",
        turning(_revolve, most=TABLELESS_SEGMENTS),
    ),
    "gruslys-hidden": Classic("keep states in slots", GRUSLYS, turning(_hidden)),
    "gruslys-internal": Classic("keep the internals of steps in slots", GRUSLYS, turning(_internal)),
    "gruslys-mixed": Classic("keep states or internals, whichever pays", GRUSLYS, turning(_mixed)),
    "rotor": Classic(
        "states and internals of a chain of unequal stages, by bytes and seconds",
        "Beaumont et al. 2019, Optimal checkpointing for heterogeneous chains",
        rotor(most=[ROTOR_STAGES], menus=False),
    ),
    "rockmate": Classic(
        "the same with a menu of internals for each stage",
        "Zhao et al. 2023, Rockmate: an efficient, fast, automatic and generic tool for re-materialization",
        rotor(most=MENU_LEVELS, menus=True),
    ),
}
