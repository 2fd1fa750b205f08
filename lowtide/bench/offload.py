"""Is a value that must go copied away where that is cheaper, and made again where that is?

Each case is a small step: values of one kind are made early, are idle while others need the memory, and are read late.
It is planned with recomputation only, with copies only and with both, and the programs run by turns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from lowtide.bench.throttle import throttled
from lowtide.capture import capture
from lowtide.costs import Lane
from lowtide.device import CPU, Device
from lowtide.execute import Runner, execute
from lowtide.graph import Graph, Op
from lowtide.measure import correct, corrected, measure, measure_lanes
from lowtide.plan import BEST, OFFLOAD, plan
from lowtide.program import Copy, Plan, Run
from lowtide.rewrite import EXACT, apply, offload

COLUMNS = 1024  # of each value; its rows make its size
SIDE = 512  # of the matrices that are multiplied meanwhile
SIZES = (1, 4, 16, 90)  # MB of a value
FEWER = (2, 30)  # the same, on places that stand in for another disk
TOGETHER = 16 * 10**6  # bytes: of small values there are several, as the memory that copies go through is not free
ROUNDS = 7
TURN = 0.04  # seconds of a way in each round, at least, but for so many steps:
MOST = 10
TIME_LIMIT = 0.1  # seconds of search: these graphs are small
RATES = {"0.5 GB/s": 0.5e9, "2 GB/s": 2e9, "12 GB/s": 12e9}  # of places that stand in for another disk
DISK = "disk"
PART = 0.95  # of the pairs of runners of one program: two ways that differ by less than these are equally cheap
NOISE = 0.05  # of a step: on a machine where one program differs from itself by more, these cases say nothing
LESSONS = 6  # steps that teach what ops and copies take
RIGHT = 0.95  # of the cases, that the planner must choose right
WINS = 10  # cases that each way must be the cheaper one in

Make = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Kind:
    """An op: of how many numbers each row of its result is made, and how."""

    source: Callable[[int], tuple[int, ...]]  # shape of what all values are made from, by rows
    own: Callable[[int], tuple[int, ...]]  # shape of what each is made from besides
    make: Make


def _rows(columns: int) -> Callable[[int], tuple[int, ...]]:
    return lambda rows: (rows, columns)


def _convolution(channels: int, side: int) -> Kind:
    """An image of as many numbers as the value, or fewer, and a kernel of this side."""

    def image(rows: int) -> tuple[int, ...]:
        return 1, channels, rows, COLUMNS // 16

    def convolve(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return functional.conv2d(x, w, padding=side // 2).view(-1, COLUMNS)

    return Kind(image, lambda _: (16, channels, side, side), convolve)


KINDS = {
    "elementwise": Kind(_rows(COLUMNS), lambda _: (COLUMNS,), torch.mul),
    "elementwise, logarithm": Kind(_rows(COLUMNS), lambda _: (COLUMNS,), torch.xlogy),
    "concat": Kind(
        lambda rows: (rows - rows // 8, COLUMNS), lambda rows: (rows // 8, COLUMNS), lambda x, w: torch.cat([x, w])
    ),
    "norm": Kind(_rows(COLUMNS), lambda _: (COLUMNS,), lambda x, w: functional.layer_norm(x, (COLUMNS,), w)),
    "matmul, 64": Kind(_rows(64), lambda _: (64, COLUMNS), torch.mm),
    "matmul, 256": Kind(_rows(256), lambda _: (256, COLUMNS), torch.mm),
    "convolution, 3 x 3": _convolution(4, 3),
    "convolution, 7 x 7": _convolution(16, 7),
}


@dataclass(frozen=True)
class Case:
    """A step."""

    kind: str
    megabytes: int  # of a value, 10**6
    idle: int  # products of matrices before the memory is needed, and after

    @property
    def rows(self) -> int:
        """Rows of a value."""
        return max(16, round(self.megabytes * 10**6 / (4 * COLUMNS * 16)) * 16)

    @property
    def nbytes(self) -> int:
        """Bytes of a value."""
        return self.rows * COLUMNS * 4

    @property
    def count(self) -> int:
        """How many values there are."""
        return max(1, TOGETHER // self.nbytes)


@dataclass(frozen=True)
class Outcome:
    """What the ways of a case take, as predicted and as measured."""

    kind: str
    place: str
    nbytes: int  # of a value
    values: int
    idle: int
    recompute_seconds: float  # of one value, measured alone
    load_seconds: float  # the same
    predicted: dict[str, float]  # seconds of a step, by its way
    measured: dict[str, float]  # the same, the median of all rounds
    chose: dict[str, str]  # by joint plans: recompute, offload or both
    alike: dict[str, str]  # joint plans that are one of the others, too
    strayed: bool  # whether a step held more than its budget, or allocated otherwise than planned

    @property
    def chosen(self) -> str:
        """What the planner chose."""
        return self.chose["joint"]

    @property
    def cheaper(self) -> str:
        """The way that took less time."""
        return "recompute" if self.measured["recompute"] < self.measured["offload"] else "offload"

    @property
    def apart(self) -> float | None:
        """By what part two runners of one program differ; None where the joint plan is a program of its own."""
        same = self.alike.get("joint")
        return None if same is None else abs(self.measured["joint"] / self.measured[same] - 1)

    def tie(self, tolerance: float) -> bool:
        """Whether the two ways differ by less than one program from itself."""
        low, high = sorted((self.measured["recompute"], self.measured["offload"]))
        return high <= (1 + tolerance) * low

    def right(self, way: str, tolerance: float) -> bool:
        """Whether always this way, or what a joint plan chose, was the cheaper one; both together may be, too."""
        seconds = self.measured[self.alike.get(way, way)]
        best = min(self.measured["recompute"], self.measured["offload"])
        return self.chose.get(way, way) == self.cheaper or seconds <= (1 + tolerance) * best


def tolerance(found: Sequence[Outcome]) -> float:
    """The part of a step by which two runners of one program differ, in all but the worst cases."""
    apart = sorted(one.apart for one in found if one.apart is not None)
    return apart[min(len(apart) - 1, int(PART * len(apart)))] if apart else 0.0


def cases(lanes: Sequence[Lane], sizes: Iterable[int] = SIZES) -> list[Case]:
    """Steps with next to nothing to do meanwhile, and with about as much as a copy takes."""
    slowest = min(lane.rate for lane in lanes)
    found = []
    for kind in KINDS:
        for size in sizes:
            seconds = max(size * 10**6, TOGETHER) / slowest
            long = min(24, max(2, round(seconds / _product_seconds())))
            found += [Case(kind, size, idle) for idle in ((1,) if size == max(SIZES) else (1, long))]
    return found


@dataclass(frozen=True, eq=False)
class Place:
    """A place and what copies cost there."""

    name: str
    device: Device
    lanes: tuple[Lane, ...]
    _loads: dict[int, float] = field(default_factory=dict)  # seconds, by bytes

    @staticmethod
    def named(name: str) -> Place:
        """The disk, or a place that stands in for another."""
        device = CPU if name == DISK else throttled(RATES[name])
        return Place(name, device, measure_lanes(device, "disk", cache=False))

    def load_seconds(self, nbytes: int) -> float:
        """The median time of a copy from there, alone."""
        if nbytes not in self._loads:
            store = self.device.stores["disk"](nbytes, None)
            held = torch.ones(nbytes, dtype=torch.uint8)
            store.write(0, held).wait()
            self._loads[nbytes] = median(_seconds(lambda: store.read(0, held).wait()) for _ in range(ROUNDS))
            store.close()
        return self._loads[nbytes]


def outcomes(cases: Sequence[Case], place: Place) -> Iterator[Outcome]:
    """Run each case."""
    for case in cases:
        yield outcome(case, place)


def outcome(case: Case, place: Place) -> Outcome:
    """Plan a case in three ways within what it needs without its values, and run the programs by turns.

    The first steps of two of them correct the prices of ops and copies, as for every later plan; what the planner
    chooses before that is `first`.
    """
    trial = _Trial(case, place)
    for way in ("recompute", "offload"):
        trial.plan(way)
        for _ in range(LESSONS):
            trial.runs[way]()
    trial.plan("first")
    trial.correct()
    trial.plan("joint")
    trial.merge()
    measured = time_by_turns(trial.runs, ROUNDS)
    return Outcome(
        kind=case.kind,
        place=place.name,
        nbytes=case.nbytes,
        values=case.count,
        idle=case.idle,
        recompute_seconds=trial.recompute_seconds,
        load_seconds=place.load_seconds(case.nbytes),
        predicted={way: found.seconds for way, found in trial.plans.items()},
        measured=measured,
        chose={way: _chosen(trial.plans[way]) for way in ("first", "joint")},
        alike=trial.alike,
        strayed=any(one.mismatches or (one.peak or 0) > trial.budget for one in trial.runners.values()),
    )


class _Trial:
    """The programs of one case."""

    def __init__(self, case: Case, place: Place) -> None:
        step, model, self.example, largest = built(case)
        self.captured, self.place = capture(step, model, None, self.example), place
        self.whole = apply(self.captured.graph, EXACT).graph
        self.offered = apply(self.captured.graph, (*EXACT, *offload("disk"))).graph
        self.costs, self.lanes = measure(self.whole, corrected=False), place.lanes
        room = largest + place.device.staging + case.nbytes // 4 + 2 * SIDE * SIDE * 4
        self.budget = self.costs.persistent(self.whole) + room
        self.plans: dict[str, Plan] = {}
        self.runners: dict[str, Runner] = {}
        self.alike: dict[str, str] = {}
        maker = next(op for op, item in enumerate(self.whole.ops) if _makes(self.whole, op, item, case))
        self.recompute_seconds = self.costs.seconds[maker]

    @property
    def runs(self) -> dict[str, Callable[[], Any]]:
        """What takes a step in each way."""
        return {way: partial(runner, *self.example) for way, runner in self.runners.items()}

    def plan(self, way: str) -> None:
        """Plan one way by what is known now, and make it ready to run."""
        graph, known = self.whole, self.costs
        if way != "recompute":
            graph, staging = self.offered, self.place.device.staging
            known = replace(known, graph=graph.fingerprint, lanes=self.lanes, staging=staging)
        method = OFFLOAD if way == "offload" else BEST
        found = self.plans[way] = plan(graph, known, self.budget, method=method, time_limit=TIME_LIMIT)
        captured = replace(self.captured, graph=graph)
        self.runners[way] = execute(captured, found.program, known.nbytes, device=self.place.device)

    def correct(self) -> None:
        """Let the steps that were taken say what ops and copies take."""
        correct(self.whole, self.costs, self.runners["recompute"].timings.ops or {})
        self.costs = measure(self.whole)
        self.lanes = corrected(self.lanes, self.runners["offload"].away.transfers)

    def merge(self) -> None:
        """Note joint plans that are another of the programs; the joint one runs all the same, to see what differs."""
        for way, others in {"joint": ("recompute", "offload"), "first": ("recompute", "offload", "joint")}.items():
            same = next((one for one in others if _alike(self.plans[one], self.plans[way])), None)
            if same is not None:
                self.alike[way] = same
        if "first" in self.alike:
            del self.runners["first"]


def time_by_turns(runs: dict[str, Callable[[], Any]], rounds: int, warm_ups: int = 2) -> dict[str, float]:
    """The median seconds of each, after some that are not counted; short ones run several times in a row."""
    times: dict[str, list[float]] = {way: [] for way in runs}
    steps = dict.fromkeys(runs, 1)
    for number in range(warm_ups + rounds):
        for way, run in runs.items():
            begun = perf_counter()
            for _ in range(steps[way]):
                run()
            seconds = (perf_counter() - begun) / steps[way]
            if number >= warm_ups:
                times[way].append(seconds)
            else:
                steps[way] = max(1, min(MOST, round(TURN / seconds)))
    return {way: median(found) for way, found in times.items()}


def built(case: Case) -> tuple[Callable[..., Any], nn.Module, tuple[Any, ...], int]:
    """The step, its model and example, and the bytes of what needs the memory."""
    kind, count, idle = KINDS[case.kind], case.count, case.idle
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> nn.Parameter:
        return nn.Parameter(torch.rand(shape, generator=generator) + 0.1, requires_grad=False)

    model = nn.ParameterList([drawn(*kind.source(case.rows)), *(drawn(*kind.own(case.rows)) for _ in range(count))])
    large = 3 * max(case.nbytes * count, TOGETHER) // 4  # elements: more than any op that makes a value needs

    def step(model: nn.ParameterList, _: None, matrix: torch.Tensor) -> list[torch.Tensor]:
        values = [kind.make(model[0], own) for own in list(model)[1:]]
        now, vector = matrix, matrix[: COLUMNS // SIDE].reshape(-1)
        for value in values:
            now = now + torch.mv(value, vector).sum()  # what follows waits for all values
        for _round in range(idle):
            now = now @ matrix
        now = matrix + now[0, :1].expand(large).contiguous().sum()
        for _round in range(idle):
            now = now @ matrix
        last = now[: COLUMNS // SIDE].reshape(-1)
        return [torch.mv(value, last) for value in values]

    return step, model, (torch.rand(SIDE, SIDE, generator=generator) / SIDE,), 4 * large


def _makes(graph: Graph, op: int, item: Op, case: Case) -> bool:
    return item.target.startswith("aten.") and any(
        graph.values[value].nbytes == case.nbytes for value in graph.makes[op]
    )


def _chosen(found: Plan) -> str:
    """Whether a plan runs ops again, copies values away, or both."""
    items = found.program.instructions
    ops = [item.op for item in items if isinstance(item, Run)]
    if not any(isinstance(item, Copy) for item in items):
        return "recompute"
    return "both" if len(ops) > len(set(ops)) else "offload"


def _alike(one: Plan, other: Plan) -> bool:
    return one.program.instructions == other.program.instructions


@cache
def _product_seconds() -> float:
    matrix = torch.ones(SIDE, SIDE)
    return median(_seconds(lambda: matrix @ matrix) for _ in range(9))


def _seconds(run: Callable[[], Any]) -> float:
    start = perf_counter()
    run()
    return perf_counter() - start
