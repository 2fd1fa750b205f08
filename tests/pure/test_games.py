"""Pebble games: rules, known answers, and two searches that share nothing but the game."""

from __future__ import annotations

import itertools

import pytest
from test_digests import stored

from lowtide.errors import UsageError
from lowtide.game import GAMES, Game, Move, after, folded, named, why_not
from lowtide.plan.classics.chain import revolve_forwards
from lowtide.plan.games import Solution, frontier, least_once, least_pebbles, left, quickest
from lowtide.report.pebble import frames

SMALL = ("chain:length=4", "tree:height=2", "caterpillar:length=3", "residual:blocks=2", "unet:depth=2")


def game(name: str) -> Game:
    found = named(name)
    assert found is not None
    return found


def legal(one: Game, solution: Solution, *, once: bool) -> None:
    """Play a solution by the rules."""
    pebbles: frozenset[int] = frozenset()
    done: frozenset[int] = frozenset()
    for move in solution.moves:
        assert why_not(one, pebbles, move, budget=solution.budget, done=done if once else None) is None
        pebbles, done = after(pebbles, move), done | {move.node} if move.place else done
    assert pebbles.issuperset(one.sinks)
    assert frames(one, solution.moves)[-1].seconds == pytest.approx(solution.seconds)


def brute(one: Game, budget: int) -> float:
    """The least placements, breadth first over all positions and all moves, however silly."""
    layer, seen, cost = {frozenset[int]()}, {frozenset[int]()}, 0
    while layer:
        reachable = set(layer)
        queue = list(layer)
        while queue:  # to take pebbles off costs nothing
            now = queue.pop()
            for node in now:
                if (fewer := now - {node}) not in reachable:
                    reachable.add(fewer)
                    queue.append(fewer)
        if any(now.issuperset(one.sinks) for now in reachable):
            return cost
        following = {
            now | {node}
            for now, node in itertools.product(reachable, range(len(one.needs)))
            if why_not(one, now, Move(True, node), budget=budget) is None
        }
        seen |= reachable
        layer, cost = following - seen, cost + 1
    return float("inf")


@pytest.mark.parametrize("name", SMALL)
def test_solutions_are_legal_and_the_best(name: str) -> None:
    one = game(name)
    least, proven = least_pebbles(one)
    assert proven
    assert brute(one, least - 1) == float("inf")
    for solution in frontier(one):
        legal(one, solution, once=False)
        assert solution.proven
        assert solution.seconds == brute(one, solution.budget) == left(one, frozenset(), solution.budget)
    alone = least_once(one)
    legal(one, alone, once=True)
    assert alone.proven
    assert alone.seconds == len(one.needs)
    assert quickest(one, least - 1) is None


def test_known_answers() -> None:
    assert [least_once(game(f"tree:height={n}")).budget for n in (1, 2, 3)] == [3, 4, 5]  # height + 2
    assert [least_once(game(f"caterpillar:length={n}")).budget for n in (2, 5, 9)] == [3, 3, 3]


@pytest.mark.parametrize(("length", "slots"), [(5, 1), (8, 2), (8, 3)])
def test_a_chain_is_never_quicker_than_revolve_allows(length: int, slots: int) -> None:
    """Revolve's slots hold states; here gradients and the state at work take pebbles, too, so it is no slower."""
    solution = quickest(game(f"chain:length={length}"), slots + 3)
    assert solution is not None
    again = solution.seconds - 2 * length
    assert again <= revolve_forwards(length, slots) - length


def test_a_player_is_told_what_is_left() -> None:
    one = game("chain:length=4")
    best = quickest(one, 4)
    assert best is not None
    for frame in frames(one, best.moves):
        assert left(one, frame.pebbles, 4) == pytest.approx(best.seconds - frame.seconds)
    assert left(one, frozenset({0}), 1) == float("inf")
    assert left(one, frozenset(), 4, limit=1) is None
    assert left(one, frozenset(), 9, frozenset({0})) == float("inf")  # its pebble was taken off; once is once


def test_rules_say_why_not() -> None:
    one = game("tree:height=1")
    none: frozenset[int] = frozenset()
    assert why_not(one, none, Move(True, 2), budget=3) == "3 needs a pebble on 1, 2."
    assert why_not(one, none, Move(False, 0), budget=3) == "1 has no pebble."
    assert why_not(one, frozenset({0}), Move(True, 0), budget=3) == "1 has a pebble already."
    assert why_not(one, frozenset({0}), Move(True, 1), budget=1) == "no pebble is left for 2: take one off first."
    assert "twice" in (why_not(one, none, Move(True, 0), budget=3, done=frozenset({0})) or "")


@pytest.mark.parametrize("name", ["gpt-small", "unet-small", "lstm-cell-small", "mlp-small"])
def test_a_step_folds_to_a_game_that_can_be_won(name: str) -> None:
    graph, costs = stored(name)
    one = folded(name, graph, costs)
    assert 2 <= len(one.needs) <= 24
    assert all(max(row, default=-1) < node for node, row in enumerate(one.needs))
    places = list(zip(one.rows, one.columns, strict=True))
    assert len(set(places)) == len(places)  # no two are drawn in one place
    ops = [op for op in graph.ordinary if graph.ops[op].phase != "update"]
    assert sum(one.seconds) == pytest.approx(sum(costs.seconds[op] for op in ops))
    solution = quickest(one, sum(one.weights))
    assert solution is not None
    legal(one, solution, once=False)


def test_names_of_games() -> None:
    assert all(named(name) is not None for name in GAMES)
    assert named("gpt") is None
    for wrong in ("chain:width=3", "chain:length=0", "chain:length=x", "tree:height=9"):
        with pytest.raises(UsageError):
            named(wrong)
