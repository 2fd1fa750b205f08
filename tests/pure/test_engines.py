"""Time on several engines, against sums, against another way to count it, and in files."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from random import Random

import pytest
from graphs import Case, away_cases, cases, make_away_case
from hypothesis import given, settings
from test_digests import stored

from lowtide import files
from lowtide.costs import Costs, Direction, Lane, declared, lanes
from lowtide.engines import FLOOR, Engines
from lowtide.errors import FileError
from lowtide.graph import Alternative, Graph, Place
from lowtide.plan import least, plan
from lowtide.program import Copy, Free, Program, Run, Wait
from lowtide.simulate import simulate

SLOW = (Lane("host", "out", 1.0, 10.0, 0.5), Lane("host", "in", 0.0, 10.0, 0.25), Lane("disk", "out", 0.0, 1.0, 0.9))


def test_without_copies_time_is_the_sum() -> None:
    engines = Engines(SLOW)
    for seconds in (0.1, 0.2, 0.3):
        engines.run(seconds)
    assert engines.now == 0.1 + 0.2 + 0.3


def test_a_copy_runs_beside_compute_and_takes_its_part_of_it() -> None:
    engines = Engines(SLOW)
    assert engines.copy("host", "out", 90) == 10.0  # a second of latency, nine of bytes
    engines.run(4.0)
    assert engines.now == 8.0  # at half speed
    engines.run(4.0)
    assert engines.now == 8.0 + 2.0 + 3.0  # one second's worth until 10, then alone
    engines.wait(10.0)
    assert engines.now == 13.0


def test_copies_of_one_engine_follow_each_other_and_those_of_others_do_not_wait() -> None:
    engines = Engines(SLOW)
    assert [engines.copy("host", "out", 10), engines.copy("host", "out", 10)] == [2.0, 4.0]
    assert engines.copy("host", "in", 20) == 2.0
    engines.run(1.0)
    assert engines.now == 2.0 + (1 - 2 * 0.25) / 0.5  # a quarter of the speed, then half of it
    engines.wait(10.0)
    assert engines.copy("host", "in", 10) == 11.0


def test_compute_never_stands_still() -> None:
    engines = Engines(SLOW)
    engines.copy("disk", "out", 10)
    engines.copy("host", "out", 990)
    engines.run(1.0)
    assert engines.now == pytest.approx(10 + (1 - 10 * FLOOR) / 0.5)


def test_a_copy_without_an_engine_takes_no_time() -> None:
    engines = Engines(())
    engines.run(1.0)
    assert engines.copy("disk", "in", 10**12) == engines.now == 1.0


# ------------------------------------------------------------------------------------------------- another way to count


def _reference(graph: Graph, costs: Costs, program: Program) -> Fraction:
    """The end of a step in exact numbers: a list of all copies ever begun, asked anew for every stretch of time."""
    begun: list[tuple[Fraction, Fraction, Lane]] = []
    where = {(item.value, item.home) for item in graph.inputs}
    arrives: dict[tuple[int, str], Fraction] = {}
    now = Fraction(0)

    def borders(after: Fraction) -> Iterator[Fraction]:
        yield from sorted({when for start, end, _ in begun for when in (start, end) if when > after})

    def start(value: int, place: Place, direction: Direction) -> Fraction:
        lane = next((one for one in costs.lanes if (one.place, one.direction) == (place, direction)), None)
        if lane is None:
            return now
        first = max([now, *(end for _, end, other in begun if other == lane)])
        last = first + Fraction(lane.latency) + Fraction(costs.nbytes[value]) / Fraction(lane.rate)
        begun.append((first, last, lane))
        return last

    for row in program.instructions:
        match row:
            case Run(op):
                left = Fraction(costs.seconds[op])
                for border in [*borders(now), None]:
                    taken = sum(Fraction(lane.takes) for first, last, lane in begun if first <= now < last)
                    speed = max(Fraction(FLOOR), 1 - taken)
                    if border is None or (border - now) * speed >= left:
                        now += left / speed
                        break
                    left -= (border - now) * speed
                    now = border
            case Copy(value, "device"):
                arrives[value, "device"] = start(value, "host" if (value, "host") in where else "disk", "in")
            case Copy(value, place):
                arrives[value, place] = start(value, place, "out")
            case Wait(value, place):
                now = max(now, arrives[value, place])
                where.add((value, place))
            case Free(value, place):
                where.discard((value, place))
    return now


def _with_lanes(case: Case) -> Costs:
    random = Random(case.seed)
    found = [
        Lane(place, direction, random.choice((0.0, 0.01, 0.5)), random.choice((64.0, 1e3, 1e9)), random.random())
        for place in ("host", "disk")
        for direction in ("out", "in")
        if random.random() < 0.9
    ]
    return dataclasses.replace(case.costs, lanes=tuple(found))  # type: ignore[arg-type]


@given(cases())
@settings(max_examples=300, derandomize=True, deadline=None, database=None)
def test_agrees_with_exact_numbers(case: Case) -> None:
    _agree(case)


@given(away_cases())
@settings(max_examples=300, derandomize=True, deadline=None, database=None)
def test_agrees_with_exact_numbers_where_inputs_live_elsewhere(case: Case) -> None:
    _agree(case)


def _agree(case: Case) -> None:
    costs = _with_lanes(case)
    found = simulate(case.graph, costs, case.program).seconds
    assert found == pytest.approx(float(_reference(case.graph, costs, case.program)), rel=1e-9, abs=1e-12)
    runs = sum(costs.seconds[row.op] for row in case.program.instructions if isinstance(row, Run))
    assert found >= runs * (1 - 1e-9)
    calm = dataclasses.replace(costs, lanes=tuple(dataclasses.replace(lane, takes=0.0) for lane in costs.lanes))
    assert simulate(case.graph, calm, case.program).seconds <= found * (1 + 1e-9)


def test_random_cases_copy() -> None:
    rows = [row for seed in range(40) for row in make_away_case(8, seed).program.instructions]
    assert sum(isinstance(row, Copy) and row.to == "device" for row in rows) > 100
    assert sum(isinstance(row, Copy) and row.to != "device" for row in rows) > 100


# -------------------------------------------------------------------------------------------------- files, and promises


GRAPH = make_away_case(5, 1).graph


def test_lanes_survive_their_file(tmp_path: Path) -> None:
    costs = dataclasses.replace(declared(GRAPH), lanes=SLOW)
    costs.save(tmp_path / "costs")
    assert Costs.load(tmp_path / "costs", GRAPH) == costs


def test_files_from_when_a_place_had_one_number(tmp_path: Path) -> None:
    declared(GRAPH).save(tmp_path / "costs")
    payload = files.load(tmp_path / "costs", "costs")
    del payload["lanes"]
    payload["bandwidth"] = [["host", 100.0], ["disk", 0.0]]
    files.save(tmp_path / "old", "costs", payload)
    assert Costs.load(tmp_path / "old", GRAPH).lanes == lanes((("host", 100.0),))


@pytest.mark.parametrize(
    "lane",
    [
        ["device", "out", 0.0, 1.0, 0.0],
        ["host", "up", 0.0, 1.0, 0.0],
        ["host", "in", -1.0, 1.0, 0.0],
        ["host", "in", 0.0, 0.0, 0.0],
        ["host", "in", 0.0, 1.0, 1.5],
        ["disk", "out", 0.0, 1.0, 0.0],
    ],
)
def test_refuses_lanes_that_are_none(lane: list[object], tmp_path: Path) -> None:
    declared(GRAPH).save(tmp_path / "costs")
    payload = files.load(tmp_path / "costs", "costs")
    payload["lanes"] = [["disk", "out", 0.0, 1.0, 0.0], lane]
    files.save(tmp_path / "wrong", "costs", payload)
    with pytest.raises(FileError, match="lanes"):
        Costs.load(tmp_path / "wrong", GRAPH)


def test_there_is_no_bound_where_copies_are_offered() -> None:
    graph, costs = stored("mlp-small")
    budget = (least(graph, costs).peak + plan(graph, costs).peak) // 2
    found = plan(graph, costs, budget, time_limit=0.05)
    value = next(value for value, maker in enumerate(graph.maker) if maker >= 0)
    offered = dataclasses.replace(graph, alternatives=(*graph.alternatives, Alternative(value, value, "disk")))
    free = plan(offered, costs, budget, time_limit=0.05)
    assert found.program == free.program
    assert found.bound_seconds > free.bound_seconds == free.base_seconds
