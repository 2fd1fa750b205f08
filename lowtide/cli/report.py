"""`lowtide report`: a step and its plan on one page."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from lowtide import report, tree
from lowtide.capture import capture
from lowtide.captured import Captured
from lowtide.choice import EXACTLY, Choice, Effort, Leave, choose
from lowtide.cli.plan import (
    BUDGET,
    Allow,
    FromCosts,
    OffloadBudget,
    OffloadDir,
    OffloadTo,
    Rounding,
    TimeLimit,
    budget_of,
    read_offload,
    refuse_early,
    searching,
)
from lowtide.cli.profile import CostsFrom, Json, Target, captured_target, costs_of, optimizer_name, resized_target
from lowtide.cli.talk import answering, show_json, show_text, talk, telling, working
from lowtide.cli.target import Built, build
from lowtide.costs import Costs
from lowtide.errors import LowtideError, UsageError
from lowtide.graph import Graph
from lowtide.page import Looks, meter, page_of
from lowtide.page.advice import Situation
from lowtide.plan import TIME_LIMIT
from lowtide.plan.planning import Planning
from lowtide.program import Plan
from lowtide.rewrites import read_allow

ASKED = f"{BUDGET} Without one nothing is made again."
POINTS = "Budgets of the frontier, a second or so of search each; 0 leaves it out."
OUT = "Write the page here: one file that needs no network."
Out = Annotated[Path | None, typer.Option(dir_okay=False, metavar="<file>", help=OUT, show_default=False)]
Force = Annotated[bool, typer.Option("--force", help="Overwrite the file.")]


@answering
def make_report(
    target: Target,
    budget: Annotated[str | None, typer.Option(metavar="<bytes>", help=ASKED, show_default=False)] = None,
    out: Out = None,
    force: Force = False,
    points: Annotated[int, typer.Option(min=0, help=POINTS)] = 10,
    advice: Annotated[bool, typer.Option(help="Plan changes that might help, and show the best three.")] = True,
    offload: OffloadTo = None,
    offload_budget: OffloadBudget = None,
    offload_dir: OffloadDir = None,
    allow: Allow = None,
    rounding: Rounding = False,
    costs: FromCosts = CostsFrom.MEASURED,
    time_limit: TimeLimit = TIME_LIMIT,
    seed: Annotated[int, typer.Option(min=0, help="Of the search.")] = 0,
    as_json: Json = False,
) -> None:
    """Show a step and its plan on one page.

    Memory over time, the arena, the frontier, the peak, what is made again, where the seconds go, and what would help.
    """
    refuse_out(out, force, as_json)
    if budget is not None:
        refuse_early(budget)
    asked = read_offload(offload, offload_budget, offload_dir)
    allowed = Leave(read_allow(allow, rounding)).allowed
    built, captured, _ = captured_target(target)
    leave = Leave(allowed, resized_target(built, captured))

    def price(graph: Graph) -> Costs:
        return costs_of(graph, costs, offload_dir)

    away = asked.away(captured.graph.device)
    chosen, nbytes = planned(captured, price, budget, time_limit=time_limit, seed=seed, leave=leave, away=away)
    notes = [*chosen.graph.notes, *chosen.costs.notes]
    with working("running steps in eager and by the plan"):
        metered = meter(captured, chosen, built.example, notes, folder=offload_dir)
    now = Situation(
        captured.graph,
        chosen,
        price,
        nbytes,
        leave=leave,
        away=away,
        time_limit=min(time_limit, Situation.time_limit),
        halved=_halving(target, built),
    )
    heading = report.Heading(target, optimizer_name(built.optimizer), report.describe_costs(chosen.costs))
    looks = Looks(points=points, advice=advice, seed=seed)
    with telling("looking around") as tell:
        page = page_of(heading, now, asked=budget or "", metered=metered, looks=looks, notes=notes, tell=tell)
        document = page.to_json()
    if out is not None:
        report.write_page(out, document, kind="report", title=f"{target} · lowtide", force=force)
    if as_json:
        show_json(document)
    else:
        _tell(page, out)


def planned(
    captured: Captured,
    price: Callable[[Graph], Costs],
    budget: str | None,
    *,
    time_limit: float = TIME_LIMIT,
    seed: int = 0,
    leave: Leave = EXACTLY,
    away: Any = None,
) -> tuple[Choice, int | None]:
    """The quickest plan within a budget as it was written, and its bytes."""
    nbytes: int | None = None

    def search(graph: Graph, found: Costs, eager_peak: int, effort: Effort) -> Plan:
        nonlocal nbytes
        with searching(time_limit) as progress:
            planning = Planning(graph, found, time_limit=effort.part * time_limit, seed=seed, progress=progress)
            if budget is None:
                return planning.within(None)
            nbytes, lowest = budget_of(budget, planning, eager_peak)
            return planning.within(nbytes, known=lowest, explain=effort.explain)

    return choose(captured.graph, price, search, leave=leave, away=away), nbytes


def refuse_out(out: Path | None, force: bool, as_json: bool, *, option: str = "--out report.html") -> None:
    """Raise where the page has no place, or one that is taken, before any work."""
    if out is None and not as_json:
        raise UsageError("a page needs a file.", hint=f"pass {option}, or --json.")
    if out is not None:
        report.refuse_page(out, force=force)


def _halving(target: str, built: Built) -> Callable[[], tuple[Graph, int] | None]:
    """How to get the step with half of its batch; None where its batch can't be seen or halved."""

    def halved() -> tuple[Graph, int] | None:
        leaves, _ = tree.flatten(built.example)
        rows = {len(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim()}
        if len(rows) != 1 or (half := rows.pop() // 2) < 1:
            return None
        try:
            return capture(*build(target, batch=half)).graph, half
        except LowtideError:
            return None

    return halved


def _tell(page: report.Page, out: Path | None) -> None:
    """The page in a few lines."""
    summary, metered = page.summary, page.metered
    shown = report.show_bytes
    show_text(f"{page.heading.target}: {shown(summary.eager_peak)} in eager, {shown(summary.peak)} planned")
    if metered.peak is not None and metered.eager_peak is not None:
        show_text(f"metered: {shown(metered.eager_peak)} in eager, {shown(metered.peak)} by the plan")
    more = report.show_overhead(summary.overhead)
    show_text(f"a step: {report.show_seconds(summary.seconds)} predicted, {more} for what is made again")
    if page.advice:
        show_text("what would help most, each planned:")
        for one in page.advice:
            show_text(f"  {report.show_advice(one)} ({one.how})")
    talk().print(f"saved to {out}", markup=False, soft_wrap=True)
