"""Windows: a step in parts is planned as its parts are, identical ones alike, and never above the budget."""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from brute import frontier
from hypothesis import given, settings
from hypothesis import strategies as st
from test_classics import Builder, assert_valid
from test_layout import assert_apart

from lowtide.check import check
from lowtide.costs import Costs, declared
from lowtide.errors import BudgetError
from lowtide.graph import Graph
from lowtide.plan.layout import Buffers, pack
from lowtide.plan.planning import Planning
from lowtide.plan.windows import windows
from lowtide.program import Run

FEW = settings(max_examples=8, derandomize=True, deadline=None)
SOME = settings(max_examples=25, derandomize=True, deadline=None)
STATE, SUM = 640, 64  # bytes of a state of the net, of a weight and of the sum of its gradients


def one_part(build: Builder, weights: list[int], sums: list[int | None], length: int) -> list[int]:
    """A forward and a backward of so many layers; what the sums are after it."""
    states = build.op("slice", (), (STATE,), "forward")
    for place in range(length):
        states += build.op("tanh", (states[-1], weights[place]), (STATE,), "forward")
    (gradient,) = build.op("loss", (states[-1],), (STATE,), "backward")
    after: list[int] = []
    for place in reversed(range(length)):
        (term,) = build.op("mm", (gradient, states[place]), (SUM,), "backward")
        before = sums[place]
        after += [term] if before is None else build.op("add", (before, term), (SUM,), "backward")
        if place:
            (gradient,) = build.op("back", (gradient, states[place], weights[place]), (STATE,), "backward")
    return after[::-1]


def in_parts(parts: int, length: int) -> tuple[Graph, Costs]:
    """A net of tanh layers whose batch is in parts: gradients of weights are sums over them, written in place."""
    build = Builder()
    weights = [build.given(SUM) for _ in range(length)]
    sums: list[int | None] = [None] * length
    for _ in range(parts):
        sums = [*one_part(build, weights, sums, length)]
    graph = build.graph([value for value in sums if value is not None])
    return graph, in_place(graph)


def mostly_whole(parts: int, length: int) -> Graph:
    """A long net whose batch is whole, behind short ones in parts."""
    build = Builder()
    weights = [build.given(SUM) for _ in range(length)]
    sums: list[int | None] = [None] * length
    for _ in range(parts):
        sums = [*one_part(build, weights[:2], sums[:2], 2), *sums[2:]]
    sums = [*one_part(build, weights, sums, length)]
    return build.graph([value for value in sums if value is not None])


def test_a_step_that_is_mostly_one_window_has_none() -> None:
    """Alike pieces count by their ops: a cut before the one large piece would keep what it may make again."""
    graph = mostly_whole(8, 60)
    planning = Planning(graph, in_place(graph))
    assert not planning.windows
    few, _ = in_parts(8, 2)
    assert Planning(few, in_place(few)).windows


def in_place(graph: Graph) -> Costs:
    """A second an op, and sums that may be written over what they add to."""
    costs = declared(graph)
    pairs = tuple(((op.makes[0], op.reads[0]),) if op.target == "aten.add.default" else () for op in graph.ops)
    return replace(costs, in_place=pairs)


def test_each_part_is_a_window_and_those_between_are_alike() -> None:
    planning = Planning(*in_parts(9, 12))
    found = windows(planning.arrays, planning.order)
    assert len(found) == 9
    assert len({window.signature for window in found[1:-1]}) == 1
    assert sorted(op for window in found for op in window.ops) == sorted(planning.order.tolist())
    for window in found:
        assert window.graph.fault is None
        inside = Planning(window.graph, window.costs).arrays
        alone = window.beside + inside.peak(np.arange(len(window.graph.ordinary)))
        assert alone <= planning.arrays.peak(planning.order)


def test_a_step_of_one_part_and_one_of_unlike_parts_have_none() -> None:
    for graph, costs in (in_parts(1, 12), in_parts(2, 12)):
        planning = Planning(graph, costs)
        assert windows(planning.arrays, planning.order) == []


def test_the_least_peak_is_that_of_a_part() -> None:
    """By brute force for one part with sums that are there; in all of them the same is enough."""
    length = 2
    build = Builder()
    weights = [build.given(SUM) for _ in range(length)]
    sums: list[int | None] = [build.given(SUM) for _ in range(length)]
    one = build.graph(one_part(build, weights, sums, length))
    # Sums are there all the time, and new ones are written over them: what they take is not counted twice.
    alone = min(peak for peak, _ in frontier(one, in_place(one)))
    graph, costs = in_parts(40, length)
    planning = Planning(graph, costs)
    assert planning.windows
    assert planning.arrays.peak(planning._lowest_sequence) <= alone


@FEW
@given(st.integers(4, 9), st.integers(6, 16), st.floats(0, 1))
def test_plans_keep_their_budgets_and_run_parts_alike(parts: int, length: int, share: float) -> None:
    graph, costs = in_parts(parts, length)
    planning = Planning(graph, costs, time_limit=0.2)
    least, most = planning.arrays.peak(planning._lowest_sequence), planning.arrays.peak(planning.order)
    budget = int(least + share * (most - least)) + 256  # what offsets that are multiples of 64 bytes may need more
    found = planning.within(budget)
    assert found.peak <= budget
    assert check(graph, costs, found.program, budget=budget) == found.peak
    runs = Counter(row.op for row in found.program.instructions if isinstance(row, Run))
    between = [[runs[op] for op in window.ops] for window in planning.windows[1:-1]]
    assert all(row == between[0] for row in between)
    assert_valid(planning.arrays, planning._lowest_sequence, None)


def test_an_impossible_budget_says_what_is_possible() -> None:
    graph, costs = in_parts(5, 8)
    with pytest.raises(BudgetError) as raised:
        Planning(graph, costs, time_limit=0.2).within(STATE)
    assert raised.value.least is not None
    assert Planning(graph, costs, time_limit=0.2).within(raised.value.least).peak <= raised.value.least


@SOME
@given(st.integers(3, 8), st.lists(st.tuples(st.integers(0, 20), st.integers(1, 9), st.integers(1, 40)), min_size=3))
def test_windows_are_packed_apart(parts: int, rows: list[tuple[int, int, int]]) -> None:
    """Buffers of one window over and over, and two that live through all: none overlap, and windows are alike."""
    length = 40
    moved = [(length * part, row) for part in range(parts) for row in rows]
    boxes = [(begin + start, begin + start + last, 64 * units) for begin, (start, last, units) in moved]
    boxes += [(0, length * parts, 64), (1, length * parts - 1, 64)]
    first, last, nbytes = np.array(boxes, np.int64).T.copy()
    buffers = Buffers(first, last, nbytes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules[Buffers.__module__], "APART", 3)
        offsets = pack(buffers)
    assert_apart(buffers, offsets)
    assert buffers.top(offsets) <= 2 * buffers.live
