"""Loops within a budget in bytes: published integers, brute force over all schedules, and plans replayed."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowtide.errors import BudgetError, UsageError
from lowtide.plan import loop
from lowtide.plan.classics.chain import Backward
from lowtide.plan.loop import LoopPlan, Sizes, plan_loop, usual
from lowtide.plan.settings import EXACT_LENGTH

SOME = settings(max_examples=150, derandomize=True, deadline=None)
Now = tuple[frozenset[int], frozenset[int], int, int]  # stored states, kept cells, the state at hand, the next backward


def nbytes(sizes: Sizes, stored: frozenset[int] | set[int], kept: frozenset[int] | set[int]) -> int:
    """What is held, state by state: the first one is there anyway."""
    found = sizes.internals * len(kept)
    for state in (stored | kept | {cell + 1 for cell in kept}) - {0}:
        after, before = state - 1 in kept, state in kept
        if state in stored:
            found += sizes.state
        elif after and before:
            found += sizes.between
        else:
            found += sizes.after * after + sizes.before * before
    return found


def replay(plan: LoopPlan) -> tuple[int, int]:
    """The forwards of a plan, and the most that it holds; fail where it does the impossible."""
    stored, kept = {0}, set[int]()
    running, waiting, forwards, most = 0, plan.length - 1, 0, 0
    for action in plan.actions:
        step = action.step
        if isinstance(action, Backward):
            assert step == waiting, "the gradient is somewhere else"
            kept.remove(step)
            stored.discard(step)
            running, waiting = -1, waiting - 1
        else:
            assert step == running or step in stored, "there is no state"
            assert step <= waiting, "its backward is done"
            assert step not in kept, "it is kept already"
            forwards, running = forwards + 1, step + 1
            if action.keep == "input":
                stored.add(step)
            elif action.keep == "internals":
                kept.add(step)
        most = max(most, nbytes(plan.sizes, stored, kept))
    assert waiting == -1, "the backward is not done"
    assert not kept
    return forwards, most


def fewest(length: int, sizes: Sizes, budget: int) -> int | None:
    """The fewest forwards by trying every move; what is stored is held until the backward of its cell."""
    start = (frozenset([0]), frozenset[int](), 0, length - 1)
    best, queue, count = {start: 0}, [(0, 0, start)], 0

    def moves(now: Now) -> Iterator[tuple[int, Now]]:
        stored, kept, running, waiting = now
        if waiting in kept:
            yield 0, (stored - {waiting}, kept - {waiting}, -1, waiting - 1)
        if 0 <= running <= waiting:
            yield 0, (stored | {running}, kept, running, waiting)
        for step in range(waiting + 1):
            if step == running or step in stored:
                yield 1, (stored, kept, step + 1, waiting)
                yield 1, (stored, kept | {step}, step + 1, waiting)

    while queue:
        cost, _, now = heapq.heappop(queue)
        if now[3] < 0:
            return cost
        if cost > best[now]:
            continue
        for more, after in moves(now):
            if nbytes(sizes, after[0], after[1]) <= budget and cost + more < best.get(after, 10**9):
                best[after] = cost + more
                count += 1
                heapq.heappush(queue, (cost + more, count, after))
    return None


@st.composite
def any_sizes(draw: st.DrawFn) -> Sizes:
    """Small sizes of every kind of cell: the state's leaves are saved before, after, on both sides, or not at all."""
    neither, first, second, both = (draw(st.integers(0, 2)) for _ in range(4))
    before, after = first + both, second + both
    state = max(1, neither + first + second + both)
    return Sizes(state, draw(st.integers(0, 4)) + before + after, before, after, first + second + both)


@SOME
@given(st.integers(1, 6), any_sizes(), st.integers(0, 24))
def test_no_schedule_has_fewer_forwards(length: int, sizes: Sizes, budget: int) -> None:
    expected = fewest(length, sizes, budget)
    if expected is None:
        with pytest.raises(BudgetError):
            plan_loop(length, sizes, budget)
        assert budget < sizes.least(length)
        return
    plan = plan_loop(length, sizes, budget)
    assert replay(plan) == (plan.forwards, plan.nbytes)
    assert plan.nbytes <= budget
    assert plan.forwards == expected


