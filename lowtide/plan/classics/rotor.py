"""Chains of stages with sizes and seconds of their own: the dynamic program of rotor, with a menu for each stage.

Beaumont, Eyraud-Dubois, Herrmann, Joly and Shilova 2019, "Optimal checkpointing for heterogeneous chains". A stretch
i .. j of stages, whose input is there and whose output's gradient is known, is done in one of two ways: run stage i and
keep its internals until its backward, with i+1 .. j done in between; or run ahead to some stage k, keep only what
enters k, do k .. j, and then do i .. k-1 from the start. That is optimal among schedules in which what is kept stays
until its backward (persistent ones). Several ways to keep a stage's internals are the menus of Rockmate (Zhao et al.
2023). Memory is a whole number of units.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from lowtide.plan.classics.chain import Action, Backward, Forward, advance
from lowtide.plan.problem import Floats

Costs32 = npt.NDArray[np.float32]  # seconds, to seven digits
Stretch = tuple[int, int, int]  # first stage, last stage, units


@dataclass(frozen=True)
class Way:
    """A way to run a stage so that its backward can follow; what enters the stage is not counted in it."""

    kept: float  # memory held between its forward and its backward, what leaves the stage aside
    forward: float  # most memory during the forward, gradients aside
    backward: float  # most memory during the backward, with gradients, what was kept and what leaves the stage
    alone: float  # most memory when the backward follows right after the forward, with gradients
    seconds: float = 0.0  # that the backward takes beyond what it always takes: recomputation inside the stage
    stages: int = 1  # how many in a row run as one


@dataclass(frozen=True)
class Chain:
    """The stages in order; memory in any unit."""

    seconds: Floats  # of the forward of each stage
    ways: tuple[tuple[Way, ...], ...]  # for each stage
    crossing: Floats  # [i, k]: of what enters stage k, the part that is made in stage i or later
    transit: Floats  # [i, l]: most memory in the forward of l on a run ahead from i, without gradients
    gradient: Floats  # of each stage: gradients that are there when its backward begins

    def in_units(self, unit: float) -> Chain:
        """The same chain with memory in whole units, rounded to the nearest."""

        def rounded(way: Way) -> Way:
            kept, forward, backward, alone = np.rint(np.array((way.kept, way.forward, way.backward, way.alone)) / unit)
            return Way(kept, forward, backward, alone, way.seconds, way.stages)

        return replace(
            self,
            ways=tuple(tuple(map(rounded, ways)) for ways in self.ways),
            crossing=np.rint(self.crossing / unit),
            transit=np.rint(self.transit / unit),
            gradient=np.rint(self.gradient / unit),
        )


def plain_chain(
    seconds: Sequence[float],
    output: Sequence[float],
    saved: Sequence[float],
    forward_temporaries: Sequence[float] | None = None,
    backward_temporaries: Sequence[float] | None = None,
) -> Chain:
    """The chain of the paper: sizes of each stage's output and of its saved set, output included, and overheads.

    A gradient is as large as the output that it belongs to; the input of the chain has none.
    """
    length = len(seconds)
    outputs, saves = np.array(output, float), np.array(saved, float)
    during = np.zeros(length) if forward_temporaries is None else np.array(forward_temporaries, float)
    after = np.zeros(length) if backward_temporaries is None else np.array(backward_temporaries, float)
    inputs = np.concatenate([[0.0], outputs[:-1]])
    transit = np.tile(inputs + outputs + during, (length, 1))
    np.fill_diagonal(transit, outputs + during)
    forward, backward = saves + during, inputs + outputs + saves + after
    alone = np.maximum(forward + outputs, backward)
    ways = zip(*(sizes.tolist() for sizes in (saves - outputs, forward, backward, alone)), strict=True)
    return Chain(
        seconds=np.array(seconds, float),
        ways=tuple((Way(*sizes),) for sizes in ways),
        crossing=np.tile(inputs, (length, 1)),
        transit=transit,
        gradient=outputs,
    )


class Rotor:
    """The least forward seconds of every stretch of a chain, for every memory from 0 to `memory` units."""

    def __init__(self, chain: Chain, memory: int) -> None:
        self.chain, self.memory = chain, memory
        length = len(chain.seconds)
        self.length = length
        self.reach = np.concatenate([[0.0], np.cumsum(chain.seconds)])
        self.crossing = chain.crossing.astype(np.int64)
        self.gradient = chain.gradient.astype(np.int64)
        self.widest = np.maximum.accumulate(np.triu(chain.transit), axis=1).astype(np.int64)
        self.table = np.full((length, length, memory + 1), np.inf, np.float32)  # [i, j, units]
        self._fill()

    def _fill(self) -> None:
        right = np.full_like(self.table, np.inf)  # [j, k, units]: stretch k .. j beside what crosses into k
        for i in reversed(range(self.length)):
            for way in self.chain.ways[i]:
                self._keep_internals(i, way)
            # What crosses into k counts if it is made in i or later: more and more, where something skips over stages.
            for k in range(i + 1, self.length):
                if k == i + 1 or self.crossing[i, k] != self.crossing[i + 1, k]:
                    right[k:, k] = _beside(self.table[k, k:], int(self.crossing[i, k]))
            self._run_ahead(i, right)

    def _keep_internals(self, i: int, way: Way) -> None:
        """Enter what the stretches i .. j cost for every j when stage i runs this way."""
        row, next_ = self.table[i], i + way.stages
        seconds = np.float32(self.chain.seconds[i:next_].sum() + way.seconds)
        row[next_ - 1, int(way.alone) :] = np.minimum(row[next_ - 1, int(way.alone) :], seconds)
        if next_ < self.length:
            found = _beside(self.table[next_, next_:], self._held(i, way)) + seconds
            needs = np.maximum(int(way.forward) + self.gradient[next_:], int(way.backward))
            found[np.arange(self.memory + 1) < needs[:, None]] = np.inf
            np.minimum(row[next_:], found, out=row[next_:])

    def _run_ahead(self, i: int, right: Costs32) -> None:
        """Enter what the stretches i .. j cost, j by j, when the first thing is to run ahead to the best stage k."""
        row, reach, units = self.table[i], self.reach.astype(np.float32), np.arange(self.memory + 1)
        left = np.full_like(row, np.inf)  # [k-1, units]: to run ahead up to k, and stretch i .. k-1 later
        left[i] = row[i] + reach[i + 1]
        for j in range(i + 1, self.length):
            total = left[i:j] + right[j, i + 1 : j + 1]
            needs = self.widest[i, i:j] + self.gradient[j]
            # Most runs ahead need less than what comes after them: only look at the others.
            low = np.isfinite(total[np.arange(j - i), np.clip(needs - 1, 0, self.memory)]) & (needs > 0)
            if low.any():
                total[low] = np.where(units < needs[low, None], np.float32(np.inf), total[low])
            np.minimum(row[j], total.min(axis=0) - reach[i], out=row[j])
            left[j] = row[j] + reach[j + 1]

    def _held(self, i: int, way: Way) -> int:
        """The units that stay while the stages after i are done."""
        return int(way.kept) + int(self.crossing[i, i + way.stages])

    def seconds(self, memory: int | None = None) -> float:
        """The least seconds of all forwards, and of recomputation inside backwards; infinite where nothing fits."""
        return float(self.table[0, -1, self.memory if memory is None else memory])

    def schedule(self, memory: int | None = None) -> list[Action] | None:
        """A schedule with these seconds; None where nothing fits."""
        if np.isinf(self.seconds(memory)):
            return None
        actions: list[Action] = []
        waiting: list[Stretch | Action] = [(0, self.length - 1, self.memory if memory is None else memory)]
        while waiting:
            item = waiting.pop()
            if not isinstance(item, tuple):
                actions.append(item)
                continue
            (i, j, units), (way, k) = item, self._best(*item)
            if way is None:
                actions += advance(i, k)
                waiting += [(i, k - 1, units), (k, j, units - int(self.crossing[i, k]))]
                continue
            chosen = self.chain.ways[i][way]
            actions.append(Forward(i, "internals", way, chosen.stages))
            waiting.append(Backward(i, chosen.stages))
            if j >= i + chosen.stages:
                waiting.append((i + chosen.stages, j, units - self._held(i, chosen)))
        return actions

    def _best(self, i: int, j: int, units: int) -> tuple[int | None, int]:
        """How to begin the stretch: the way to run stage i, or the stage to run ahead to."""
        options: list[tuple[float, int | None, int]] = []
        for number, way in enumerate(self.chain.ways[i]):
            next_ = i + way.stages
            if j < next_:
                fits, rest = j == next_ - 1 and units >= way.alone, 0.0
            else:
                held = self._held(i, way)
                fits = units >= max(way.forward + self.gradient[j], way.backward, held)
                rest = float(self.table[next_, j, units - held]) if fits else 0.0
            if fits:
                options.append((float(self.chain.seconds[i:next_].sum()) + way.seconds + rest, number, 0))
        for k in range(i + 1, j + 1):
            if units >= max(self.widest[i, k - 1] + self.gradient[j], self.crossing[i, k]):
                right = float(self.table[k, j, units - self.crossing[i, k]])
                options.append((self.reach[k] - self.reach[i] + right + float(self.table[i, k - 1, units]), None, k))
        _, chosen, ahead = min(options, key=lambda option: option[0])
        return chosen, ahead


def _beside(costs: Costs32, units: int) -> Costs32:
    """What stretches cost when so many units are taken by something else."""
    shifted = np.full_like(costs, np.inf)
    if units < costs.shape[1]:
        shifted[:, units:] = costs[:, : costs.shape[1] - units]
    return shifted
