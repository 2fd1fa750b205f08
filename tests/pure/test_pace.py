"""Where seconds go: sums of what was measured against a machine whose limits are round numbers."""

from __future__ import annotations

from io import StringIO
from typing import Any

from rich.console import Console

from lowtide.graph import Graph, Input, Op, Output, Read, Value
from lowtide.limits import Limits, Work
from lowtide.program import Program, Run
from lowtide.report import Heading, Paced, PaceReport, paced

LIMITS = Limits({"float32": 100.0, "bfloat16": 400.0}, 10.0, "a machine")
#               operations, bytes: needed: 4 s of arithmetic; 3 s of bytes; 1 s of bytes; 2 s at the rate of bfloat16
WORK = (Work(400.0, "float32", 20), Work(None, "float32", 30), Work(50.0, "float32", 10), Work(800.0, "bfloat16", 1))
TAKEN = {0: 6.0, 1: 4.0, 2: 0.5, 3: 4.0}  # seconds; the third is quicker than memory


def step() -> Graph:
    """Two layers that are alike, and a head."""
    values = [Value("x", 4, "batch", 0, shape=(1,), stride=(1,))]
    values += [Value(f"v{n}", 4, "activation", n, shape=(1,), stride=(1,)) for n in range(1, 5)]
    calls = (("aten.mm.default", "layers.0"), ("aten.relu.default", "middle"), ("aten.mm.default", "layers.1"))
    ops = [
        Op(f"op{n}", target, (Read(n),), outputs=(n + 1,), module=module)
        for n, (target, module) in enumerate((*calls, ("aten.mm.default", "head")))
    ]
    return Graph(tuple(ops), tuple(values), (Input(0, (0,)),), (Output(4, "result", (0,)),))


def pace_of(*runs: Run, taken: dict[int, float] = TAKEN, work: tuple[Work, ...] = WORK) -> Paced:
    graph = step()
    rounds: dict[str, Any] = {"rounds": (20.0, 15.0, 16.0), "eager_rounds": (10.0, 30.0, 16.0)}
    return paced(graph, Program(graph.fingerprint, runs), taken, work, LIMITS, **rounds)


ONCE = tuple(map(Run, range(4)))
TWICE = (*ONCE, Run(1, again=True))


def test_an_op_needs_the_longer_of_arithmetic_and_bytes_at_the_rate_of_its_dtype() -> None:
    assert [one.needed(LIMITS) for one in WORK] == [4.0, 3.0, 1.0, 2.0]
    assert Work(200.0, "float8", 1).needed(LIMITS) == 2.0  # a rate that is not known: that of float32


def test_sums_are_those_of_the_runs() -> None:
    found = pace_of(*TWICE, taken=TAKEN | {2: 6.0})
    assert found.in_ops == 6 + 4 * 2 + 6 + 4
    assert found.again == 4
    assert found.held == {"arithmetic": (6 + 4, 4 + 2), "bytes": (4 + 6, 3 + 1)}
    assert found.needed == 4 + 3 + 1 + 2
    assert found.uncounted == 4
    assert found.quicker == 0
    assert found.seconds == 16
    assert found.distance == 1.6
    assert found.ratios == (2.0, 0.5, 1.0)
    kinds = {kind.target: kind for kind in found.kinds}
    mm, relu = kinds["aten.mm.default"], kinds["aten.relu.default"]
    assert (mm.runs, mm.seconds, mm.again, mm.needed, mm.operations, mm.nbytes) == (3, 16, 0, 7, 1250, 31)
    assert (relu.runs, relu.seconds, relu.again, relu.needed, relu.held_by) == (2, 8, 4, 3, "bytes")


def test_what_is_quicker_than_memory_needs_what_it_takes() -> None:
    found = pace_of(*ONCE, taken={0: 6.0, 1: 1.0, 2: 6.0, 3: 4.0})
    assert found.quicker == 1
    assert found.needed == 4 + 1 + 1 + 2


def test_a_step_that_does_more_than_the_limits_raises_them_but_not_those_of_memory() -> None:
    found = pace_of(*ONCE, taken={0: 2.0, 1: 1.0, 2: 2.0, 3: 4.0})  # products are alike: 2 s each
    assert found.limits.operations == {"float32": 200.0, "bfloat16": 400.0}
    assert found.limits.bandwidth == LIMITS.bandwidth
    assert found.needed == 2 + 1 + 1 + 2
    assert LIMITS.raised(WORK, {0: 1e-6}) == LIMITS  # too short to be believed


def test_modules_hold_all_seconds_and_those_that_are_alike_are_one() -> None:
    alike = (WORK[0], WORK[1], WORK[0], WORK[3])  # the two products take 6 s each on average
    found = pace_of(*ONCE, taken={0: 5.0, 1: 4.0, 2: 7.0, 3: 4.0}, work=alike)
    assert [(branch.path, branch.count) for branch in found.modules] == [
        ("layers.{0,1}", 2),
        ("middle", 1),
        ("head", 1),
    ]
    assert [branch.nbytes for branch in found.modules] == [12 * 10**9, 4 * 10**9, 4 * 10**9]
    data = found.to_json()
    assert sum(row["seconds"] for row in data["modules"]) == found.in_ops
    assert sum(row["needed"] for row in data["modules"]) == found.needed
    assert sum(row["seconds"] for row in data["ops"]) == found.in_ops


def test_the_report_says_what_counts() -> None:
    console = Console(width=100, file=StringIO())
    console.print(PaceReport(Heading("mine", "SGD", ""), 4, "50%", pace_of(*TWICE, taken=TAKEN | {2: 6.0}), ["a note"]))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    for words in ("SGD · 4 ops · within 50%", "takes 1.60 times", "0.500 to 2.000 by round", "aten.mm", "a note"):
        assert words in text
    assert "100.0%" in text
