"""The exact planner against brute force: the same seconds at every budget where something changes, and none below."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
from brute import frontier
from graphs import Costed, costed, make_costed
from hypothesis import given, settings

from lowtide.check import check
from lowtide.errors import BudgetError
from lowtide.plan import plan
from lowtide.plan.emit import emit
from lowtide.plan.exact import exact, least_peak
from lowtide.plan.order import captured_order
from lowtide.plan.pebble import pebble_game
from lowtide.plan.problem import Problem, problem

KINDS = ("graph", "step", "step", "optional")


def assert_optimal(case: Costed) -> None:
    """At each level of the brute-force frontier, and right below it, the exact planner finds the same seconds."""
    arrays = problem(case.graph, case.costs)
    levels = frontier(case.graph, case.costs)
    assert least_peak(arrays).peak == levels[0][0]
    below = math.inf
    for peak, seconds in levels:
        found = exact(arrays, peak)
        assert found.proven
        assert found.sequence is not None
        assert found.bound_seconds == arrays.time(found.sequence) == pytest.approx(seconds)
        assert check(case.graph, case.costs, emit(arrays, found.sequence)) <= peak
        tighter = exact(arrays, peak - 1)
        assert tighter.proven
        assert tighter.bound_seconds == pytest.approx(below)
        assert (tighter.sequence is None) == (below == math.inf)
        below = seconds


@settings(max_examples=2000, derandomize=True, deadline=None)
@given(costed(KINDS, max_size=5))
def test_tiny_graphs_are_solved_as_by_brute_force(case: Costed) -> None:
    assert_optimal(case)


@pytest.mark.parametrize("seed", range(25))
@pytest.mark.parametrize(("kind", "size"), [("step", 8), ("optional", 6)])
def test_graphs_of_eight_ops_are_solved_as_by_brute_force(kind: str, size: int, seed: int) -> None:
    assert_optimal(make_costed(kind, size, seed))


def chain(length: int) -> Problem:
    """A chain of so many values and a backward that reads them in reverse, in units of a byte and a second."""
    forward = [[], *([number - 1] for number in range(1, length))]
    backward = [[length + count - 1, length - 1 - count] for count in range(1, length)]
    return pebble_game([*forward, [length - 1], *backward])


@pytest.mark.parametrize("length", [6, 20])
def test_giving_up_leaves_a_bound(length: int) -> None:
    arrays = chain(length)
    truth = exact(arrays, 4)
    assert truth.proven
    assert truth.sequence is not None
    bounds = [exact(arrays, 4, limit=limit) for limit in (1, 10, truth.states // 2)]
    assert not any(found.proven or found.sequence is not None for found in bounds)
    seconds = [found.bound_seconds for found in (*bounds, truth)]
    assert seconds == sorted(seconds)
    assert seconds[0] >= 2 * length - 1e-6


def test_a_budget_below_the_largest_op_is_refused_without_a_search() -> None:
    found = exact(chain(10), 2)
    assert found.proven
    assert found.sequence is None
    assert found.states == 0


def levels_of(case: Costed) -> Iterator[tuple[int, float]]:
    """Each budget at which the quickest program changes, falling, and its seconds."""
    arrays = problem(case.graph, case.costs)
    budget = arrays.peak(captured_order(case.graph))
    while (found := exact(arrays, budget)).sequence is not None:
        peak = check(case.graph, case.costs, emit(arrays, found.sequence))
        yield peak, found.bound_seconds
        budget = peak - 1
    yield budget, math.inf


@pytest.mark.parametrize("seed", range(60))
@pytest.mark.parametrize("kind", ["graph", "step"])
def test_no_plan_is_quicker_than_the_exact_one(kind: str, seed: int) -> None:
    case = make_costed(kind, 3 + seed % 6, seed)
    for budget, seconds in levels_of(case):
        try:
            found = plan(case.graph, case.costs, budget, time_limit=0.01)
        except BudgetError:
            continue
        assert found.seconds >= seconds - 1e-9


@pytest.mark.parametrize("seed", range(60))
@pytest.mark.parametrize("kind", ["graph", "step", "optional"])
def test_plans_of_small_graphs_are_optimal(kind: str, seed: int) -> None:
    case = make_costed(kind, 3 + seed % 6, seed)
    for budget, seconds in levels_of(case):
        if seconds == math.inf:
            with pytest.raises(BudgetError):
                plan(case.graph, case.costs, budget, time_limit=0.01)
        else:
            found = plan(case.graph, case.costs, budget, time_limit=0.01)
            assert found.seconds == pytest.approx(seconds)
            assert found.bound_seconds <= seconds + 1e-9
