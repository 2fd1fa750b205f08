"""The front door: a training step and a budget in, the same step within the budget out."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import torch

from lowtide import report
from lowtide.allocator.arena import ArenaError, give_back
from lowtide.budget import free_memory, read_budget
from lowtide.capture import capture
from lowtide.capture.door import refuse_to_run
from lowtide.captured import Captured
from lowtide.check import check
from lowtide.costs import Costs
from lowtide.errors import BudgetError, FileError, LowtideWarning, UsageError
from lowtide.execute import Runner, StaleError, execute
from lowtide.graph import Graph
from lowtide.lossy import RECURRENT, cut, longest
from lowtide.measure import measure, roofline
from lowtide.plan import TIME_LIMIT, as_eager, plan, with_narrow
from lowtide.plan.infeasible import floor
from lowtide.plan.problem import problem
from lowtide.program import Plan, Program
from lowtide.simulate import simulate
from lowtide.verify import Verifier, announce, refuse_call

ROUNDING = "recurrent layers are cut in time; results are the same up to rounding"
SHORTEST = 4  # moments of a chunk: with fewer, a call has more to do around its moments than with them
WORTH = 0.01  # of the step's seconds that a cut must save, where the layers fit as they are
FREE = 0.9  # of the memory that is free: the budget where none is given
TIGHTER = 3  # times at most that a step is planned anew because it held more than its budget, or finds less memory
BESIDE = 32 * 2**20  # bytes that the libraries below torch take beside a step, but for the code that they compile
PLANNING = 24 * 2**20  # bytes that planning anew leaves behind in the heap
CRAMPED, SHRINK = 8 * 2**20, 0.03  # bytes, and of the arena: how much less it then asks for, at least

Tell = Callable[[str], None]
CostsFrom = Literal["measured", "roofline"]


@dataclass(frozen=True)
class Choice:
    """A plan, and what it is a plan of."""

    graph: Graph  # with its optional ops
    costs: Costs
    plan: Plan
    chunks: int  # that recurrent layers are cut into in time; 1: they are whole
    eager_peak: int  # bytes, predicted; eager's layers are whole


def candidates(graph: Graph, *, rounding: bool) -> Iterator[tuple[int, Graph]]:
    """The graphs that may be planned for a captured one, the exact one first, with the chunks of recurrent layers."""
    yield 1, with_narrow(graph)
    chunks, moments = 2, longest(graph) if rounding else 0
    while moments >= SHORTEST * chunks:
        yield chunks, with_narrow(cut(graph, chunks))
        chunks *= 2


def choose(
    graph: Graph,
    price: Callable[[Graph], Costs],
    search: Callable[[Graph, Costs, int], Plan],
    *,
    rounding: bool,
) -> Choice:
    """The quickest plan of a captured graph; with rounding, recurrent layers may be cut in time where that pays.

    `search` plans a graph with its costs, given eager's peak in bytes.
    """
    best: Choice | None = None
    failure: BudgetError | None = None
    eager_peak = 0
    for chunks, candidate in candidates(graph, rounding=rounding):
        costs = price(candidate)
        if chunks == 1:
            eager_peak = simulate(candidate, costs, as_eager(candidate)).peak
        if best is not None and sum(costs.seconds[op] for op in candidate.ordinary) >= best.plan.seconds:
            continue  # slower, even if nothing runs twice
        try:
            found = search(candidate, costs, eager_peak)
        except BudgetError as error:
            if not rounding:
                if not _helps(graph, candidate, costs):
                    raise
                more = "with rounding=True (--rounding) recurrent layers are cut in time, which needs less"
                raise BudgetError(error.message, hint=f"{error.hint}\n{more}.", least=error.least) from error
            failure = min(failure or error, error, key=lambda one: float("inf") if one.least is None else one.least)
            continue
        limit = float("inf") if best is None else best.plan.seconds * (1 - WORTH if best.chunks == 1 else 1)
        if found.seconds < limit:
            best = Choice(candidate, costs, found, chunks, eager_peak)
        if chunks == 1 and found.seconds <= found.base_seconds:
            break  # nothing runs twice, and every bit is eager's
    if best is None:
        assert failure is not None
        raise failure
    return best


def _helps(captured: Graph, graph: Graph, costs: Costs) -> bool:
    """Whether a recurrent layer that can be cut is what needs most."""
    _, op = floor(problem(graph, costs))
    return op >= 0 and graph.ops[op].target in RECURRENT and longest(captured) >= 2 * SHORTEST


def given(
    plan: Plan | str | os.PathLike[str], graph: Graph, price: Callable[[Graph], Costs], *, rounding: bool
) -> Choice:
    """A plan that was made before, with what it is a plan of; whether it keeps its promise is for the judge to say."""
    failure: FileError | None = None
    for chunks, candidate in candidates(graph, rounding=rounding):
        if isinstance(plan, Plan) and plan.program.graph != candidate.fingerprint and rounding:
            continue
        try:
            found = plan if isinstance(plan, Plan) else Plan.load(plan, candidate)
        except FileError as error:
            failure = failure or error
            continue
        costs = price(candidate)
        whole = candidate if chunks == 1 else with_narrow(graph)
        eager_peak = simulate(whole, costs if chunks == 1 else price(whole), as_eager(whole)).peak
        return Choice(candidate, costs, found, chunks, eager_peak)
    if failure is None:
        raise UsageError("the plan is one of another step.", hint="plan this step.")
    if rounding or not longest(graph):
        raise failure
    raise FileError(failure.message, hint=f"{failure.hint} A plan with rounding needs it here too.") from failure


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
        self._bytes: int | None = None  # the budget, once it is known what a part of the step is
        self.verifier: Verifier | None = None  # of the steps that run beside eager
        refuse_to_run(model)
        self._fits = [self._make(example, plan)]

    def __call__(self, *batch: Any) -> Any:
        """One training step; returns what the step returns, detached."""
        if self.verifier is not None and self.verifier.left:
            return self.verifier.check(batch, self._call, lambda: self._fits[0].runner)
        return self._call(*batch)

    def _call(self, *batch: Any) -> Any:
        for fit in self._fits:
            try:
                result = self._take(fit, batch)
            except StaleError:
                continue
            if fit is not self._fits[0]:
                self._fits.remove(fit)
                self._fits.insert(0, fit)
            self._hold(fit)
            return result
        self._tell("the batch, or the model, is not as in the steps so far: it is planned now, within the same budget")
        self._fits.insert(0, self._make(batch))
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
            chosen = choose(captured.graph, self._price, self._search, rounding=self._rounding)
        found, costs = chosen.plan, chosen.costs
        bytes_, seconds = report.show_bytes(found.peak), report.show_seconds(found.planning_seconds)
        self._tell(f"planned {bytes_} with {report.show_overhead(found.overhead)} overhead in {seconds}")
        runner = self._execute(replace(captured, graph=chosen.graph), found.program, costs.nbytes)
        return _Fit(runner, found, costs, chosen.eager_peak, chosen.chunks)

    def _capture(self, batch: tuple[Any, ...]) -> Captured:
        return capture(self._step, self._model, self._optimizer, batch)

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
                free = torch.cuda.mem_get_info(device)[0] if device.startswith("cuda") else free_memory()
                self._bytes = stays + int(FREE * free)
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
