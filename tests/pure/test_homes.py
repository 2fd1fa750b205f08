"""Inputs and outputs that live in other places than the device, to the judge, the simulator, the layout, the files."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from graphs import Case, away_cases, captured, make_away_case
from hypothesis import given, settings
from test_check import _agree

from lowtide.check import check
from lowtide.costs import declared, lanes
from lowtide.errors import BudgetError, FileError, ProgramError, UsageError
from lowtide.graph import Graph, Input, Op, Output, Place, Read, Value, View
from lowtide.plan import plan
from lowtide.plan.layout import layout
from lowtide.program import Copy, Free, Instruction, Program, Run, Wait
from lowtide.simulate import simulate

# A weight on the disk, a batch on the device, a gradient that is wanted on the host; the update is in place.
WEIGHT, BATCH, GRADIENT, NEW = range(4)
BACKWARD, UPDATE = range(2)
SIZES = (100, 10, 100, 100)


def _graph(weight: Place = "disk", gradient: Place = "host", *, persistent: bool = True) -> Graph:
    return Graph(
        ops=(
            Op("backward", "aten.mul.Tensor", (Read(WEIGHT), Read(BATCH)), outputs=(GRADIENT,), phase="backward"),
            Op("update", "aten.add_.Tensor", (Read(WEIGHT), Read(GRADIENT)), (), (None,), ((NEW, WEIGHT),)),
        ),
        values=tuple(
            Value(name, nbytes, "activation", storage)
            for name, nbytes, storage in zip(("weight", "batch", "gradient", "new"), SIZES, (0, 1, 2, 0), strict=True)
        ),
        inputs=(Input(WEIGHT, ("weight",), persistent, weight), Input(BATCH, ("batch",))),
        outputs=(Output(NEW, "input", ("weight",), None, weight), Output(GRADIENT, "gradient", (), None, gradient)),
    )


FETCH: list[Instruction] = [Copy(WEIGHT, "device"), Wait(WEIGHT, "device")]
TO_HOST: list[Instruction] = [Copy(GRADIENT, "host"), Wait(GRADIENT, "host"), Free(GRADIENT)]
TO_DISK: list[Instruction] = [Free(WEIGHT, "disk"), Copy(NEW, "disk"), Wait(NEW, "disk"), Free(NEW)]
STEP = [*FETCH, Run(BACKWARD), Run(UPDATE, over=((NEW, WEIGHT),)), *TO_HOST, *TO_DISK]


def _check(rows: list[Instruction], graph: Graph | None = None) -> int:
    graph = graph or _graph()
    costs, program = declared(graph), Program(graph.fingerprint, tuple(rows))
    found = check(graph, costs, program)
    assert simulate(graph, costs, program).peak == found
    return found


def test_what_lives_elsewhere_takes_bytes_of_the_device_only_while_it_is_there() -> None:
    assert _check(STEP) == 100 + 10 + 100
    graph = _graph()
    live = simulate(graph, declared(graph), Program(graph.fingerprint, tuple(STEP))).live
    assert live == (110, 110, 210, 210, 210, 210, 210, 110, 110, 110, 110)
    assert simulate(graph, declared(graph), Program(graph.fingerprint, ())).peak == 10


def test_an_input_that_the_step_uses_up_leaves_its_slot_to_what_becomes_of_it() -> None:
    assert _check(STEP, _graph(persistent=False)) == 210


def test_what_lives_elsewhere_may_be_in_the_arena_while_it_is_here() -> None:
    graph = _graph()
    laid = layout(graph, declared(graph), Program(graph.fingerprint, tuple(STEP)))
    assert check(graph, declared(graph), laid) == 10 + 256
    assert [row.at >= 0 for row in laid.instructions if isinstance(row, Copy)] == [True, False, False]
    assert all(offset >= 0 for row in laid.instructions if isinstance(row, Run) for offset in row.at)


def _without(*rows: Instruction) -> list[Instruction]:
    return [row for row in STEP if row not in rows]


@pytest.mark.parametrize(
    ("rule", "at", "rows"),
    [
        pytest.param("read before made", 0, STEP[2:], id="not fetched"),
        pytest.param("read before wait", 1, _without(Wait(WEIGHT, "device")), id="not awaited"),
        pytest.param("overlap", 7, _without(Free(WEIGHT, "disk")), id="over what is still there"),
        pytest.param("missing output", 7, [*STEP[:-4], Free(NEW)], id="not written back"),
        pytest.param("missing output", 8, _without(*TO_HOST[:2]), id="gradient not sent home"),
        pytest.param("missing output", 8, [*STEP[:-4], TO_DISK[0], Free(NEW)], id="neither old nor new"),
        pytest.param("copy never awaited", 8, [*STEP[:-2]], id="end before it is home"),
        pytest.param("never freed", 3, STEP[:-1], id="left on the device"),
        pytest.param("never freed", 2, _without(TO_HOST[2]), id="gradient left on the device"),
        pytest.param("free during copy", 9, [*STEP[:-2], Free(NEW)], id="gone while it is copied"),
        pytest.param("read after free", 1, [Free(WEIGHT, "disk"), *STEP], id="let go before it is fetched"),
        pytest.param("never freed", 2, [*STEP[:2], Copy(WEIGHT, "host"), Wait(WEIGHT, "host"), *STEP[2:]], id="twice"),
    ],
)
def test_refuses(rule: str, at: int, rows: list[Instruction]) -> None:
    with pytest.raises(ProgramError) as caught:
        _check(rows)
    assert (caught.value.rule, caught.value.instruction) == (rule, at), str(caught.value)


@given(away_cases())
@settings(max_examples=600, derandomize=True, deadline=None, database=None)
def test_agrees_with_brute_force(case: Case) -> None:
    """600 random graphs with homes anywhere: two valid programs each, and 5 broken ones of each."""
    for program in (case.program, captured(case.graph)):
        assert simulate(case.graph, case.costs, program).peak == check(case.graph, case.costs, program)
    for program in (case.program, *case.broken(5)):
        _agree(case, program)


@given(away_cases())
@settings(max_examples=200, derandomize=True, deadline=None, database=None)
def test_layouts_are_valid(case: Case) -> None:
    laid = layout(case.graph, case.costs, captured(case.graph), steps=200)
    assert check(case.graph, case.costs, laid) == simulate(case.graph, case.costs, laid).peak


def test_random_cases_have_homes_everywhere() -> None:
    found = {item.home for case in map(_case, range(40)) for item in (*case.graph.inputs, *case.graph.outputs)}
    assert found == {"device", "host", "disk"}


def _case(seed: int) -> Case:
    return make_away_case(8, seed)


# ---------------------------------------------------------------------------------------------------- files, and sounds


def test_homes_and_forms_are_in_the_file_and_the_fingerprint_only_where_they_are_not_the_usual(tmp_path: Path) -> None:
    plain = _graph("device", "device")
    blocked = dataclasses.replace(plain.values[GRADIENT], form="blocked")
    for number, graph in enumerate((plain, _graph(), dataclasses.replace(plain, values=(*plain.values[:2], blocked)))):
        graph = dataclasses.replace(graph, values=(*graph.values[:3], plain.values[NEW]))
        graph.save(tmp_path / str(number))
        assert Graph.load(tmp_path / str(number)) == graph
        text = (tmp_path / str(number)).read_text(encoding="utf-8")
        assert [word in text for word in ("blocked", '"disk"')] == [number == 2, number == 1]
    assert len({plain.fingerprint, _graph().fingerprint, graph.fingerprint}) == 3
    assert "<- weight on disk" in str(_graph())
    assert "-> gradient  on host" in str(_graph())
    assert " blocked " in str(graph)


def _with(graph: Graph, **changes: object) -> Graph:
    return dataclasses.replace(graph, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("graph", "words"),
    [
        (_with(_graph(), inputs=(Input(WEIGHT, (), True, "attic"), Input(BATCH, ()))), "no home: 'attic'"),  # type: ignore[arg-type]
        (_with(_graph(), outputs=(Output(NEW, "input", (), None, "host"),)), "two homes: disk and host"),
        (
            _with(_graph(), outputs=(*_graph().outputs, Output(GRADIENT, "result", (), None, "disk"))),
            "two homes: host and disk",
        ),
        (
            _with(_graph(), values=(dataclasses.replace(_graph().values[0], form="liquid"), *_graph().values[1:])),
            "no form: 'liquid'",
        ),
    ],
)
def test_refuses_homes_and_forms_that_are_none(graph: Graph, words: str, tmp_path: Path) -> None:
    assert graph.fault is not None
    assert words in graph.fault
    graph.save(tmp_path / "graph")
    with pytest.raises(FileError):
        Graph.load(tmp_path / "graph")


@pytest.mark.parametrize("form", ["plain", "blocked", "packed", "sparse", "sharded"])
def test_an_opaque_value_is_read_by_no_view(form: str) -> None:
    graph = _graph("device", "device")
    seen = dataclasses.replace(graph.ops[UPDATE], args=(Read(WEIGHT), Read(GRADIENT, 0)))
    gradient = dataclasses.replace(graph.values[GRADIENT], form=form)
    values = (*graph.values[:GRADIENT], gradient, graph.values[NEW])
    view = View(None, "aten.t.default")
    graph = dataclasses.replace(graph, ops=(graph.ops[0], seen), values=values, views=(view,))
    opaque = form in ("blocked", "packed", "sparse")
    assert graph.fault == (f"op 1 update sees %2 through a view, but it is {form}" if opaque else None)


def test_the_planner_needs_to_know_what_copies_cost() -> None:
    with pytest.raises(UsageError, match="weight, which lives on the disk: its costs say nothing about copies"):
        plan(_graph(), declared(_graph()), 1000)


def test_a_step_with_ends_elsewhere_is_planned() -> None:
    graph = _graph()
    costs = dataclasses.replace(declared(graph), lanes=lanes((("host", 100.0), ("disk", 100.0))))
    found = plan(graph, costs, 210, time_limit=0.1)
    assert found.peak == 210
    assert found.seconds == 1.0 + 2.0 + 1.0  # a copy, two ops, and two copies side by side
    with pytest.raises(BudgetError, match="210"):
        plan(graph, costs, 209, time_limit=0.1)
