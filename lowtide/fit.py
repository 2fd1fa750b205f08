"""The front door: a training step and a budget in, the same step within the budget out."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from lowtide.budget import read_budget
from lowtide.capture import capture
from lowtide.captured import Captured
from lowtide.check import check
from lowtide.costs import Costs
from lowtide.errors import UsageError
from lowtide.execute import Runner, StaleError, execute
from lowtide.graph import Graph
from lowtide.measure import measure
from lowtide.plan import TIME_LIMIT, as_eager, keep_everything, plan, with_narrow
from lowtide.program import Plan, Program
from lowtide.simulate import simulate


class Fitted:
    """A training step that runs by its program; call it with a batch as you would call the step."""

    def __init__(
        self,
        step: Callable[..., Any],
        model: Any,
        optimizer: Any,
        example: tuple[Any, ...],
        budget: int | str | None,
        plan: Plan | str | os.PathLike[str] | None,
        time_limit: float,
    ) -> None:
        if budget is not None and plan is not None:
            raise UsageError("a plan has its own budget.", hint="give a budget or a plan, not both.")
        self._step, self._model, self._optimizer = step, model, optimizer
        self._budget, self._plan, self._time_limit = budget, plan, time_limit
        self._plans: dict[int, Plan] = {}  # id of the runner -> its plan, where there is a budget
        self._runners = [self._make(example)]

    def __call__(self, *batch: Any) -> Any:
        """One training step; returns what the step returns, detached."""
        for runner in self._runners:
            try:
                result = runner(*batch)
            except StaleError:
                continue
            if runner is not self._runners[0]:
                self._runners.remove(runner)
                self._runners.insert(0, runner)
            return result
        self._runners.insert(0, self._make(batch))
        return self._runners[0](*batch)

    @property
    def captured(self) -> Captured:
        """The step as data, as it last ran."""
        return self._runners[0].captured

    @property
    def program(self) -> Program:
        """The program, as it last ran."""
        return self._runners[0].program

    @property
    def plan(self) -> Plan | None:
        """What the program promises, as it last ran; None where no budget was given."""
        return self._plans.get(id(self._runners[0]))

    @property
    def source(self) -> str:
        """The Python source of the program, as it last ran."""
        return self._runners[0].source

    def _make(self, batch: tuple[Any, ...]) -> Runner:
        captured = capture(self._step, self._model, self._optimizer, batch)
        graph = captured.graph
        if self._budget is None and self._plan is None:
            return execute(captured, keep_everything(graph))
        captured = replace(captured, graph=with_narrow(graph))
        graph = captured.graph
        costs = measure(graph)
        found = self._planned(graph, costs)
        runner = execute(captured, found.program)
        self._plans[id(runner)] = found
        return runner

    def _planned(self, graph: Graph, costs: Costs) -> Plan:
        """The plan that was given, judged again with these costs, or one within the budget."""
        if self._budget is None:
            found = self._plan if isinstance(self._plan, Plan) else Plan.load(self._plan or "", graph)
            check(graph, costs, found.program, budget=found.budget)
            return found
        eager_peak = simulate(graph, costs, as_eager(graph)).peak
        budget = read_budget(self._budget, stays=costs.stays(graph), eager_peak=eager_peak)
        return plan(graph, costs, budget, time_limit=self._time_limit)


def fit(
    step: Callable[..., Any],
    model: Any,
    optimizer: Any = None,
    *,
    example: tuple[Any, ...],
    budget: int | str | None = None,
    plan: Plan | str | os.PathLike[str] | None = None,
    time_limit: float = TIME_LIMIT,
) -> Fitted:
    """Return `step` as a step that does the same arithmetic and never holds more than the budget.

    The budget is the peak of the whole step in bytes, "2GiB", or "50%": what stays between steps and half of what
    eager's step adds to it. Without one the step runs as captured. `time_limit` is the seconds of planning. In place of
    a budget a plan of this step may be given, or the file that it was saved to.
    """
    return Fitted(step, model, optimizer, example, budget, plan, time_limit)
