"""From a plan of one graph to a plan of a similar one, without a search: the same order, ops made again, and copies.

Ops are matched by phase, module and call, counted from the beginning, and values by the op that makes them; what only
the old graph has is left out, what only the new one has runs where eager runs it. The judge decides. What it does not
do: improve anything, or prove a bound.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator

import numpy as np

from lowtide.check import check
from lowtide.costs import Costs
from lowtide.errors import ProgramError
from lowtide.graph import Graph
from lowtide.plan.copies import copying, offers_copies
from lowtide.plan.emit import emit
from lowtide.plan.exact import useful
from lowtide.plan.infeasible import floor
from lowtide.plan.layout import layout
from lowtide.plan.problem import FETCH, LEAVE, SEND, Ints, Problem, problem
from lowtide.program import Copy, Plan, Program, Run, Wait
from lowtide.simulate import simulate


def carry(known: Plan, known_graph: Graph, graph: Graph, costs: Costs, budget: int | None) -> Plan | None:
    """The plan of a similar graph that runs as the known one does; None where that does not fit the budget."""
    begun = time.monotonic()
    copies = offers_copies(graph) and bool(costs.lanes)
    arrays = copying(graph, costs) if copies else problem(graph, costs)
    room = None if budget is None else budget - (costs.staging if copies else 0)
    try:
        sequence = _complete(arrays, list(_matched(known.program, known_graph, arrays)))
        if not arrays.allows(sequence):
            return None
        if copies:
            sequence, _ = arrays.retimed(sequence, arrays.peak(sequence) if room is None else room)
        program = layout(graph, costs, emit(arrays, sequence), limit=room)
        check(graph, costs, program, budget=room)
    except ProgramError:
        return None
    simulation = simulate(graph, costs, program)
    base = float(arrays.seconds[: len(graph.ordinary)].sum())
    return Plan(
        program=program,
        budget=budget,
        peak=simulation.peak + (costs.staging if program.copies else 0),
        seconds=simulation.seconds,
        base_seconds=base,
        bound_seconds=min(base, simulation.seconds),
        least_bound=floor(arrays)[0],
        planning_seconds=time.monotonic() - begun,
        rewrites=known.rewrites,
    )


def _keys(graph: Graph) -> list[tuple[object, ...]]:
    """For each op what it is known by in a similar graph."""
    seen: Counter[tuple[object, ...]] = Counter()
    found: list[tuple[object, ...]] = []
    for op in graph.ops:
        key = (op.phase, op.module, op.target, op.optional)
        found.append((*key, seen[key]))
        seen[key] += 1
    return found


def _matched(program: Program, old: Graph, arrays: Problem) -> Iterator[int]:
    """The ops of the new graph that match those that the program runs, and its copies of matching values, in order."""
    new = arrays.graph
    keys, places = _keys(old), {key: op for op, key in enumerate(_keys(new))}
    values = {item.value: found for item in old.inputs for found in _inputs(new).get(item.path, ())}
    for op, key in enumerate(keys):
        if (match := places.get(key)) is not None:
            values |= dict(zip(old.makes[op], new.makes[match], strict=False))
    moves = {(move.kind, move.value): len(new.ops) + number for number, move in enumerate(arrays.copies.moves)}
    for instruction in program.instructions:
        match instruction:
            case Run(op):
                found = places.get(keys[op])
            case Copy(value, "device"):
                found = moves.get((FETCH, values.get(value, -1)))
            case Copy(value):
                found = moves.get((SEND, values.get(value, -1)))
            case Wait(value, place) if place != "device":
                found = moves.get((LEAVE, values.get(value, -1)))
            case _:
                found = None
        if found is not None:
            yield found


def _inputs(graph: Graph) -> dict[tuple[str | int, ...], list[int]]:
    """The inputs by their paths."""
    found: dict[tuple[str | int, ...], list[int]] = {}
    for item in graph.inputs:
        found.setdefault(item.path, []).append(item.value)
    return found


def _complete(arrays: Problem, order: list[int]) -> Ints:
    """The order with what it lacks: a missing op behind the one before it in the graph, a reader behind makers."""
    first: dict[int, int] = {}
    for place, op in enumerate(order):
        first.setdefault(op, place)
    made = {value for op in first for value in arrays.make_rows[op]}
    behind: dict[int, list[int]] = {}
    last = -1
    for op in map(int, useful(arrays)):
        if op in first:
            last = first[op]
        elif not arrays.optional[op] and not made.issuperset(
            arrays.make_rows[op] or [-1]
        ):  # else another stands in for it
            behind.setdefault(last, []).append(op)
    merged = [*behind.get(-1, ())]
    for place, op in enumerate(order):
        merged += [op, *behind.get(place, ())]
    done: set[int] = set()
    found: list[int] = []
    for op in merged:
        _run(op, arrays, done, found)
    return np.array(found, np.int64)


def _run(op: int, arrays: Problem, done: set[int], found: list[int]) -> None:
    """Put an op behind all that it needs and that has not run yet."""
    waiting = [op]
    while waiting:
        now = waiting[-1]
        makers = (int(arrays.maker[value]) for value in arrays.read_rows[now])
        needs = [maker for maker in makers if maker >= 0 and maker not in done]
        if needs:
            waiting += needs
            continue
        waiting.pop()
        if now not in done or now == op:
            found.append(now)
        done.add(now)
