"""The planner: every plan is valid and keeps its budget; the bound and the plan enclose the brute-force optimum."""

from __future__ import annotations

import heapq
import time
from dataclasses import replace
from itertools import pairwise
from random import Random

import numpy as np
import pytest
from graphs import Case, Costed, cases, costed
from hypothesis import given, settings
from test_windows import in_parts

from lowtide.budget import read_budget
from lowtide.check import check
from lowtide.costs import Costs, declared
from lowtide.errors import BudgetError, UsageError
from lowtide.graph import Graph, Input, Op, Output, Phase, Read, Value
from lowtide.plan import METHODS, curve, least, plan, planning
from lowtide.plan.bound import bound_alone, bound_together, gates
from lowtide.plan.emit import emit
from lowtide.plan.exact import exact, least_peak, useful
from lowtide.plan.gate import Web
from lowtide.plan.infeasible import floor
from lowtide.plan.order import captured_order, early_updates
from lowtide.plan.planning import OFFLOAD
from lowtide.plan.problem import library, problem
from lowtide.plan.recompute import _Race, shave, tidy
from lowtide.program import Plan, Run
from lowtide.simulate import simulate

MANY = settings(max_examples=400, derandomize=True, deadline=None)


def assert_peak(case: Case, sequence: np.ndarray) -> None:
    """The program of a sequence is valid, and its peak is the one that the arrays predict.

    Two things are not in the arrays: inputs that the step uses up count as persistent, and saved generator
    states as none.
    """
    arrays = problem(case.graph, case.costs)
    program = emit(arrays, sequence)
    found = check(case.graph, case.costs, program)
    assert found == simulate(case.graph, case.costs, program).peak
    ops = [int(op) for op in sequence]
    states = 2 * sum(case.graph.generator_bytes for op in set(ops) if case.graph.ops[op].random and ops.count(op) > 1)
    assert found <= arrays.peak(sequence) + states
    if all(item.persistent for item in case.graph.inputs):
        assert found >= arrays.peak(sequence)


@MANY
@given(cases())
def test_orders_are_valid_and_their_peaks_are_those_of_the_simulator(case: Case) -> None:
    for order in (captured_order(case.graph), early_updates(case.graph)):
        assert sorted(order) == list(range(len(case.graph.ops)))
        assert_peak(case, order)


@MANY
@given(cases())
def test_shaving_and_deleting_keep_a_sequence_valid(case: Case) -> None:
    arrays = problem(case.graph, case.costs)
    order = captured_order(case.graph)
    high, low = arrays.peak(order), floor(arrays)[0]
    for part in (0.0, 0.3, 0.6, 0.9):
        budget = int(low + part * (high - low))
        for batch in (1, 4):
            shaved, peak = shave(arrays, order, budget, batch=batch)
            assert peak == arrays.peak(shaved)
            for sequence in (shaved, tidy(arrays, shaved, max(budget, peak))):
                assert arrays.peak(sequence) <= max(budget, peak)
                assert arrays.time(sequence) <= arrays.time(shaved)
                assert_peak(case, sequence)


