"""Layout: the judge accepts every program with offsets; small arenas are the least there are, by CP-SAT."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import pairwise
from random import Random

import numpy as np
import pytest
from graphs import Case, cases
from hypothesis import given, settings
from hypothesis import strategies as st
from ortools.sat.python import cp_model

from lowtide.check import check
from lowtide.costs import ALIGNMENT, Costs, declared
from lowtide.graph import Graph, Input, Op, Output, Read, Value
from lowtide.plan.emit import emit
from lowtide.plan.layout import Buffers, first_fit, layout, pack, skyline
from lowtide.plan.order import captured_order
from lowtide.plan.problem import problem
from lowtide.program import Copy, Free, Program, Run
from lowtide.simulate import memory_states, simulate

MANY = settings(max_examples=400, derandomize=True, deadline=None)
SOME = settings(max_examples=100, derandomize=True, deadline=None)


# ------------------------------------------------------------------------------------------------------------- programs


@MANY
@given(cases(), st.integers(0, 1000))
def test_the_judge_accepts_every_program_with_offsets(case: Case, limit: int) -> None:
    for given_limit in (None, limit):
        laid = layout(case.graph, case.costs, case.program, limit=given_limit, steps=2000)
        peak = check(case.graph, case.costs, laid)
        assert peak == simulate(case.graph, case.costs, laid).peak
        for memory in memory_states(case.graph, case.costs, laid):
            assert laid.arena >= memory.in_arena + memory.temporaries - memory.temporaries_outside
        assert [type(row) for row in laid.instructions] == [type(row) for row in case.program.instructions]


@MANY
@given(cases())
def test_all_that_may_be_in_the_arena_is(case: Case) -> None:
    laid = layout(case.graph, case.costs, case.program, limit=10**9, steps=0)
    graph, nbytes = case.graph, case.costs.nbytes
    leaves = {v for v, value in enumerate(graph.values) if value.storage in graph.lasting_storages} | graph.required
    under = {read: made for row in laid.instructions if isinstance(row, Run) for made, read in row.over}
    for row in laid.instructions:
        if isinstance(row, Run) and laid.arena:
            makes = graph.makes_of(row.op, again=row.again)
            for value, offset in zip(makes, row.at, strict=False):
                if offset < 0 and nbytes[value]:
                    assert value in leaves or value in under or value in under.values()
            assert len(row.at) == len(makes) or row.at[-1] >= 0
        if isinstance(row, Copy) and row.to == "device" and row.at < 0 and nbytes[row.value]:
            assert row.value in leaves or row.value in under


@SOME
@given(cases(max_size=25))
def test_a_seed_gives_the_same_offsets(case: Case) -> None:
    one, other = (layout(case.graph, case.costs, case.program, steps=3000, seed=7) for _ in range(2))
    assert one == other


def test_no_time_gives_an_answer_at_once() -> None:
    buffers = dissection(Random(5), 60)
    begun = time.monotonic()
    offsets = pack(buffers, until=begun)
    assert_apart(buffers, offsets)
    assert time.monotonic() - begun < 1


def step_with_gradients(layers: int, nbytes: int) -> tuple[Graph, Costs]:
    """A step that drops the gradients that it finds, and leaves new ones, as large as all activations."""
    values: list[Value] = []
    ops: list[Op] = []

    def value(name: str, kind: str) -> int:
        values.append(Value(name, nbytes, kind, len(values), shape=(nbytes // 4,), stride=(1,)))  # type: ignore[arg-type]
        return len(values) - 1

    def op(name: str, reads: list[int], makes: int) -> int:
        ops.append(Op(name, f"made.up.{name}", tuple(map(Read, reads)), outputs=(makes,)))
        return makes

    batch = value("x", "batch")
    weights = [value(f"w{k}", "parameter") for k in range(layers)]
    old = [value(f"g{k}", "gradient") for k in range(layers)]
    kept = [batch]
    for k in range(layers):
        kept.append(op(f"forward{k}", [kept[-1], weights[k]], value(f"a{k}", "activation")))
    back, new = op("loss", [kept[-1]], value("d", "activation gradient")), []
    for k in reversed(range(layers)):
        new.append(op(f"gradient{k}", [kept[k], back], value(f"n{k}", "gradient")))
        back = op(f"backward{k}", [back, kept[k + 1], weights[k]], value(f"d{k}", "activation gradient"))
    inputs = [Input(v, (v,)) for v in (batch, *weights)] + [Input(v, (v,), persistent=False) for v in old]
    outputs = tuple(Output(v, "gradient", (v,)) for v in new)
    graph = Graph(tuple(ops), tuple(values), tuple(inputs), outputs)
    return graph, declared(graph)


def test_activations_move_out_to_where_gradients_will_be() -> None:
    graph, costs = step_with_gradients(layers=12, nbytes=1024)
    program = emit(problem(graph, costs), captured_order(graph))
    dropped = tuple(Free(item.value) for item in graph.inputs if not item.persistent)
    program = Program(program.graph, dropped + program.instructions)
    live = check(graph, costs, program)
    for limit in (live, None):
        assert check(graph, costs, layout(graph, costs, program, limit=limit)) <= 1.01 * live
    assert check(graph, costs, layout(graph, costs, program, limit=live), budget=live) == live
    apart = check(graph, costs, layout(graph, costs, program, limit=2 * live))
    assert 1.3 * live < apart <= 2 * live


# -------------------------------------------------------------------------------------------------------------- packing


def some_buffers(random: Random, number: int, times: int) -> Buffers:
    """Buffers of random lives; several have equal sizes."""
    rows = []
    for _ in range(number):
        first = random.randrange(times)
        rows.append((first, random.randint(first + 1, times), ALIGNMENT * random.choice((1, 1, 2, 3, 4, 7))))
    return Buffers(*np.array(rows, np.int64).reshape(-1, 3).T.copy())


def dissection(random: Random, number: int) -> Buffers:
    """A block of 64 x 4096 times and aligned bytes, cut into so many: there is no hole in the best arena."""
    pieces = [(0, 64, 0, 4096)]
    while len(pieces) < number:
        pieces.sort(key=lambda piece: (piece[1] - piece[0]) * (piece[3] - piece[2]))
        first, last, low, high = pieces.pop()
        if random.random() < 0.5 and last - first > 1:
            cut = random.randint(first + 1, last - 1)
            pieces += [(first, cut, low, high), (cut, last, low, high)]
        elif high - low > 1:
            cut = random.randint(low + 1, high - 1)
            pieces += [(first, last, low, cut), (first, last, cut, high)]
        else:
            pieces.append((first, last, low, high))
    random.shuffle(pieces)
    rows = [(first, last, ALIGNMENT * (high - low)) for first, last, low, high in pieces]
    return Buffers(*np.array(rows, np.int64).T.copy())


def assert_apart(buffers: Buffers, offsets: np.ndarray) -> None:
    """All have an offset, and no two that are there together overlap."""
    assert (offsets >= 0).all()
    assert not (offsets % ALIGNMENT).any()
    for now in range(int(buffers.last.max(initial=0))):
        there = np.flatnonzero((buffers.first <= now) & (now < buffers.last))
        spans = sorted((int(offsets[k]), int(offsets[k] + buffers.nbytes[k])) for k in there)
        assert all(one[1] <= other[0] for one, other in pairwise(spans)), (now, spans)


def least_arena(buffers: Buffers) -> int:
    """The fewest bytes that hold them all, proven by CP-SAT."""
    model = cp_model.CpModel()
    high = int(buffers.nbytes.sum()) // ALIGNMENT
    top = model.new_int_var(0, high, "top")
    times, spans = [], []
    for first, last, nbytes in zip(buffers.first, buffers.last, buffers.nbytes, strict=True):
        size = int(nbytes) // ALIGNMENT
        offset = model.new_int_var(0, high - size, "")
        times.append(model.new_fixed_size_interval_var(int(first), int(last - first), ""))
        spans.append(model.new_fixed_size_interval_var(offset, size, ""))
        model.add(offset + size <= top)
    model.add_no_overlap_2d(times, spans)
    model.minimize(top)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    assert solver.solve(model) == cp_model.OPTIMAL
    return round(solver.objective_value) * ALIGNMENT


@SOME
@given(st.integers(0, 12), st.integers(1, 10), st.integers(0, 2**32))
def test_small_arenas_are_the_least_there_are(number: int, times: int, seed: int) -> None:
    buffers = some_buffers(Random(seed), number, times)
    offsets = pack(buffers)
    assert_apart(buffers, offsets)
    assert buffers.top(offsets) == least_arena(buffers)


@SOME
@given(st.integers(0, 60), st.integers(1, 30), st.integers(0, 2**32))
def test_larger_arenas_are_never_below_the_live_bytes(number: int, times: int, seed: int) -> None:
    buffers = some_buffers(Random(seed), number, times)
    offsets = pack(buffers, steps=20_000)
    assert_apart(buffers, offsets)
    live = max((int(buffers.nbytes[(buffers.first <= t) & (t < buffers.last)].sum()) for t in range(times)), default=0)
    assert buffers.live == live
    assert live <= buffers.top(offsets) <= 1.05 * live


@pytest.mark.parametrize("seed", range(5))
def test_what_can_be_packed_without_a_hole_is(seed: int) -> None:
    buffers = dissection(Random(seed), 40)
    assert buffers.live == 4096 * ALIGNMENT
    assert buffers.top(pack(buffers)) == buffers.live


def test_enough_is_enough() -> None:
    buffers = dissection(Random(3), 300)
    enough = buffers.top(first_fit(buffers, np.lexsort((buffers.first, -buffers.nbytes)))) - ALIGNMENT
    offsets = pack(buffers, enough=enough)
    assert_apart(buffers, offsets)
    assert buffers.top(offsets) <= enough


# ------------------------------------------------------------------------------ the compiled loops, and in plain Python


def plain_first_fit(buffers: Buffers, order: list[int], offsets: list[int]) -> list[int]:
    """The lowest multiple of the alignment at which a buffer meets none that is there with it."""
    for box in order:
        others = [
            (offsets[k], offsets[k] + int(buffers.nbytes[k]))
            for k in range(len(offsets))
            if offsets[k] >= 0 and buffers.first[k] < buffers.last[box] and buffers.first[box] < buffers.last[k]
        ]
        low = 0
        while any(start < low + buffers.nbytes[box] and low < end for start, end in others):
            low += ALIGNMENT
        offsets[box] = low
    return offsets


@SOME
@given(st.integers(1, 40), st.integers(1, 300), st.integers(0, 2**32))
def test_first_fit_is_the_lowest_fit(number: int, times: int, seed: int) -> None:
    buffers = some_buffers(Random(seed), number, times)
    order = list(range(number))
    Random(seed).shuffle(order)
    half = number // 2
    expected = plain_first_fit(buffers, order[:half], [-1] * number)
    given_some = np.array(expected, np.int64)
    assert first_fit(buffers, np.array(order[:half], np.int64)).tolist() == expected
    expected = plain_first_fit(buffers, order[half:], expected)
    assert first_fit(buffers, np.array(order[half:], np.int64), given_some).tolist() == expected


class Enough(Exception):
    """No steps are left."""


class PlainSkyline:
    """The search of layout.cpp, without its bookkeeping."""

    def __init__(self, buffers: Buffers, height: int, weight: list[float], blamed: list[int], steps: int) -> None:
        rows = zip(buffers.first.tolist(), buffers.last.tolist(), buffers.nbytes.tolist(), strict=True)
        self.boxes = list(rows)
        self.height, self.weight, self.blamed, self.steps = height, weight, blamed, steps
        self.offsets = [-1] * len(self.boxes)
        self.tops = [0] * int(buffers.last.max(initial=0))

    def run(self) -> int:
        """1, 0 or -1 as in `skyline`."""
        try:
            return 1 if self.search() else -1
        except Enough:
            return 0

    def waiting(self, when: int) -> list[int]:
        """The boxes that are still to come at a time."""
        if not 0 <= when < len(self.tops):
            return []
        return [k for k, (a, b, _) in enumerate(self.boxes) if a <= when < b and self.offsets[k] < 0]

    def wall(self, when: int) -> float:
        return self.tops[when] if self.waiting(when) else float("inf")

    def valleys(self) -> Iterator[tuple[int, int]]:
        """Width and first time of each run of equal height between higher ones."""
        busy = [t for t in range(len(self.tops)) if self.waiting(t)]
        for left in busy:
            right = left
            while right + 1 in busy and self.tops[right + 1] == self.tops[left]:
                right += 1
            if self.wall(left - 1) > self.tops[left] < self.wall(right + 1):
                yield right + 1 - left, left

    def spend(self) -> None:
        if self.steps == 0:
            raise Enough
        self.steps -= 1

    def search(self) -> bool:
        if min(self.offsets, default=0) >= 0:
            return True
        width, left = min(self.valleys())
        right, floor = left + width, self.tops[left]
        inside = [k for k, (a, b, _) in enumerate(self.boxes) if left <= a and b <= right and self.offsets[k] < 0]
        inside.sort(key=lambda k: self.boxes[k][0])

        def covering(when: int) -> list[int]:
            return [k for k in inside if self.boxes[k][0] <= when < self.boxes[k][1]]

        def to_come(when: int) -> int:
            return sum(self.boxes[k][2] for k in self.waiting(when))

        when = min(range(left, right), key=lambda t: (-to_come(t), len(covering(t))))
        choices = sorted(covering(when), key=lambda k: -self.weight[k] * (1 + self.blamed[k]))
        tried = set()
        for box in choices:
            if self.boxes[box] in tried:
                continue
            tried.add(self.boxes[box])
            self.spend()
            if self.with_box(box, floor):
                return True
        hole = range(when, when + 1)
        wall = min(self.wall(left - 1), self.wall(right))
        if choices:
            wall = min([wall, *(floor + self.boxes[k][2] for k in inside if k not in choices)])
        else:
            while hole.start > left and not covering(hole.start - 1):
                hole = range(hole.start - 1, hole.stop)
            while hole.stop < right and not covering(hole.stop):
                hole = range(hole.start, hole.stop + 1)
        if any(wall + to_come(t) > self.height for t in hole):
            for box in [] if choices else self.waiting(when):
                self.blamed[box] += 1
            return False
        self.spend()
        return self.with_tops(hole, int(wall), floor)

    def with_box(self, box: int, floor: int) -> bool:
        first, last, nbytes = self.boxes[box]
        self.offsets[box] = floor
        if self.with_tops(range(first, last), floor + nbytes, floor):
            return True
        self.offsets[box] = -1
        return False

    def with_tops(self, where: range, top: int, before: int) -> bool:
        for when in where:
            self.tops[when] = top
        if self.search():
            return True
        for when in where:
            self.tops[when] = before
        return False


@MANY
@given(st.integers(0, 25), st.integers(1, 20), st.integers(0, 2**32), st.integers(0, 150))
def test_the_compiled_search_takes_the_steps_of_the_plain_one(number: int, times: int, seed: int, steps: int) -> None:
    random = Random(seed)
    buffers = some_buffers(random, number, times).only(np.arange(number))
    height = buffers.live + random.choice((0, 0, 0, 1, 2)) * ALIGNMENT
    weight = [random.choice((1.0, 2.0, random.random())) for _ in range(number)]
    blamed, compiled = [0] * number, np.zeros(number, np.int64)
    plain = PlainSkyline(buffers, height, weight, blamed, steps)
    expected = plain.run()
    state, offsets = skyline(buffers, height, np.array(weight), compiled, steps=steps)
    assert (state, compiled.tolist()) == (expected, blamed)
    if state == 1:
        assert offsets.tolist() == plain.offsets
        assert_apart(buffers, offsets)
        assert buffers.top(offsets) <= height


@SOME
@given(st.integers(1, 30), st.integers(1, 60), st.integers(0, 2**32))
def test_fewer_times_tell_the_same(number: int, times: int, seed: int) -> None:
    buffers = some_buffers(Random(seed), number, times)
    fewer = buffers.only(np.arange(number))
    assert (fewer.first < fewer.last).all()
    for k in range(number):
        for other in range(number):
            meet = buffers.first[k] < buffers.last[other] and buffers.first[other] < buffers.last[k]
            assert meet == (fewer.first[k] < fewer.last[other] and fewer.first[other] < fewer.last[k])
