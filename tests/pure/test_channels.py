"""Ops in channels keep their order: to the judge, its oracles, the orders, the exact planner and the files."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from random import Random

import pytest
from brute import frontier, in_order
from graphs import Case, make_acting_case, make_costs, make_step, with_channels
from hypothesis import given, settings
from hypothesis import strategies as st
from test_check import _agree

from lowtide.check import check
from lowtide.costs import declared
from lowtide.errors import ProgramError
from lowtide.graph import Graph, Op, Output, Read, Value
from lowtide.plan import plan
from lowtide.plan.emit import emit
from lowtide.plan.exact import exact
from lowtide.plan.order import early_updates, late_results
from lowtide.plan.pebble import one_shot
from lowtide.plan.problem import problem
from lowtide.program import Program, Run
from lowtide.simulate import simulate


def _graph(*channels: tuple[str, ...]) -> Graph:
    """A chain of ops in these channels: each has a result, and the last ones read nothing."""
    ops = tuple(Op(f"op{n}", "aten.rand.default", outputs=(n,), channels=row) for n, row in enumerate(channels))
    values = tuple(Value(f"v{n}", 4, "activation", n) for n in range(len(ops)))
    return Graph(ops, values, (), tuple(Output(n, "result", (n,)) for n in range(len(ops))), generator_bytes=40)


DRAW, HAND, GROUP = ("generator",), ("handover",), ("group:0",)


@pytest.mark.parametrize(
    ("first", "second", "rule"),
    [
        (DRAW, DRAW, "random replay"),
        (HAND, HAND, "out of order"),
        (GROUP, GROUP, "out of order"),
        (DRAW, HAND, "out of order"),
        (HAND, DRAW, "out of order"),
        (HAND, GROUP, "out of order"),
        (GROUP, HAND, "out of order"),
        (GROUP, ("group:0", "group:1"), "out of order"),
        (DRAW, GROUP, None),
        (GROUP, ("group:1",), None),
        ((), HAND, None),
        (HAND, (), None),
    ],
)
def test_first_runs_keep_the_order_of_their_channels(
    first: tuple[str, ...], second: tuple[str, ...], rule: str | None
) -> None:
    graph = _graph(first, second)
    assert graph.ordered(0, 1) == graph.ordered(1, 0) == (rule is not None)
    assert graph.waits == (frozenset(), frozenset({0} if rule else ()))
    check(graph, declared(graph), Program(graph.fingerprint, (Run(0), Run(1))))
    program = Program(graph.fingerprint, (Run(1), Run(0)))
    if rule is None:
        check(graph, declared(graph), program)
        return
    with pytest.raises(ProgramError) as caught:
        check(graph, declared(graph), program)
    assert (caught.value.rule, caught.value.instruction) == (rule, 1)


@pytest.mark.parametrize(
    ("channels", "rule"), [(DRAW, "random replay"), (HAND, "out of order"), (GROUP, "out of order")]
)
def test_what_is_in_a_channel_runs_once(channels: tuple[str, ...], rule: str) -> None:
    graph = dataclasses.replace(_graph(channels), outputs=())
    with pytest.raises(ProgramError) as caught:
        check(graph, declared(graph), Program(graph.fingerprint, ()))
    assert caught.value.rule == rule
    assert graph.repeatable(0) == (channels == DRAW)
    graph = _graph(channels)
    again = Program(graph.fingerprint, (Run(0), Run(0, again=True)))
    if channels == DRAW:
        assert check(graph, declared(graph), again) == 4 + 4 + 2 * 40
        return
    with pytest.raises(ProgramError) as caught:
        check(graph, declared(graph), again)
    assert caught.value.rule == "side effect twice"


@given(st.integers(1, 10), st.integers(0, 2**32 - 1))
@settings(max_examples=500, derandomize=True, deadline=None, database=None)
def test_agrees_with_brute_force(size: int, seed: int) -> None:
    """500 random graphs with several channels: a valid program each, and 5 broken ones of each."""
    case: Case = make_acting_case(size, seed)
    assert simulate(case.graph, case.costs, case.program).peak == check(case.graph, case.costs, case.program)
    for program in (case.program, *case.broken(5)):
        _agree(case, program)


@given(st.integers(2, 7), st.integers(0, 2**32 - 1))
@settings(max_examples=60, derandomize=True, deadline=None, database=None)
def test_planners_keep_channels_and_the_exact_one_is_exact(size: int, seed: int) -> None:
    random = Random(seed)
    graph = with_channels(random, make_step(random, size))
    costs = make_costs(random, graph)
    arrays = problem(graph, costs)
    early = early_updates(graph)
    for order in (early, late_results(arrays, early), one_shot(arrays, early)):
        place = {int(op): number for number, op in enumerate(order)}
        pairs = [(a, b) for a in place for b in place if a < b and in_order(graph, a, b)]
        assert all(place[a] < place[b] for a, b in pairs)
        check(graph, costs, emit(arrays, order))
    for peak, seconds in frontier(graph, dataclasses.replace(costs, in_place=((),) * len(graph.ops)))[:3]:
        alone = dataclasses.replace(costs, in_place=((),) * len(graph.ops))
        found = exact(problem(graph, alone), peak)
        assert found.proven
        assert found.bound_seconds == pytest.approx(seconds)
    check(graph, costs, plan(graph, costs, time_limit=0.05).program)


def test_channels_are_in_the_file_and_the_fingerprint_where_there_are_new_ones(tmp_path: Path) -> None:
    graph = _graph(DRAW, HAND, ("generator", "group:0"), ())
    graph.save(tmp_path / "graph")
    assert Graph.load(tmp_path / "graph") == graph
    drawing = _graph(DRAW, ())
    drawing.save(tmp_path / "drawing")
    assert "channels" not in (tmp_path / "drawing").read_text(encoding="utf-8")
    assert (
        len({_graph(DRAW).fingerprint, _graph(HAND).fingerprint, _graph(GROUP).fingerprint, _graph(()).fingerprint})
        == 4
    )
    assert [op.random for op in graph.ops] == [True, False, True, False]
    assert " in handover" in graph.show_op(1)
    assert " random in group:0" in graph.show_op(2)


@pytest.mark.parametrize(
    "channels", [("noise",), ("group:00",), ("group:",), ("handover", "handover"), ("handover", "generator"), (1,)]
)
def test_refuses_channels_that_are_none(channels: tuple[str, ...]) -> None:
    assert "channels" in (_graph(channels).fault or "")


def test_an_optional_op_is_in_no_channel() -> None:
    graph = _graph((), ())
    extra = Op("extra", "aten.clone.default", (Read(0),), outputs=(1,), optional=True, channels=("handover",))
    assert "is optional" in (dataclasses.replace(graph, ops=(*graph.ops, extra)).fault or "")