@settings(max_examples=60, derandomize=True, deadline=None)
@given(cases())
def test_a_plan_keeps_its_budget_or_says_what_would_fit(case: Case) -> None:
    arrays = problem(case.graph, case.costs)
    high, low = arrays.peak(captured_order(case.graph)), floor(arrays)[0]
    for budget in {low, (low + high) // 2, high}:
        try:
            found = plan(case.graph, case.costs, budget, time_limit=0.02)
        except BudgetError:
            assert budget < high, "what needs no recomputation always fits"
            continue
        assert found.peak <= budget
        assert found.peak == check(case.graph, case.costs, found.program, budget=budget)
        assert found.bound <= found.overhead + 1e-9


def training_chain(length: int, random: Random | None = None) -> tuple[Graph, Costs]:
    """A chain of `length` ops and its backward, which reads the chain's values in reverse; sizes 64 unless random."""
    values = [Value("x", 0, "batch", 0)]
    ops: list[Op] = []

    def add(name: str, reads: tuple[int, ...], phase: Phase) -> int:
        size = 64 if random is None else 64 * random.randint(1, 3)
        values.append(Value(name, size, "activation", len(values), shape=(size,), stride=(1,)))
        ops.append(Op(name, "made.up.op", tuple(Read(v) for v in reads), outputs=(len(values) - 1,), phase=phase))
        return len(values) - 1

    states = [0]
    for step in range(length):
        extra = (random.choice(states),) if random is not None and random.random() < 0.4 else ()
        states.append(add(f"f{step}", tuple(dict.fromkeys((states[-1], *extra))), "forward"))
    gradient = add("loss", (states[-1],), "backward")
    for step in reversed(range(1, length)):
        gradient = add(f"b{step}", (gradient, states[step]), "backward")
    graph = Graph(tuple(ops), tuple(values), (Input(0, (0,)),), (Output(gradient, "result", ()),))
    costs = declared(graph)
    if random is not None:
        seconds = tuple(float(random.randint(1, 4)) for _ in ops)
        costs = Costs(
            graph.fingerprint, seconds, costs.arena_temporaries, costs.nbytes, costs.in_place, "roofline", "unit"
        )
    return graph, costs


def least_seconds(graph: Graph, costs: Costs, budget: int) -> float | None:
    """The quickest program within the budget, by trying every one: shortest paths over what is there and has run."""
    wanted = graph.required
    start = (frozenset[int](), frozenset[int]())
    queue: list[tuple[float, int, tuple[frozenset[int], frozenset[int]]]] = [(0.0, 0, start)]
    best = {start: 0.0}
    count = 0
    while queue:
        seconds, _, (present, ran) = heapq.heappop(queue)
        if wanted <= present:
            return seconds
        if best[present, ran] < seconds:
            continue
        steps: list[tuple[float, frozenset[int], frozenset[int]]] = []
        for op, reads in enumerate(graph.reads):
            if all(read == 0 or read in present for read in reads):
                after = present | set(graph.makes[op])
                if sum(costs.nbytes[value] for value in after) <= budget:
                    steps.append((seconds + costs.seconds[op], after, ran))
        steps += [(seconds, present - {value}, ran) for value in present]
        for took, there, done in steps:
            if took < best.get((there, done), float("inf")):
                best[there, done] = took
                count += 1
                heapq.heappush(queue, (took, count, (there, done)))
    return None


@pytest.mark.parametrize("seed", range(40))
def test_bound_and_plan_enclose_the_optimum(seed: int) -> None:
    random = Random(seed)
    graph, costs = training_chain(random.randint(3, 5), random)
    arrays = problem(graph, costs)
    high, low = arrays.peak(captured_order(graph)), floor(arrays)[0]
    base = sum(costs.seconds)
    for budget in range(low, high + 64, 64):
        optimum = least_seconds(graph, costs, budget)
        candidates = gates(Web(arrays), captured_order(graph))
        alone, gate = bound_alone(candidates, budget)
        if optimum is None:
            with pytest.raises(BudgetError):
                plan(graph, costs, budget, time_limit=0.05)
            continue
        assert base + alone <= optimum + 1e-6
        if gate is not None:
            together = bound_together(candidates, gate, budget, alone, float("inf"), time.monotonic() + 1)
            assert alone <= together <= optimum - base + 1e-6
        found = plan(graph, costs, budget, time_limit=0.1)
        assert found.seconds >= optimum - 1e-9
        assert found.seconds == pytest.approx(optimum), (seed, budget)


def test_a_chain_recomputes_at_most_one_forward_in_two_square_roots_of_its_bytes() -> None:
    graph, costs = training_chain(100)
    found = plan(graph, costs, 64 * 21, time_limit=2)
    forwards = sum(
        graph.ops[item.op].phase == "forward" for item in found.program.instructions if isinstance(item, Run)
    )
    assert found.peak <= 64 * 21
    assert forwards <= 2 * 100


def test_the_least_budget_that_an_error_names_can_be_planned() -> None:
    graph, costs = training_chain(40)
    with pytest.raises(BudgetError, match="needs these together") as caught:
        plan(graph, costs, 64 * 2, time_limit=0.2)
    least = caught.value.least
    assert least is not None
    assert f"a budget of {least:,} bytes" in str(caught.value)
    assert plan(graph, costs, least, time_limit=0.2).peak <= least


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [(1000, 1000), ("1000", 1000), ("2GiB", 2**31), ("1.5 MB", 1_500_000), ("50%", 300), ("0%", 100), ("8k", 8192)],
)
def test_budgets_as_people_write_them(text: int | str, nbytes: int) -> None:
    assert read_budget(text, persistent=100, eager_peak=500) == nbytes


@pytest.mark.parametrize("text", ["", "much", "-3GiB", "5 parsecs", "1e9x", 0, "0", True])
def test_what_is_no_budget(text: int | str) -> None:
    with pytest.raises(UsageError, match="budget"):
        read_budget(text, persistent=100, eager_peak=500)


def planned(case: Costed, budget: int, method: str) -> Plan | None:
    try:
        return plan(case.graph, case.costs, budget, method=method, time_limit=0.01)
    except BudgetError:
        return None


