"""Order: the captured one, with every update right after what it needs, so that gradients go early, and with
results that wait for long made only when they are read.

With global clipping an update needs every gradient, and the order says so by itself.
"""

from __future__ import annotations

import numpy as np

from lowtide.graph import Graph
from lowtide.plan.problem import Ints, Problem


def captured_order(graph: Graph) -> Ints:
    """The order in which eager ran the ops."""
    return np.array(graph.ordinary, dtype=np.int64)


def early_updates(graph: Graph) -> Ints:
    """The captured order, but each op of the optimizer as soon as its arguments are there and unread elsewhere."""
    waits = _waits(graph)
    # What needs no gradient (weight decay, the decay of momentum) could run early, and would take from recomputation
    # the old contents of what it writes over; it runs when something waits for it.
    idle: set[int] = set()
    for op, item in enumerate(graph.ops):
        makers = {graph.maker[value] for value in graph.reads[op]} - {-1}
        if item.phase == "update" and makers <= idle:
            idle.add(op)
    demands: list[set[int]] = []  # for each op what must have run, seen through the idle ones
    for before in waits:
        demands.append(before - idle)
        for other in before & idle:
            demands[-1] |= demands[other]
    missing = [len(before) for before in demands]
    followers: list[list[int]] = [[] for _ in graph.ops]
    for op, before in enumerate(demands):
        if op not in idle:
            for other in before:
                followers[other].append(op)
    order: list[int] = []
    done = [False] * len(graph.ops)

    def emit(first: int) -> None:
        stack = [first]
        while stack:
            op = stack.pop()
            lacking = [other for other in sorted(waits[op] & idle, reverse=True) if not done[other]]
            if lacking:
                stack += [op, *lacking]
                continue
            if done[op]:
                continue
            done[op] = True
            order.append(op)
            for other in followers[op]:
                missing[other] -= 1
            ready = [other for other in followers[op] if not missing[other] and graph.ops[other].phase == "update"]
            stack += reversed(ready)

    for op in graph.ordinary:
        if not done[op]:
            emit(op)
    return np.array(order, dtype=np.int64)


def late_results(problem: Problem, order: Ints) -> Ints:
    """The order, but an op that makes more bytes than it lets go runs right before what first needs it."""
    graph = problem.graph
    waits = _waits(graph)
    followers: list[list[int]] = [[] for _ in graph.ops]
    for op in map(int, order):
        for other in waits[op]:
            followers[other].append(op)
    place = {int(op): number for number, op in enumerate(order)}
    goes_to = dict(place)
    for op in map(int, reversed(order)):
        if graph.effects[op] or graph.ops[op].channels or graph.ops[op].phase == "update" or not followers[op]:
            continue
        to = min(goes_to[other] for other in followers[op])
        made = sum(int(problem.nbytes[value]) for value in graph.makes[op])
        held = 0  # bytes of arguments that live longer if the op waits
        for value in graph.reads[op]:
            if graph.maker[value] >= 0 and value not in graph.required:
                readers = (goes_to[other] for other in graph.readers[value] if other != op and other in place)
                held += int(problem.nbytes[value]) if max(readers, default=-1) < to else 0
        if made > held:
            goes_to[op] = to
    return np.array(sorted(place, key=lambda op: (goes_to[op], place[op])), np.int64)


def _waits(graph: Graph) -> list[set[int]]:
    """For each op those that must run before it: makers of what it reads, readers of what it writes over, channels."""
    waits: list[set[int]] = []
    for index, op in enumerate(graph.ops):
        before = {graph.maker[value] for value in graph.reads[index]} | set(graph.awaits[index])
        for _, old in op.updates:
            before |= {reader for reader in graph.readers[old] if reader < index}
        waits.append(before - {-1, index})
    return waits
