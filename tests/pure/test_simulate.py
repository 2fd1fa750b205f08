"""The simulator, which adds up the bytes and the seconds, agrees with brute force and with the judge."""

from __future__ import annotations

import dataclasses
from random import Random

import brute
import pytest
from graphs import Case, captured, cases, lay_out, make_case, make_program
from hypothesis import given, settings

from lowtide.check import check
from lowtide.costs import declared, lanes
from lowtide.graph import Graph, Input, Value
from lowtide.program import Copy, Free, Program, Run, Wait
from lowtide.simulate import simulate


@given(cases())
@settings(max_examples=1500, derandomize=True, deadline=None, database=None)
def test_agrees_with_brute_force(case: Case) -> None:
    """1500 graphs with four valid programs each: two random ones, one of those with an arena, and as captured."""
    random = Random(case.seed)
    other = make_program(random, case.graph, case.costs)
    placed = lay_out(random, case.graph, case.costs, other)
    for program in (case.program, other, placed, captured(case.graph)):
        if program.instructions:
            _agree(case, program)


def test_an_empty_program_holds_its_inputs() -> None:
    case = make_case(1, 2663)
    for arena in (0, 64):
        _agree(case, Program(case.graph.fingerprint, (), arena))


def _agree(case: Case, program: Program) -> None:
    simulated = simulate(case.graph, case.costs, program)
    assert simulated.peak == brute.execute(case.graph, case.costs, program)
    assert simulated.peak == check(case.graph, case.costs, program)
    runs = [row.op for row in program.instructions if isinstance(row, Run)]
    alone = sum(case.costs.seconds[op] for op in runs)
    if any(isinstance(row, Copy) for row in program.instructions):
        assert simulated.seconds >= alone * (1 - 1e-9)
    else:
        assert simulated.seconds == pytest.approx(alone, rel=1e-9)


def test_a_copy_comes_from_the_host_if_it_is_there_or_else_from_the_disk() -> None:
    graph = Graph((), (Value("x", 100, "batch", 0),), (Input(0, ("x",)),), ())
    costs = dataclasses.replace(declared(graph), lanes=lanes((("host", 100.0), ("disk", 1.0))))
    there = (Copy(0, "host"), Wait(0, "host"), Copy(0, "disk"), Wait(0, "disk"), Free(0))
    back = (Copy(0, "device"), Wait(0, "device"))
    end = (Free(0, "host"), Free(0, "disk"))
    for rows, seconds in (
        ((*there, *back, *end), 102),
        ((*there, end[0], *back, end[1]), 201),
        ((*there[2:4], *there[:2], Free(0), *back, *end), 102),
    ):
        program = Program(graph.fingerprint, rows)
        check(graph, costs, program)
        assert simulate(graph, costs, program).seconds == pytest.approx(seconds)
