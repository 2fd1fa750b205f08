"""Chains of tanh (Chen et al. 2016): a hundred nodes, a thousand, and memory against length."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from lowtide.bench.classics.claim import Figure, Found, show, yes
from lowtide.bench.classics.duel import duel
from lowtide.capture import capture
from lowtide.errors import BudgetError, LowtideError
from lowtide.graph import Graph
from lowtide.measure import roofline
from lowtide.models import build
from lowtide.plan import TIME_LIMIT, plan
from lowtide.plan.classics import chen
from lowtide.plan.classics.chain import Action, Forward, revolve_forwards
from lowtide.plan.problem import Ints, Problem, problem

NODE = 10**6  # bytes
ROOM = {100: 20 * NODE, 1000: 30 * NODE}  # nodes -> bytes of the whole step
LENGTHS = (10, 30, 100, 300, 1000, 3000, 10_000)
ROUNDS = 7
MORE = 4  # nodes beside the slots: the one that is made, its gradient, and what the ends of the chain need
TRIES = 4  # budgets at most, of which the last is as large as what lowtide is held against
PATIENCE = 600.0  # seconds for all plans of one length
KEEP = "nothing twice"
WAYS = {"sqrt (Chen)": "lowtide in sqrt's time", "recursion (Chen)": "lowtide in the recursion's time"}
SCHEDULES: dict[str, Callable[[int], list[Action]]] = {
    "sqrt (Chen)": chen.square_root,
    "recursion (Chen)": lambda length: chen.recursive(length, 1),
}


def chain(length: int, nbytes: int = NODE) -> str:
    """The target with nodes of so many bytes."""
    return f"tanh-chain:length={length},width={nbytes // 1000},batch=250"


def tanh(small: bool) -> Found:
    """Train chains of 1 MB nodes in memory for twenty and thirty of them."""
    rooms = {20: 9 * 10**4} if small else ROOM
    figures: list[Figure] = []
    for length, room in rooms.items():
        found = duel(
            chain(length, 10**4 if small else NODE),
            lambda _, room=room: room,  # type: ignore[misc]
            rounds=1 if small else ROUNDS,
            time_limit=TIME_LIMIT / 10 if small else TIME_LIMIT,
        )
        name, published = f"{length:,} nodes", "20 to 21 MB, one more forward" if length == 100 else ""
        figures += [
            Figure(f"{name}: metered peak of the whole step", found.lowtide.peak, "bytes", published, most=room),
            Figure(f"{name}: eager's", found.eager.peak, "bytes"),
            yes(f"{name}: all that 5 steps change is eager's, bit for bit", found.equal),
            Figure(f"{name}: time, of eager's", found.time_ratio, "time"),
            Figure(f"{name}: planned overhead", found.overhead, "overhead"),
        ]
    return Found(tuple(figures))


# ------------------------------------------------------------------------------------------- memory against length


@dataclass(frozen=True)
class Point:
    """One way to train a chain of one length."""

    way: str
    length: int  # nodes
    own: int  # bytes of the step's own part
    overhead: float  # as a fraction of the step without recomputation
    planning_seconds: float  # 0: a schedule in closed form


def lengths(small: bool) -> Found:
    """Memory against length for Chen's two schedules, and for lowtide with no more time than each takes."""
    chosen = (10, 50) if small else LENGTHS
    limit = TIME_LIMIT / 10 if small else TIME_LIMIT
    figures = []
    series: dict[str, list[int | None]] = {way: [] for way in (KEEP, *WAYS, *WAYS.values())}
    for length in chosen:
        chain_of = Chain(length)
        series[KEEP].append(chain_of.kept.own)
        for theirs, ours in WAYS.items():
            other, mine = chain_of.by_chen(theirs), planned_apart(length, theirs, limit)
            series[theirs].append(other.own)
            series[ours].append(None if mine is None else mine.own)
            figures += _held(other, mine)
    return Found(tuple(figures), {"lengths": list(chosen), "series": series})


