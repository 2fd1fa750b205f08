"""Cuts at the turn from forward to backward: starts for the search, and a bound that no plan can beat.

When the first op of the backward runs, every plan holds some set of values within the budget, and what the rest of the
backward reads beyond that set runs again. Seconds of recomputation plus a price for each byte held is least on a
minimum cut; the best price gives a lower bound (Lagrange), and the cuts at several prices give good sets to keep. It
does not see what must be together later in the backward.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from ortools.graph.python import max_flow

from lowtide.plan.problem import Ints, Problem

SCALE = 1e11  # units of flow for all seconds of the step
FOREVER = 4 * 10**15  # more than any cut costs


@dataclass(frozen=True)
class Cut:
    """A set of values to hold at the turn."""

    keep: frozenset[int]
    nbytes: int  # of the set
    cost: float  # seconds of recomputation and the price of the bytes


class Turn:
    """The turn of one order of the ops: what is made before it and read after it."""

    def __init__(self, problem: Problem, order: Ints) -> None:
        self.problem = problem
        self.order = [int(op) for op in order]
        graph = problem.graph
        backward = [place for place, op in enumerate(self.order) if graph.ops[op].phase == "backward"]
        self.place = backward[0] if backward else len(self.order)
        before = set(self.order[: self.place])
        self.before = sorted(before)
        self.needed = sorted(
            {
                read
                for op in self.order[self.place :]
                for read in graph.reads_of(op, again=graph.ops[op].detachable)
                if graph.maker[read] in before
            }
        )
        self._build()

    def _build(self) -> None:
        """The arcs: value -> maker costs its bytes, maker -> sink its seconds; what runs again needs its arguments."""
        problem, graph = self.problem, self.problem.graph
        values = len(graph.values)
        self.scale = SCALE / max(float(problem.seconds.sum()), 1e-12)
        ran = self._certainly_ran()
        rows: list[tuple[int, int, int, int]] = []  # from, to, units that it costs, bytes that it costs
        for op in self.before:
            node = 2 + values + op
            seconds = int(problem.seconds[op] * self.scale) if op in ran else 0
            rows.append((node, 1, seconds if problem.repeatable[op] else FOREVER, 0))
            for read in problem.reads[problem.read_start[op] : problem.read_start[op + 1]]:
                if problem.maker[read] >= 0:
                    rows.append((node, 2 + int(read), FOREVER, 0))
            for made in problem.makes[problem.make_start[op] : problem.make_start[op + 1]]:
                rows.append((2 + int(made), node, 0, int(problem.nbytes[made])))
        rows += [(0, 2 + value, FOREVER, 0) for value in self.needed]
        self.arcs = tuple(np.array(column, np.int64) for column in zip(*rows, strict=True))

    def _certainly_ran(self) -> set[int]:
        """The ops that have run before the first op of the backward in every plan: those that it depends on."""
        graph = self.problem.graph
        ran: set[int] = set()
        waiting = [self.order[self.place]] if self.place < len(self.order) else []
        while waiting:
            for read in graph.reads[waiting.pop()]:
                maker = graph.maker[read]
                if maker >= 0 and maker not in ran:
                    ran.add(maker)
                    waiting.append(maker)
        return ran

    def cut(self, price: float) -> Cut:
        """The set to hold when a byte costs `price` seconds."""
        tail, head, fixed, nbytes = self.arcs
        paid = np.minimum(nbytes * (price * self.scale), FOREVER).astype(np.int64)
        flow = max_flow.SimpleMaxFlow()
        flow.add_arcs_with_capacity(tail, head, fixed + paid)
        flow.solve(0, 1)
        side = np.zeros(2 + len(self.problem.graph.values) + len(self.problem.graph.ops), bool)
        side[flow.get_source_side_min_cut()] = True
        values = len(self.problem.graph.values)
        held = (tail >= 2) & (tail < 2 + values) & side[tail] & ~side[head]
        keep = frozenset(int(value) - 2 for value in tail[held])
        return Cut(keep, int(nbytes[held].sum()), flow.optimal_flow() / self.scale)

    def search(self, budget: int, rounds: int = 24) -> tuple[float, list[Cut]]:
        """A lower bound on the seconds of recomputation within `budget` bytes, and the cuts met on the way to it."""
        if self.place >= len(self.order) or not self.needed:
            return 0.0, []
        total, held = float(self.problem.seconds.sum()), max(1, int(self.problem.nbytes[self.needed].sum()))
        low, high = 1e-6 * total / held, 1e4 * total / held
        bound, cuts = 0.0, []
        for _ in range(rounds):
            price = (low * high) ** 0.5
            cut = self.cut(price)
            cuts.append(cut)
            bound = max(bound, cut.cost - price * budget)
            if cut.nbytes > budget:
                low = price
            else:
                high = price
        return bound, cuts

    def sequence(self, keep: frozenset[int]) -> Ints:
        """The ops in order, where only `keep` is held at the turn and the rest is made again when it is first read."""
        graph, problem = self.problem.graph, self.problem
        done = list(self.order[: self.place])
        made = {value for op in done for value in graph.makes[op]}
        present = set(keep)
        for op in self.order[self.place :]:
            lacking: set[int] = set()
            waiting = [op]
            while waiting:
                now = waiting.pop()
                for read in problem.reads[problem.read_start[now] : problem.read_start[now + 1]]:
                    value, maker = int(read), int(problem.maker[read])
                    if value in made and value not in present and maker not in lacking and problem.repeatable[maker]:
                        lacking.add(maker)
                        waiting.append(maker)
            for again in (*sorted(lacking), op):
                done.append(again)
                present.update(graph.makes[again])
        return np.array(done, np.int64)
