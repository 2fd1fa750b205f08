"""A sequence of ops as a program: repeats marked, results on dying arguments, everything freed at its last reader."""

from __future__ import annotations

from lowtide.plan.in_place import paired
from lowtide.plan.problem import Ints, Problem
from lowtide.program import Free, Instruction, Program, Run


def emit(problem: Problem, sequence: Ints) -> Program:
    """The program that runs the ops in this sequence."""
    graph = problem.graph
    inputs = {item.value for item in graph.inputs}
    given_up = {item.value for item in graph.inputs if not item.stays} - graph.required
    order = [int(op) for op in sequence]
    seen: set[int] = set()
    again = []
    for op in order:
        again.append(op in seen)
        seen.add(op)
    # From the end: a value is alive where it will be read before it is made again.
    alive = set(graph.required) | (inputs - given_up)
    rows: list[list[Instruction]] = []
    for op, repeated in zip(reversed(order), reversed(again), strict=True):
        reads, makes = graph.reads_of(op, again=repeated), graph.makes_of(op, again=repeated)
        dying = [value for value in reads if value not in alive]
        effects = () if repeated else graph.effects[op]
        over = list(effects) + paired(problem.over_rows[op], set(dying) - {old for _, old in effects})
        taken = {old for _, old in over}
        unused = [value for value in makes if value not in alive]
        frees = [Free(value) for value in (*dying, *unused) if value not in taken]
        rows.append([Run(op, over=tuple(over), again=repeated), *frees])
        alive -= set(makes)
        alive |= set(reads)
        alive |= {old for _, old in effects}
    return Program(graph.fingerprint, tuple(item for row in reversed(rows) for item in row))
