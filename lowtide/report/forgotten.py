"""What functions of `lowtide.recompute` forget: a plan takes it as it is, and a report says what it costs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.console import RenderableType
from rich.text import Text

from lowtide.costs import Costs
from lowtide.graph import Graph
from lowtide.report.bytes import show_bytes, show_seconds
from lowtide.report.show import TIMES
from lowtide.report.table import Table

ROWS = 15  # of the table; what is left is counted in a last one


@dataclass(frozen=True)
class Forgotten:
    """What one function of `lowtide.recompute` forgets: a constraint of the plan."""

    function: str
    count: int  # values that the backward reads from second runs, and that nobody keeps until then
    nbytes: int  # of these values
    seconds: float  # of the ops of its second runs


def forgotten(graph: Graph, costs: Costs) -> tuple[Forgotten, ...]:
    """What each function forgets that someone chose by hand, most bytes first."""
    functions: dict[str, list[int]] = {}
    for index, op in enumerate(graph.ops):
        if op.forgotten:
            functions.setdefault(op.forgotten, []).append(index)
    found = []
    for function, ops in functions.items():
        made = {value for op in ops for value in graph.makes[op]}
        needed = [value for value in made if any(not graph.ops[reader].forgotten for reader in graph.readers[value])]
        nbytes, seconds = sum(costs.nbytes[value] for value in needed), sum(costs.seconds[op] for op in ops)
        found.append(Forgotten(function, len(needed), nbytes, seconds))
    return tuple(sorted(found, key=lambda item: (-item.nbytes, item.function)))


def show_forgotten(found: Sequence[Forgotten]) -> Iterator[RenderableType]:
    """A table of what is forgotten by hand, where something is."""
    if not found:
        return
    seconds = show_seconds(sum(item.seconds for item in found))
    yield Text(f"\nForgotten by hand: {forgotten_values(found)}, {seconds}", style="bold")
    rows = [
        [item.function, f"{TIMES}{item.count:,}", show_bytes(item.nbytes), show_seconds(item.seconds)]
        for item in found[:ROWS]
    ]
    if rest := found[ROWS:]:
        count, nbytes = sum(item.count for item in rest), sum(item.nbytes for item in rest)
        more = [f"and {len(rest)} more", f"{TIMES}{count:,}", show_bytes(nbytes)]
        rows.append([*more, show_seconds(sum(item.seconds for item in rest))])
    yield Table("srrr", rows, ("function", "", "all", "time"), ("", "", "bold", ""), 2)
    yield Text("  lowtide.recompute: the plan makes these again, whatever the budget", style="dim")


def forgotten_values(found: Sequence[Forgotten]) -> str:
    """How much is forgotten by hand: `12 values, 3.0 MiB`."""
    count, nbytes = sum(item.count for item in found), sum(item.nbytes for item in found)
    return f"{count:,} value{'' if count == 1 else 's'}, {show_bytes(nbytes)}"
