"""Rolled source does what the plain lines do: both are run, and everything that they call is compared."""

from __future__ import annotations

from random import Random
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from lowtide.execute.loops import roll


class Machine:
    """Calls that note their arguments, and tensors that note when they go."""

    def __init__(self) -> None:
        self.seen: list[Any] = []
        self.over = False  # what is still there at the end may go in any order

    def end(self) -> None:
        self.over = True

    def call(self, *arguments: Any) -> Thing:
        self.seen.append(("call", *(getattr(item, "number", item) for item in arguments)))
        return Thing(self, len(self.seen))


class Thing:
    """What a call returns."""

    def __init__(self, machine: Machine, number: int) -> None:
        self.machine, self.number = machine, number

    def __del__(self) -> None:
        if not self.machine.over:
            self.machine.seen.append(("gone", self.number))


def run(lines: list[str], tables: dict[str, Any]) -> list[Any]:
    machine = Machine()
    names: dict[str, Any] = {**tables, "k1": machine.call, "k2": lambda *args: machine.call("two", *args)}
    names["k3"] = machine.end
    source = "\n".join(["def run(inputs, at):", *(f"  {line}" for line in [*lines[:-1], "k3()", lines[-1]]), ""])
    exec(source, names)
    at = [0]
    result = names["run"]([machine.call("input"), machine.call("input")], at)
    return [*machine.seen, at[0], [item.number for item in result]]


def chain(length: int, *, extra: frozenset[int] = frozenset()) -> list[str]:
    """A forward that keeps everything, with something odd here and there, and a backward."""
    lines = ["(t1, t2, ) = inputs", "inputs.clear()"]
    for number in range(length):
        lines += [f"at[0] = {number}", f"t{number + 3} = k1(t{number + 2}, t1, {number}, 1.5, 1e-05, 't7')"]
        if number in extra:
            lines += [f"s{number} = k2({number})"]
    lines.append("t0 = k2()")
    for number in reversed(range(length)):
        lines += [f"at[0] = {number + length}", f"t0 = k2(t0, t{number + 2})", f"del t{number + 3}"]
    return [*lines, "return [t0, t1, t2]"]


def test_a_chain_becomes_two_loops() -> None:
    lines = chain(100)
    rolled, tables = roll(lines, long=0)
    assert len(rolled) < 20
    assert len(tables) == 2
    assert run(rolled, tables) == run(lines, {})


def test_short_source_stays_as_it_is() -> None:
    lines = chain(100)
    assert roll(lines) == (lines, {})


PATIENT = settings(deadline=None)  # a busy machine is no failure


@PATIENT
@given(st.integers(1, 150), st.frozensets(st.integers(0, 150), max_size=6))
def test_any_chain_does_the_same(length: int, extra: frozenset[int]) -> None:
    lines = chain(length, extra=extra)
    rolled, tables = roll(lines, long=0)
    assert run(rolled, tables) == run(lines, {})
    assert len(rolled) <= len(lines) + 2


@PATIENT
@given(st.lists(st.sampled_from(["a", "b", "c"]), max_size=40), st.integers(1, 30))
def test_any_pattern_does_the_same(body: list[str], times: int) -> None:
    lines = ["(t1, t2, ) = inputs", "inputs.clear()"]
    made = 2
    for kind in body * times:
        made += 1
        first = f"t{made} = k1(t{made - 1}, {made})"
        lines += {"a": [first], "b": [f"at[0] = {made}", first], "c": [first, f"t1 = k2(t1, t{made})"]}[kind]
    lines.append(f"return [t{made}, t1]")
    rolled, tables = roll(lines, long=0)
    assert run(rolled, tables) == run(lines, {})


def parts(times: int, length: int) -> list[str]:
    """The same long body over and over, of lines that are alike within it: distances of single lines say nothing."""
    chance, lines, made = Random(0), ["(t1, t2, ) = inputs", "inputs.clear()"], 3
    calls = [chance.choice(("k1", "k2")) for _ in range(length)]
    for _ in range(times):
        for place, call in enumerate(calls):
            lines += [f"at[0] = {made}", f"t{made} = {call}(t{made - 1}, {place})", f"del t{made - 1}"]
            made += 1
        lines += [f"t{made} = k1(t1)", f"del t{made - 1}"]
        made += 1
    return [*lines, f"return [t1, t{made - 1}]"]


def test_a_long_body_that_repeats_itself_is_written_once() -> None:
    lines = parts(7, 700)
    rolled, tables = roll(lines)
    assert len(rolled) < len(lines) / 3
    assert run(rolled, tables) == run(lines, {})
