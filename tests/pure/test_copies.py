"""Plans with copies: right to the judge, priced as the simulator does, never slower than plans with fewer levers."""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from itertools import count
from random import Random

import numpy as np
import pytest
from graphs import make_costs, make_graph, make_step, persisting, with_homes, with_optional
from hypothesis import given, settings
from hypothesis import strategies as st
from test_digests import stored

from lowtide.check import check
from lowtide.costs import Costs, Lane
from lowtide.errors import BudgetError, LowtideError, UsageError
from lowtide.graph import Alternative, Graph
from lowtide.plan import carry, plan
from lowtide.plan.copies import copying, least_seconds, sequence_of, weave
from lowtide.plan.emit import emit
from lowtide.plan.planning import Planning
from lowtide.plan.problem import FETCH, Problem
from lowtide.plan.recompute import shave
from lowtide.program import Copy, Plan, Run
from lowtide.simulate import elapsed, simulate

BRIEF = 0.02  # seconds of search


def case(seed: int, *, homes: bool = True) -> tuple[Graph, Costs]:
    """A random step, of which values may wait elsewhere, and some inputs and outputs live there."""
    random = Random(seed)
    graph = random.choice((make_step, make_graph))(random, random.randint(2, 14))
    graph = persisting(with_optional(random, graph) if random.random() < 0.3 else graph)
    if homes and random.random() < 0.6:
        graph = with_homes(random, graph)
    lasting = graph.lasting_storages
    rows = tuple(
        Alternative(value, value, random.choice(("host", "disk", "disk")))
        for value, item in enumerate(graph.values)
        if item.storage not in lasting and item.kind != "scalar" and random.random() < 0.8
    )
    graph = dataclasses.replace(graph, alternatives=(*graph.alternatives, *rows))
    found = [
        Lane(place, direction, random.choice((0.0, 0.01, 0.3)), random.choice((50.0, 1e3, 1e9)), random.random() ** 2)
        for place in ("host", "disk")
        for direction in ("out", "in")
    ]
    return graph, dataclasses.replace(make_costs(random, graph), lanes=tuple(found))  # type: ignore[arg-type]


def start(graph: Graph, costs: Costs) -> tuple[Problem, np.ndarray]:
    """The arrays of a step with copies, and its captured order with those that it can't do without."""
    arrays = copying(graph, costs)
    return arrays, weave(arrays, Planning(graph, costs).order)


seeds = st.integers(0, 2**32 - 1)


