"""The chains in plain numbers: published integers, brute force over all schedules, and schedules replayed."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from math import inf
from typing import TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowtide.plan.classics import chen
from lowtide.plan.classics.chain import Action, Backward, Gruslys, hidden, internal, mixed, revolve, revolve_forwards
from lowtide.plan.classics.rotor import Rotor, plain_chain

SOME = settings(max_examples=120, derandomize=True, deadline=None)

Item = tuple[str, int]  # ("state", i) or ("internals", i)
Held = frozenset[Item]
State = TypeVar("State", bound=Hashable)


# ------------------------------------------------------------------------------------------------- schedules, replayed


def replay(steps: int, schedule: list[Action]) -> tuple[list[int], list[Held]]:
    """The steps that a schedule runs, and what it holds after each action; fail where it does the impossible."""
    held: set[Item] = {("state", 0)}
    running, waiting = 0, steps - 1
    run: list[int] = []
    trace: list[Held] = []
    for action in schedule:
        step = action.step
        if isinstance(action, Backward):
            assert step == waiting, "the gradient is somewhere else"
            assert ("internals", step) in held, "the backward has no internals"
            held -= {("internals", step), ("state", step)}
            running, waiting = -1, waiting - 1
        else:
            assert step <= waiting, "its backward is done"
            assert step == running or held & {("state", step), ("internals", step - 1)}, "there is no state"
            run.append(step)
            running = step + 1
            held |= {("state", step)} if action.keep == "input" else set()
            held |= {("internals", step)} if action.keep == "internals" else set()
        trace.append(frozenset(held))
    assert waiting == -1, "the backward is not done"
    return run, trace


def slots(held: Held, *, state: int, internals: int, first: int = 0) -> int:
    """The slots that are taken; internals bring their own two states with them, and the first state takes `first`."""
    kept = {step for kind, step in held if kind == "internals"}
    states = {step for kind, step in held if kind == "state"}
    if kept:
        states -= kept | {step + 1 for step in kept}
    return first * (0 in states) + state * len(states - {0}) + internals * len(kept)


def most_slots(trace: list[Held], *, state: int, internals: int, first: int = 0) -> int:
    return max(slots(held, state=state, internals=internals, first=first) for held in trace)


# --------------------------------------------------------------------------------------------------------- brute force


def least(
    start: State, moves: Callable[[State], Iterator[tuple[float, State]]], done: Callable[[State], bool]
) -> float:
    """The cheapest way from `start` to a state that is done, by trying every move (Dijkstra)."""
    best: dict[State, float] = {start: 0.0}
    queue: list[tuple[float, int, State]] = [(0.0, 0, start)]
    while queue:
        cost, _, state = heapq.heappop(queue)
        if done(state):
            return cost
        if cost > best[state]:
            continue
        for more, after in moves(state):
            if cost + more < best.get(after, inf):
                best[after] = cost + more
                heapq.heappush(queue, (cost + more, len(best) * 1000 + len(queue), after))
    return inf


def least_forwards(steps: int, room: int, *, state: int | None, internals: int | None) -> float:
    """The fewest forwards of any schedule: anything may be kept where there is room, and dropped at any time."""
    first = 1 if internals is None else 0

    def fits(held: Held) -> bool:
        return slots(held, state=state or 0, internals=internals or 0, first=first) <= room

    def moves(now: tuple[Held, int, int]) -> Iterator[tuple[float, tuple[Held, int, int]]]:
        held, running, waiting = now
        for item in held:
            yield 0, (held - {item}, running, waiting)
        if state is not None and 0 <= running < steps and fits(held | {("state", running)}):
            yield 0, (held | {("state", running)}, running, waiting)
        if ("internals", waiting) in held:
            yield 0, (held - {("internals", waiting)}, -1, waiting - 1)
        for step in range(waiting + 1):
            free = step == 0 and not first
            if not (free or step == running or held & {("state", step), ("internals", step - 1)}):
                continue
            yield 1, (held, step + 1, waiting)
            if internals is None and step == waiting:  # the internals of the step at hand need no slot
                yield 1, (held, -1, waiting - 1)
            if internals is not None and fits(held | {("internals", step)}):
                yield 1, (held | {("internals", step)}, step + 1, waiting)

    begin = (frozenset([("state", 0)]) if first else frozenset[Item](), -1, steps - 1)
    return least(begin, moves, lambda now: now[2] < 0) if fits(begin[0]) else inf


# ------------------------------------------------------------------------------------------------------ equal steps


@pytest.mark.parametrize(
    ("count", "of_states", "of_internals"), [(10, 4636, 3640), (50, 2948, 1950), (100, 2898, 1900)]
)
def test_the_integers_of_gruslys(count: int, of_states: int, of_internals: int) -> None:
    assert hidden(1000, count).forwards(count) == of_states == revolve_forwards(1000, count)
    assert internal(1000, count).forwards(count) == of_internals
    assert len(replay(1000, revolve(1000, count))[0]) == of_states


def test_a_hundred_steps_with_eight_slots() -> None:
    assert hidden(100, 8).forwards(8) == revolve_forwards(100, 8) == 345
    assert internal(100, 8).forwards(8) == 248


def test_mixed_slots_take_two_percent_of_the_memory_for_one_more_forward() -> None:
    table = mixed(1000, 100, 5)
    assert table.forwards(100) == 2028
    schedule = table.schedule(100)
    assert schedule is not None
    run, trace = replay(1000, schedule)
    assert len(run) == 2028
    assert most_slots(trace, state=1, internals=5) <= 100


@SOME
@given(st.integers(1, 60), st.integers(1, 9))
def test_revolve_keeps_its_closed_form_and_its_slots(steps: int, count: int) -> None:
    run, trace = replay(steps, revolve(steps, count))
    assert len(run) == revolve_forwards(steps, count) == hidden(steps, count).forwards(count)
    assert most_slots(trace, state=1, internals=0, first=1) <= count


@SOME
@given(st.integers(1, 40), st.integers(1, 12), st.sampled_from([(1, None), (None, 1), (1, 2), (1, 5), (2, 3)]))
def test_schedules_keep_what_their_table_says(steps: int, count: int, prices: tuple[int | None, int | None]) -> None:
    table = Gruslys(steps, count, state=prices[0], internals=prices[1])
    schedule = table.schedule(count)
    if schedule is None:
        assert table.forwards(count) == inf
        return
    run, trace = replay(steps, schedule)
    assert len(run) == table.forwards(count)
    assert most_slots(trace, state=prices[0] or 0, internals=prices[1] or 0, first=prices[1] is None) <= count


@pytest.mark.parametrize("steps", range(1, 6))
@pytest.mark.parametrize("prices", [(1, None), (None, 1), (1, 2), (1, 3)])
def test_no_schedule_has_fewer_forwards(steps: int, prices: tuple[int | None, int | None]) -> None:
    table = Gruslys(steps, 7, state=prices[0], internals=prices[1])
    for count in range(1, 8):
        assert table.forwards(count) == least_forwards(steps, count, state=prices[0], internals=prices[1])


# ---------------------------------------------------------------------------------------------------- unequal stages


@dataclass(frozen=True)
class Stages:
    """A chain of the paper in whole numbers."""

    seconds: tuple[int, ...]
    output: tuple[int, ...]
    internals: tuple[int, ...]  # what is saved beyond the output
    forward_temporaries: tuple[int, ...]
    backward_temporaries: tuple[int, ...]

    def saved(self, stage: int) -> int:
        return self.output[stage] + self.internals[stage]

    def entering(self, stage: int) -> int:
        return self.output[stage - 1] if stage > 0 else 0

    def size(self, held: Held, running: int, waiting: int) -> int:
        """The memory between two actions: what is held, the running state, and the gradient."""
        total = self.output[waiting] if waiting >= 0 else 0
        internals = {step for kind, step in held if kind == "internals"}
        states = {step for kind, step in held if kind == "state"} | {running}
        states -= {step + 1 for step in internals}
        return total + sum(map(self.saved, internals)) + sum(self.entering(state) for state in states if state >= 0)

    def rotor(self, memory: int) -> Rotor:
        saved = [self.saved(stage) for stage in range(len(self.seconds))]
        return Rotor(
            plain_chain(self.seconds, self.output, saved, self.forward_temporaries, self.backward_temporaries), memory
        )


def stages(longest: int) -> st.SearchStrategy[Stages]:
    def build(rows: list[tuple[int, int, int, int, int]]) -> Stages:
        return Stages(*zip(*rows, strict=True))

    row = st.tuples(st.integers(1, 5), st.integers(1, 4), st.integers(0, 4), st.integers(0, 2), st.integers(0, 2))
    return st.lists(row, min_size=1, max_size=longest).map(build)


def least_seconds(chain: Stages, memory: int) -> float:
    """The least seconds of any persistent schedule: what is kept stays until its backward."""
    last = len(chain.seconds) - 1

    def moves(now: tuple[Held, int, int]) -> Iterator[tuple[float, tuple[Held, int, int]]]:
        held, running, waiting = now
        if running >= 0:
            yield 0, (held, -1, waiting)
        backward = chain.size(held, -1, waiting) + chain.entering(waiting) + chain.backward_temporaries[waiting]
        if running < 0 and ("internals", waiting) in held and backward <= memory:
            yield 0, (held - {("internals", waiting), ("state", waiting)}, -1, waiting - 1)
        for step in range(waiting + 1):
            there = step == running or (running < 0 and held & {("state", step), ("internals", step - 1)})
            if not there or ("internals", step) in held:
                continue
            during = chain.size(held, step, waiting) + chain.forward_temporaries[step]
            after = -1 if step == last else step + 1
            if during + chain.output[step] <= memory:
                yield chain.seconds[step], (held, after, waiting)
                yield chain.seconds[step], (held | {("state", step)}, after, waiting)
            if during + chain.saved(step) <= memory:
                yield chain.seconds[step], (held | {("state", step), ("internals", step)}, after, waiting)

    return least((frozenset([("state", 0)]), -1, last), moves, lambda now: now[2] < 0)


@settings(max_examples=60, derandomize=True, deadline=None)
@given(stages(4))
def test_rotor_is_the_optimum_of_persistent_schedules(chain: Stages) -> None:
    most = 2 * sum(map(chain.saved, range(len(chain.seconds)))) + 8
    table = chain.rotor(most)
    for memory in range(2, most, 3):
        assert table.seconds(memory) == least_seconds(chain, memory)


@SOME
@given(stages(12), st.floats(0.2, 1.0))
def test_rotor_schedules_keep_their_memory_and_their_seconds(chain: Stages, part: float) -> None:
    memory = int(part * sum(map(chain.saved, range(len(chain.seconds))))) + 6
    table = chain.rotor(memory)
    schedule = table.schedule()
    if schedule is None:
        assert table.seconds() == inf
        return
    run, trace = replay(len(chain.seconds), schedule)
    assert sum(chain.seconds[step] for step in run) == table.seconds()
    waiting, before = len(chain.seconds) - 1, frozenset([("state", 0)])
    for action, kept in zip(schedule, trace, strict=True):
        step = action.step
        after = kept | {("state", number) for kind, number in kept if kind == "internals"}
        if isinstance(action, Backward):
            used = chain.size(before, -1, waiting) + chain.entering(step) + chain.backward_temporaries[step]
            waiting -= 1
        else:
            makes = chain.saved(step) if action.keep == "internals" else chain.output[step]
            used = chain.size(before, step, waiting) + makes + chain.forward_temporaries[step]
        assert used <= memory
        before = after


def test_rotor_keeps_everything_where_it_can_and_says_where_nothing_fits() -> None:
    chain = plain_chain([1] * 5, [1] * 5, [3] * 5)
    assert Rotor(chain, 40).seconds() == 5
    assert Rotor(chain, 2).schedule() is None


# ---------------------------------------------------------------------------------------------------------------- Chen


@pytest.mark.parametrize("steps", [1, 2, 9, 100, 300])
def test_chen_needs_two_square_roots_and_at_most_one_more_forward(steps: int) -> None:
    run, trace = replay(steps, chen.square_root(steps))
    assert len(run) <= 2 * steps
    assert most_slots(trace, state=1, internals=1) <= 2 * steps**0.5 + 1


@pytest.mark.parametrize("kept", [1, 2, 5])
def test_the_recursion_needs_logarithmic_memory(kept: int) -> None:
    for levels in range(1, 5):
        steps = (kept + 1) ** levels
        run, trace = replay(steps, chen.recursive(steps, kept))
        assert most_slots(trace, state=1, internals=1) <= kept * levels + 1
        assert len(run) <= steps * (levels + 1)


@SOME
@given(st.lists(st.integers(0, 9), min_size=1, max_size=30), st.integers(0, 40))
def test_groups_close_when_they_are_full(sizes: list[int], limit: int) -> None:
    starts = chen.by_bytes(sizes, limit)
    replay(len(sizes), chen.grouped(len(sizes), starts))
    for begin, end in zip(starts, [*starts[1:], len(sizes)], strict=True):
        assert sum(sizes[begin : end - 1]) <= limit
