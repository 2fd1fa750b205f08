"""Minimum cuts: which values to keep so that the rest can be made again, at the least price."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from ortools.graph.python import max_flow

from lowtide.plan.classics.tape import Links
from lowtide.plan.problem import Floats

WHOLE = 1e14  # units of flow for the sum of all prices
ENDLESS = 4 * 10**15


def cheapest(
    links: Links, ops: Iterable[int], wanted: Iterable[int], to_keep: Floats, to_run: Floats
) -> frozenset[int]:
    """The values to keep after these ops, so that they can make again what is wanted; prices of all values and ops.

    What no op of these makes is there for nothing. An op with an infinite price does not run again.
    """
    return Net(links, ops, wanted).cheapest(to_keep, to_run)


class Net:
    """The arcs of a cut, for many prices: what is wanted -> value -> the op that makes it -> end, and what ops read."""

    def __init__(self, links: Links, ops: Iterable[int], wanted: Iterable[int]) -> None:
        runs = {op: 2 + number for number, op in enumerate(ops)}
        made = [(value, op) for op in runs for value in links.makes[op]]
        held = {value: 2 + len(runs) + number for number, (value, _) in enumerate(made)}
        endless = [(0, held[value]) for value in wanted if value in held]
        endless += [(node, held[value]) for op, node in runs.items() for value in links.reads[op] if value in held]
        paid = [(held[value], runs[op]) for value, op in made] + [(node, 1) for node in runs.values()]
        self.ops, self.values = np.array(list(runs), np.int64), np.array([value for value, _ in made], np.int64)
        self.arcs = np.array([*endless, *paid], np.int64).reshape(-1, 2).T.copy()
        self.endless, self.made = len(endless), [(value, held[value], runs[op]) for value, op in made]

    def cheapest(self, to_keep: Floats, to_run: Floats) -> frozenset[int]:
        """The values to keep at these prices of all values and ops."""
        if not self.arcs.size:
            return frozenset()
        price = np.concatenate((np.full(self.endless, np.inf), to_keep[self.values], to_run[self.ops]))
        finite = np.isfinite(price)
        units = np.full(len(price), ENDLESS, np.int64)
        units[finite] = price[finite] * (WHOLE / (float(price[finite].sum()) or 1.0))
        flow = max_flow.SimpleMaxFlow()
        flow.add_arcs_with_capacity(*self.arcs, units)
        flow.solve(0, 1)
        reached = set(flow.get_source_side_min_cut())
        return frozenset(value for value, held, run in self.made if held in reached and run not in reached)