@given(seeds)
@settings(max_examples=300, derandomize=True, deadline=None, database=None)
def test_sequences_are_priced_as_programs_are(seed: int) -> None:
    graph, costs = case(seed)
    arrays, sequence = start(graph, costs)
    random = Random(seed)
    highest = arrays.peak(sequence)
    for _ in range(4):
        target = random.randint(arrays.persistent, highest)
        rate, batch = random.choice((0.0, 0.1, 1.0)), random.choice((1, 4))
        shaved, reached = shave(arrays, sequence, target, rate=rate, batch=batch)
        assert reached == arrays.peak(shaved)
        budget = random.choice((reached, max(reached, highest), (reached + max(reached, highest)) // 2))
        timed, seconds = arrays.retimed(shaved, budget)
        program = emit(arrays, timed)
        assert elapsed(graph, costs, program) == seconds  # to the last bit
        assert sorted(timed) == sorted(shaved)  # copies moved, nothing else
        assert [op for op in timed if op < len(graph.ops)] == [op for op in shaved if op < len(graph.ops)]
        assert arrays.peak(timed) <= budget
        assert check(graph, costs, program) == simulate(graph, costs, program).peak
        assert list(sequence_of(arrays, program)) == list(timed)


def planned(graph: Graph, costs: Costs, budget: int, method: str = "lowtide") -> Plan | None:
    try:
        return plan(graph, costs, budget, method=method, time_limit=BRIEF)
    except BudgetError:
        return None


@given(seeds)
@settings(max_examples=120, derandomize=True, deadline=None, database=None)
def test_no_plan_is_slower_than_one_with_fewer_levers(seed: int) -> None:
    graph, costs = case(seed, homes=False)
    highest = plan(graph, costs, time_limit=BRIEF).peak
    lowest = sum(costs.nbytes[item.value] for item in graph.inputs)
    budget = Random(seed).randint(lowest, highest)
    joint = planned(graph, costs, budget)
    kept = tuple(row for row in graph.alternatives if row.place == "device")
    alone = planned(dataclasses.replace(graph, alternatives=kept), costs, budget)
    copied = planned(graph, costs, budget, "offload") if kept != graph.alternatives else None
    if joint is None:
        assert alone is None
        assert copied is None
        return
    assert joint.peak <= budget
    assert joint.bound_seconds == joint.base_seconds
    assert all(joint.seconds <= other.seconds + 1e-12 for other in (alone, copied) if other is not None)
    if copied is not None:
        runs = [item.op for item in copied.program.instructions if isinstance(item, Run)]
        assert len(runs) == len(set(runs))


@given(seeds)
@settings(max_examples=200, derandomize=True, deadline=None, database=None)
def test_no_program_takes_less_than_its_ops_and_the_copies_of_what_lives_elsewhere(seed: int) -> None:
    """So that what can't be quicker need not be looked for: held against the simulator, with little to wait for."""
    graph, costs = case(seed)
    planning = Planning(graph, costs, time_limit=BRIEF)
    least = least_seconds(graph, costs, planning.base)
    assert least >= planning.base
    arrays, sequence = start(graph, costs)
    room = int(arrays.nbytes.sum()) + arrays.persistent
    assert elapsed(graph, costs, emit(arrays, sequence)) >= least * (1 - 1e-12)
    assert arrays.retimed(sequence, room)[1] >= least * (1 - 1e-12)
    shaved, peak = shave(arrays, sequence, (arrays.persistent + room) // 2, rate=0.1)
    assert arrays.retimed(shaved, max(peak, room))[1] >= least * (1 - 1e-12)


@pytest.mark.parametrize("method", ["lowtide", "offload"])
def test_where_nobody_asks_what_would_fit_the_error_comes_at_once(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    graph, costs = case(3, homes=False)
    planning = Planning(graph, costs, time_limit=BRIEF)
    budget = planning.least().least_bound - 1
    with pytest.raises(BudgetError) as explained:
        planning.within(budget, method)
    assert explained.value.least is not None
    assert explained.value.least >= planning.least().peak
    monkeypatch.setattr(Planning, "_lowest", property(lambda _: pytest.fail("the least peak is looked for")))
    with pytest.raises(BudgetError) as brief:
        Planning(graph, costs, time_limit=BRIEF).within(budget, method, explain=False)
    assert (brief.value.least, brief.value.budget) == (None, budget)


@given(seeds)
@settings(max_examples=120, derandomize=True, deadline=None, database=None)
def test_steps_with_ends_elsewhere_are_planned_within_any_budget_that_can_be(seed: int) -> None:
    graph, costs = case(seed)
    planning = Planning(graph, costs, time_limit=BRIEF)
    highest, lowest = planning.within(None).peak, planning.least().peak
    assert planning.least().least_bound <= lowest <= highest
    for budget in (lowest, (lowest + highest) // 2, highest):
        found = planning.within(budget)
        assert check(graph, costs, found.program, budget=budget) <= found.peak <= budget
    if lowest > 1:
        with pytest.raises(BudgetError):
            planning.within(planning.least().least_bound - 1)


def test_random_cases_copy_back_and_live_elsewhere() -> None:
    fetched = lived = 0
    for seed in range(60):
        graph, costs = case(seed)
        found = Planning(graph, costs, time_limit=BRIEF).least().program.instructions
        fetched += any(isinstance(item, Copy) and item.to == "device" for item in found)
        lived += any(item.home != "device" for item in graph.inputs)
    assert fetched > 20
    assert lived > 15


def waiting(graph: Graph, costs: Costs) -> tuple[Graph, Costs]:
    """A stored step of which every value may wait on the disk, however small."""
    made = [value for value, maker in enumerate(graph.maker) if maker >= 0 and value not in graph.required]
    kept = [value for value in made if graph.values[value].storage not in graph.lasting_storages]
    rows = tuple(Alternative(value, value, "disk") for value in kept if graph.values[value].kind != "scalar")
    return dataclasses.replace(graph, alternatives=(*graph.alternatives, *rows)), costs


@pytest.mark.parametrize("name", ["mlp-small", "gpt-small"])
def test_slow_places_are_left_alone_and_quick_ones_are_used(name: str) -> None:
    graph, costs = waiting(*stored(name))
    keep, low = plan(graph, costs), Planning(graph, dataclasses.replace(costs, lanes=())).least()
    budget = (keep.peak + low.peak) // 2
    copies = []
    for rate in (1e3, 1e15):
        lanes = tuple(Lane("disk", direction, 0.0, rate) for direction in ("out", "in"))
        found = plan(graph, dataclasses.replace(costs, lanes=lanes), budget, time_limit=0.3)
        copies.append(sum(isinstance(item, Copy) for item in found.program.instructions))
        if rate == 1e15:
            assert found.seconds == pytest.approx(found.base_seconds, rel=1e-6)
    assert copies[0] == 0 < copies[1]


def test_without_a_clock_a_slow_machine_finds_the_same_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, costs = waiting(*stored("gpt-small"))
    lanes = tuple(Lane("disk", direction, 0.0, 1e9) for direction in ("out", "in"))
    costs = dataclasses.replace(costs, lanes=lanes)
    budget = (plan(graph, costs).peak + Planning(graph, costs).least().peak) // 2
    known = plan(graph, costs, budget, time_limit=0.1, clock=False)
    later = count(0.0, 1000.0)  # each look at the clock is a quarter of an hour after the one before
    monkeypatch.setattr(time, "monotonic", lambda: next(later))
    assert plan(graph, costs, budget, time_limit=0.1, clock=False).program == known.program


def test_staging_is_in_the_promise() -> None:
    graph, costs = waiting(*stored("gpt-small"))
    lanes = tuple(Lane("disk", direction, 0.0, 1e15) for direction in ("out", "in"))
    costs = dataclasses.replace(costs, lanes=lanes, staging=1000)
    keep = plan(graph, costs)
    assert keep.peak == simulate(graph, costs, keep.program).peak  # nothing is copied
    budget = (keep.peak + Planning(graph, costs).least().peak) // 2
    found = plan(graph, costs, budget, method="offload", time_limit=BRIEF)
    assert found.peak == simulate(graph, costs, found.program).peak + 1000 <= budget
    with pytest.raises(BudgetError, match="with the 1,000 that copies go through"):
        plan(graph, costs, 1000, time_limit=BRIEF)


@pytest.mark.parametrize("name", ["gpt-small", "resnet-small"])
def test_a_plan_with_copies_is_carried_to_a_similar_step(name: str) -> None:
    graph, costs = waiting(*stored(name))
    lanes = tuple(Lane("disk", direction, 0.0, 1e9, 0.1) for direction in ("out", "in"))
    costs = dataclasses.replace(costs, lanes=lanes, staging=64)
    budget = (plan(graph, costs).peak + Planning(graph, costs).least().peak) // 2
    known = plan(graph, costs, budget, method="offload", time_limit=0.1)
    slower = dataclasses.replace(costs, seconds=tuple(2 * seconds for seconds in costs.seconds))
    found = carry(known, graph, graph, slower, budget)
    assert found is not None
    assert found.peak <= budget
    one, other = (Counter(type(item) for item in each.program.instructions) for each in (known, found))
    assert one == other
    assert one[Copy] > 0
    assert carry(known, graph, graph, slower, known.peak // 2) is None


def test_a_step_without_copies_has_none_to_plan() -> None:
    graph, costs = stored("mlp-small")
    with pytest.raises(UsageError, match="offers no copies"):
        plan(graph, costs, 10**9, method="offload")


def test_a_problem_that_is_wrong_is_refused() -> None:
    graph, costs = case(3)
    arrays, sequence = start(graph, costs)
    copies = arrays.copies
    for name, wrong in (("tokens", -1), ("kind", np.full_like(copies.kind, 9)), ("lane", copies.lane - 9)):
        with pytest.raises(LowtideError, match="numbers that belong to no graph"):
            dataclasses.replace(arrays, copies=dataclasses.replace(copies, **{name: wrong})).peak(sequence)
    assert (arrays.copies.kind == FETCH).any()
