"""Pebble games solved: the least pebbles, the least moves within a budget, and how far a player is from the end."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from lowtide.costs import Costs, declared
from lowtide.game import Game, Move, after
from lowtide.graph import Graph, Op, Output, Read, Value
from lowtide.plan.emit import emit
from lowtide.plan.exact import exact, least_peak
from lowtide.plan.pebble import Board, by_tree, least, one_shot
from lowtide.plan.problem import Ints, Problem, problem
from lowtide.program import Run

STATES = 300_000  # that the exact solver may meet for one budget
SECONDS = 3.0  # that it may take
REACHED = 60_000  # positions that are looked at from where a player is


@dataclass(frozen=True)
class Solution:
    """A way to play a game within a budget."""

    budget: int  # pebbles, or bytes
    moves: tuple[Move, ...]
    seconds: float  # of all placements; in a game of unit nodes their number
    proven: bool  # that no other way within the budget is quicker


def as_problem(game: Game) -> tuple[Graph, Costs, Problem]:
    """The game as a step: a node is an op, its pebble a value."""
    values = tuple(Value(label, weight, "activation", n) for n, (label, weight) in enumerate(_named(game)))
    ops = tuple(Op(f"node{n}", "pebble", tuple(map(Read, row)), outputs=(n,)) for n, row in enumerate(game.needs))
    graph = Graph(ops, values, (), tuple(Output(node, "result", (node,)) for node in game.sinks))
    unit = declared(graph)
    costs = Costs(
        unit.graph, game.seconds, unit.arena_temporaries, game.weights, unit.in_place, unit.origin, unit.machine
    )
    return graph, costs, problem(graph, costs)


def _named(game: Game) -> Iterator[tuple[str, int]]:
    yield from zip(game.labels, game.weights, strict=True)


def least_once(game: Game) -> Solution:
    """The one-shot game with the fewest pebbles that are found, and whether no fewer can be."""
    _, _, arrays = as_problem(game)
    order = one_shot(arrays, np.arange(len(game.needs)))
    peak = arrays.peak(order)
    board = Board(arrays, np.arange(len(game.needs)))
    proven = by_tree(board) is not None or peak == least(board)  # orders of trees are optimal (Liu 1987)
    proven = proven or left(game, frozenset(), peak - 1, frozenset()) == float("inf")
    return _solution(game, arrays, order, peak, proven=proven)


def least_pebbles(game: Game) -> tuple[int, bool]:
    """The fewest pebbles with which the multi-shot game can be won at all, and whether that is proven."""
    _, _, arrays = as_problem(game)
    found = least_peak(arrays, limit=STATES, seconds=SECONDS)
    if found.sequence is not None:
        return found.peak, found.proven
    return least_once(game).budget, False


def quickest(game: Game, budget: int) -> Solution | None:
    """The multi-shot game within a budget in the least time; None where it can't be won, or was not solved."""
    _, _, arrays = as_problem(game)
    found = exact(arrays, budget, limit=STATES, seconds=SECONDS)
    if found.sequence is None:
        return None
    return _solution(game, arrays, found.sequence, budget, proven=found.proven)


def frontier(game: Game, *, most: int = 12) -> list[Solution]:
    """The quickest play for each number of pebbles, from the least to that with which nothing is placed twice."""
    low, _ = least_pebbles(game)
    high = max(low, least_once(game).budget)
    steps = range(low, high + 1) if high - low < most else np.linspace(low, high, most).astype(int).tolist()
    found: list[Solution] = []
    for budget in steps:
        one = quickest(game, budget)
        if one is not None and (not found or one.seconds < found[-1].seconds * (1 - 1e-12)):
            found.append(one)
    return found


def _solution(game: Game, arrays: Problem, sequence: Ints, budget: int, *, proven: bool) -> Solution:
    """The moves of a sequence: a pebble is taken off as soon as nobody needs it any more."""
    moves = []
    for item in emit(arrays, sequence).instructions:
        moves.append(Move(True, item.op) if isinstance(item, Run) else Move(False, item.value))
    seconds = sum(game.seconds[move.node] for move in moves if move.place)
    return Solution(budget, tuple(moves), seconds, proven)


def left(
    game: Game, pebbles: frozenset[int], budget: int, done: frozenset[int] | None = None, *, limit: int = REACHED
) -> float | None:
    """The least time to the end from a position; infinite where it can't be won; None where that is too much to find.

    Dijkstra over positions. `done` are the nodes that had a pebble, in the one-shot game. Pebbles are taken off only
    to make room for the next one: to take one off earlier helps nobody.
    """
    goal = frozenset(game.sinks)
    start = pebbles, done
    best: dict[object, float] = {start: 0.0}
    queue: list[tuple[float, int, tuple[frozenset[int], frozenset[int] | None]]] = [(0.0, 0, start)]
    count = 0
    while queue:
        spent, _, (now, had) = heapq.heappop(queue)
        if spent > best[now, had]:
            continue
        if goal <= now:
            return spent
        if len(best) > limit:
            return None
        for node in range(len(game.needs)):
            if node in now or (had is not None and node in had) or not now.issuperset(game.needs[node]):
                continue
            placed = after(now, Move(True, node))
            for position in _within(game, placed, node, budget, now):
                key = position, None if had is None else had | {node}
                cost = spent + game.seconds[node]
                if cost < best.get(key, float("inf")):
                    best[key] = cost
                    count += 1
                    heapq.heappush(queue, (cost, count, key))
    return float("inf")


def _within(
    game: Game, placed: frozenset[int], node: int, budget: int, before: frozenset[int]
) -> Iterator[frozenset[int]]:
    """The positions after a node took its pebble: all pebbles, or, where room is needed, fewer by as little as can be.

    What the node needs must be there while it takes its pebble, so room is made of the others.
    """
    over = game.weight(placed) - budget
    if over <= 0:
        yield placed
        return
    others = sorted(before - set(game.needs[node]), key=lambda one: -game.weights[one])
    yield from _without(game, placed, others, over)


def _without(game: Game, placed: frozenset[int], others: list[int], over: int) -> Iterator[frozenset[int]]:
    """All smallest sets of pebbles whose absence makes so much room."""
    if over <= 0:
        yield placed
        return
    for number, one in enumerate(others):
        if game.weights[one]:
            yield from _without(game, placed - {one}, others[number + 1 :], over - game.weights[one])
