"""What a step does about memory: before it, room for its arena; after it, the budget. Both ask for tighter plans.

Before a step it is in one of three states, and goes from one to the next only:

    NEW       no step was taken: what libraries take for themselves is still to come, and must be there beside the arena
    INSISTS   the arena must be there, or the step is planned anew with less
    YIELDS    less can't be had: the step makes do with what there is

After a step that held more than its limit it is planned anew, a few times; then the limit is given up, and said so.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import replace
from enum import Enum, auto
from typing import Any

from lowtide.allocator.arena import ArenaError, give_back
from lowtide.costs import Costs
from lowtide.errors import BudgetError, LowtideWarning
from lowtide.execute import Batch
from lowtide.fit.make import Fit, Maker

TIGHTER = 3  # times at most that a step is planned anew because it held more than its budget, or finds less memory
BESIDE = 32 * 2**20  # bytes that the libraries below torch take beside a step, but for the code that they compile
PLANNING = 24 * 2**20  # bytes that planning anew leaves behind in the heap
CRAMPED, SHRINK = 8 * 2**20, 0.03  # bytes, and of the arena: how much less it then asks for, at least


class State(Enum):
    """How a step stands with the memory that there is."""

    NEW = auto()
    INSISTS = auto()
    YIELDS = auto()


class Pressure:
    """A step under pressure of memory, with the plan that it has come to."""

    def __init__(self, fit: Fit, maker: Maker) -> None:
        self.fit = fit  # as it is planned now
        self.state = State.NEW
        self.limit = maker.budget  # bytes that a step may hold; None: there is none, or it was given up
        self._maker = maker
        self._corrected: Fit | None = None  # whose ops' prices were compared with what they take
        self._shrunk = 0  # times that there was no memory for its arena
        self._tightened = 0  # times that it held more than the limit

    def take(self, batch: Batch) -> Any:
        """One step; where the system has no memory for its arena, it is planned anew with less, a few times."""
        while self.state is not State.YIELDS:
            self.fit.runner.arrangement.beside = BESIDE + self.fit.costs.code if self.state is State.NEW else 0
            try:
                result = self.fit.call(batch)
            except ArenaError as error:  # before anything ran
                self._shrink(error)
                continue
            self.state = State.INSISTS
            return result
        self.fit.runner.arrangement.beside = None
        return self.fit.call(batch)

    def hold(self) -> None:
        """After a step: where it held more than the limit, or would in the arena, plan anew.

        Where ops have larger temporaries than was known, that is what the new plan counts with; else it aims lower.
        """
        if self._corrected is not self.fit and self._maker.correct(self.fit):
            self._corrected = self.fit
        limit, most = self.limit, self._maker.most(self.fit)
        if limit is None or most is None or most <= limit:
            return
        what = f"the step needs {most:,} bytes as measured, {most - limit:,} more than its budget"
        if self._tightened == TIGHTER:
            self.limit = None
            text = f"{what}; {TIGHTER} tighter plans did not help, and it stays so."
            warnings.warn(text, LowtideWarning, stacklevel=4)  # as far as whoever called the fitted step
            return
        costs = _corrected(self.fit.costs, self._maker.temporaries(self.fit))
        least = costs.persistent(self.fit.runner.captured.graph)
        aim = limit if costs != self.fit.costs else max(least, self.fit.plan.peak - (most - limit))
        if (why := self._plan_anew(aim, costs)) is not None:
            self.limit = None
            warnings.warn(f"{what}, and no tighter plan fits: {why}", LowtideWarning, stacklevel=4)
            return
        self._tightened += 1
        warnings.warn(f"{what}; it is planned anew.", LowtideWarning, stacklevel=4)

    def _shrink(self, error: ArenaError) -> None:
        """Plan the step anew with as much less as is missing, if that can be; where it can't, it is tried as it is."""
        if not self._maker.alone:
            warnings.warn(f"{error.message} It is tried as it is.", LowtideWarning, stacklevel=5)
            self.state = State.YIELDS
            return
        less = max(error.short, CRAMPED, int(SHRINK * self.fit.plan.program.arena))
        for aim in (self.fit.plan.peak - less - PLANNING, self.fit.plan.peak - less):
            if (why := self._plan_anew(aim, self.fit.costs)) is None:
                break
        give_back()
        then = "It is planned anew, with less." if why is None else f"No plan with less is known: {why}"
        warnings.warn(f"{error.message} {then}", LowtideWarning, stacklevel=5)
        self._shrunk += 1
        if self._shrunk == TIGHTER or (why is not None and self.state is State.INSISTS):
            self.state = State.YIELDS
        elif why is not None:
            self.state = State.INSISTS

    def _plan_anew(self, aim: int, costs: Costs) -> str | None:
        """Plan the step again with another aim, in bytes, or other costs; why not, where nothing fits."""
        try:
            self.fit = self._maker.anew(self.fit, aim, costs)
        except BudgetError as error:
            return error.message.splitlines()[0]
        return None


def _corrected(costs: Costs, temporaries: Mapping[int, tuple[int, int]]) -> Costs:
    """The costs with the temporaries that showed in a step, where they are larger."""
    in_arena = list(costs.arena_temporaries)
    in_heap = list(costs.heap_temporaries or costs.arena_temporaries)
    for op, (piece, heap) in temporaries.items():
        in_arena[op], in_heap[op] = max(in_arena[op], piece), max(in_heap[op], heap)
    if tuple(in_arena) == costs.arena_temporaries:
        return costs
    return replace(costs, arena_temporaries=tuple(in_arena), heap_temporaries=tuple(in_heap))
