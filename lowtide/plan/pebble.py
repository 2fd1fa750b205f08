"""One-shot pebbling: nothing runs twice; the order of the ops with the least peak.

Optimal on trees (Liu 1987, hills and valleys). Elsewhere some greedy orders, whose peaks are then lowered by solving
windows around the peak exactly, wider and wider until one is the whole order, which is then proven to be the best, or
has too many states. `least` says how far off the rest can be.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from lowtide.costs import declared
from lowtide.graph import Graph, Op, Output, Read, Value
from lowtide.plan.in_place import paired
from lowtide.plan.problem import Ints, Problem
from lowtide.plan.problem import problem as problem_of
from lowtide.plan.settings import LARGEST_IMPROVED, WINDOW_STATES, WINDOWS_IMPROVED

Key = Callable[[int, int, int], tuple[int, ...]]  # change in bytes, bytes needed, place in the start -> rank
Segment = tuple[int, int, list[int]]  # the most bytes in use in a stretch of ops, the bytes after it, the ops


def one_shot(problem: Problem, start: Ints, *, rounds: int = WINDOWS_IMPROVED, until: float = math.inf) -> Ints:
    """The ops of `start` in the order with the least peak that is found in so many windows or until the clock says."""
    board = Board(problem, start)
    order = by_tree(board)
    if order is None:
        orders = [list(range(len(board.ops))), least_change(board), free_first(board), by_need(board)]
        orders.sort(key=board.peak)
        if len(board.ops) <= LARGEST_IMPROVED:
            floor = least(board)
            for number, given in enumerate(orders):
                orders[number], proven = improve(board, given, floor=floor, rounds=rounds, until=until)
                if proven:
                    break
        order = min(orders, key=board.peak)
    return np.array([board.ops[number] for number in order], np.int64)


def pebble_game(needs: Sequence[Sequence[int]]) -> Problem:
    """A graph of unit values to pebble: node n takes a pebble while all of `needs[n]` have one; sinks keep theirs."""
    values = tuple(Value(f"node{node}", 1, "activation", node) for node in range(len(needs)))
    ops = tuple(Op(f"node{n}", "pebble", tuple(map(Read, row)), outputs=(n,)) for n, row in enumerate(needs))
    sinks = set(range(len(needs))).difference(*needs)
    graph = Graph(ops, values, (), tuple(Output(node, "result", (node,)) for node in sorted(sinks)))
    return problem_of(graph, declared(graph))


def pebbles(needs: Sequence[Sequence[int]]) -> int:
    """The pebbles that a graph needs when no node is pebbled twice and none slides."""
    game = pebble_game(needs)
    return game.peak(one_shot(game, np.arange(len(needs))))


class Board:
    """The ops of an order, numbered by their places in it, with what each waits for and what its step takes."""

    def __init__(self, problem: Problem, start: Ints) -> None:
        graph = problem.graph
        self.ops = [int(op) for op in start]
        place = {op: number for number, op in enumerate(self.ops)}
        self.bytes = problem.nbytes.tolist()
        self.required = problem.required.astype(bool).tolist()  # values that outlive the step
        reads = [problem.reads[problem.read_start[op] : problem.read_start[op + 1]].tolist() for op in self.ops]
        self.reads = [[value for value in row if problem.maker[value] >= 0] for row in reads]
        self.makes = [problem.makes[problem.make_start[op] : problem.make_start[op + 1]].tolist() for op in self.ops]
        self.pairs = [problem.over_rows[op] for op in self.ops]
        self.temporaries = problem.temporaries[self.ops].tolist()
        self.readers: list[list[int]] = [[] for _ in self.bytes]
        for number, row in enumerate(self.reads):
            for value in row:
                self.readers[value].append(number)
        self.keeps = [  # bytes that each op leaves behind for others
            sum(self.bytes[value] for value in row if self.readers[value] or self.required[value]) for row in self.makes
        ]
        self.before = [{place[other] for other in graph.waits[op] if other in place} for op in self.ops]
        self.after: list[list[int]] = [[] for _ in self.ops]
        for number, wait in enumerate(self.before):
            for other in wait:
                self.after[other].append(number)

    def profile(self, order: list[int]) -> tuple[list[int], list[int]]:
        """For each place of an order the bytes in use while the op runs, and those that are there before it."""
        left = [len(readers) for readers in self.readers]
        used, held = [], [0]
        for number in order:
            need, change = self.step(number, self.dying(number, left))
            used.append(held[-1] + need)
            held.append(held[-1] + change)
            for value in self.reads[number]:
                left[value] -= 1
        return used, held

    def peak(self, order: list[int]) -> int:
        """The most bytes in use."""
        return max(self.profile(order)[0], default=0)

    def dying(self, number: int, left: list[int]) -> list[int]:
        """The arguments that nobody needs after a run, given how many readers each value still has."""
        return [value for value in self.reads[number] if left[value] == 1 and not self.required[value]]

    def mortal(self, number: int) -> list[int]:
        """The arguments that can die in a run."""
        return [value for value in self.reads[number] if not self.required[value]]

    def step(self, number: int, dying: list[int]) -> tuple[int, int]:
        """The bytes that a run needs besides what is there, and how many more are there after it."""
        onto = dict(paired(self.pairs[number], dying))
        need = self.temporaries[number] + sum(self.bytes[value] for value in self.makes[number] if value not in onto)
        return need, self.keeps[number] - sum(self.bytes[value] for value in dying)


def greedy(board: Board, key: Key) -> list[int]:
    """Among the ops that may run, always the one of the least rank."""
    left = [len(readers) for readers in board.readers]
    missing = [len(before) for before in board.before]
    done = [False] * len(board.ops)
    order: list[int] = []

    def rank(number: int) -> tuple[int, ...]:
        need, change = board.step(number, board.dying(number, left))
        return (*key(change, need, number), number)

    heap = [rank(number) for number, count in enumerate(missing) if not count]
    heapq.heapify(heap)
    while heap:
        entry = heapq.heappop(heap)
        number = entry[-1]
        if done[number] or entry != rank(number):  # it has become better since, and is in the heap again
            continue
        done[number] = True
        order.append(number)
        better = []
        for value in board.reads[number]:
            left[value] -= 1
            if left[value] == 1:
                better += [other for other in board.readers[value] if not done[other] and not missing[other]]
        for other in board.after[number]:
            missing[other] -= 1
            if not missing[other]:
                better.append(other)
        for other in better:
            heapq.heappush(heap, rank(other))
    return order


def least_change(board: Board) -> list[int]:
    """The op that leaves the least bytes behind comes first."""
    return greedy(board, lambda change, need, number: (change, need, number))


def free_first(board: Board) -> list[int]:
    """The given order, but an op that adds no bytes runs as soon as it may."""
    return greedy(board, lambda change, need, number: (change > 0, number))


def by_need(board: Board) -> list[int]:
    """Depth first, of the arguments first the one that needs the most beyond what it leaves (Sethi and Ullman 1970)."""
    needs: list[int] = []  # of each op, were it the root of a tree
    keeps = board.keeps
    for number, before in enumerate(board.before):
        held = most = 0
        for other in sorted(before, key=lambda other: keeps[other] - needs[other]):
            most = max(most, held + needs[other])
            held += keeps[other]
        needs.append(max(most, held + board.step(number, board.mortal(number))[0]))
    order: list[int] = []
    done = [False] * len(board.ops)
    for root in range(len(board.ops)):
        stack = [] if board.after[root] else [root]
        while stack:
            number = stack[-1]
            waiting = [other for other in board.before[number] if not done[other]]
            if waiting:
                stack.append(max(waiting, key=lambda other: (needs[other] - keeps[other], -other)))
            else:
                stack.pop()
                if not done[number]:
                    done[number] = True
                    order.append(number)
    return order


def by_tree(board: Board) -> list[int] | None:
    """The best order of ops that form trees, each waited for by at most one other; None for other graphs.

    Each subtree is a row of segments with falling hills and rising valleys; rows are merged by hill minus valley.
    """
    if any(len(after) > 1 for after in board.after):
        return None
    rows: list[list[Segment]] = []
    for number, before in enumerate(board.before):
        row, held = _merge([rows[other] for other in before])
        need, change = board.step(number, board.mortal(number))
        row.append((held + need, held + change, [number]))
        rows.append(_fold(row))
    roots = [rows[number] for number, after in enumerate(board.after) if not after]
    return [number for _, _, numbers in _merge(roots)[0] for number in numbers]


def _merge(rows: list[list[Segment]]) -> tuple[list[Segment], int]:
    """Independent rows as one, and the bytes that are there after it."""
    steps = []
    for row in rows:
        base = 0
        for hill, valley, numbers in row:
            steps.append((hill - base, valley - base, numbers))
            base = valley
    steps.sort(key=lambda step: step[1] - step[0])
    held, merged = 0, []
    for hill, valley, numbers in steps:
        merged.append((held + hill, held + valley, numbers))
        held += valley
    return merged, held


def _fold(row: list[Segment]) -> list[Segment]:
    """The same row with falling hills and rising valleys."""
    folded: list[Segment] = []
    for hill, valley, numbers in row:
        while folded and (hill >= folded[-1][0] or valley <= folded[-1][1]):
            before = folded.pop()
            hill, numbers = max(hill, before[0]), [*before[2], *numbers]
        folded.append((hill, valley, numbers))
    return folded


def improve(
    board: Board, order: list[int], *, floor: int, rounds: int, until: float = math.inf
) -> tuple[list[int], bool]:
    """Reorder windows around the peak, as wide as it takes; an order, and whether no other has a lower peak."""
    order, reach = list(order), 8
    used, held = board.profile(order)
    for _ in range(rounds):
        peak = max(used, default=0)
        if peak <= floor:
            return order, True
        at = used.index(peak)
        low, high = max(0, at - reach), min(len(order), at + reach + 1)
        window, ended = downsets(board, order, low, high, held=held[low], most=peak, floor=floor)
        if window is not None:
            order[low:high] = window
            used, held = board.profile(order)
            reach = 8
        elif not ended or high - low == len(order):
            return order, ended
        else:
            reach *= 2
        if time.monotonic() > until:
            break
    return order, False


def downsets(
    board: Board,
    order: list[int],
    low: int,
    high: int,
    *,
    held: int,
    most: int,
    floor: int = 0,
    limit: int = WINDOW_STATES,
) -> tuple[list[int] | None, bool]:
    """A window of an order, with the least peak if that is below `most`, and whether the search came to its end.

    Shortest paths (Dijkstra 1959, for the largest instead of the sum) over the sets of ops that have run; `held` bytes
    are there before the window, and a peak below `floor` is as good as that.
    """
    window, later = order[low:high], set(order[high:])
    bit = {number: 1 << place for place, number in enumerate(window)}
    before = [sum(bit.get(other, 0) for other in board.before[number]) for number in window]
    after_it: list[list[int]] = [[] for _ in window]  # for each place those that wait for it
    for place, waits in enumerate(before):
        for other in _bits(waits):
            after_it[other].append(place)
    dying = [  # for each op the arguments that may die there, with their readers
        [
            (value, sum(bit.get(reader, 0) for reader in board.readers[value]))
            for value in board.mortal(number)
            if later.isdisjoint(board.readers[value])
        ]
        for number in window
    ]
    goal = (1 << len(window)) - 1
    came = {0: (floor, held, -1)}  # the ops that have run -> the least peak so far, the bytes there, the last op
    queue = [(floor, len(window), 0)]
    ready = {0: sum(1 << place for place, waits in enumerate(before) if not waits)}  # what may run next, once looked at
    while queue and len(ready) < limit:
        peak, left, done = heapq.heappop(queue)
        if done == goal:
            return [window[place] for place in _way_back(came, goal)], True
        if done:
            if done in ready:
                continue
            last = came[done][2]
            ready[done] = ready[done ^ 1 << last] ^ 1 << last
            ready[done] |= sum(1 << place for place in after_it[last] if not before[place] & ~done)
        steps = []
        for place in _bits(ready[done]):
            after = done | 1 << place
            need, change = board.step(window[place], [value for value, readers in dying[place] if not readers & ~after])
            used, there = came[done][1] + need, came[done][1] + change
            if used >= most:
                continue
            steps.append((max(peak, used), there, place))
            if used <= peak and change <= 0:  # nothing is gained by waiting
                del steps[:-1]
                break
        for used, there, place in steps:
            after = done | 1 << place
            if after not in came or used < came[after][0]:
                came[after] = (used, there, place)
                heapq.heappush(queue, (used, left - 1, after))
    return None, not queue


def _bits(mask: int) -> Iterator[int]:
    """The places of the ones in a number, from the lowest."""
    while mask:
        lowest = mask & -mask
        yield lowest.bit_length() - 1
        mask ^= lowest


def _way_back(came: dict[int, tuple[int, int, int]], done: int) -> list[int]:
    """The places of a window in the order in which they came to be done."""
    order = []
    while done:
        order.append(came[done][2])
        done ^= 1 << order[-1]
    return order[::-1]


def least(board: Board) -> int:
    """Bytes that no order can do without: at each op, what was made before it in every order and is read after it."""
    count = len(board.ops)
    earlier = np.zeros((count, (count + 7) // 8), np.uint8)  # for each op a bit for itself and each that it waits for
    for number, before in enumerate(board.before):
        for other in before:
            earlier[number] |= earlier[other]
        earlier[number, number // 8] |= 1 << number % 8
    later = np.zeros_like(earlier)
    for number in reversed(range(count)):
        for other in board.after[number]:
            later[number] |= later[other]
        later[number, number // 8] |= 1 << number % 8
    held = np.zeros(count, np.int64)
    maker = {value: number for number, made in enumerate(board.makes) for value in made}
    for value, number in maker.items():
        if board.bytes[value] and (board.readers[value] or board.required[value]):
            until = np.bitwise_or.reduce([earlier[other] for other in board.readers[value]] or [earlier[number]])
            there = later[number] if board.required[value] else later[number] & until
            held += np.int64(board.bytes[value]) * np.unpackbits(there, count=count, bitorder="little")
    for number in range(count):
        held[number] += board.step(number, board.mortal(number))[0] - board.keeps[number]
    return int(held.max(initial=0))
