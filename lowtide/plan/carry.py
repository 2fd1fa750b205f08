"""From a plan of one graph to a plan of a similar one, without a search: the same order, the same ops made again.

Ops are matched by phase, module and call, counted from the beginning; what only the old graph has is left out, what
only the new one has runs where eager runs it. The judge decides. What it does not do: improve anything, or prove a
bound.
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
from lowtide.plan.emit import emit
from lowtide.plan.exact import useful
from lowtide.plan.infeasible import floor
from lowtide.plan.layout import layout
from lowtide.plan.problem import Ints, Problem, problem
from lowtide.program import Plan, Program, Run
from lowtide.simulate import simulate


def carry(known: Plan, known_graph: Graph, graph: Graph, costs: Costs, budget: int | None) -> Plan | None:
    """The plan of a similar graph that runs as the known one does; None where that does not fit the budget."""
    begun = time.monotonic()
    arrays = problem(graph, costs)
    try:
        sequence = _complete(arrays, list(_matched(known.program, known_graph, graph)))
        if not arrays.allows(sequence):
            return None
        program = layout(graph, costs, emit(arrays, sequence), limit=budget)
        check(graph, costs, program, budget=budget)
    except ProgramError:
        return None
    simulation = simulate(graph, costs, program)
    base = float(arrays.seconds[: len(graph.ordinary)].sum())
    return Plan(
        program=program,
        budget=budget,
        peak=simulation.peak,
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


def _matched(program: Program, old: Graph, new: Graph) -> Iterator[int]:
    """The ops of the new graph that match those that the program runs, in its order."""
    keys, places = _keys(old), {key: op for op, key in enumerate(_keys(new))}
    for instruction in program.instructions:
        if isinstance(instruction, Run) and (match := places.get(keys[instruction.op])) is not None:
            yield match


def _complete(arrays: Problem, order: list[int]) -> Ints:
    """The order with what it lacks: a missing op behind the one before it in the graph, a reader behind makers."""
    graph = arrays.graph
    first: dict[int, int] = {}
    for place, op in enumerate(order):
        first.setdefault(op, place)
    behind: dict[int, list[int]] = {}
    last = -1
    for op in map(int, useful(arrays)):
        if op not in first:
            behind.setdefault(last, []).append(op)
        else:
            last = first[op]
    merged = [*behind.get(-1, ())]
    for place, op in enumerate(order):
        merged += [op, *behind.get(place, ())]
    done: set[int] = set()
    found: list[int] = []
    for op in merged:
        _run(op, graph, done, found)
    return np.array(found, np.int64)


def _run(op: int, graph: Graph, done: set[int], found: list[int]) -> None:
    """Put an op behind all that it needs and that has not run yet."""
    waiting = [op]
    while waiting:
        now = waiting[-1]
        needs = [maker for value in graph.reads[now] if (maker := graph.maker[value]) >= 0 and maker not in done]
        if needs:
            waiting += needs
            continue
        waiting.pop()
        if now not in done or now == op:
            found.append(now)
        done.add(now)
