"""Is a plan that may copy and recompute at least as quick as the better of those that may do one of both?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import blake2b
from statistics import median
from time import perf_counter
from typing import Any

import torch

from lowtide.bench.offload import DISK, RATES
from lowtide.bench.throttle import throttled
from lowtide.budget import read_budget
from lowtide.capture import capture
from lowtide.captured import Captured
from lowtide.choice import Away, Choice, Effort, choose
from lowtide.cli.target import build
from lowtide.costs import Costs
from lowtide.device import CPU, Device
from lowtide.errors import BudgetError, UsageError
from lowtide.execute import execute
from lowtide.fit import fit
from lowtide.fit.request import CostsFrom
from lowtide.graph import Graph
from lowtide.measure import measure, measure_lanes, roofline, with_lanes
from lowtide.plan import BEST, plan
from lowtide.plan.planning import OFFLOAD
from lowtide.program import Plan
from lowtide.verify.compare import digest
from lowtide.verify.copies import lasting_tensors

WAYS = {"recompute": (BEST, False), "offload": (OFFLOAD, True), "joint": (BEST, True)}  # and whether it copies
EXECUTED = (
    "resnet:depth=50,batch=8,size=96",
    "gpt:layers=6,width=256,context=256",
    "unet:width=16,size=128",
    "bert:layers=4,width=256,vocabulary=8192",
)
SLOWER = 1e-6  # of a step: what sums in another order may differ by
NOISE = 0.03  # of a step: what interleaved medians of the same program differ by here
OFF = 0.10  # of a step, that a prediction may be off by
WARM_UPS = 2
LESSON = 70.0  # percent: a budget whose first steps correct the prices of ops before plans are made that run
LESSONS = 6  # of these steps


@dataclass(frozen=True)
class Cell:
    """The plans of one target within one budget."""

    target: str
    percent: float  # of the step's own part
    budget: int  # bytes
    base: float  # seconds of the step without recomputation and copies, predicted
    predicted: dict[str, float] = field(default_factory=dict)  # seconds of a step, by its way; without what never fits
    measured: dict[str, float] = field(default_factory=dict)  # the same, the median of all rounds
    peaks: dict[str, int] = field(default_factory=dict)  # bytes, metered
    equal: dict[str, bool] = field(default_factory=dict)  # whether all is eager's after the last step, bit for bit
    moved: dict[str, int] = field(default_factory=dict)  # bytes of state and parameters that live elsewhere
    searched: dict[str, float] = field(default_factory=dict)  # seconds of planning, by way
    mismatches: int = 0  # allocations that did not come as planned

    @property
    def gain(self) -> float | None:
        """The part of the better way's time that the joint plan saves; as measured, or else as predicted."""
        seconds = self.measured or self.predicted
        alone = [seconds[way] for way in ("recompute", "offload") if way in seconds]
        return 1 - seconds["joint"] / min(alone) if alone and "joint" in seconds else None

    @property
    def missed(self) -> tuple[str, ...]:
        """The bars that are missed."""
        found = []
        alone = [self.predicted[way] for way in ("recompute", "offload") if way in self.predicted]
        if alone and self.predicted.get("joint", float("inf")) > min(alone) * (1 + SLOWER):
            found.append("slower, as predicted")
        if self.measured and (self.gain or 0) < -NOISE:
            found.append("slower")
        for way, seconds in self.measured.items():
            off = self.predicted[way] / seconds - 1
            if abs(off) > OFF:
                found.append(f"{way} {off:+.0%} off")
        found += [f"{way} over its budget" for way, peak in self.peaks.items() if peak > self.budget]
        found += [f"{way} differs from eager" for way, equal in self.equal.items() if not equal]
        if self.mismatches:
            found.append(f"{self.mismatches} mismatches")
        return tuple(found)


