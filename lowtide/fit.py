"""The front door: a training step and a budget in, the same step within the budget out."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import torch

from lowtide import report
from lowtide.budget import free_memory, read_budget
from lowtide.capture import capture
from lowtide.captured import Captured
from lowtide.check import check
from lowtide.costs import Costs
from lowtide.errors import BudgetError, LowtideWarning, UsageError
from lowtide.execute import Runner, StaleError, execute
from lowtide.graph import Graph
from lowtide.measure import measure, roofline
from lowtide.plan import TIME_LIMIT, as_eager, plan, with_narrow
from lowtide.program import Plan, Program
from lowtide.simulate import simulate

FREE = 0.9  # of the memory that is free: the budget where none is given
TIGHTER = 3  # times at most that a step is planned anew because it held more than its budget

Tell = Callable[[str], None]
CostsFrom = Literal["measured", "roofline"]


@dataclass
class _Fit:
    """The step for batches of one shape."""

    runner: Runner
    plan: Plan
    costs: Costs
    eager_peak: int  # bytes, predicted
    tightened: int = 0  # times
    settled: bool = False  # it stays as it is, also above the budget


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
        tell: Tell | None,
        costs: CostsFrom,
    ) -> None:
        if budget is not None and plan is not None:
            raise UsageError("a plan has its own budget.", hint="give a budget or a plan, not both.")
        if costs not in get_args(CostsFrom):
            raise UsageError(f"there are no costs {costs!r}.", hint=f"choose one of {', '.join(get_args(CostsFrom))}.")
        if isinstance(budget, str):
            read_budget(budget, stays=1, eager_peak=1)  # a wrong one is refused before anything is captured
        self._step, self._model, self._optimizer = step, model, optimizer
        self._asked, self._time_limit, self._costs = budget, time_limit, costs
        self._tell: Tell = tell if tell is not None else lambda _: None
        self._bytes: int | None = None  # the budget, once it is known what a part of the step is
        self._fits = [self._make(example, plan)]

    def __call__(self, *batch: Any) -> Any:
        """One training step; returns what the step returns, detached."""
        for fit in self._fits:
            try:
                result = fit.runner(*batch)
            except StaleError:
                continue
            if fit is not self._fits[0]:
                self._fits.remove(fit)
                self._fits.insert(0, fit)
            self._hold(fit)
            return result
        self._tell("the batch, or the model, is not as in the steps so far: it is planned now, within the same budget")
        self._fits.insert(0, self._make(batch))
        result = self._fits[0].runner(*batch)
        self._hold(self._fits[0])
        return result

    @property
    def captured(self) -> Captured:
        """The step as data, as it last ran."""
        return self._fits[0].runner.captured

    @property
    def costs(self) -> Costs:
        """What its ops cost, as it last ran."""
        return self._fits[0].costs

    @property
    def plan(self) -> Plan:
        """What the program promises, as it last ran."""
        return self._fits[0].plan

    @property
    def program(self) -> Program:
        """The program, as it last ran."""
        return self._fits[0].runner.program

    @property
    def source(self) -> str:
        """The Python source of the program, as it last ran."""
        return self._fits[0].runner.source

    @property
    def peak(self) -> int | None:
        """The most bytes that any step held, metered; None before the first, and where there is no meter."""
        return max((fit.runner.peak for fit in self._fits if fit.runner.peak is not None), default=None)

    @property
    def arena_bytes(self) -> int:
        """The bytes of the one block that holds what a step makes, between steps too; 0 where there is none."""
        return max(fit.runner.arena_bytes for fit in self._fits)

    @property
    def mismatches(self) -> int:
        """How many allocations of all steps did not come as they were planned; they went outside the arena."""
        return sum(fit.runner.mismatches for fit in self._fits)

    def report(self) -> str:
        """What the plan does and what was measured, for a person."""
        fit = self._fits[0]
        graph = self.captured.graph
        summary = report.summarize(graph, fit.costs, fit.plan, eager_peak=fit.eager_peak)
        measured = report.Measured(self.peak, self.arena_bytes, self.mismatches, len(self._fits))
        return report.show_fitted(summary, measured)

    def _make(self, batch: tuple[Any, ...], given: Plan | str | os.PathLike[str] | None = None) -> _Fit:
        """Capture, measure and plan the step for batches like this one."""
        captured = capture(self._step, self._model, self._optimizer, batch)
        captured = replace(captured, graph=with_narrow(captured.graph))
        graph = captured.graph
        self._tell(f"captured {len(graph.ordinary)} ops")
        costs = roofline(graph) if self._costs == "roofline" else self._measure(graph)
        eager_peak = simulate(graph, costs, as_eager(graph)).peak
        if given is not None:
            found = given if isinstance(given, Plan) else Plan.load(given, graph)
            check(graph, costs, found.program, budget=found.budget)
            self._bytes = found.budget
        else:
            budget = self._budget(graph.device, costs.stays(graph), eager_peak)
            self._tell(f"planning within {report.show_bytes(budget)}")
            found = plan(graph, costs, budget, time_limit=self._time_limit)
        bytes_, seconds = report.show_bytes(found.peak), report.show_seconds(found.planning_seconds)
        self._tell(f"planned {bytes_} with {report.show_overhead(found.overhead)} overhead in {seconds}")
        return _Fit(execute(captured, found.program, costs.nbytes), found, costs, eager_peak)

    def _measure(self, graph: Graph) -> Costs:
        return measure(graph, progress=lambda done, all_: self._tell(f"measured {done} of {all_} distinct ops"))

    def _budget(self, device: str, stays: int, eager_peak: int) -> int:
        """The budget in bytes: the same for batches of every shape."""
        if self._bytes is None:
            if self._asked is not None:
                self._bytes = read_budget(self._asked, stays=stays, eager_peak=eager_peak)
            else:
                free = torch.cuda.mem_get_info(device)[0] if device.startswith("cuda") else free_memory()
                self._bytes = stays + int(FREE * free)
        return self._bytes

    def _hold(self, fit: _Fit) -> None:
        """After a step: where it held more than the budget, or would in the arena, plan anew.

        Where ops have larger temporaries than was known, that is what the new plan counts with; else it aims lower.
        """
        budget, most = self._bytes, fit.runner.most
        if budget is None or most is None or most <= budget or fit.settled:
            return
        what = f"the step needs {most:,} bytes as measured, {most - budget:,} more than its budget"
        if fit.tightened == TIGHTER:
            fit.settled = True
            warnings.warn(
                f"{what}; {TIGHTER} tighter plans did not help, and it stays so.", LowtideWarning, stacklevel=3
            )
            return
        captured = fit.runner.captured
        costs = _corrected(fit.costs, fit.runner.temporaries)
        aim = budget if costs != fit.costs else fit.plan.peak - (most - budget)
        try:
            found = plan(captured.graph, costs, aim, time_limit=self._time_limit)
        except BudgetError as error:
            fit.settled = True
            why = error.message.splitlines()[0]
            warnings.warn(f"{what}, and no tighter plan fits: {why}", LowtideWarning, stacklevel=3)
            return
        runner = execute(captured, found.program, costs.nbytes)
        runner.mismatches = fit.runner.mismatches
        fit.runner, fit.costs, fit.plan = runner, costs, replace(found, budget=budget)
        fit.tightened += 1
        warnings.warn(f"{what}; it is planned anew.", LowtideWarning, stacklevel=3)


def _corrected(costs: Costs, temporaries: Mapping[int, tuple[int, int]]) -> Costs:
    """The costs with the temporaries that showed in a step, where they are larger."""
    extra, inside = list(costs.extra), list(costs.inside or costs.extra)
    for op, (piece, heap) in temporaries.items():
        extra[op], inside[op] = max(extra[op], piece), max(inside[op], heap)
    if tuple(extra) == costs.extra:
        return costs
    return replace(costs, extra=tuple(extra), inside=tuple(inside))


def fit(
    step: Callable[..., Any],
    model: Any,
    optimizer: Any = None,
    *,
    example: tuple[Any, ...],
    budget: int | str | None = None,
    plan: Plan | str | os.PathLike[str] | None = None,
    time_limit: float = TIME_LIMIT,
    tell: Tell | None = None,
    costs: CostsFrom = "measured",
) -> Fitted:
    """Return `step` as a step that does the same arithmetic and never holds more than the budget.

    The budget is the peak of the whole step in bytes, "2GiB", or "50%": what stays between steps and half of what
    eager's step adds to it. Without one it is what is free on the machine. `time_limit` is the seconds of planning.
    In place of a budget a plan of this step may be given, or the file that it was saved to. `tell` is told, in one line
    each, what happens before the first step and when a batch of another shape is planned. With costs="roofline" the ops
    are not measured but estimated: quicker to fit, but what they hold inside is unknown, and the budget may be missed.
    """
    return Fitted(step, model, optimizer, example, budget, plan, time_limit, tell, costs)
