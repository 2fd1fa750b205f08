"""`lowtide diff`: two plans, profiles or targets beside each other."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer

from lowtide import report
from lowtide.choice import given
from lowtide.cli.plan import FromCosts, TimeLimit, refuse_early
from lowtide.cli.profile import CostsFrom, Json, captured_target, costs_of, optimizer_name
from lowtide.cli.report import Force, planned
from lowtide.cli.talk import answering, show, show_json, talk
from lowtide.costs import Costs
from lowtide.graph import Graph
from lowtide.page import Looks, page_of
from lowtide.page.advice import Situation
from lowtide.plan import TIME_LIMIT

SIDE = "A page or JSON of report, plan or profile; or a target, with a budget or a saved plan behind an @: gpt@50%."


@answering
def diff(
    before: Annotated[str, typer.Argument(metavar="A", help=SIDE, show_default=False)],
    after: Annotated[str, typer.Argument(metavar="B", help="The same, for what it is compared with.")],
    out: Annotated[
        Path | None,
        typer.Option(dir_okay=False, metavar="<file>", help="Write a page of it here, too.", show_default=False),
    ] = None,
    force: Force = False,
    costs: FromCosts = CostsFrom.MEASURED,
    time_limit: TimeLimit = TIME_LIMIT,
    as_json: Json = False,
) -> None:
    """Compare two plans, profiles or targets.

    Say what moved between them, and why.
    """
    if out is not None:
        report.refuse_page(out, force=force)
    sides = [report.side(name, _document(name, costs, time_limit)) for name in (before, after)]
    found = report.diff(*sides, version=version("lowtide"))
    if out is not None:
        report.write_page(out, found.to_json(), kind="diff", title=f"{before} and {after} · lowtide", force=force)
    if as_json:
        show_json(found.to_json())
    else:
        show(found)
    if out is not None:
        talk().print(f"saved to {out}", markup=False, soft_wrap=True)


def _document(name: str, costs: CostsFrom, time_limit: float) -> Any:
    """The document of a file, or of a target that is captured and planned now."""
    if Path(name).suffix in (".json", ".html") and Path(name).is_file():
        return report.document_of(name)
    target, _, asked = name.rpartition("@") if "@" in name else (name, "", "")
    saved = Path(asked) if asked and Path(asked).is_file() else None
    if asked and saved is None:
        refuse_early(asked)
    built, captured, _ = captured_target(target)

    def price(graph: Graph) -> Costs:
        return costs_of(graph, costs)

    if saved is not None:
        chosen = given(saved, captured.graph, price)
        nbytes = chosen.plan.budget
    else:
        chosen, nbytes = planned(captured, price, asked or None, time_limit=time_limit)
    heading = report.Heading(target, optimizer_name(built.optimizer), report.describe_costs(chosen.costs))
    now = Situation(captured.graph, chosen, price, nbytes)
    return page_of(heading, now, asked=asked, looks=Looks(points=0, advice=False)).to_json()
