"""Lifetimes: at every instruction of random programs they agree with the simulator, which shares no code with them."""

from __future__ import annotations

from graphs import Case, cases
from hypothesis import given, settings

from lowtide.lifetimes import BEFORE, OUTSIDE, lifetimes
from lowtide.program import Copy, Free, Run
from lowtide.simulate import memory_states

MANY = settings(max_examples=400, derandomize=True, deadline=None)


@MANY
@given(cases())
def test_the_values_of_each_instruction_are_those_of_the_simulator(case: Case) -> None:
    found = lifetimes(case.graph, case.program, case.costs.nbytes, case.costs.arena_temporaries)
    walk = zip(case.program.instructions, memory_states(case.graph, case.costs, case.program), strict=True)
    for number, (instruction, memory) in enumerate(walk):
        gone = {instruction.value} if isinstance(instruction, Free) and instruction.place == "device" else set()
        assert set(found.at(number)) == memory.present.keys() - gone


@MANY
@given(cases())
def test_each_block_is_where_the_program_puts_it_for_as_long_as_it_holds_something(case: Case) -> None:
    found = lifetimes(case.graph, case.program, case.costs.nbytes, case.costs.arena_temporaries)
    assert [block.first for block in found.blocks[: len(case.graph.inputs)]] == [BEFORE] * len(case.graph.inputs)
    for instruction, row in zip(case.program.instructions, found.made, strict=True):
        match instruction:
            case Run(op, at, over, again):
                makes = case.graph.makes_of(op, again=again)
                assert len(row) == len(makes) + bool(case.costs.arena_temporaries[op])
                fresh = [place for place in range(len(row)) if place >= len(makes) or makes[place] not in dict(over)]
                assert [found.blocks[row[place]].offset for place in fresh] == [
                    at[place] if at else OUTSIDE for place in fresh
                ]
            case Copy(value, "device", at):
                (block,) = (found.blocks[number] for number in row)
                assert (block.offset, block.holds[0].value, block.copied) == (at, value, True)
            case _:
                assert row == ()
    for block in found.blocks:
        assert block.first < block.last <= len(case.program.instructions)
        if block.holds:
            starts, ends = [held.first for held in block.holds], [held.last for held in block.holds]
            assert (starts[0], starts[1:], ends[-1]) == (block.first, ends[:-1], block.last)
