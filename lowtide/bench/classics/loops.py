"""Recurrent loops of one's own cells: `lowtide.scan` against the plain loop (Gruslys et al., Chen et al. 2016)."""

# mypy: allow-untyped-calls
# (torch leaves Tensor.backward without annotations)

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from lowtide import allocator
from lowtide.bench.classics.claim import Figure, Found, yes
from lowtide.scan import ScanPlan, scan, scan_plan

SHARES = {5: 1.30, 2: 1.36}  # percent of what the plain loop keeps -> the most time, of its own
ROUNDS = 7
GB = 10**9
ROOM = 9 * GB // 10  # bytes of the deep loop: what it keeps, and its outputs
EXECUTED = 128  # time steps of the deep loop that are run
PART = 10  # percent of what the plain loop keeps, for these

State = tuple[tuple[Tensor, Tensor], ...]
Loop = Callable[[], tuple[Tensor, State]]


class Layers(nn.Module):
    """LSTM cells on top of each other, which count how often they run."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.cells = nn.ModuleList(nn.LSTMCell(width, width) for _ in range(layers))
        self.calls = 0

    def forward(self, inputs: Tensor, states: State) -> tuple[Tensor, State]:
        self.calls += 1
        found: list[tuple[Tensor, Tensor]] = []
        for cell, state in zip(self.cells, states, strict=True):
            found.append(cell(inputs, state))
            inputs = found[-1][0]
        return inputs, tuple(found)


@dataclass(frozen=True)
class Setting:
    """A loop to be run: its cell and its data."""

    cell: Layers
    inputs: Tensor  # [length, batch, width]
    state: State

    def plain(self) -> tuple[Tensor, State]:
        """The loop that everybody writes."""
        outputs, state = [], self.state
        for time_step in self.inputs.unbind(0):
            output, state = self.cell(time_step, state)
            outputs.append(output)
        return torch.stack(outputs), state

    def scan(self, budget: str | int) -> Loop:
        """The same within a budget."""
        return lambda: scan(self.cell, self.inputs, self.state, budget=budget)

    def plan(self, budget: str | int | None) -> ScanPlan:
        """What the scan plans: its bytes, its forwards, and the least that it can do with."""
        return scan_plan(self.cell, self.inputs, self.state, budget=budget)


def setting(*, layers: int, width: int, batch: int, length: int, real: bool = True, below: bool = True) -> Setting:
    """A loop with made-up data; where it is only planned its inputs take no memory."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        cell = Layers(layers, width)
        inputs = torch.randn(length, batch, width) if real else torch.zeros(1, batch, width).expand(length, -1, -1)
    inputs.requires_grad_(real and below)  # as if a layer below learned
    zeros = torch.zeros(batch, width)
    return Setting(cell, inputs, tuple((zeros, zeros) for _ in range(layers)))


@dataclass(frozen=True)
class Taken:
    """One pass forward and backward."""

    own: (
        int  # bytes: the metered peak beyond the inputs, and beyond the outputs and gradients that are there in the end
    )
    forwards: int  # calls of the cell
    results: list[Tensor]  # outputs, last states and gradients


def take(given: Setting, loop: Loop, gradient: Tensor) -> Taken:
    """Run a loop forward and backward, metered."""
    given.cell.calls = 0
    gc.collect()
    with allocator.meter() as meter:
        outputs, state = run(given, loop, gradient)
    states = [leaf.detach() for pair in state for leaf in pair]
    gradients = [tensor.grad for tensor in (*given.cell.parameters(), given.inputs) if tensor.grad is not None]
    left = sum(tensor.nbytes for tensor in (outputs, *gradients))
    return Taken(meter.peak - left, given.cell.calls, [outputs.detach(), *states, *gradients])


def run(given: Setting, loop: Loop, gradient: Tensor) -> tuple[Tensor, State]:
    """Run a loop forward and backward."""
    given.cell.zero_grad()
    given.inputs.grad = None
    outputs, state = loop()
    outputs.backward(gradient)
    return outputs, state


