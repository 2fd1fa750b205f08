"""Chains of equal steps in plain numbers: Revolve, and the three dynamic programs of Gruslys et al.

A chain has steps 0 .. n-1; step i turns state i into state i+1, and its backward needs its *internals*, all that the
step computed on its way, state i+1 among them. Internals come only from running the step, so every backward follows a
forward of the same step that kept them. The cost is the number of forwards; the memory is counted in slots.

Griewank and Walther 2000, "Algorithm 799: Revolve"; Gruslys et al. 2016, "Memory-efficient backpropagation through
time". Steps of different sizes and durations are in `rotor`.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import comb
from typing import Literal

import numpy as np

from lowtide.plan.problem import Floats

Keep = Literal["nothing", "input", "internals"]


@dataclass(frozen=True, slots=True)
class Forward:
    """Run a step from its state and keep nothing but the next state, or the step's own state too, or its internals."""

    step: int
    keep: Keep
    way: int = 0  # which of several sets of internals, where there are several
    steps: int = 1  # how many in a row run as one


@dataclass(frozen=True, slots=True)
class Backward:
    """Run the backward of a step; afterwards its internals and its state are not kept any more."""

    step: int
    steps: int = 1  # how many in a row run as one; this is the first


Action = Forward | Backward
Part = tuple[int, int, int]  # a stretch of the chain that is still to do: its first step, its length, its slots


def advance(start: int, stop: int) -> list[Action]:
    """Run the steps from `start` up to `stop`, where the state at `start` is kept and nothing else."""
    return [Forward(step, "nothing" if step > start else "input") for step in range(start, stop)]


# -------------------------------------------------------------------------------------------------------------- Revolve


def revolve_forwards(steps: int, slots: int) -> int:
    """The least forwards when the slots hold states, the first one included: Revolve's closed form.

    Griewank and Walther count r * steps - binomial(slots + r, slots + 1); the forwards that keep internals, one for
    each step, are added here.
    """
    return steps + _repetitions(steps, slots) * steps - comb(slots + _repetitions(steps, slots), slots + 1)


def revolve(steps: int, slots: int) -> list[Action]:
    """The schedule with that many forwards; each split is where both parts keep their number of repetitions."""

    def split(length: int, slots: int) -> int:
        repeats = _repetitions(length, slots)
        return max(1, _reach(slots, repeats - 2), length - _reach(slots - 1, repeats))

    actions: list[Action] = []
    waiting: list[Part] = [(0, steps, slots)]
    while waiting:
        start, length, free = waiting.pop()
        if length == 1:
            actions += [Forward(start, "internals"), Backward(start)]
            continue
        left = split(length, free)
        actions += advance(start, start + left)
        waiting += [(start, left, free), (start + left, length - left, free - 1)]
    return actions


def _reach(slots: int, repeats: int) -> int:
    """The longest chain that these slots can reverse when no step is advanced over more than `repeats` times."""
    return comb(slots + repeats, slots) if repeats >= 0 else 0


def _repetitions(steps: int, slots: int) -> int:
    """How often the most repeated step is advanced over."""
    repeats = 0
    while _reach(slots, repeats) < steps:
        repeats += 1
    return repeats


# ------------------------------------------------------------------------------------------------------------- Gruslys


class Gruslys:
    """The least forwards for every length up to `steps` and every number of slots up to `slots`.

    A stretch begins at a state that is there. Run ahead over y steps, then keep the state there (for `state` slots) or
    the internals of the last of them (for `internals` slots; None: never); do what is to the right with the slots that
    are left, then what is to the left with all of them.
    """

    def __init__(self, steps: int, slots: int, *, state: int | None, internals: int | None) -> None:
        self.steps, self.slots = steps, slots
        prices: dict[Keep, int | None] = {"input": state, "internals": internals}
        self.prices = {keep: price for keep, price in prices.items() if price is not None and price <= slots}
        self.table = np.full((steps + 1, slots + 1), np.inf)
        self.table[0] = 0
        for length in range(1, steps + 1):
            if length == 1 and internals is None:
                self.table[1] = 1  # the internals of the step at hand need no slot
                continue
            for keep, price in self.prices.items():
                found = self._costs(keep, length, price, slots).min(axis=0, initial=np.inf)
                self.table[length, price:] = np.minimum(self.table[length, price:], found)

    def _costs(self, keep: Keep, length: int, low: int, high: int) -> Floats:
        """The forwards for each y = 1, 2, .. (rows) and each number of slots from `low` to `high`."""
        price = self.prices[keep]
        parts = self.table[1 if keep == "input" else 0 : length]  # the rows of what is left, in order; right, reversed
        ahead = np.arange(1.0, len(parts) + 1)[:, None]
        found: Floats = ahead + parts[::-1, low - price : high + 1 - price] + parts[:, low : high + 1]
        return found

    def forwards(self, slots: int) -> float:
        """The least forwards for the whole chain; infinite where the slots do not suffice."""
        return float(self.table[self.steps, slots])

    def schedule(self, slots: int) -> list[Action] | None:
        """A schedule with that many forwards; None where the slots do not suffice."""
        if np.isinf(self.forwards(slots)):
            return None
        actions: list[Action] = []
        waiting: list[Part | Action] = [(0, self.steps, slots)]
        while waiting:
            item = waiting.pop()
            if not isinstance(item, tuple):
                actions.append(item)
                continue
            start, length, free = item
            if length == 0:
                continue
            if length == 1:
                actions += [Forward(start, "internals"), Backward(start)]
                continue
            keep, ahead = self._best(length, free)
            middle = start + ahead
            right = (middle, length - ahead, free - self.prices[keep])
            if keep == "input":
                actions += advance(start, middle)
                waiting += [(start, ahead, free), right]
            else:
                actions += [*advance(start, middle - 1), Forward(middle - 1, "internals")]
                waiting += [(start, ahead - 1, free), Backward(middle - 1), right]
        return actions

    def _best(self, length: int, slots: int) -> tuple[Keep, int]:
        """What to keep, and after how many steps, with the least forwards."""
        options: list[tuple[float, Keep, int]] = []
        for keep, price in self.prices.items():
            if price <= slots:
                costs = self._costs(keep, length, slots, slots)
                options.append((float(costs.min()), keep, 1 + int(costs.argmin())))
        _, keep, ahead = min(options, key=lambda option: option[0])
        return keep, ahead


def hidden(steps: int, slots: int) -> Gruslys:
    """Slots hold states, the first one included: what Revolve solves too."""
    return Gruslys(steps, slots, state=1, internals=None)


def internal(steps: int, slots: int) -> Gruslys:
    """Slots hold the internals of a step; the first state needs none."""
    return Gruslys(steps, slots, state=None, internals=1)


def mixed(steps: int, slots: int, alpha: int) -> Gruslys:
    """A state takes one slot and the internals of a step `alpha`; the first state needs none."""
    return Gruslys(steps, slots, state=1, internals=alpha)
