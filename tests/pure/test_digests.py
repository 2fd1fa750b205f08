"""Plan replay: a change that is called a refactor gives the same plans of stored steps, byte for byte.

A change that is meant to give other plans writes the table anew (`python tests/store.py --digests`) and says so. Plans
depend on the versions of the solvers and on the rounding of the machine's mathematics library, on nothing else: the
clock stands still here.
"""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import json
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from lowtide.costs import Costs, declared
from lowtide.errors import BudgetError
from lowtide.graph import Graph
from lowtide.plan import layout, pebble, planning, recompute
from lowtide.plan.problem import problem
from lowtide.program import Program
from lowtide.rewrite import with_narrow

FOLDER = Path(__file__).parent / "stored"
TABLE = FOLDER / "digests.json"
BUDGETS = (50, 30)  # percent of the step's own part in the order that needs least, beside what persists
LONG = ("resnet-50", "gpt-12x384", "bert-small")
LIMIT = 0.2  # seconds' worth of search
STILL = SimpleNamespace(monotonic=lambda: 0.0)


def stored(name: str) -> tuple[Graph, Costs]:
    """A stored step with its optional ops, and its costs."""
    data = json.loads(gzip.decompress((FOLDER / f"{name}.json.gz").read_bytes()))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name
        path.write_text(data["graph"])
        graph = with_narrow(Graph.load(path))
    pairs = [tuple(map(tuple, data["in_place"].get(str(op), ()))) for op in range(len(graph.ops))]
    costs = dataclasses.replace(declared(graph), seconds=tuple(data["seconds"]), in_place=tuple(pairs))
    return graph, costs


def digest(program: Program) -> str:
    """A digest of the instructions and the arena; not of the graph, whose fingerprint knows more than they do."""
    rows = [[type(row).__name__, *dataclasses.astuple(row)] for row in program.instructions]
    return hashlib.sha256(json.dumps([program.arena, rows]).encode()).hexdigest()


def digests(name: str) -> dict[str, str]:
    """For each budget the digest of the plan; of the one with the least peak, where nothing fits."""
    graph, costs = stored(name)
    arrays = problem(graph, costs)
    found = {}
    for percent in BUDGETS:
        with pytest.MonkeyPatch.context() as patch:
            for room in (layout, pebble, planning, recompute):
                patch.setattr(room, "time", STILL)
            patch.setattr(planning, "bound_together", lambda *given: given[3])  # it proves, and decides nothing
            plans = planning.Planning(graph, costs, time_limit=LIMIT)
            budget = arrays.persistent + (arrays.peak(plans.order) - arrays.persistent) * percent // 100
            try:
                found[f"{name} at {percent}%"] = digest(plans.within(budget).program)
            except BudgetError:
                found[f"{name} at {percent}%"] = digest(plans.least().program)
    return found


def write_table(names: list[str]) -> None:
    """Write the digests of all stored steps."""
    table = {key: value for name in names for key, value in digests(name).items()}
    TABLE.write_text(json.dumps(table, indent=1) + "\n")


NAMES = sorted(path.name.removesuffix(".json.gz") for path in FOLDER.glob("*.json.gz"))


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.long] if n in LONG else []) for n in NAMES])
def test_plans_of_stored_steps_are_the_same_byte_for_byte(name: str) -> None:
    table = json.loads(TABLE.read_text())
    expected = {key: value for key, value in table.items() if key.startswith(f"{name} at ")}
    assert len(expected) == len(BUDGETS)
    assert digests(name) == expected
