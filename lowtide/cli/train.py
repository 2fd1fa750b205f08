"""`lowtide train`: run a training step by its program."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import torch
import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from lowtide import allocator, tree
from lowtide.bench.peaks import Peak, step_meter, why_not
from lowtide.captured import Captured
from lowtide.cli.plan import BUDGET, TimeLimit, load_plan, plan_within, promised, refuse_early, with_optional
from lowtide.cli.profile import CostsFrom, Json, Target, captured_target, common, costs_of
from lowtide.cli.talk import answering, show, show_json, talk
from lowtide.costs import Costs
from lowtide.errors import UsageError
from lowtide.execute import execute
from lowtide.plan import TIME_LIMIT, keep_everything
from lowtide.program import Plan
from lowtide.report import Table, show_bytes, show_difference, show_overhead, show_seconds
from lowtide.simulate import simulate


@dataclass
class Log:
    """What the steps did."""

    losses: list[float | None]
    seconds: float = 0.0  # of all steps but the first
    peak: int | None = None  # metered, of all steps but the first

    @property
    def rate(self) -> float | None:
        """Steps a second, without the first."""
        steps = len(self.losses) - 1
        return steps / self.seconds if steps > 0 and self.seconds else None


@answering
def train(
    target: Target,
    steps: Annotated[int, typer.Option(min=1, help="How many steps to run.")] = 20,
    budget: Annotated[str | None, typer.Option(metavar="<bytes>", help=BUDGET, show_default=False)] = None,
    plan: Annotated[
        Path | None,
        typer.Option(
            dir_okay=False, metavar="<file>", help="Train by this saved plan, instead of a budget.", show_default=False
        ),
    ] = None,
    time_limit: TimeLimit = TIME_LIMIT,
    as_json: Json = False,
) -> None:
    """Train on the example batch, as captured or by a plan."""
    if budget is not None:
        refuse_early(budget)
        if plan is not None:
            raise UsageError("a saved plan has its own budget.", hint="pass --plan or --budget, not both.")
    built, captured, _ = captured_target(target)
    if budget is not None or plan is not None:
        captured = with_optional(captured)
    costs = costs_of(captured.graph, CostsFrom.MEASURED)
    planned = None
    notes: list[str] = []
    if plan is not None:
        planned = load_plan(plan, captured.graph, costs, notes)
    elif budget is not None:
        planned = plan_within(captured.graph, costs, budget, time_limit=time_limit)
    program = planned.program if planned is not None else keep_everything(captured.graph)
    predicted = simulate(captured.graph, costs, program).peak
    runner = execute(captured, program)
    log = _run(captured, costs, lambda: runner(*built.example), steps, predicted)
    first, last = log.losses[0], log.losses[-1]
    reason = why_not(captured)
    if as_json:
        stays = costs.stays(captured.graph)
        show_json(
            {
                "target": target,
                **common(stays=stays, predicted=predicted, metered=log.peak),
                **(promised(planned) if planned is not None else {}),
                "steps": steps,
                "first_loss": _finite(first),
                "last_loss": _finite(last),
                "losses": [_finite(loss) for loss in log.losses],
                "steps_per_second": log.rate,
                "notes": [*captured.graph.notes, *notes, *([reason] if reason else [])],
            }
        )
        return
    rows = [
        ("loss", f"{_number(first)} -> {_number(last)}", f"over {steps} steps on one batch"),
        ("steps a second", _speed(log.rate), "without the first one"),
        *_rows(planned),
        ("predicted peak", show_bytes(predicted), ""),
    ]
    if log.peak is not None:
        off = f"the prediction is off by {show_difference(log.peak, predicted)}"
        rows.append(("metered peak", show_bytes(log.peak), off))
    else:
        rows.append(("metered peak", "-", reason or "the first step warms up; take more"))
    show(Table("lrs", rows, (), ("", "bold", "")))
    for note in notes:
        talk().print(f"note: {note}", markup=False, soft_wrap=True)


def _rows(planned: Plan | None) -> list[tuple[str, str, str]]:
    """What is known only with a budget, for a person."""
    if planned is None or planned.budget is None:
        return []
    bound = f"predicted; the bound is {show_overhead(planned.bound)}"
    return [
        ("overhead", show_overhead(planned.overhead), bound),
        ("budget", show_bytes(planned.budget), f"planned in {show_seconds(planned.planning_seconds)}"),
    ]


def _run(captured: Captured, costs: Costs, step: Callable[[], Any], steps: int, predicted: int) -> Log:
    """Take the steps; the first one warms up, the others are timed and metered."""
    log = Log([])
    with ExitStack() as stack:
        stack.enter_context(redirect_stdout(sys.stderr))
        advance = stack.enter_context(_bar(steps))
        metered = why_not(captured) is None
        if metered:
            stack.enter_context(allocator.meter())  # makes the blocks of the first step known to the next meter
        log.losses.append(_loss(step()))
        advance(log, predicted)
        peak: Peak | None = stack.enter_context(step_meter(captured, costs)) if metered and steps > 1 else None
        for _ in range(steps - 1):
            start = perf_counter()
            log.losses.append(_loss(step()))
            log.seconds += perf_counter() - start
            log.peak = peak() if peak is not None else None
            advance(log, predicted)
    return log


@contextmanager
def _bar(steps: int) -> Iterator[Callable[[Log, int], None]]:
    """A progress bar with the loss, the speed, and the peak against the prediction."""
    console = talk()
    columns = (TextColumn("training"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=steps)

        def advance(log: Log, predicted: int) -> None:
            peak = f"peak {show_bytes(log.peak)} of {show_bytes(predicted)} predicted" if log.peak else ""
            speed = f"{_speed(log.rate)} steps/s" if log.rate else ""
            text = "  ".join(filter(None, [f"loss {_number(log.losses[-1])}", speed, peak]))
            progress.update(task, completed=len(log.losses), description=text)

        yield advance


def _loss(result: Any) -> float | None:
    """The first number among the results of a step."""
    for leaf in tree.flatten(result)[0]:
        if isinstance(leaf, torch.Tensor) and leaf.numel() == 1:
            return float(leaf)
    return None


def _finite(number: float | None) -> float | None:
    return number if number is not None and math.isfinite(number) else None


def _speed(rate: float | None) -> str:
    return "-" if rate is None else f"{rate:,.1f}" if rate >= 10 else f"{rate:.3g}"


def _number(number: float | None) -> str:
    return "-" if number is None else f"{number:.4g}"
