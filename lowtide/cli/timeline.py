"""`lowtide timeline`: a step over time, for tools that people already have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from lowtide import files, report
from lowtide.choice import Leave, eager_step
from lowtide.cli.plan import (
    Allow,
    FromCosts,
    OffloadBudget,
    OffloadDir,
    OffloadTo,
    Rounding,
    TimeLimit,
    read_offload,
    refuse_early,
)
from lowtide.cli.profile import CostsFrom, Json, Target, captured_target, costs_of, resized_target
from lowtide.cli.report import ASKED, Force, planned
from lowtide.cli.talk import answering, show_json, show_text, talk
from lowtide.costs import Costs
from lowtide.errors import FileError, UsageError
from lowtide.files.disk import advice
from lowtide.graph import Graph
from lowtide.plan import TIME_LIMIT, as_eager
from lowtide.rewrites import read_allow

OUT = "Write a Chrome trace here (trace.json): eager and the plan with their engines and memory, for ui.perfetto.dev."
SNAPSHOT = "Write a memory snapshot of the plan here (plan.pickle), for pytorch.org/memory_viz."


@answering
def timeline(
    target: Target,
    budget: Annotated[str | None, typer.Option(metavar="<bytes>", help=ASKED, show_default=False)] = None,
    out: Annotated[Path | None, typer.Option(dir_okay=False, metavar="<file>", help=OUT, show_default=False)] = None,
    snapshot: Annotated[
        Path | None, typer.Option(dir_okay=False, metavar="<file>", help=SNAPSHOT, show_default=False)
    ] = None,
    force: Force = False,
    offload: OffloadTo = None,
    offload_budget: OffloadBudget = None,
    offload_dir: OffloadDir = None,
    allow: Allow = None,
    rounding: Rounding = False,
    costs: FromCosts = CostsFrom.MEASURED,
    time_limit: TimeLimit = TIME_LIMIT,
    as_json: Json = False,
) -> None:
    """Write a step over time, for other tools.

    A trace for Perfetto has eager and the plan, a snapshot for PyTorch's memory_viz has the plan.
    """
    if out is None and snapshot is None and not as_json:
        raise UsageError("a timeline needs a file.", hint="pass --out trace.json, --snapshot plan.pickle, or --json.")
    for path in (out, snapshot):
        if path is not None:
            report.refuse_page(path, force=force)
    if budget is not None:
        refuse_early(budget)
    asked = read_offload(offload, offload_budget, offload_dir)
    allowed = Leave(read_allow(allow, rounding)).allowed
    built, captured, _ = captured_target(target)
    leave = Leave(allowed, resized_target(built, captured))

    def price(graph: Graph) -> Costs:
        return costs_of(graph, costs, offload_dir)

    away = asked.away(captured.graph.device)
    chosen, _ = planned(captured, price, budget, time_limit=time_limit, leave=leave, away=away)
    whole, priced = eager_step(captured.graph, chosen.graph, chosen.plan.rewrites, chosen.costs, price)
    eager = report.track("eager", whole, priced, as_eager(whole))
    plan = report.track("plan", chosen.graph, chosen.costs, chosen.plan.program)
    trace = report.trace_events([(whole, eager), (chosen.graph, plan)])
    if out is not None:
        _write(out, json.dumps(trace, separators=(",", ":"), allow_nan=False))
    if snapshot is not None:
        _write(snapshot, report.snapshot(chosen.graph, plan))
    if as_json:
        show_json(trace)
    else:
        shown = report.show_bytes
        show_text(f"{target}: {shown(eager.peak)} in eager, {shown(plan.peak)} planned")
    for path, where in ((out, "ui.perfetto.dev"), (snapshot, "pytorch.org/memory_viz")):
        if path is not None:
            talk().print(f"saved to {path}; open it in {where}", markup=False, soft_wrap=True)


def _write(path: Path, content: str | bytes) -> None:
    try:
        files.write_atomically(path, content)
    except OSError as error:
        raise FileError(f"cannot write {path}: {error.strerror or error}.", hint=advice(error)) from error