def _held(other: Point, mine: Point | None) -> list[Figure]:
    """Lowtide's point against Chen's."""
    name = f"{other.length:,} nodes, in the time of {other.way.partition(' ')[0]}"
    published = f"{other.own / NODE:.0f} MB at {other.overhead:+.0%}"
    if mine is None:
        return [yes(f"{name}: planned within {show(PATIENCE, 'seconds')}", False, published)]
    return [
        Figure(name, mine.own, "bytes", published, most=other.own),
        Figure("  its overhead", mine.overhead, "overhead", published, most=other.overhead),
        Figure("  planned in", mine.planning_seconds, "seconds"),
    ]


class Chain:
    """A chain of one length, with roofline costs."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.graph = capture(*build(chain(length))).graph
        self.costs = roofline(self.graph)
        self.arrays, self.persistent = problem(self.graph, self.costs), self.costs.persistent(self.graph)
        self.keep = plan(self.graph, self.costs)

    @property
    def kept(self) -> Point:
        """What nothing but order and sharing need."""
        return Point(KEEP, self.length, self.keep.peak - self.persistent, 0.0, self.keep.planning_seconds)

    def by_chen(self, way: str) -> Point:
        """What one of Chen's schedules needs."""
        sequence = replay(self.graph, self.arrays, SCHEDULES[way](self.length))
        overhead = self.arrays.time(sequence) / self.keep.base_seconds - 1
        return Point(way, self.length, self.arrays.peak(sequence) - self.persistent, overhead, 0.0)

    def by_lowtide(self, theirs: str, time_limit: float) -> Point:
        """Lowtide with the slots with which Revolve needs no more forwards; it is told nothing of that but the bytes.

        Where its plan takes longer, or there is none, it gets more, in a few steps up to what theirs has.
        """
        other, node, length = self.by_chen(theirs), max(self.costs.nbytes), self.length
        forwards = sum(isinstance(action, Forward) for action in SCHEDULES[theirs](length))
        slots = next(slots for slots in range(1, length + 1) if revolve_forwards(length, slots) - length <= forwards)
        low = min((slots + MORE) * node, other.own)
        best, seconds = None, 0.0
        for own in sorted({low + (other.own - low) * number // (TRIES - 1) for number in range(TRIES)}):
            try:
                found = plan(self.graph, self.costs, self.persistent + own, time_limit=time_limit)
            except BudgetError:
                continue
            seconds = max(seconds, found.planning_seconds)
            best = Point(WAYS[theirs], length, found.peak - self.persistent, found.overhead, seconds)
            if found.overhead <= other.overhead:
                break
        if best is None:
            raise BudgetError(f"no plan for a chain of {length:,} nodes within {self.persistent + other.own:,} bytes.")
        return best


def planned_apart(length: int, theirs: str, time_limit: float, *, patience: float = PATIENCE) -> Point | None:
    """What lowtide finds in a process of its own; None where that takes too long."""
    script = "from lowtide.bench.classics import chain; chain.main()"
    command = [sys.executable, "-c", script, str(length), theirs, str(time_limit)]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=patience, check=False)
    except subprocess.TimeoutExpired:
        return None
    if ended.returncode:
        raise LowtideError(f"{length:,} nodes: {(ended.stderr.strip().splitlines() or ['no answer'])[-1]}")
    return Point(**json.loads(ended.stdout.splitlines()[-1]))


def main() -> None:
    """The process of one point."""
    length, theirs, time_limit = sys.argv[1:]
    print(json.dumps(asdict(Chain(int(length)).by_lowtide(theirs, float(time_limit)))))


def replay(graph: Graph, arrays: Problem, schedule: Sequence[Action]) -> Ints:
    """The sequence of ops of a schedule in which each step is one tanh; what is around the chain runs as captured."""
    ops = list(graph.ordinary)
    ahead = [op for op in ops if graph.ops[op].target.startswith("aten.tanh.")]
    back = [op for op in ops if graph.ops[op].target.startswith("aten.tanh_backward.")][::-1]
    assert len(ahead) == len(back) == 1 + max(action.step for action in schedule)
    backwards = False
    sequence = ops[: ahead[0]]
    for action in schedule:
        if isinstance(action, Forward):
            sequence.append(ahead[action.step])
            continue
        if not backwards:
            sequence += ops[ahead[-1] + 1 : back[-1]]
            backwards = True
        sequence.append(back[action.step])
    found = np.array([*sequence, *ops[back[0] + 1 :]], np.int64)
    assert arrays.allows(found)
    return found
