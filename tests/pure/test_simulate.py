"""The simulator, which adds up the bytes and the seconds, agrees with brute force and with the judge."""

from __future__ import annotations

from random import Random

import brute
import pytest
from graphs import Case, captured, cases, lay_out, make_case, make_program
from hypothesis import given, settings

from lowtide.check import check
from lowtide.program import Copy, Program, Run
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