def compare(
    target: str,
    *,
    percents: Sequence[float],
    rounds: int = 0,
    time_limit: float,
    costs: CostsFrom = "measured",
    place: str = DISK,
    say: Callable[[str], None] = lambda _: None,
) -> list[Cell]:
    """Plan a target in all ways within each budget; with rounds, run the plans by turns beside eager.

    `place` is this disk, or one of `offload.RATES` that stands in for another; state and parameters stay here then.
    """
    device = CPU if place == DISK else throttled(RATES[place])
    lanes = () if place == DISK else measure_lanes(device, "disk", cache=False)
    if rounds and costs == "measured":
        say(f"{target}: taking steps that correct prices")
        _teach(target, time_limit)
    captured = capture(*build(target))

    def price(graph: Graph) -> Costs:
        known = with_lanes(graph, roofline(graph) if costs == "roofline" else measure(graph))
        return replace(known, lanes=lanes, staging=device.staging) if lanes and known.lanes else known

    cells = []
    for percent in percents:
        choices: dict[str, Choice] = {}
        searched: dict[str, float] = {}
        budget = 0

        def within(
            graph: Graph, known: Costs, eager_peak: int, effort: Effort, *, method: str, percent: float = percent
        ) -> Plan:
            nonlocal budget
            budget = budget or read_budget(f"{percent}%", persistent=known.persistent(graph), eager_peak=eager_peak)
            limit = effort.part * time_limit
            # Where nothing is run, nothing else on the machine may change what is found.
            return plan(
                graph, known, budget, method=method, time_limit=limit, explain=effort.explain, clock=bool(rounds)
            )

        for way, (method, copies) in WAYS.items():
            away = Away("disk", lasting="disk" in device.homes) if copies else None
            say(f"{target}: planning {way} within {percent:g}%")
            begun = perf_counter()
            try:
                choices[way] = choose(captured.graph, price, partial(within, method=method), away=away)
            except (BudgetError, UsageError):  # nothing fits, or nothing is large enough to be copied
                continue
            finally:
                searched[way] = perf_counter() - begun
        base = next(iter(choices.values())).plan.base_seconds if choices else 0.0
        cell = Cell(
            target, percent, budget, base,
            predicted={way: choice.plan.seconds for way, choice in choices.items()},
            moved={way: _moved(choice) for way, choice in choices.items()},
            searched=searched,
        )  # fmt: skip
        cells.append(_raced(cell, choices, rounds, device, say) if rounds else cell)
    return cells


def _teach(target: str, time_limit: float) -> None:
    """Take the first steps within another budget, which correct prices as for every later plan."""
    step, model, optimizer, example = build(target)
    with suppress(BudgetError):
        train = fit(step, model, optimizer, example=example, budget=f"{LESSON}%", time_limit=time_limit)
        for _ in range(LESSONS):
            train(*example)


class _Racer:
    """A model of its own that takes steps in one way, with random numbers of its own."""

    def __init__(self, target: str, choice: Choice | None, device: Device) -> None:
        torch.manual_seed(0)
        step, self.model, self.optimizer, self.example = build(target)
        self.random = torch.get_rng_state()
        if choice is None:
            self.runner = None
            self._run: Callable[[], Any] = lambda: step(self.model, self.optimizer, *self.example)
        else:
            captured: Captured = capture(step, self.model, self.optimizer, self.example)
            captured = replace(captured, graph=choice.graph)
            self.runner = execute(captured, choice.plan.program, choice.costs.nbytes, device=device)
            self._run = lambda: self.runner(*self.example) if self.runner is not None else None
        self.digest = b""

    def step(self) -> float:
        """Take a step, and say how long it took."""
        torch.set_rng_state(self.random)
        start = perf_counter()
        result = self._run()
        seconds = perf_counter() - start
        self.random = torch.get_rng_state()
        del result
        return seconds

    def state(self) -> bytes:
        """A digest of all that steps change."""
        tensors = [*lasting_tensors(self.model, self.optimizer, ()), self.random]
        return blake2b(b"".join(map(digest, tensors)), digest_size=8).digest()


def _raced(cell: Cell, choices: dict[str, Choice], rounds: int, device: Device, say: Callable[[str], None]) -> Cell:
    eager = _Racer(cell.target, None, device)
    racers = {way: _Racer(cell.target, choice, device) for way, choice in choices.items()}
    times: dict[str, list[float]] = {way: [] for way in racers}
    for number in range(WARM_UPS + rounds):
        say(f"{cell.target} within {cell.percent:g}%: round {number + 1} of {WARM_UPS + rounds}")
        eager.step()
        for way, racer in racers.items():
            seconds = racer.step()
            if number >= WARM_UPS:
                times[way].append(seconds)
    expected = eager.state()
    runners = {way: racer.runner for way, racer in racers.items() if racer.runner is not None}
    return replace(
        cell,
        measured={way: median(found) for way, found in times.items()},
        peaks={way: runner.peak or 0 for way, runner in runners.items()},
        equal={way: racer.state() == expected for way, racer in racers.items()},
        mismatches=sum(runner.mismatches for runner in runners.values()),
    )


def _moved(choice: Choice) -> int:
    graph = choice.graph
    return sum(choice.costs.nbytes[item.value] for item in graph.inputs if item.home != "device")
