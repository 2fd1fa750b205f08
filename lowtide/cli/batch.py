"""`lowtide batch`: throughput against batch size within a budget, and the batch to use."""

from __future__ import annotations

from typing import Annotated

import typer

from lowtide import report
from lowtide.batch import Levers, Parts, batch_sizes, forward_of
from lowtide.budget import free_memory, read_budget
from lowtide.choice import Leave
from lowtide.cli.plan import Allow, FromCosts, OffloadBudget, OffloadDir, OffloadTo, Rounding, TimeLimit, read_offload
from lowtide.cli.profile import CostsFrom, Json, Target
from lowtide.cli.talk import answering, show, show_json, telling
from lowtide.cli.target import build
from lowtide.costs import Costs
from lowtide.errors import UsageError
from lowtide.graph import Graph
from lowtide.measure import measure, roofline, with_lanes
from lowtide.rewrites import read_allow

FORWARD = "Of forwards alone, as in inference: eval(), no gradients."
BUDGET = "The most bytes that the whole step may hold: 2GiB, 800MB; nine tenths of what is free if left out."
TIME_LIMIT = 2.0  # seconds of search for each size
FREE = 0.9  # of the memory that is free


@answering
def batch(
    target: Target,
    budget: Annotated[str | None, typer.Option(metavar="<bytes>", help=BUDGET, show_default=False)] = None,
    forward: Annotated[bool, typer.Option("--forward", help=FORWARD)] = False,
    offload: OffloadTo = None,
    offload_budget: OffloadBudget = None,
    offload_dir: OffloadDir = None,
    allow: Allow = None,
    rounding: Rounding = False,
    costs: FromCosts = CostsFrom.MEASURED,
    time_limit: TimeLimit = TIME_LIMIT,
    as_json: Json = False,
) -> None:
    """Show the throughput of each batch size within a budget, the largest that fits, and the one to use."""
    nbytes = _bytes(budget)
    asked = read_offload(offload, offload_budget, offload_dir)
    levers = Levers(asked, Leave(read_allow(allow, rounding)).allowed)

    def make(count: int | None = None) -> Parts:
        parts = Parts(*build(target, batch=count))
        return forward_of(parts) if forward else parts

    make()  # an error in it comes before all work
    with telling(f"building {target}") as tell:

        def price(graph: Graph) -> Costs:
            if costs is CostsFrom.ROOFLINE:
                return with_lanes(graph, roofline(graph), folder=offload_dir)
            # Prices that steps have corrected are known for some sizes only; real steps correct all of them alike.
            told = lambda done, all_: tell(f"measured {done} of {all_} distinct ops")  # noqa: E731
            return with_lanes(graph, measure(graph, progress=told, corrected=False), folder=offload_dir)

        found = batch_sizes(
            make,
            nbytes,
            price=price,
            time_limit=time_limit,
            levers=levers,
            real=costs is CostsFrom.MEASURED,
            tell=tell,
        )
    if as_json:
        show_json({"target": target, "forward": forward, "costs": costs.value, **found.to_json()})
    else:
        show(report.BatchReport(target, costs.value, found, forward=forward))


def _bytes(budget: str | None) -> int:
    if budget is None:
        return int(FREE * free_memory())
    if "%" in budget:
        raise UsageError(
            f"a budget of {budget!r} is another one for each batch size.", hint="give bytes: --budget 2GiB."
        )
    return read_budget(budget, persistent=1, eager_peak=1)