def same(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    """Whether all tensors are equal, bit for bit."""
    return len(one) == len(other) and all(map(torch.equal, one, other))


def race(given: Setting, loops: Sequence[Loop], *, rounds: int) -> tuple[list[Taken], list[float]]:
    """The second pass of each loop, and the seconds of each, of the first one's, as the median of rounds by turns."""
    second, ratios = rounds_of(given, loops, rounds=rounds)
    return second, [median(found) for found in ratios]


def rounds_of(given: Setting, loops: Sequence[Loop], *, rounds: int) -> tuple[list[Taken], list[list[float]]]:
    """The second pass of each loop, and the seconds of each, of the first one's, of all rounds, by turns."""
    gradient = torch.randn(given.inputs.shape, generator=torch.Generator().manual_seed(1))
    for loop in loops:
        run(given, loop, gradient)
    second = [take(given, loop, gradient) for loop in loops]
    ratios: list[list[float]] = [[] for _ in loops]
    for number in range(rounds):
        seconds = [0.0] * len(loops)
        first = number % len(loops)
        for place in (*range(first, len(loops)), *range(first)):
            begun = perf_counter()
            run(given, loops[place], gradient)
            seconds[place] = perf_counter() - begun
        for place, found in enumerate(seconds):
            ratios[place].append(found / seconds[0])
    return second, ratios


def lstm_loop(small: bool) -> Found:
    """Run a loop of a thousand time steps within parts of what the plain one keeps.

    Wide, and with gradients of the inputs: the narrower the cell, the larger the part of the forward, which runs twice.
    """
    shares: dict[int, float | None] = {30: None} if small else {**SHARES}
    sizes: dict[str, Any] = (
        {"width": 8, "batch": 4, "length": 40} if small else {"width": 512, "batch": 64, "length": 1000}
    )
    given = setting(layers=1, **sizes)
    loops = [given.plain, *(given.scan(f"{share}%") for share in shares)]
    passes, ratios = race(given, loops, rounds=1 if small else ROUNDS)
    figures = [Figure("the plain loop's metered peak", passes[0].own, "bytes")]
    for (share, most), taken, ratio in zip(shares.items(), passes[1:], ratios[1:], strict=True):
        plan = given.plan(f"{share}%")
        published = {5: "5% for a third more time", 2: "2% at 2.028 forwards"}.get(share, "")
        figures += [
            Figure(
                f"{share}%: kept, of the plain loop",
                plan.nbytes / plan.plain_bytes,
                "share",
                published,
                most=share / 100,
            ),
            Figure(f"{share}%: time, of the plain loop's", ratio, "time", published, most=most),
            Figure(f"{share}%: forwards of the dynamic program", plan.forwards, "count", "1,950" if share == 5 else ""),
            Figure(f"{share}%: forwards, counted", taken.forwards, "count", most=plan.forwards, least=plan.forwards),
            yes(f"{share}%: outputs, states and gradients equal, bit for bit", same(passes[0].results, taken.results)),
            Figure(f"{share}%: metered, gradients aside, of the plain loop", taken.own / passes[0].own, "share"),
        ]
    return Found(tuple(figures))


def deep_lstm(small: bool) -> Found:
    """Plan a thousand time steps of four layers, and run 128 of them."""
    sizes: dict[str, Any] = (
        {"layers": 2, "width": 8, "batch": 4} if small else {"layers": 4, "width": 1024, "batch": 64}
    )
    length, executed = (60, 40) if small else (1000, EXECUTED)
    planned = setting(**sizes, length=length, real=False)
    outputs = 4 * length * sizes["batch"] * sizes["width"]
    plain_bytes = planned.plan(None).plain_bytes
    room = outputs + plain_bytes // 3 if small else ROOM
    plan = planned.plan(room - outputs)
    given = setting(**sizes, length=executed)
    part = 40 if small else PART
    passes, ratios = race(given, [given.plain, given.scan(f"{part}%")], rounds=1 if small else 3)
    plain, ours = passes
    return Found(
        (
            Figure(
                f"{length:,} time steps, planned", plan.nbytes + outputs, "bytes", "over 4 times less (Chen)", most=room
            ),
            Figure("  with everything kept", plain_bytes + outputs, "bytes", "15.2 GB shared"),
            Figure("  forwards for each time step", plan.forwards / length, "time"),
            Figure("  the least that it can do with", plan.least + outputs, "bytes"),
            Figure(
                f"{executed} time steps at {part}%: less than the plain loop, metered",
                plain.own / ours.own,
                "times",
                "over 4 times (Chen)",
                least=1.1 if small else 4.0,
            ),
            Figure("  metered", ours.own, "bytes"),
            Figure("  the plain loop's", plain.own, "bytes"),
            Figure("  time, of the plain loop's", ratios[1], "time"),
            yes("  outputs, states and gradients equal, bit for bit", same(plain.results, ours.results)),
        )
    )
