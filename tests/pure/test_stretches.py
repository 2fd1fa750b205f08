"""Stretches: what is measured at one place holds at all others of its class, and what the table promises is kept."""

from __future__ import annotations

import pytest
from graphs import cases
from hypothesis import given, settings
from hypothesis import strategies as st
from test_classics import Builder, assert_valid, steps

from lowtide.costs import Costs, declared
from lowtide.graph import Graph
from lowtide.plan.classics import CLASSICS
from lowtide.plan.classics.measured import Meter, measured_chain
from lowtide.plan.classics.rotor import Rotor
from lowtide.plan.classics.segments import segments
from lowtide.plan.order import captured_order, early_updates
from lowtide.plan.planning import Planning
from lowtide.plan.problem import Ints, Problem, problem
from lowtide.plan.stretches import classed, joined_chain, stretches

SOME = settings(max_examples=60, derandomize=True, deadline=None)
PLENTY = 10**6  # ops that may be measured


def residual(blocks: int) -> tuple[Graph, Costs]:
    """A net of equal residual blocks, x + tanh(x @ a) @ b, with its backward: products are dear, the rest is cheap."""
    build = Builder()
    state = build.given(640)
    tape = []
    for _ in range(blocks):
        first, second = build.given(64), build.given(64)
        (product,) = build.op("mm", (state, first), (640,), "forward")
        (inner,) = build.op("tanh", (product,), (640,), "forward")
        (outer,) = build.op("mm", (inner, second), (640,), "forward")
        tape.append((state, inner, first, second))
        (state,) = build.op("add", (state, outer), (640,), "forward")
    (gradient,) = build.op("ones", (), (640,), "backward")
    results = []
    for entering, inner, first, second in reversed(tape):
        results += build.op("mm", (inner, gradient), (64,), "backward")
        (down,) = build.op("mm", (gradient, second), (640,), "backward")
        (down,) = build.op("tanh_backward", (down, inner), (640,), "backward")
        results += build.op("mm", (entering, down), (64,), "backward")
        (down,) = build.op("mm", (down, first), (640,), "backward")
        (gradient,) = build.op("add", (gradient, down), (640,), "backward")
    graph = build.graph([gradient, *results])
    costs = declared(graph)
    seconds = tuple(10.0 if op.target == "aten.mm.default" else 1.0 for op in graph.ops)
    return graph, Costs(costs.graph, seconds, costs.arena_temporaries, costs.nbytes, costs.in_place, "roofline", "unit")


def assert_measured_everywhere(arrays: Problem, order: Ints) -> None:
    """Each way, wherever its menu was measured, is what measuring it where it stands gives."""
    chain = segments(arrays, order)
    sizes, keeps = joined_chain(chain, PLENTY)
    meter = Meter(chain)
    gradient = meter.gradient()
    for first, (ways, menu) in enumerate(zip(sizes.ways, keeps, strict=True)):
        assert {way.stages for way in ways} >= {1}
        for way, keep in zip(ways, menu, strict=True):
            part, more = chain.joined(first, way.stages), gradient[first + way.stages - 1]
            assert keep <= part.made
            direct = meter.way(first, part, keep)
            assert (way.kept, way.forward, way.seconds) == (direct.kept, direct.forward, direct.seconds)
            assert (way.backward, way.alone) == (direct.backward + more, direct.alone + more)


@SOME
@given(steps)
def test_a_menu_holds_at_every_place_of_its_class(step: tuple[Graph, Costs]) -> None:
    assert_measured_everywhere(problem(*step), early_updates(step[0]))


@pytest.mark.parametrize("blocks", [1, 2, 5, 12])
def test_a_menu_holds_at_every_block_of_a_net_that_repeats_itself(blocks: int) -> None:
    graph, costs = residual(blocks)
    assert_measured_everywhere(problem(graph, costs), captured_order(graph))


def test_a_deep_net_has_as_many_classes_as_a_shallow_one() -> None:
    counts = []
    for blocks in (20, 60):
        graph, costs = residual(blocks)
        classes, _ = classed(Meter(segments(problem(graph, costs), captured_order(graph))), 16)
        assert len(classes) >= blocks
        counts.append(len(set(classes)))
    assert counts[0] == counts[1] < 10


@SOME
@given(steps, st.integers(0, 500))
def test_a_table_of_stretches_predicts_the_peak_and_the_seconds(step: tuple[Graph, Costs], work: int) -> None:
    """As that of the classics does, and it is no slower with more to choose from."""
    arrays, order = problem(*step), early_updates(step[0])
    chain = segments(arrays, order)
    sizes, keeps = joined_chain(chain, work)
    made = {value for part in chain.parts for op in part.forward for value in step[0].makes[op]}
    uncounted = int(arrays.nbytes[sorted(made - chain.droppable)].sum())
    own = (arrays.peak(order) - arrays.persistent) // 4
    table, single = Rotor(sizes.in_units(4), own), Rotor(measured_chain(chain, menus=True)[0].in_units(4), own)
    base = arrays.time(order) - float(sizes.seconds.sum())
    for memory in (own, own * 3 // 4, own // 2):
        assert table.seconds(memory) <= single.seconds(memory)
        schedule = table.schedule(memory)
        if schedule is not None:
            sequence = chain.replay(schedule, keeps)
            assert_valid(arrays, sequence, None)
            assert arrays.peak(sequence) - arrays.persistent - uncounted <= memory * 4
            assert arrays.time(sequence) <= base + table.seconds(memory) + 1e-6


@SOME
@given(case=cases())
def test_stretches_are_valid_on_any_graph(case) -> None:
    arrays = problem(case.graph, case.costs)
    order = captured_order(case.graph)
    find = stretches(arrays, order, seconds=1.0)
    for part in (1.0, 0.7, 0.4):
        budget = int(arrays.persistent + part * (arrays.peak(order) - arrays.persistent))
        sequence = find(budget)
        if sequence is not None:
            assert_valid(arrays, sequence, budget)


def test_blocks_that_run_as_one_are_quicker_than_the_same_blocks_cut_once() -> None:
    graph, costs = residual(100)
    arrays, order = problem(graph, costs), captured_order(graph)
    budget = arrays.persistent + (arrays.peak(order) - arrays.persistent) * 15 // 100
    classic, ours = CLASSICS["rockmate"](arrays, order, budget), stretches(arrays, order, seconds=6.0)(budget)
    assert classic is not None
    assert ours is not None
    assert arrays.time(ours) < arrays.time(classic)
    assert Planning(graph, costs, time_limit=0.2).within(budget).seconds <= arrays.time(ours)
