"""The judge, the simulator and a machine of bytes agree on random programs that were changed where it matters."""

from __future__ import annotations

import dataclasses
from collections import Counter
from random import Random
from typing import Any

import pytest
from graphs import (
    Case,
    captured,
    lay_out,
    make_acting_case,
    make_away_case,
    make_case,
    make_costs,
    make_graph,
    make_program,
    make_step,
)
from machine import Machine, Step, Wrong
from mutations import mutate
from optional import make_optional_case

from lowtide.check import _Judge, check
from lowtide.errors import ProgramError
from lowtide.program import Program
from lowtide.simulate import simulate

EACH = 20  # changed programs of one graph


def any_case(seed: int) -> Case:
    """A graph as capture could have made it, a training step, or one with optional ops; and a valid program."""
    size = 1 + seed % 12
    if seed % 5 == 0:
        return make_optional_case(size, seed)
    if seed % 7 == 0:
        return make_away_case(size, seed) if seed % 2 else make_acting_case(size, seed)
    if seed % 5 > 2:
        return make_case(size, seed)
    random = Random(seed)
    graph = make_step(random, size) if seed % 5 == 1 else make_graph(random, size)
    if random.random() < 0.5:  # what becomes of the inputs need not be listed
        lasting = {value for value, item in enumerate(graph.values) if item.storage in graph.lasting_storages}
        graph = dataclasses.replace(graph, outputs=tuple(item for item in graph.outputs if item.value not in lasting))
    costs = make_costs(random, graph)
    program = make_program(random, graph, costs, wild=random.choice((0.2, 0.5)), astray=0.5)
    return Case(size, seed, graph, costs, lay_out(random, graph, costs, program))


def campaign(seeds: range) -> Counter[str]:
    """Compare all witnesses on `EACH` changed programs of each seed's case; what the judge said, counted."""
    said: Counter[str] = Counter()
    for seed in seeds:
        case = any_case(seed)
        step, random = Step(case.graph, case.costs), Random(f"{seed} changed")
        for program in (case.program, captured(case.graph)):
            assert agree(case, step, program) == "valid", f"seed {seed}"
        for _ in range(EACH):
            said[agree(case, step, mutate(random, case.graph, case.costs, case.program))] += 1
    return said


def agree(case: Case, step: Step, program: Program) -> str:
    """What the judge says of a program; if that is "valid", the machine and the simulator say the same."""
    try:
        peak = check(case.graph, case.costs, program)
    except ProgramError as error:
        return error.rule
    try:
        assert Machine(step, program).execute() == peak
    except (Wrong, LookupError) as error:
        raise AssertionError(f"seed {case.seed}: {error!r}\n{case.graph}\n{program.show(case.graph)}") from error
    assert simulate(case.graph, case.costs, program).peak == peak
    return "valid"


def test_twenty_thousand_changed_programs() -> None:
    said = campaign(range(1000))
    assert sum(said.values()) == 20_000
    assert said["valid"] > 2_000
    assert len(said) > 17


@pytest.mark.long
@pytest.mark.parametrize("part", range(50))
def test_a_million_changed_programs(part: int) -> None:
    """In parts of 20,000, each with seeds of its own: they can run one after the other, or beside each other."""
    said = campaign(range(1000 * (part + 1), 1000 * (part + 2)))
    print(f"\npart {part}: {sum(said.values()):,} programs: {dict(said.most_common())}")
    assert sum(said.values()) == 20_000


# ------------------------------------------------------------------------------------------- the machine can see faults


def test_the_machine_sees_what_most_rules_are_about() -> None:
    wrong: Counter[str] = Counter()
    for seed in range(1000, 1200):
        case = any_case(seed)
        step, random = Step(case.graph, case.costs), Random(f"{seed} changed")
        for program in (mutate(random, case.graph, case.costs, case.program) for _ in range(EACH)):
            try:
                check(case.graph, case.costs, program)
            except ProgramError as error:
                try:
                    Machine(step, program).execute()
                except (Wrong, LookupError):
                    wrong[error.rule] += 1
    harmless = {"never freed", "over budget", "wrong graph"}  # to the bytes
    rules = {"read before made", "read after free", "read before wait", "double free", "free before made", "overlap"}
    rules |= {"missing output", "misplaced", "illegal in-place", "random replay", "side effect twice", "copied twice"}
    rules |= {"free during copy", "not marked as repeat", "repeat before first", "no such"}
    assert rules <= set(wrong)
    assert not harmless & set(wrong)


def _blind(*_: Any, **__: Any) -> None:
    """See nothing."""


def _there(self: Any, values: set[int]) -> set[int]:
    """Those that happen to be there."""
    return {value for value in values if ("device", value) in self.blocks}


BLIND: dict[str, tuple[str, Any]] = {
    "copies in flight": ("check_still", _blind),
    "in place": ("check_over", _blind),
    "unreadable": ("check_readable", _blind),
    "repeats": ("check_order", lambda self, op, again: self.has_run.add(op)),
    "the end": ("end", _blind),
    "home": ("at_home", lambda self, block: self.blocks.get(block, (0, 0))[0] == -1),
    "last contents": ("last_contents", lambda self, all_of=_Judge.last_contents: _there(self, all_of(self))),
}


@pytest.mark.parametrize("what", BLIND)
def test_a_judge_that_is_blind_in_one_eye_is_found_out(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_Judge, *BLIND[what])
    for seed in range(2000, 2200):
        case = any_case(seed)
        step, random = Step(case.graph, case.costs), Random(f"{seed} changed")
        for _ in range(EACH):
            program = mutate(random, case.graph, case.costs, case.program)
            try:
                agree(case, step, program)
            except AssertionError:
                return
            except LookupError:
                continue  # the judge stumbles over what it does not see
    pytest.fail("nobody noticed")
