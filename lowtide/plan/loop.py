"""A loop over one cell within a budget in bytes: which states and which cells to keep, with the fewest forwards.

The dynamic program of Gruslys et al. 2016, "Memory-efficient backpropagation through time", mixed case, with bytes in
place of slots. A kept cell is charged what it saves; the states before and after it only as far as nobody else holds
them. Cells take equal time, and each runs once with its graph, so the fewest forwards are the least time.

Not counted, for they are there in any case: the first state, and the one that the loop is just at.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from lowtide.errors import BudgetError, UsageError
from lowtide.plan.classics.chain import Action, Backward, Forward, Keep, advance
from lowtide.plan.settings import (
    CELLS_A_STATE,
    COARSE_LENGTHS,
    EXACT_LENGTH,
    FINE_LENGTHS,
    TABLE_LEVELS,
    TABLE_ROUND,
    TABLE_WORK,
)

Counts = npt.NDArray[np.int32]
Rows = npt.NDArray[np.int64] | slice

NEVER = 10**9  # forwards; two of them and a length still fit into 32 bits


@dataclass(frozen=True)
class Sizes:
    """What a loop holds, in bytes."""

    state: int  # one state that is stored, with the generator's state where the cell is random
    cell: int  # all that autograd saves for one cell, without parameters and inputs
    before: int  # of `cell`: what belongs to the state before it
    after: int  # of `cell`: what belongs to the state after it
    between: int  # of the state between two cells, what one of them saves or both

    @property
    def internals(self) -> int:
        """What a cell saves besides its states."""
        return self.cell - self.before - self.after

    def plain(self, length: int) -> int:
        """What the plain loop saves."""
        return length * self.internals + (length - 1) * self.between + self.after

    def least(self, length: int) -> int:
        """The smallest budget that can be planned."""
        if length == 1:
            return self.internals + self.after
        return self.cell if length <= EXACT_LENGTH else self.cell + self.state


@dataclass(frozen=True)
class LoopPlan:
    """A schedule and what it promises."""

    length: int  # time steps
    sizes: Sizes
    budget: int | None  # bytes; None: no limit
    nbytes: int  # the most that it holds
    forwards: int  # runs of the cell, the first ones included
    actions: tuple[Action, ...]

    @property
    def least(self) -> int:
        """The smallest budget that can be planned, in bytes."""
        return self.sizes.least(self.length)


def usual(state: int, cell: int) -> Sizes:
    """The sizes of a cell that saves the whole state before it and nothing of the one after it, as LSTM and GRU do."""
    return Sizes(state=state, cell=cell, before=state, after=0, between=state)


@lru_cache(maxsize=64)
def plan_loop(length: int, sizes: Sizes, budget: int | None = None) -> LoopPlan:
    """The schedule with the fewest forwards within the budget; without one nothing runs twice.

    Exact up to `EXACT_LENGTH` time steps where the amounts that can be left of the budget are few enough to be listed;
    otherwise what is left is rounded down to a grid. A plan never exceeds its budget.
    """
    if length < 1:
        raise UsageError(f"a loop of {length} time steps can't be planned.", hint="give at least one time step.")
    prices = _prices(sizes)
    if budget is None or budget >= prices.cell + (length - 1) * prices.cell_after:
        actions: list[Action] = [Forward(step, "internals") for step in range(length)]
        actions += [Backward(step) for step in reversed(range(length))]
    else:
        if budget < sizes.least(length):
            raise _too_small(length, sizes, budget)
        rows = min(EXACT_LENGTH, -(-length // TABLE_ROUND) * TABLE_ROUND) if length <= EXACT_LENGTH else length
        table = _table(prices, budget, rows)
        if table.forwards(length) >= NEVER:
            raise _too_small(length, sizes, budget)
        actions = table.schedule(length)
    forwards = sum(isinstance(action, Forward) for action in actions)
    return LoopPlan(length, sizes, budget, _most(sizes, actions), forwards, tuple(actions))


def _too_small(length: int, sizes: Sizes, budget: int) -> BudgetError:
    least = sizes.least(length)
    return BudgetError(
        f"{budget:,} bytes are too few for a loop of {length:,} time steps: one cell saves {sizes.cell:,} bytes for "
        f"its backward, and a state has {sizes.state:,}.",
        hint=f"give at least {least:,} bytes; the plain loop saves {sizes.plain(length):,}.",
        least=least,
    )


def _most(sizes: Sizes, actions: Iterable[Action]) -> int:
    """The most bytes that a schedule holds."""
    stored: set[int] = set()
    kept: set[int] = set()
    now = most = 0

    def around(state: int) -> int:
        if state == 0:
            return 0
        if state in stored:
            return sizes.state
        if state in kept and state - 1 in kept:
            return sizes.between
        return sizes.before * (state in kept) + sizes.after * (state - 1 in kept)

    for action in actions:
        step = action.step
        if isinstance(action, Forward) and (action.keep == "nothing" or (action.keep == "input" and step in stored)):
            continue
        now -= around(step) + around(step + 1)
        if isinstance(action, Backward):
            kept.remove(step)
            stored.discard(step)
            now -= sizes.internals
        elif action.keep == "input":
            stored.add(step)
        else:
            kept.add(step)
            now += sizes.internals
        now += around(step) + around(step + 1)
        most = max(most, now)
    return most


# ----------------------------------------------------------------------------------------------------- dynamic program


@dataclass(frozen=True)
class _Prices:
    """What each choice takes of the room, in bytes."""

    state: int  # store a state
    cell: int  # keep a cell whose state is stored
    far: int  # keep a cell whose state is not
    state_after: int  # store the state after a kept cell
    cell_after: int  # keep a cell right after a kept one


def _prices(sizes: Sizes) -> _Prices:
    cell = sizes.internals + sizes.after
    return _Prices(
        state=sizes.state,
        cell=cell,
        far=cell + sizes.before,
        state_after=sizes.state - sizes.after,
        cell_after=cell + sizes.between - sizes.after,
    )


class _Table:
    """The fewest forwards of every length, for every amount of room that can be left.

    A stretch begins at a state. `held`: it is stored, and paid for. `fresh`: it is what a kept cell has just made, and
    paid for as far as that cell saves it. In a held stretch run ahead, then store a state or keep a cell, do what is to
    the right with the room that is left, and then what is to the left with all of it.
    """

    def __init__(self, prices: _Prices, room: int, longest: int, levels: list[int]) -> None:
        self.prices, self.room, self.levels = prices, room, levels
        self.block = 1 if longest <= EXACT_LENGTH else -(-longest // COARSE_LENGTHS)
        fine = longest if longest <= EXACT_LENGTH else FINE_LENGTHS
        self.lengths = [*range(fine + 1), *(n for n in range(fine + 1, longest + 1) if self._coarse(n, longest))]
        self.row = {length: row for row, length in enumerate(self.lengths)}
        self.fine = fine
        shape = (len(self.lengths), len(levels))
        self.held, self.fresh = (np.full(shape, NEVER, np.int32) for _ in range(2))
        self.held[0] = self.fresh[0] = 0
        self._payments: dict[int, tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]] = {}
        self._ahead = self.held.copy()  # a held stretch, after running over it once
        self._stored = self.held.copy()  # a held stretch that pays for its state, at the levels before it has paid
        self._far = self._paid(self.fresh, prices.far)  # a fresh stretch after a far cell, likewise
        self._lefts = np.array(self.lengths, np.int64)
        for row in range(1, len(self.lengths)):
            self._fill(row)

    def _coarse(self, length: int, longest: int) -> bool:
        return length % self.block == 0 or length == longest

    def _paid(self, table: Counts, price: int) -> Counts:
        """Each row of a table with what is left after paying, NEVER where the room does not suffice."""
        if price not in self._payments:
            levels = np.array(self.levels)
            left = np.searchsorted(levels, levels - price, side="right") - 1
            self._payments[price] = left, left >= 0
        left, enough = self._payments[price]
        return np.where(enough, table[..., left], np.int32(NEVER))

    def _kept(self, length: int) -> int:
        """How many cells are kept in a row where one would be, so that a length of the table is left."""
        before: int = self.lengths[self.row[length] - 1]
        return length - before

    def _chain_price(self, first: int, cells: int) -> int:
        return first + (cells - 1) * self.prices.cell_after

    def _pairs(self, length: int, skipped: int) -> tuple[Rows, Rows]:
        """The rows of the left and the right part, where `skipped` cells are between them."""
        if length <= self.fine:
            last = length - 1 - skipped  # of the right part
            return slice(1, length), slice(last, None if skipped else 0, -1)
        lefts = self._lefts[1 : self.row[length]]
        rests = ((left, length - skipped - left) for left in lefts.tolist())
        pairs = [(self.row[left], self.row[rest]) for left, rest in rests if rest in self.row]
        both = np.array(pairs, np.int64).reshape(-1, 2)
        return both[:, 0], both[:, 1]

    def _split_costs(self, length: int, keep: Keep, level: int | slice) -> tuple[Rows, Counts]:
        """The rows of the left parts, and the forwards of each split at a level or at all."""
        if keep == "input":
            left, right = self._pairs(length, 0)
            return left, self._ahead[left, level] + self._stored[right, level]
        left, right = self._pairs(length, 1)
        return left, self._ahead[left, level] + self._far[right, level] + np.int32(1)

    def _fill(self, row: int) -> None:
        length, prices = self.lengths[row], self.prices
        cells = self._kept(length)
        rest = self.fresh[row - 1]
        best = self._paid(rest, self._chain_price(prices.cell, cells)) + cells
        for keep in self._splits() if length > 1 else ():
            _, costs = self._split_costs(length, keep, slice(None))
            best = np.minimum(best, costs.min(axis=0, initial=NEVER))
        self.held[row] = np.minimum(best, NEVER)
        self._ahead[row] = np.minimum(best + length, NEVER)
        self._stored[row] = self._paid(self.held[row], prices.state)
        on = self._paid(rest, self._chain_price(prices.cell_after, cells)) + cells
        self.fresh[row] = np.minimum(np.minimum(on, self._paid(self.held[row], prices.state_after)), NEVER)
        self._far[row] = self._paid(self.fresh[row], prices.far)

    def _splits(self) -> tuple[Keep, ...]:
        """Where a far cell takes as much as a state and the cell after it, storing the state is no worse."""
        worse = self.prices.far >= self.prices.state + self.prices.cell
        return ("input",) if worse else ("input", "internals")

    def forwards(self, length: int) -> int:
        """The fewest forwards of a whole loop, whose first state is there."""
        return int(self.held[self.row[length], -1])

    def schedule(self, length: int) -> list[Action]:
        """A schedule with that many forwards."""
        actions: list[Action] = []
        waiting: list[tuple[int, int, int, bool] | Action] = [(0, length, self.room, True)]
        while waiting:
            item = waiting.pop()
            if not isinstance(item, tuple):
                actions.append(item)
                continue
            start, count, room, stored = item
            if count == 0:
                continue
            level, row = bisect_right(self.levels, room) - 1, self.row[count]
            first = self.prices.cell if stored else self.prices.cell_after
            goal = (self.held if stored else self.fresh)[row, level]
            cells = self._kept(count)
            price = self._chain_price(first, cells)
            left = bisect_right(self.levels, self.levels[level] - price) - 1
            if left >= 0 and self.fresh[row - 1, left] + cells == goal:
                actions += [Forward(step, "internals") for step in range(start, start + cells)]
                waiting += [Backward(step) for step in range(start, start + cells)]
                waiting.append((start + cells, count - cells, self.levels[left], False))
                continue
            if not stored:
                waiting.append((start, count, self.levels[level] - self.prices.state_after, True))
                continue
            keep, ahead = self._best(count, level)
            middle = start + ahead
            if keep == "input":
                actions += advance(start, middle)
                waiting.append((start, ahead, self.levels[level], True))
                waiting.append((middle, count - ahead, self.levels[level] - self.prices.state, True))
            else:
                actions += [*advance(start, middle), Forward(middle, "internals")]
                waiting += [(start, ahead, self.levels[level], True), Backward(middle)]
                waiting.append((middle + 1, count - ahead - 1, self.levels[level] - self.prices.far, False))
        return actions

    def _best(self, length: int, level: int) -> tuple[Keep, int]:
        """What to keep, and after how many time steps, with the fewest forwards."""
        options: list[tuple[int, Keep, int]] = []
        for keep in self._splits():
            left, costs = self._split_costs(length, keep, level)
            if len(costs):
                place = int(costs.argmin())
                options.append((int(costs[place]), keep, int(self._lefts[left][place])))
        _, keep, ahead = min(options, key=lambda option: option[0])
        return keep, ahead


@lru_cache(maxsize=8)
def _table(prices: _Prices, room: int, longest: int) -> _Table:
    rows = longest if longest <= EXACT_LENGTH else FINE_LENGTHS + COARSE_LENGTHS
    most = int(min(TABLE_LEVELS, TABLE_WORK / max(1, rows * rows // 2)))
    return _Table(prices, room, longest, _levels(prices, room, most))


def _levels(prices: _Prices, room: int, most: int) -> list[int]:
    """The amounts that can be left of the room, in order; where they are too many, a grid.

    Whoever is between two levels counts as being at the lower one, so a plan may come out slower, never larger.
    """
    charges = sorted({prices.state, prices.state_after, prices.cell_after, prices.cell, prices.far} - {0})
    floor = min(prices.cell, prices.cell_after)  # with less no cell fits
    found, waiting = {0, room}, [room]
    while waiting and len(found) <= most:
        now = waiting.pop()
        for left in {now - charge for charge in charges if now - charge >= floor} - found:
            found.add(left)
            waiting.append(left)
    if len(found) <= most:
        return sorted(found)
    finest = -(-room // most)
    units = {finest, *(-(-charge // parts) for charge in charges for parts in range(1, charge // finest + 1))}
    often = [*charges, *[prices.cell_after] * CELLS_A_STATE]
    unit = min(units, key=lambda unit: (sum(-charge % unit for charge in often), unit))
    ends = {room - charge for charge in charges if charge <= room}
    return sorted({0} | set(range(room, -1, -unit)) | ends)
