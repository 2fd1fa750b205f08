"""Choose what the forward saves for the backward; what else the backward reads is made again, once, where it is needed.

Only cheap ops run again: activations, norms, elementwise ops and the like, but no matrix products, convolutions,
attention or recurrent layers, and nothing that draws random numbers. The names of the ops say which is which; what is
unknown is cheap.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from lowtide.aten import EXPENSIVE
from lowtide.graph import Graph
from lowtide.plan.classics.cut import cheapest
from lowtide.plan.classics.tape import Links, Tape, split_at_backward
from lowtide.plan.problem import Ints, Problem

DEAR = 1e4  # bytes count so much more than seconds that only the bytes matter, and seconds break ties


def cheap(graph: Graph, op: int) -> bool:
    """Whether an op may run again at little cost."""
    item = graph.ops[op]
    words = item.target.split(".")[1:2] or [item.target]
    return not item.random and EXPENSIVE.isdisjoint(words[0].split("_"))


def drop_cheap(problem: Problem, order: Ints) -> Ints:
    """Save nothing that a cheap op makes."""
    graph = problem.graph
    return keeping(problem, order, (v for op in order.tolist() if not cheap(graph, op) for v in graph.makes[op]))


def minimum_cut(problem: Problem, order: Ints) -> Ints:
    """Save the fewest bytes from which cheap ops can make the rest."""
    links, (forward, backward) = Links(problem), split_at_backward(problem, order)
    may = [bool(problem.repeatable[op]) and cheap(problem.graph, op) for op in range(len(problem.seconds))]
    to_run = np.where(may, problem.seconds / max(float(problem.seconds.sum()), 1e-12), np.inf)
    to_keep = DEAR * problem.nbytes / max(1, int(problem.nbytes.sum()))
    wanted = {value for op in backward for value in links.reads[op]}
    return keeping(problem, order, cheapest(links, forward, wanted, to_keep, to_run))


def keeping(problem: Problem, order: Ints, saved: Iterable[int]) -> Ints:
    """The order, where of what the forward makes only `saved` is there for the backward."""
    tape, (forward, backward) = Tape(Links(problem)), split_at_backward(problem, order)
    for op in forward:
        tape.run(op)
    made = {value for op in forward for value in problem.graph.makes[op]}
    tape.dropped = made.difference(saved, problem.graph.required)
    for op in backward:
        tape.run(op)
    return tape.sequence()
