"""Cuts at one op: sets to hold while it runs, as starts for the search and as bounds that no plan can beat.

When an op runs for the first time, everything that it depends on has run, and nothing that depends on it has. Every
plan holds some set of values at that point, within the budget less what the op itself works with; what later ops read
beyond that set runs again. Seconds of recomputation plus a price for each byte held is least on a minimum cut. The best
price gives a lower bound (Lagrange), and the cuts at several prices give good sets to keep.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from ortools.graph.python import max_flow
from scipy.sparse import csr_array
from scipy.sparse.csgraph import breadth_first_order

from lowtide.plan.exact import useful
from lowtide.plan.problem import Flags, Ints, Problem

SCALE = 1e11  # units of flow for all seconds of the step
FOREVER = 4 * 10**15  # more than any cut costs
SOURCE, SINK, NODES = 0, 1, 2  # the first node of the values


@dataclass(frozen=True)
class Cut:
    """A set of values to hold at the gate."""

    keep: frozenset[int]
    nbytes: int  # of the set
    cost: float  # seconds of recomputation and the price of the bytes
    price: float  # seconds a byte


class Web:
    """Which op depends on which, as every cut needs it.

    Alternatives are seen as no dearer than they are: a value that can be restored may be held as its keeper for the
    seconds there and back, a reader that another op can stand in for is that op, and storing for such takes no time.
    """

    def __init__(self, problem: Problem) -> None:
        ops, values = len(problem.seconds), len(problem.nbytes)
        self.least = problem.nbytes.copy()  # of each value: the bytes that it can be held in
        self.restoring = np.zeros(values)  # seconds there and back, the least of all ways
        shared = Counter(row.keeper for row in problem.rows)
        known: set[int] = set()
        for row in problem.rows:
            if not row.restore:
                continue
            free = row.store < 0 or shared[row.keeper] > 1  # the keeper may be there for another reason
            trip = sum(float(problem.seconds[op]) for op in (row.store, *row.restore) if op >= 0)
            self.least[row.value] = min(self.least[row.value], 0 if free else problem.nbytes[row.keeper])
            self.restoring[row.value] = min(trip, self.restoring[row.value]) if row.value in known else trip
            known.add(row.value)
        self.stored = [row for row in problem.rows if row.store >= 0 and not row.restore]
        stores = np.array([row.store for row in self.stored], np.int64)
        seconds = problem.seconds.copy()
        seconds[stores] = 0
        self.problem = replace(problem, seconds=seconds)
        self.stores = stores
        runs = np.zeros(ops, bool)
        runs[useful(problem)] = True
        runs &= problem.optional == 0
        runs[stores] = True
        reader = np.repeat(np.arange(ops), np.diff(problem.read_start))
        maker = np.repeat(np.arange(ops), np.diff(problem.make_start))
        read = problem.reads.copy()
        for row in problem.rows:
            for instead_of, _ in row.instead:
                entries = slice(problem.read_start[instead_of], problem.read_start[instead_of + 1])
                read[entries][problem.reads[entries] == row.value] = row.keeper
        inner = (problem.maker[read] >= 0) & runs[reader]
        self.runs, self.reader, self.read = runs, reader[inner], read[inner]
        made = runs[maker]
        self.maker, self.made = maker[made], problem.makes[made]
        edges = (np.ones(len(self.reader), np.int8), (problem.maker[self.read], self.reader))
        self.down = csr_array(edges, shape=(ops, ops))
        self.up = csr_array(self.down.T)
        self.scale = SCALE / max(float(seconds.sum()), 1e-12)
        self.nodes = NODES + values + ops

    def before(self, op: int) -> Flags:
        """The ops that this one depends on, and stores of what these make."""
        found = self._reached(self.up, op)
        found[self.stores] |= found[self.problem.maker[[row.value for row in self.stored]]]
        return found

    def after(self, op: int) -> Flags:
        """The ops that depend on this one."""
        return self._reached(self.down, op)

    def _reached(self, edges: csr_array, op: int) -> Flags:
        found = np.zeros(len(self.problem.seconds), bool)
        found[breadth_first_order(edges, op, return_predecessors=False)] = True
        found[op] = False
        return found


class Gate:
    """The point at which one op runs for the first time."""

    def __init__(self, web: Web, op: int) -> None:
        self.web, self.op = web, op

    @cached_property
    def before(self) -> Flags:
        """The ops that this one depends on."""
        return self.web.before(self.op)

    @cached_property
    def after(self) -> Flags:
        """The ops that depend on this one."""
        return self.web.after(self.op)

    @cached_property
    def needed(self) -> Ints:
        """The values that are made before and read after."""
        web, problem = self.web, self.web.problem
        made = self.before[problem.maker] & (problem.maker >= 0)
        wanted = np.zeros(len(problem.nbytes), bool)
        wanted[web.read[self.after[web.reader]]] = True
        wanted |= problem.required.astype(bool)
        return np.flatnonzero(wanted & made)

    @cached_property
    def overwritten(self) -> frozenset[int]:
        """Arguments that only one result may sit on, and that has no other place: keeping one costs its bytes."""
        problem = self.web.problem
        pairs = slice(problem.over_start[self.op], problem.over_start[self.op + 1])
        made, read = list(problem.over_made[pairs]), list(problem.over_read[pairs])
        alone = [r for m, r in zip(made, read, strict=True) if made.count(m) == 1 and read.count(r) == 1]
        return frozenset(map(int, alone))

    @cached_property
    def work(self) -> int:
        """Bytes that the op works with: arguments, results that sit on none of them, temporaries."""
        problem, op = self.web.problem, self.op
        reads = problem.reads[problem.read_start[op] : problem.read_start[op + 1]]
        makes = problem.makes[problem.make_start[op] : problem.make_start[op + 1]]
        onto = np.unique(problem.over_made[problem.over_start[op] : problem.over_start[op + 1]])
        nbytes = problem.nbytes
        held = nbytes[reads].sum() + nbytes[makes].sum() - nbytes[onto].sum()
        return int(held) + problem.costs.fewest_temporaries(op)

    @cached_property
    def arcs(self) -> tuple[Ints, Ints, Ints, Ints]:
        """Tail, head, units and value: value -> maker costs what holding it costs, maker -> sink its seconds."""
        web, problem = self.web, self.web.problem
        values = len(problem.nbytes)
        ops = np.flatnonzero(self.before)
        seconds = np.where(problem.repeatable[ops], problem.seconds[ops] * web.scale, FOREVER).astype(np.int64)
        asks = self.before[web.reader]
        makes = self.before[web.maker]
        made = web.made[makes]
        there = set(problem.reads[problem.read_start[self.op] : problem.read_start[self.op + 1]]) - self.overwritten
        held = np.where(np.isin(made, list(there)), -1, made)
        op_node, value_node = NODES + values, NODES
        rows = (
            (ops + op_node, np.full(len(ops), SINK), seconds, np.full_like(ops, -1)),
            _endless(web.reader[asks] + op_node, web.read[asks] + value_node),
            (made + value_node, web.maker[makes] + op_node, np.zeros_like(held), held),
            _endless(np.full(len(self.needed), SOURCE), self.needed + value_node),
        )
        tail, head, fixed, value = (np.concatenate(column) for column in zip(*rows, strict=True))
        return tail, head, fixed, value

    def cut(self, price: float) -> Cut:
        """The set to hold when a byte costs `price` seconds."""
        tail, head, fixed, value = self.arcs
        web, wide = self.web, self.web.problem.nbytes
        values = len(wide)
        instead = price * web.least + web.restoring < price * wide
        nbytes = np.where(value < 0, 0, np.where(instead, web.least, wide)[value])
        seconds = np.where(value < 0, 0, np.where(instead, web.restoring, 0)[value])
        paid = np.minimum((nbytes * price + seconds) * web.scale, FOREVER).astype(np.int64)
        flow = max_flow.SimpleMaxFlow()
        flow.add_arcs_with_capacity(tail, head, fixed + paid)
        flow.solve(SOURCE, SINK)
        side = np.zeros(self.web.nodes, bool)
        side[flow.get_source_side_min_cut()] = True
        held = (tail >= NODES) & (tail < NODES + values) & side[tail] & ~side[head]
        keep = frozenset(int(value) - NODES for value in tail[held])
        return Cut(keep, int(nbytes[held].sum()), flow.optimal_flow() / self.web.scale, price)

    def promise(self, price: float, budget: int) -> float:
        """The bound that this gate gives at one price."""
        room = budget - self.work
        if room < 0:
            return float("inf")
        return self.cut(price).cost - price * room if len(self.needed) else 0.0

    def search(self, budget: int, rounds: int = 24) -> tuple[float, list[Cut]]:
        """A lower bound on the seconds of recomputation within `budget` bytes, and the cuts met on the way to it."""
        if not len(self.needed):
            return 0.0, []
        room = budget - self.work
        if room < 0:
            return float("inf"), []
        problem = self.web.problem
        total, held = float(problem.seconds.sum()), max(1, int(problem.nbytes[self.needed].sum()))
        low, high = 1e-6 * total / held, 1e4 * total / held
        bound, cuts = 0.0, []
        for _ in range(rounds):
            price = (low * high) ** 0.5
            cut = self.cut(price)
            cuts.append(cut)
            bound = max(bound, cut.cost - price * room)
            if cut.nbytes > room:
                low = price
            else:
                high = price
        return bound, cuts


def holding(problem: Problem, order: Ints, place: int, keep: frozenset[int]) -> Ints:
    """The ops in order, where only `keep` is held on from a place and the rest is made again when it is first read."""
    ops = [int(op) for op in order]
    reads, makes = problem.read_rows, problem.make_rows
    done = ops[:place]
    made = {value for op in done for value in makes[op]}
    present = set(keep)
    for op in ops[place:]:
        lacking: set[int] = set()
        waiting = [op]
        while waiting:
            for value in reads[waiting.pop()]:
                maker = int(problem.maker[value])
                if value in made and value not in present and maker not in lacking and problem.repeatable[maker]:
                    lacking.add(maker)
                    waiting.append(maker)
        for again in (*sorted(lacking), op):
            done.append(again)
            present.update(makes[again])
    return np.array(done, np.int64)


def _endless(tail: Ints, head: Ints) -> tuple[Ints, Ints, Ints, Ints]:
    return tail, head, np.full(len(tail), FOREVER), np.full_like(tail, -1)
