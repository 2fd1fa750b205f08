"""One-shot pebbling: the least peak of all orders on small graphs and on trees, the known numbers of pebble games."""

from __future__ import annotations

import pytest
from brute import least_peak_of_orders
from graphs import Costed, costed, make_costed
from hypothesis import given, settings

from lowtide.bench.games import binary_tree, caterpillar
from lowtide.check import check
from lowtide.plan.emit import emit
from lowtide.plan.exact import least_peak
from lowtide.plan.order import captured_order
from lowtide.plan.pebble import (
    Board,
    by_need,
    by_tree,
    downsets,
    free_first,
    improve,
    least,
    least_change,
    one_shot,
    pebble_game,
    pebbles,
)
from lowtide.plan.problem import problem

MANY = settings(max_examples=1500, derandomize=True, deadline=None)
SOME = settings(max_examples=200, derandomize=True, deadline=None)


@MANY
@given(costed(("graph", "step", "tree"), max_size=8))
def test_small_graphs_get_the_least_peak_of_all_orders(case: Costed) -> None:
    arrays = problem(case.graph, case.costs)
    start = captured_order(case.graph)
    order = one_shot(arrays, start)
    assert sorted(order) == list(start)
    truth = least_peak_of_orders(case.graph, case.costs)
    assert arrays.peak(order) == truth
    assert check(case.graph, case.costs, emit(arrays, order)) == truth
    assert arrays.persistent + least(Board(arrays, start)) <= truth


@SOME
@given(costed(("tree",), max_size=24))
def test_trees_get_the_least_peak_without_a_search(case: Costed) -> None:
    board = Board(problem(case.graph, case.costs), captured_order(case.graph))
    order = by_tree(board)
    assert order is not None
    better, ended = downsets(board, order, 0, len(order), held=0, most=board.peak(order), limit=1_000_000)
    assert better is None
    assert ended


@SOME
@given(costed(("graph", "step"), max_size=24))
def test_every_order_is_valid_and_its_profile_that_of_the_planner(case: Costed) -> None:
    arrays = problem(case.graph, case.costs)
    board = Board(arrays, captured_order(case.graph))
    given_order = list(range(len(board.ops)))
    orders = [given_order, least_change(board), free_first(board), by_need(board)]
    orders += [improve(board, order, floor=least(board), rounds=20)[0] for order in orders]
    for order in orders:
        sequence = captured_order(case.graph)[order]
        assert sorted(order) == given_order
        assert board.profile(order)[0] == list(arrays.profile(sequence))
        assert check(case.graph, case.costs, emit(arrays, sequence)) == arrays.peak(sequence)
    for order, improved in zip(orders[:4], orders[4:], strict=True):
        assert least(board) <= board.peak(improved) <= board.peak(order)


def test_a_window_is_as_good_as_the_whole() -> None:
    for seed in range(100):
        case = make_costed("step", 14, seed)
        board = Board(problem(case.graph, case.costs), captured_order(case.graph))
        order, proven = improve(board, by_need(board), floor=0, rounds=100)
        assert proven
        better, ended = downsets(board, order, 0, 14, held=0, most=board.peak(order), limit=1_000_000)
        assert better is None
        assert ended


def test_orders_are_the_same_each_time() -> None:
    case = make_costed("step", 40, 1)
    arrays = problem(case.graph, case.costs)
    first, second = (one_shot(arrays, captured_order(case.graph), rounds=5) for _ in range(2))
    assert list(first) == list(second)


# --------------------------------------------------------------------------------------------------------- pebble games


def pyramid(height: int) -> list[list[int]]:
    """Rows of falling length; each node needs its two neighbours of the row below."""
    rows = [[(row, n) for n in range(height + 1 - row)] for row in range(height + 1)]
    number = {node: count for count, node in enumerate(node for row in rows for node in row)}
    return [[number[row - 1, n], number[row - 1, n + 1]] if row else [] for row, n in number]


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 10, 100, 1000])
def test_a_caterpillar_needs_three_pebbles(length: int) -> None:
    assert pebbles(caterpillar(length)) == 3


@pytest.mark.parametrize("height", range(1, 11))
def test_a_binary_tree_needs_two_pebbles_more_than_its_height(height: int) -> None:
    assert pebbles(binary_tree(height)) == height + 2


@pytest.mark.parametrize("height", range(1, 7))
def test_a_pyramid_needs_two_pebbles_more_than_its_height(height: int) -> None:
    assert pebbles(pyramid(height)) == height + 2


@pytest.mark.parametrize(
    "needs", [caterpillar(6), caterpillar(12), *map(binary_tree, (1, 2, 3, 4)), *map(pyramid, (1, 2, 3, 4))]
)
def test_pebbling_a_node_again_does_not_help_there(needs: list[list[int]]) -> None:
    found = least_peak(pebble_game(needs))
    assert found.proven
    assert found.peak == pebbles(needs)


def test_pebbling_a_node_again_helps_where_a_value_waits_for_long() -> None:
    chain = [[], [0], [1], [2], [3], [4, 2], [5, 1], [6, 0]]
    assert pebbles(chain) == 5
    assert least_peak(pebble_game(chain)).peak == 3