@SOME
@given(st.integers(1, 60), any_sizes(), st.integers(0, 200), st.integers(1, 1000))
def test_plans_keep_their_budget_and_run_back_in_order(length: int, sizes: Sizes, extra: int, scale: int) -> None:
    sizes = Sizes(*(scale * getattr(sizes, name) for name in ("state", "cell", "before", "after", "between")))
    plan = plan_loop(length, sizes, sizes.least(length) + extra)
    assert replay(plan) == (plan.forwards, plan.nbytes)
    assert plan.nbytes <= sizes.least(length) + extra


@pytest.mark.parametrize(
    ("length", "slots", "of_states", "of_internals"),
    [(1000, 10, 4636, 3640), (1000, 50, 2948, 1950), (1000, 100, 2898, 1900), (100, 8, 345, 248)],
)
def test_the_integers_of_gruslys(length: int, slots: int, of_states: int, of_internals: int) -> None:
    everything = Sizes(state=1, cell=1, before=0, after=1, between=1)  # what a cell saves is the state after it
    assert plan_loop(length, everything, slots).forwards == of_internals
    huge = 10**6  # only the cell at hand can be kept; the first state has a slot in the paper
    alone = Sizes(state=1, cell=huge, before=0, after=0, between=0)
    assert plan_loop(length, alone, huge + slots - 1).forwards == of_states


def test_mixed_slots_take_two_percent_of_the_memory_for_one_more_forward() -> None:
    plan = plan_loop(1000, Sizes(state=1, cell=5, before=0, after=1, between=1), 100)
    assert plan.forwards == 2028
    assert replay(plan)[0] == 2028


@pytest.mark.parametrize(("length", "part"), [(1100, 50), (2000, 200), (1999, 100)])
def test_long_loops_lose_little_to_their_blocks(monkeypatch: pytest.MonkeyPatch, length: int, part: int) -> None:
    sizes = usual(2, 7)
    plans = []
    for exact in (2000, 1000):
        monkeypatch.setattr(loop, "EXACT_LENGTH", exact)
        monkeypatch.setattr(loop, "TABLE_WORK", 1e9)
        plans.append(plan_loop.__wrapped__(length, sizes, sizes.plain(length) // part))
        loop._table.cache_clear()
    assert replay(plans[1]) == (plans[1].forwards, plans[1].nbytes)
    assert plans[1].nbytes <= sizes.plain(length) // part
    assert plans[0].forwards <= plans[1].forwards <= 1.01 * plans[0].forwards


def test_very_long_loops_are_planned_too() -> None:
    sizes = usual(2 * 65536, 7 * 65536)
    plan = plan_loop(10_000, sizes, sizes.plain(10_000) // 500)
    assert replay(plan) == (plan.forwards, plan.nbytes)
    assert plan.nbytes <= sizes.plain(10_000) // 500
    assert plan.forwards < 30_000


def test_long_loops_name_the_least_that_they_can_be_planned_with() -> None:
    sizes = usual(2, 7)
    with pytest.raises(BudgetError) as error:
        plan_loop(EXACT_LENGTH + 1, sizes, 8)
    assert error.value.least == 9
    assert plan_loop(EXACT_LENGTH + 1, sizes, 9).nbytes <= 9


def test_a_grid_wastes_little_of_a_large_budget() -> None:
    sizes = usual(2, 7)
    assert plan_loop(1000, sizes, sizes.plain(1000) // 2).forwards <= 1510  # half of the cells run a second time


def test_odd_sizes_lose_little_to_the_grid() -> None:
    even = plan_loop(1000, usual(2 * 65536, 7 * 65536), 140 * 65536)
    odd = plan_loop(1000, usual(2 * 65536 - 13, 7 * 65536 - 11), 140 * 65536 - 17)
    assert odd.nbytes <= 140 * 65536 - 17
    assert odd.forwards <= 1.02 * even.forwards


def test_more_bytes_never_mean_more_forwards() -> None:
    sizes = usual(2, 7)
    forwards = [plan_loop(40, sizes, budget).forwards for budget in range(7, 282)]
    assert forwards == sorted(forwards, reverse=True)
    assert forwards[0] == 40 * 41 // 2
    assert forwards[-1] == 40
    assert plan_loop(40, sizes).forwards == 40
    assert plan_loop(40, sizes).nbytes == sizes.plain(40)


def test_too_few_bytes_name_the_least_that_works() -> None:
    with pytest.raises(BudgetError, match="give at least 7 bytes") as error:
        plan_loop(40, usual(2, 7), 6)
    assert error.value.least == 7
    assert replay(plan_loop(40, usual(2, 7), 7)) == (820, 7)
    with pytest.raises(UsageError, match="0 time steps"):
        plan_loop(0, usual(2, 7), 7)
