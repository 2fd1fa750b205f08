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
from lowtide.costs import Costs, Lane
from lowtide.device import CPU, Device
from lowtide.execute import execute
from lowtide.graph import Graph
from lowtide.measure import measure, measure_lanes
from lowtide.plan import plan
from lowtide.program import Copy, Plan, Run
from lowtide.rewrite import EXACT, apply, offload

COLUMNS = 1024  # of each value; its rows make its size
SIDE = 512  # of the matrices that are multiplied meanwhile
SIZES = (1, 4, 16, 90)  # MB of a value
FEWER = (2, 30)  # the same, on places that stand in for another disk
TOGETHER = 16 * 10**6  # bytes: of small values there are several, as the memory that copies go through is not free
ROUNDS = 5
TIME_LIMIT = 0.1  # seconds of search: these graphs are small
RATES = {"0.5 GB/s": 0.5e9, "2 GB/s": 2e9, "12 GB/s": 12e9}  # of places that stand in for another disk
DISK = "disk"
TIE = 0.02  # of the step: two ways that differ by less are equally cheap, as far as these rounds can tell
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
    measured: dict[str, float]  # the same, the least of all rounds
    recomputed: int  # values that the joint plan makes again
    copied: int  # values that it copies away

    @property
    def chosen(self) -> str:
        """What the planner chose."""
        if self.recomputed and self.copied:
            return "both"
        return "offload" if self.copied else "recompute"

    @property
    def cheaper(self) -> str:
        """The way that took less time."""
        return "recompute" if self.measured["recompute"] < self.measured["offload"] else "offload"

    @property
    def tie(self) -> bool:
        """Whether these rounds can't tell them apart."""
        return abs(self.measured["recompute"] - self.measured["offload"]) <= TIE * min(self.measured.values())

    def right(self, way: str | None = None) -> bool:
        """Whether the planner's choice, or always this way, was the cheaper one; some of each may be cheaper still."""
        if way is not None:
            return self.tie or way == self.cheaper
        best = min(self.measured["recompute"], self.measured["offload"])
        return self.tie or self.chosen == self.cheaper or self.measured["joint"] <= (1 + TIE) * best


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
    """Plan a case in three ways within what it needs without its values, and run the programs by turns."""
    step, model, example, largest = built(case)
    captured = capture(step, model, None, example)
    whole = apply(captured.graph, EXACT).graph
    offered = apply(captured.graph, (*EXACT, *offload("disk"))).graph
    costs = measure(whole)
    priced = replace(costs, graph=offered.fingerprint, lanes=place.lanes, staging=place.device.staging)
    budget = costs.persistent(whole) + largest + place.device.staging + case.nbytes // 4 + 2 * SIDE * SIDE * 4
    ways: dict[str, tuple[Graph, Costs, str]] = {
        "recompute": (whole, costs, "lowtide"),
        "offload": (offered, priced, "offload"),
        "joint": (offered, priced, "lowtide"),
    }
    plans: dict[str, Plan] = {}
    runs: dict[str, Callable[[], Any]] = {}
    for way, (graph, known, method) in ways.items():
        plans[way] = plan(graph, known, budget, method=method, time_limit=TIME_LIMIT)
        runner = execute(replace(captured, graph=graph), plans[way].program, known.nbytes, device=place.device)
        runs[way] = partial(runner, *example)
    same = next((way for way in ("recompute", "offload") if _alike(plans[way], plans["joint"])), None)
    if same is not None:
        del runs["joint"]  # one program, one time
    measured = time_by_turns(runs, ROUNDS)
    if same is not None:
        measured["joint"] = measured[same]
    again, copied = _counts(plans["joint"])
    maker = next(op for op, item in enumerate(whole.ops) if item.target.startswith("aten.") and _makes(whole, op, case))
    return Outcome(
        kind=case.kind,
        place=place.name,
        nbytes=case.nbytes,
        values=case.count,
        idle=case.idle,
        recompute_seconds=costs.seconds[maker],
        load_seconds=place.load_seconds(case.nbytes),
        predicted={way: found.seconds for way, found in plans.items()},
        measured=measured,
        recomputed=again,
        copied=copied,
    )


def time_by_turns(runs: dict[str, Callable[[], Any]], rounds: int, warm_ups: int = 2) -> dict[str, float]:
    """The least seconds of each, after some that are not counted: what else runs on a machine only adds to them."""
    times: dict[str, list[float]] = {way: [] for way in runs}
    for number in range(warm_ups + rounds):
        for way, run in runs.items():
            seconds = _seconds(run)
            if number >= warm_ups:
                times[way].append(seconds)
    return {way: min(found) for way, found in times.items()}


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


def _makes(graph: Graph, op: int, case: Case) -> bool:
    return any(graph.values[value].nbytes == case.nbytes for value in graph.makes[op])


def _counts(found: Plan) -> tuple[int, int]:
    """How many ops a plan runs again, and how many values it copies away."""
    items = found.program.instructions
    ops = [item.op for item in items if isinstance(item, Run)]
    copies = [item for item in items if isinstance(item, Copy) and item.to != "device"]
    return len(ops) - len(set(ops)), len(copies)


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
