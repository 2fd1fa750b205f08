"""From a plan of a step with collectives to one whose collectives have time: what waits for them runs later.

A plan has an update right behind the sum of its gradients, where the bytes of a bucket are free soonest, and there is
nothing that could run beside the sum. Here all that depends on a bucket comes after so many later buckets were begun,
as many as the budget has room for. What it does not do: price the network, or move what a plan with copies does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from lowtide.check import check
from lowtide.costs import Costs
from lowtide.errors import ProgramError
from lowtide.graph import Graph
from lowtide.plan.emit import emit
from lowtide.plan.layout import layout
from lowtide.plan.problem import problem
from lowtide.program import Plan, Run
from lowtide.simulate import simulate


def overlap(known: Plan, graph: Graph, costs: Costs, collectives: Sequence[int]) -> Plan:
    """The plan with what depends on these collectives as late as its budget allows; itself, where nothing can move."""
    if known.budget is None or known.program.copies or len(collectives) < 2:
        return known
    order = [item.op for item in known.program.instructions if isinstance(item, Run)]
    waiting = _waiting(graph, collectives)
    arrays = problem(graph, costs)
    later = len(collectives)
    while later:
        sequence = np.array(_deferred(order, collectives, waiting, later), np.int64)
        later //= 2
        if not arrays.allows(sequence):
            continue
        try:
            program = layout(graph, costs, emit(arrays, sequence), limit=known.budget)
            check(graph, costs, program, budget=known.budget)
        except ProgramError:
            continue
        return replace(known, program=program, peak=simulate(graph, costs, program).peak)
    return known


def _waiting(graph: Graph, collectives: Sequence[int]) -> dict[int, int]:
    """For each op that has to wait for collectives, the place of the last of them."""
    found: dict[int, int] = {}
    places = {op: place for place, op in enumerate(collectives)}
    for op in graph.ordinary:
        if op in places or graph.ops[op].channels:
            continue  # which keep their order
        after = [places.get(before, found.get(before, -1)) for before in graph.waits[op]]
        if (last := max(after, default=-1)) >= 0:
            found[op] = last
    return found


def _deferred(order: Sequence[int], collectives: Sequence[int], waiting: dict[int, int], later: int) -> list[int]:
    """The order with each waiting op behind so many more collectives."""
    found: list[int] = []
    held: list[int] = []
    begun = 0
    for op in order:
        if op in waiting:
            held.append(op)
            continue
        found.append(op)
        if op in collectives:
            begun += 1
            found += [one for one in held if waiting[one] + later < begun]
            held = [one for one in held if waiting[one] + later >= begun]
    return found + held
