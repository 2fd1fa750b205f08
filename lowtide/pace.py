"""What the ops of a planned step take in it, with eager's steps by turns and the limits of the machine."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from lowtide import device, report
from lowtide.errors import LowtideError
from lowtide.execute.timings import PATIENCE
from lowtide.fit import Fitted, fit
from lowtide.graph import Graph
from lowtide.measure import limits, work
from lowtide.program import Plan

ROUNDS = 7
TURN = 0.1  # seconds that a turn takes at least, by several steps where one is quicker
MOST = 100  # steps of one turn

Progress = Callable[[int, int], None]
Shown = Callable[[str], AbstractContextManager[Progress]]
Step = Callable[[], Any]


def _unseen(_: str) -> AbstractContextManager[Progress]:
    """Where nobody looks at progress."""
    return nullcontext(lambda done, total: None)


@dataclass(frozen=True)
class Pace:
    """A step as it was planned, and its time."""

    graph: Graph
    plan: Plan
    time: report.Paced


def pace(
    step: Callable[..., Any],
    model: Any,
    optimizer: Any,
    example: tuple[Any, ...],
    *,
    budget: int | str,
    rounds: int = ROUNDS,
    fitting: Mapping[str, Any] | None = None,
    shown: Shown = _unseen,
) -> Pace:
    """Time a step by its program and in eager PyTorch, by turns; the model is trained by both."""
    fitted = fit(step, model, optimizer, example=example, budget=budget, **(fitting or {}))
    eager, planned = (lambda: step(model, optimizer, *example)), (lambda: fitted(*example))
    with shown("measuring the machine") as progress:
        found = limits(fitted.captured.graph, progress=progress)
    with shown("timing steps") as progress:
        ops = _ops(fitted, planned)
        where = device.of(fitted.captured.graph.device)
        taken: dict[Step, list[float]] = {planned: [], eager: []}
        steps = {turn: _steps_of_a_turn(_seconds(where, turn, 1)) for turn in taken}
        for number in range(rounds):
            for turn in (planned, eager) if number % 2 else (eager, planned):
                taken[turn].append(_seconds(where, turn, steps[turn]))
            progress(number + 1, rounds)
    graph = fitted.captured.graph
    rounds_of = {"rounds": taken[planned], "eager_rounds": taken[eager]}
    return Pace(graph, fitted.plan, report.paced(graph, fitted.program, ops, work(graph), found, **rounds_of))


def _ops(fitted: Fitted, planned: Step) -> Mapping[int, float]:
    """Take steps until the ops of the program were timed; one of eager's between them would take the arena's pages."""
    for _ in range(2 * PATIENCE):
        planned()
        found = fitted.timings.ops
        if found is not None:
            return found
    raise LowtideError(
        "the ops of this step can't be timed: that needs an arena, and a program without copies.",
        hint="`lowtide doctor` says what is missing here.",
    )


def _seconds(where: device.Device, turn: Step, steps: int) -> float:
    """The seconds of a step, by so many at once, after one that nobody counts."""
    turn()  # steps of the other one took pages of memory, which are there again after this
    where.synchronise()
    begun = where.clock()
    for _ in range(steps):
        turn()
    where.synchronise()
    return (where.clock() - begun) / steps


def _steps_of_a_turn(seconds: float) -> int:
    """How many steps one turn has, where a step takes so long."""
    return max(1, min(MOST, math.ceil(TURN / seconds)))