@settings(max_examples=40, derandomize=True, deadline=None)
@given(costed(("graph", "step", "optional", "tree"), max_size=12))
def test_every_method_keeps_every_budget_that_it_accepts(case: Costed) -> None:
    arrays = problem(case.graph, case.costs)
    high, low = arrays.peak(captured_order(case.graph)), floor(arrays)[0]
    for budget in {low, (low + high) // 2, high + 64 * len(case.graph.values)}:
        for method in METHODS:
            if method == OFFLOAD:  # these graphs offer no copies; test_copies.py has some that do
                continue
            found = planned(case, budget, method)
            if found is not None:
                assert found.peak <= budget
                assert found.peak == check(case.graph, case.costs, found.program, budget=budget)
                assert found.bound_seconds <= found.seconds + 1e-9


@settings(max_examples=100, derandomize=True, deadline=None)
@given(costed(("step", "optional"), max_size=14))
def test_no_bound_is_above_the_optimum(case: Costed) -> None:
    assert_bounded(case)


@pytest.mark.long
@settings(max_examples=300, derandomize=True, deadline=None)
@given(costed(("step", "optional"), max_size=14))
def test_no_bound_of_more_graphs_is_above_the_optimum(case: Costed) -> None:
    assert_bounded(case)


def assert_bounded(case: Costed) -> None:
    """No bound is above the seconds of the exact planner, at the least budget and at two more."""
    arrays = problem(case.graph, case.costs)
    order = captured_order(case.graph)
    order = order[np.isin(order, useful(arrays))]
    base = arrays.time(order)
    high, low = arrays.peak(order), least_peak(arrays).peak
    candidates = gates(Web(arrays), order)
    for budget in {low, (2 * low + high) // 3, (low + 2 * high) // 3}:
        optimum = exact(arrays, budget)
        assert optimum.proven
        own = budget - arrays.persistent
        alone, gate = bound_alone(candidates, own)
        assert base + alone <= optimum.bound_seconds + 1e-6
        if gate is not None and alone < float("inf"):
            until = time.monotonic() + 1
            assert (
                base + bound_together(candidates, gate, own, alone, float("inf"), until) <= optimum.bound_seconds + 1e-6
            )


SOLVED = [(4, seed) for seed in range(5)]
SEARCHED = [(40, 0), (40, 1), *(pytest.param(40, seed, marks=pytest.mark.long) for seed in (2, 3, 4))]


@pytest.mark.parametrize(("length", "seed"), [*SOLVED, *SEARCHED])
def test_bounds_hold_where_temporaries_need_less_in_the_heap_than_in_one_piece(length: int, seed: int) -> None:
    random = Random(seed)
    graph, costs = training_chain(length, random)
    piece = tuple(random.choice((0, 64, 640)) for _ in graph.ops)
    costs = replace(costs, arena_temporaries=piece, heap_temporaries=tuple(nbytes // 8 for nbytes in piece))
    smallest = least(graph, costs).peak
    for budget in range(smallest, smallest + 700, 100):
        found = plan(graph, costs, budget, time_limit=0.05)
        assert found.peak <= budget
        assert found.bound_seconds <= found.seconds + 1e-9


def assert_monotone(plans: list[Plan]) -> None:
    for smaller, larger in pairwise(plans):
        assert smaller.budget is not None
        assert larger.budget is not None
        assert smaller.budget < larger.budget
        assert smaller.peak <= larger.peak <= larger.budget
        assert smaller.seconds >= larger.seconds - 1e-9


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in (1, 2))])
def test_forty_budgets_never_cross(seed: int) -> None:
    graph, costs = training_chain(30, Random(seed))
    plans = curve(graph, costs, points=40, time_limit=0.02)
    assert len(plans) == 40
    assert_monotone(plans)
    assert plans[-1].overhead == pytest.approx(0)
    assert plans[0].overhead > 0


def test_a_known_plan_is_never_made_worse() -> None:
    graph, costs = training_chain(40)
    thorough = plan(graph, costs, 64 * 13, time_limit=1)
    assert plan(graph, costs, 64 * 14, time_limit=0, known=[thorough]).seconds <= thorough.seconds


def test_a_seed_gives_the_same_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "monotonic", lambda: 0.0)  # it is the work that ends a search, where the clock does not
    graph, costs = training_chain(80, Random(1))
    budget = 64 * 40
    one, again = (plan(graph, costs, budget, time_limit=0.1, seed=3).program for _ in range(2))
    assert one == again


def test_a_method_that_is_none_is_refused() -> None:
    graph, costs = training_chain(3)
    with pytest.raises(UsageError, match="there is no method 'magic'"):
        plan(graph, costs, 1000, method="magic")


@pytest.mark.skipif(library() is None, reason="there is no C++ compiler here")
def test_a_plan_that_is_proven_to_be_the_quickest_races_no_further(monkeypatch: pytest.MonkeyPatch) -> None:
    raced: list[int] = []
    monkeypatch.setattr(_Race, "run", lambda race, field, share, number: raced.append(number) or field)
    monkeypatch.setattr(planning, "PROOF_SHARE", 100.0)  # however slow this machine is
    graph, costs = in_parts(1, 24)
    steps = planning.Planning(graph, costs, clock=False)
    own = steps.arrays.peak(steps.order) - steps.arrays.persistent
    found = steps.within(steps.arrays.persistent + own * 70 // 100)
    assert found.overhead == pytest.approx(found.bound, rel=1e-3)
    assert bound_alone(steps.gates, own * 70 // 100)[0] < 0.98 * found.bound * found.base_seconds
    assert not raced
    steps.within(steps.arrays.persistent + own * 50 // 100)  # for which there is no such proof
    assert raced == [0, 1]
