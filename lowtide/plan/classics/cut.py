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
    runs = {op: 2 + number for number, op in enumerate(ops)}
    made = [(value, op) for op in runs for value in links.makes[op]]
    held = {value: 2 + len(runs) + number for number, (value, _) in enumerate(made)}
    rows: list[tuple[int, int, float]] = [(0, held[value], np.inf) for value in wanted if value in held]
    rows += [(held[value], runs[op], float(to_keep[value])) for value, op in made]
    for op, node in runs.items():
        rows.append((node, 1, float(to_run[op])))
        rows += [(node, held[value], np.inf) for value in links.reads[op] if value in held]
    if not rows:
        return frozenset()
    tail, head, price = (np.array(column) for column in zip(*rows, strict=True))
    finite = np.isfinite(price)
    units = np.full(len(price), ENDLESS, np.int64)
    units[finite] = price[finite] * (WHOLE / (float(price[finite].sum()) or 1.0))
    flow = max_flow.SimpleMaxFlow()
    flow.add_arcs_with_capacity(tail, head, units)
    flow.solve(0, 1)
    reached = set(flow.get_source_side_min_cut())
    return frozenset(value for value, op in made if held[value] in reached and runs[op] not in reached)
