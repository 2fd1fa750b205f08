"""The front door: a training step and a budget in, the same step within the budget out."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from lowtide import device as devices
from lowtide import report
from lowtide.allocator.arena import ArenaError, give_back
from lowtide.budget import read_budget
from lowtide.capture import capture
from lowtide.capture.door import refuse_to_run
from lowtide.captured import Captured
from lowtide.changes import Changes
from lowtide.check import check
from lowtide.choice import Choice, choose, given
from lowtide.costs import Costs
from lowtide.errors import BudgetError, CaptureError, LowtideWarning, UsageError
from lowtide.execute import Runner, StaleError, execute
from lowtide.graph import Graph
from lowtide.measure import measure, roofline
from lowtide.plan import TIME_LIMIT, as_eager, carry, plan, with_narrow
from lowtide.program import Plan, Program
from lowtide.simulate import simulate
from lowtide.verify import Verifier, announce, refuse_call

ROUNDING = "recurrent layers are cut in time; results are the same up to rounding"
KEPT = 64  # programs that are kept, the latest first
FREE = 0.9  # of the memory that is free: the budget where none is given
TIGHTER = 3  # times at most that a step is planned anew because it held more than its budget, or finds less memory
BESIDE = 32 * 2**20  # bytes that the libraries below torch take beside a step, but for the code that they compile
PLANNING = 24 * 2**20  # bytes that planning anew leaves behind in the heap
CRAMPED, SHRINK = 8 * 2**20, 0.03  # bytes, and of the arena: how much less it then asks for, at least

Tell = Callable[[str], None]
CostsFrom = Literal["measured", "roofline"]


@dataclass
class _Fit:
    """The step for batches of one shape."""

    runner: Runner
    plan: Plan
    costs: Costs
    eager_peak: int  # bytes, predicted
    chunks: int  # that recurrent layers are cut into in time; 1: they are whole
    tightened: int = 0  # times
    cramped: int = 0  # times that there was no memory for its arena
    settled: bool = False  # it stays as it is, also above the budget
    began: bool = False  # a step was taken: what libraries keep for themselves is there


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
        rounding: bool,
    ) -> None:
        if budget is not None and plan is not None:
            raise UsageError("a plan has its own budget.", hint="give a budget or a plan, not both.")
        if costs not in get_args(CostsFrom):
            raise UsageError(f"there are no costs {costs!r}.", hint=f"choose one of {', '.join(get_args(CostsFrom))}.")
        if isinstance(budget, str):
            read_budget(budget, stays=1, eager_peak=1)  # a wrong one is refused before anything is captured
        self._step, self._model, self._optimizer = step, model, optimizer
        self._asked, self._time_limit, self._costs, self._rounding = budget, time_limit, costs, rounding
        self._told = tell
        self._tell: Tell = tell if tell is not None else lambda _: None
        self._changes = Changes()
        self._fits: list[_Fit] = []
        self._bytes: int | None = None  # the budget, once it is known what a part of the step is
        self.verifier: Verifier | None = None  # of the steps that run beside eager
        refuse_to_run(model)
        self._fits = [self._make(example, plan)]

    def __call__(self, *batch: Any) -> Any:
        """One training step; returns what the step returns, detached."""
        self._changes.step()
        if self.verifier is not None and self.verifier.left:
            return self.verifier.check(batch, self._call, lambda: self._fits[0].runner)
        return self._call(*batch)

    def _call(self, *batch: Any) -> Any:
        stale: StaleError | None = None
        for fit in self._fits:
            try:
                result = self._take(fit, batch)
            except StaleError as error:
                stale = stale or error
                continue
            if fit is not self._fits[0]:
                self._fits.remove(fit)
                self._fits.insert(0, fit)
            self._hold(fit)
            return result
        assert stale is not None
        self._changes.note(stale.change)
        self._tell(f"{stale.change.what}: the step is captured anew, within the same budget")
        self._fits.insert(0, self._make(batch))
        del self._fits[KEPT:]
        result = self._take(self._fits[0], batch)
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
    def chunks(self) -> int:
        """How many calls in time each recurrent layer is cut into, as it last ran; 1 without `rounding`."""
        return self._fits[0].chunks

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

    def explain_guards(self) -> str:
        """What the program assumes about the world around it, one thing a line."""
        return "\n".join(self.captured.guards.explain())

    def verify(self, steps: int, *, tell: Tell | None = None) -> None:
        """Let the next steps run in eager PyTorch, too, on copies, and compare every bit; `tell` is told its price."""
        fit = self._fits[0]
        stays = fit.costs.stays(self.captured.graph)
        self.verifier = Verifier(self._step, self._model, self._optimizer, steps)
        announce(steps, peak=fit.plan.peak, eager_peak=fit.eager_peak, stays=stays, tell=tell or self._told)

    def report(self) -> str:
        """What the plan does and what was measured, for a person."""
        fit = self._fits[0]
        graph = self.captured.graph
        summary = report.summarize(graph, fit.costs, fit.plan, eager_peak=fit.eager_peak)
        measured = report.Measured(self.peak, self.arena_bytes, self.mismatches, len(self._fits))
        text = report.show_fitted(summary, measured)
        return text if fit.chunks == 1 else f"{text}\n{ROUNDING} ({fit.chunks} chunks)."

    def _make(self, batch: tuple[Any, ...], plan: Plan | str | os.PathLike[str] | None = None) -> _Fit:
        """Capture, measure and plan the step for batches like this one."""
        captured = self._capture(batch)
        self._tell(f"captured {len(captured.graph.ordinary)} ops")
        if plan is not None:
            chosen = given(plan, captured.graph, self._price, rounding=self._rounding)
            check(chosen.graph, chosen.costs, chosen.plan.program, budget=chosen.plan.budget)
            self._bytes = chosen.plan.budget
        else:
            chosen = self._carried(captured.graph) or choose(
                captured.graph, self._price, self._search, rounding=self._rounding
            )
        found, costs = chosen.plan, chosen.costs
        bytes_, seconds = report.show_bytes(found.peak), report.show_seconds(found.planning_seconds)
        self._tell(f"planned {bytes_} with {report.show_overhead(found.overhead)} overhead in {seconds}")
        runner = self._execute(replace(captured, graph=chosen.graph), found.program, costs.nbytes)
        return _Fit(runner, found, costs, chosen.eager_peak, chosen.chunks)

    def _carried(self, graph: Graph) -> Choice | None:
        """A plan from one that is known for a similar graph: of the same step, with other numbers or other ops."""
        if not self._fits or self._fits[0].chunks != 1:
            return None
        known, candidate = self._fits[0], with_narrow(graph)
        costs = self._price(candidate)
        before = known.runner.captured.graph
        if before.fingerprint == candidate.fingerprint:
            return Choice(candidate, costs, known.plan, 1, known.eager_peak)
        found = carry(known.plan, before, candidate, costs, self._bytes)
        if found is None:
            return None
        return Choice(candidate, costs, found, 1, simulate(candidate, costs, as_eager(candidate)).peak)

    def _capture(self, batch: tuple[Any, ...]) -> Captured:
        return self._trace(self._step, self._optimizer, batch)

    def _trace(self, step: Callable[..., Any], optimizer: Any, batch: tuple[Any, ...]) -> Captured:
        """Capture; numbers that change all the time are inputs, unless the step can't take them as such."""
        numbers = self._changes.numbers
        try:
            return capture(step, self._model, optimizer, batch, numbers=numbers)
        except CaptureError:
            if not numbers:
                raise
            return capture(step, self._model, optimizer, batch)

    def _execute(self, captured: Captured, program: Program, nbytes: Sequence[int]) -> Runner:
        return execute(captured, program, nbytes)

    def _search(self, graph: Graph, costs: Costs, eager_peak: int) -> Plan:
        budget = self._budget(graph.device, costs.stays(graph), eager_peak)
        self._tell(f"planning within {report.show_bytes(budget)}")
        return plan(graph, costs, budget, time_limit=self._time_limit)

    def _price(self, graph: Graph) -> Costs:
        return roofline(graph) if self._costs == "roofline" else self._measure(graph)

    def _measure(self, graph: Graph) -> Costs:
        return measure(graph, progress=lambda done, all_: self._tell(f"measured {done} of {all_} distinct ops"))

    def _budget(self, device: str, stays: int, eager_peak: int) -> int:
        """The budget in bytes: the same for batches of every shape."""
        if self._bytes is None:
            if self._asked is not None:
                self._bytes = read_budget(self._asked, stays=stays, eager_peak=eager_peak)
            else:
                self._bytes = stays + int(FREE * devices.of(device).free_bytes())
        return self._bytes

    def _take(self, fit: _Fit, batch: tuple[Any, ...]) -> Any:
        """One step; where the system has no memory for its arena, it is planned anew with less, a few times."""
        while fit.cramped < TIGHTER:
            fit.runner.insists, fit.runner.beside = True, 0 if fit.began else BESIDE + fit.costs.code
            try:
                result = fit.runner(*batch)
            except ArenaError as error:  # before anything ran
                self._shrink(fit, error)
                continue
            fit.began = True
            return result
        fit.runner.insists = False
        return fit.runner(*batch)

    def _shrink(self, fit: _Fit, error: ArenaError) -> None:
        """Plan a step anew with as much less as is missing, if that can be."""
        less = max(error.short, CRAMPED, int(SHRINK * fit.plan.program.arena))
        for aim in (fit.plan.peak - less - PLANNING, fit.plan.peak - less):
            if (why := self._plan_anew(fit, aim, fit.costs)) is None:
                break
        give_back()
        then = "It is planned anew, with less." if why is None else f"No plan with less is known: {why}"
        warnings.warn(f"{error.message} {then}", LowtideWarning, stacklevel=4)
        fit.cramped = TIGHTER if why is not None and fit.began else fit.cramped + 1
        fit.began = fit.began or why is not None  # it is tried as it is

    def _plan_anew(self, fit: _Fit, aim: int, costs: Costs) -> str | None:
        """Plan a step again with another aim, in bytes, or other costs; why not, where nothing fits."""
        captured = fit.runner.captured
        try:
            found = plan(captured.graph, costs, aim, time_limit=self._time_limit)
        except BudgetError as error:
            return error.message.splitlines()[0]
        runner = self._execute(captured, found.program, costs.nbytes)
        runner.mismatches = fit.runner.mismatches
        fit.runner, fit.costs, fit.plan = runner, costs, replace(found, budget=self._bytes)
        return None

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
        costs = _corrected(fit.costs, fit.runner.temporaries)
        aim = budget if costs != fit.costs else fit.plan.peak - (most - budget)
        if (why := self._plan_anew(fit, aim, costs)) is not None:
            fit.settled = True
            warnings.warn(f"{what}, and no tighter plan fits: {why}", LowtideWarning, stacklevel=3)
            return
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
    rounding: bool = False,
    verify: int = 0,
) -> Fitted:
    """Return `step` as a step that does the same arithmetic and never holds more than the budget.

    The budget is the peak of the whole step in bytes, "2GiB", or "50%": what stays between steps and half of what
    eager's step adds to it. Without one it is what is free on the machine. `time_limit` is the seconds of planning.
    In place of a budget a plan of this step may be given, or the file that it was saved to. `tell` is told, in one line
    each, what happens before the first step and when a batch of another shape is planned. With costs="roofline" the ops
    are not measured but estimated: quicker to fit, but what they hold inside is unknown, and the budget may be missed.
    Results equal eager's to the bit. With rounding=True they are the same up to rounding: layers of an nn.LSTM may then
    be cut in time, which lowers the least budget. With verify=3 the first three steps also run in eager PyTorch, on
    copies, and every bit is compared; that needs eager's memory beside the budget, which is said first. A difference
    is a VerifyError that names what differs and the first op that does, and the step is undone.
    """
    refuse_call(verify, rounding=rounding)
    fitted = Fitted(step, model, optimizer, example, budget, plan, time_limit, tell, costs, rounding)
    if verify:
        fitted.verify(verify)
    return fitted
