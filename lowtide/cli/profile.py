"""`lowtide profile`: where the memory of a training step goes, and its time."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Annotated, Any

import typer

from lowtide import report
from lowtide.budget import read_budget
from lowtide.capture import capture
from lowtide.captured import Captured
from lowtide.cli.talk import answering, counting, show, show_json, working
from lowtide.cli.target import Built, build
from lowtide.costs import Costs
from lowtide.errors import UsageError
from lowtide.graph import Graph
from lowtide.measure import measure, roofline, with_lanes
from lowtide.models.catalog import BUILDERS
from lowtide.pace import ROUNDS, pace
from lowtide.peaks import resident, why_not
from lowtide.peaks.predict import Prediction, compare
from lowtide.plan import as_eager, keep_everything
from lowtide.program import Plan
from lowtide.resized import Resized, resizable
from lowtide.simulate import simulate

WHOLE = "100%"  # of what eager's step holds


def complete_target(incomplete: str) -> list[str]:
    """The built-in models that begin so, for the shell; files it completes by itself."""
    return [name for name in BUILDERS if name.startswith(incomplete)]


Target = Annotated[
    str,
    typer.Argument(
        help="A built-in model such as resnet:depth=50,batch=16 (see `lowtide models`), or file.py:function, "
        "a function that returns (step, model, optimizer, example).",
        show_default=False,
        autocompletion=complete_target,
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")]


class CostsFrom(StrEnum):
    """Where costs come from."""

    MEASURED = "measured"
    ROOFLINE = "roofline"


@answering
def profile(
    target: Target,
    costs: Annotated[
        CostsFrom,
        typer.Option(
            help="Measure each distinct op here, then run the step and meter it; or only estimate, "
            "for machines that are not here and sizes that do not fit."
        ),
    ] = CostsFrom.MEASURED,
    time: Annotated[
        bool, typer.Option("--time", help="Show instead where its seconds go, beside eager's and what the machine can.")
    ] = False,
    budget: Annotated[
        str, typer.Option(metavar="<bytes>", help="With --time: the budget within which the step is planned.")
    ] = WHOLE,
    rounds: Annotated[int, typer.Option(min=1, help="With --time: turns of the step and of eager's.")] = ROUNDS,
    as_json: Json = False,
) -> None:
    """Show where the memory of a training step goes, or its time."""
    if time:
        _time(target, costs, budget, rounds, as_json)
        return
    if budget != WHOLE:
        raise UsageError("without --time the step is profiled as eager holds it.", hint="pass --time, or no --budget.")
    interpreter = resident.now()
    built, captured, seconds = captured_target(target)
    found = costs_of(captured.graph, costs)
    notes = [*captured.graph.notes, *found.notes]
    metered = _metered(built, captured, found, notes)
    graph = captured.graph
    result = report.profile(graph, found, keep_everything(graph))
    peaks = report.Peaks(
        eager_predicted=metered.eager_predicted_peak if metered else simulate(graph, found, as_eager(graph)).peak,
        program=metered.metered_peak if metered else None,
        eager=metered.eager_metered_peak if metered else None,
        interpreter=interpreter if metered else None,
    )
    if as_json:
        show_json(
            {
                "target": target,
                **common(persistent=result.persistent, predicted=result.peak, metered=peaks.program),
                "eager_predicted_peak": peaks.eager_predicted,
                "eager_metered_peak": peaks.eager,
                "interpreter_bytes": interpreter,
                "optimizer": optimizer_name(built.optimizer),
                "costs": {"origin": found.origin, "machine": found.machine},
                "capture_seconds": seconds,
                **result.to_json(),
                "notes": notes,
            }
        )
    else:
        heading = report.Heading(
            target, optimizer_name(built.optimizer), report.describe_costs(found), seconds if metered else None
        )
        show(report.Report(heading, result, peaks, notes))


def _time(target: str, costs: CostsFrom, budget: str, rounds: int, as_json: bool) -> None:
    """Show where the seconds of a step go, as it is planned within a budget."""
    if costs is CostsFrom.ROOFLINE:
        raise UsageError("with --time the step runs.", hint="leave out --costs roofline.")
    read_budget(budget, persistent=1, eager_peak=1, least=lambda: 1)
    with working(f"building {target}"):
        built = build(target)
    found = pace(*built, budget=budget, rounds=rounds, shown=counting)
    result = found.time
    name = optimizer_name(built.optimizer)
    if as_json:
        persistent = sum(found.graph.values[item.value].nbytes for item in found.graph.inputs if item.persistent)
        keys = common(persistent=persistent, predicted=found.plan.peak, metered=None) | promised(found.plan)
        keys |= {"time_ratio": median(result.ratios)}
        show_json({"target": target, **keys, "optimizer": name, **result.to_json(), "notes": list(found.graph.notes)})
        return
    heading = report.Heading(target, name, "")
    show(report.PaceReport(heading, len(found.graph.ordinary), budget, result, found.graph.notes))


def _metered(built: Built, captured: Captured, costs: Costs, notes: list[str]) -> Prediction | None:
    """The peaks of real runs, where they can be had; else a note that says why not."""
    if costs.origin == "roofline":
        notes.append("with --costs roofline nothing was run: temporaries inside ops are not known, nothing is metered.")
        return None
    reason = why_not(captured)
    if reason is not None:
        notes.append(reason)
        return None
    with working("running the step, twice by its program and twice in eager PyTorch"):
        return compare(captured, costs, built.example)


def captured_target(target: str) -> tuple[Built, Captured, float]:
    """Build and capture a target; with the seconds of the capture."""
    with working(f"building {target}"):
        built = build(target)
    with working(f"capturing {target}"):
        start = perf_counter()
        captured = capture(*built)
        seconds = perf_counter() - start
    if not captured.graph.ops:
        raise UsageError(f"the step of {target} calls no op of torch.", hint="a training step computes something.")
    return built, captured, seconds


def resized_target(built: Built, captured: Captured) -> Resized | None:
    """The step of a target at other sizes, where it is known what an example is."""
    step, model, optimizer, example = built
    return resizable(captured.graph, example, lambda batch: capture(step, model, optimizer, batch).graph)


def costs_of(graph: Graph, origin: CostsFrom, folder: Path | None = None) -> Costs:
    """Measure or estimate the costs of a graph; where it copies to a disk, that of this folder."""
    if origin is CostsFrom.ROOFLINE:
        found = roofline(graph)
    else:
        with counting("measuring ops") as progress:
            found = measure(graph, progress=progress)
    with counting("measuring copies") as progress:
        return with_lanes(graph, found, folder=folder, progress=progress)


def promised(planned: Plan) -> dict[str, Any]:
    """What is known only with a plan, for JSON."""
    return {
        "budget": planned.budget,
        "overhead": planned.overhead,
        "bound": planned.bound,
        "planning_seconds": planned.planning_seconds,
    }


def optimizer_name(optimizer: Any) -> str:
    """The optimizer as a person calls it."""
    return "no optimizer" if optimizer is None else type(optimizer).__name__


def common(*, persistent: int, predicted: int, metered: int | None) -> dict[str, Any]:
    """The keys that the JSON of every command has; what needs a budget is not known here."""
    return {
        "budget": None,
        "persistent": persistent,
        "predicted_peak": predicted,
        "metered_peak": metered,
        "least_feasible": None,
        "overhead": 0.0,
        "bound": None,
        "time_ratio": None,
        "planning_seconds": 0.0,
    }
