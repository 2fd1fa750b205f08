"""Bound: seconds of recomputation that no plan within a budget can do without.

One gate (see `gate`) is a minimum cut, and its bound is quick. Several gates on one path bind each other: what is held
at the second was held at the first or made in between, and what was made in between costs seconds. That is a mixed
integer program, the staged program of Jain et al. 2020 (Checkmate) with a stage for each gate instead of one for each
op; HiGHS solves it for a few gates, and what it proved when it is stopped is a bound too.

It holds for programs that run ops: order, in-place, recomputation, and alternatives whose keepers are on the device.
Copies to other places can do without any recomputation; there is no bound for them.
"""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

from lowtide.plan.gate import Cut, Gate, Web
from lowtide.plan.problem import Floats, Ints
from lowtide.plan.settings import (
    GATES_JOINING,
    GATES_SCREENED,
    GATES_SEARCHED,
    GATES_TOGETHER,
    JOINT_VARIABLES,
    TINY_VALUE,
)


def gates(web: Web, order: Ints) -> list[Gate]:
    """The first op of the backward, and for each part of the rest the op that works with the most bytes."""
    graph = web.problem.graph
    begin = graph.forward_ends(order)
    rest = [Gate(web, int(op)) for op in order[begin:] if graph.ops[op].phase != "forward"]
    if not rest:
        return []
    parts = np.array_split(np.arange(1, len(rest)), min(GATES_SCREENED, max(1, len(rest) - 1)))
    return [rest[0], *(rest[max(part, key=lambda k: rest[k].work)] for part in parts if len(part))]


def bound_alone(candidates: list[Gate], budget: int) -> tuple[float, Gate | None]:
    """The best bound of one gate, within `budget` bytes beside the persistent ones, and the gate."""
    if not candidates:
        return 0.0, None
    first = candidates[0]
    _, cuts = first.search(max(budget, first.work))
    price = _price(cuts, budget - first.work)
    promise = {gate: gate.promise(price, budget) for gate in candidates}
    likely = sorted(candidates, key=lambda gate: -promise[gate])[:GATES_SEARCHED]
    found = [(gate.search(budget)[0], gate) for gate in dict.fromkeys((first, *likely))]
    return max(found, key=lambda pair: pair[0])


def bound_together(
    candidates: list[Gate], first: Gate, budget: int, known: float, enough: float, until: float
) -> float:
    """A bound from several gates on one path, begun with the best one: at least `known`, no better than `enough`.

    It ends where a relaxed program proves nothing new and takes so long that there is no time for all of them: of a
    very deep net even the program of two gates is too large.
    """
    path = _path(candidates, first)
    others = _spread(path, first, budget)
    chosen, best = [first], known
    patience = (until - time.monotonic()) / max(1, len(others))
    while others and len(chosen) < GATES_TOGETHER[-1] and best < enough and time.monotonic() < until:
        tried = []
        for gate in others:
            program = Stages(sorted((*chosen, gate), key=path.index), budget)
            if program.variables > JOINT_VARIABLES or time.monotonic() > until:
                break
            begun = time.monotonic()
            tried.append((program.solve(relaxed=True, seconds=until - begun), gate))
            if tried[-1][0] <= best and time.monotonic() - begun > patience:
                return best
        if not tried:
            break
        value, gate = max(tried, key=lambda pair: pair[0])
        chosen, best = [*chosen, gate], max(best, value)
        others = [other for other in others if other is not gate]
        if (len(chosen) in GATES_TOGETHER or not others) and time.monotonic() < until:
            program = Stages(sorted(chosen, key=path.index), budget)
            best = max(best, program.solve(relaxed=False, seconds=until - time.monotonic()))
    return best


def _price(cuts: list[Cut], room: int) -> float:
    return max(cuts, key=lambda cut: cut.cost - cut.price * room).price if cuts else 0.0


def _path(candidates: list[Gate], through: Gate) -> list[Gate]:
    """The longest row of gates of which each depends on the one before, with `through` among them."""
    near = [gate for gate in candidates if gate is through or gate.before[through.op] or gate.after[through.op]]
    length, previous = [1] * len(near), [-1] * len(near)
    for here, gate in enumerate(near):
        for there in range(here):
            if gate.before[near[there].op] and length[there] >= length[here]:
                length[here], previous[here] = length[there] + 1, there
    here = max(range(len(near)), key=lambda k: length[k])
    path = []
    while here >= 0:
        path.append(near[here])
        here = previous[here]
    return path[::-1]


def _spread(path: list[Gate], first: Gate, budget: int) -> list[Gate]:
    """From each part of the path the gate that works with the most bytes."""
    others = [gate for gate in path if gate is not first and gate.work <= budget]
    parts = np.array_split(np.arange(len(others)), min(GATES_JOINING, max(1, len(others))))
    return [others[max(part, key=lambda k: others[k].work)] for part in parts if len(part)]


class Stages:
    """The mixed integer program of a few gates, each of which depends on the one before.

    Stage t begins with the first run of gate t; stage 0 is what comes before the first gate. The variables say whether
    an op runs in a stage (`runs`), whether a value is held at a gate (`held`) and on from there (`on`), and whether an
    op runs at all after a gate (`later`). The last follows from the first; it makes the relaxed program at least as
    strong as each gate alone.
    """

    def __init__(self, path: list[Gate], budget: int) -> None:
        self.path, self.budget = path, budget
        web = path[0].web
        problem = replace(web.problem, nbytes=web.least)
        self.problem, self.last = problem, len(path)
        large = (problem.nbytes > TINY_VALUE * budget) & (problem.maker >= 0) & web.runs[problem.maker]
        self.values = np.flatnonzero(large)
        self.ops = np.unique(problem.maker[self.values])
        self.value_number = _numbers(self.values, len(large))
        self.op_number = _numbers(self.ops, len(problem.seconds))
        self.maker = self.op_number[problem.maker[self.values]]
        edges = large[web.read]
        self.reader, self.read = web.reader[edges], self.value_number[web.read[edges]]
        n, v = len(self.ops), len(self.values)
        self.variables = 0
        self.runs = self._new(self.last + 1, n)
        self.held = self._new(self.last, v)
        self.later = self._new(self.last, n)
        self.on = self.held.copy()
        for stage, gate in enumerate(path):
            for value in gate.overwritten:
                if large[value]:
                    self.on[stage, self.value_number[value]] = self._new(1, 1)[0, 0]

    def _new(self, *shape: int) -> Ints:
        first, self.variables = self.variables, self.variables + int(np.prod(shape))
        return np.arange(first, self.variables).reshape(shape)

    def solve(self, *, relaxed: bool, seconds: float) -> float:
        """The least seconds of recomputation, or what is proven of it in this many seconds of solving."""
        problem = self.problem
        base = float(problem.seconds[self.ops[problem.optional[self.ops] == 0]].sum())
        if not base:
            return 0.0
        cost = np.zeros(self.variables)
        cost[self.runs] = problem.seconds[self.ops] / base
        rows = _Rows(self.variables)
        bounds = self._fixed()
        self._memory(rows)
        self._presence(rows)
        self._demands(rows)
        try:
            done = milp(
                cost,
                constraints=rows.constraints(),
                integrality=np.zeros(self.variables) if relaxed else np.ones(self.variables),
                bounds=bounds,
                options={"time_limit": max(0.05, seconds)},
            )
        except MemoryError:  # under a limit of the process; nothing is proven then
            return 0.0
        proven = done.fun if relaxed or done.status == 0 else done.mip_dual_bound
        if done.status == 2:
            return float("inf")
        if proven is None or (relaxed and done.status != 0):
            return 0.0
        return (float(proven) * (1 - 1e-6) - 1) * base

    def _fixed(self) -> Bounds:
        """What is certain: no op runs before a gate that it depends on; a gate's arguments are held."""
        low, high = np.zeros(self.variables), np.ones(self.variables)
        for stage, gate in enumerate(self.path, start=1):
            depends = gate.after[self.ops] | (self.ops == gate.op)
            high[self.runs[:stage, depends]] = 0
            high[self.held[stage - 1, depends[self.maker]]] = 0
            low[self.runs[stage, self.ops == gate.op]] = 1
            low[self.held[stage - 1, self.read[self.reader == gate.op]]] = 1
        return Bounds(low, high)

    def _memory(self, rows: _Rows) -> None:
        """What is held at a gate and the bytes that its op works with beyond its arguments are within the budget."""
        nbytes = self.problem.nbytes[self.values] / self.budget
        for stage, gate in enumerate(self.path):
            arguments = int(self.problem.nbytes[self.values[self.read[self.reader == gate.op]]].sum())
            apart = self.on[stage] != self.held[stage]
            columns = np.concatenate((self.held[stage], self.on[stage, apart]))
            weights = np.concatenate((nbytes, nbytes[apart]))
            rows.add(columns[None], weights[None], -np.inf, 1 - (gate.work - arguments) / self.budget)
            rows.less(self.on[stage, apart], [self.held[stage, apart]])

    def _presence(self, rows: _Rows) -> None:
        """What is read in a stage or held at its end was held at its beginning or is made in it."""
        producer = self.op_number[self.reader]
        inner = producer >= 0
        reads, readers = self.read[inner], producer[inner]
        for stage in range(self.last + 1):
            itself = self.path[stage - 1].op if stage else -1
            asks = self.ops[readers] != itself
            rows.less(self.runs[stage, readers[asks]], self._there(stage, reads[asks]))
            if stage < self.last:
                rows.less(self.held[stage], self._there(stage, np.arange(len(self.values))))
        for stage, gate in enumerate(self.path, start=1):
            known = ~(gate.after | (np.arange(len(gate.after)) == gate.op))[self.ops]
            asks = known[readers] & known[self.maker[reads]]
            held, later = self.on[stage - 1], self.later[stage - 1]
            rows.less(later[readers[asks]], [held[reads[asks]], later[self.maker[reads[asks]]]])
            rows.less(later[known], list(self.runs[stage:, known]))
            needed = np.unique(self.read[gate.after[self.reader] & known[self.maker[self.read]]])
            rows.least([held[needed], later[self.maker[needed]]])

    def _demands(self, rows: _Rows) -> None:
        """Every op runs before the first gate that depends on it; what other ops and the caller read is there then."""
        ends = np.full(len(self.problem.seconds), self.last)
        begins = np.zeros(len(self.problem.seconds), int)
        for stage, gate in enumerate(self.path, start=1):
            begins[gate.after] = stage
        for stage, gate in reversed(list(enumerate(self.path))):
            ends[gate.before] = stage
        for stage in range(self.last + 1):
            certain = (ends[self.ops] == stage) & (self.problem.optional[self.ops] == 0)
            rows.least(list(self.runs[: stage + 1, certain]))
            certain = (begins == stage) & (ends == stage) & (self.op_number < 0)
            rows.least(self._there(stage, np.unique(self.read[certain[self.reader]])))
        once = self.runs[:, ~self.problem.repeatable[self.ops].astype(bool)]
        rows.add(once.T, np.ones_like(once.T), 0, 1)
        rows.least(self._there(self.last, np.flatnonzero(self.problem.required[self.values])))

    def _there(self, stage: int, values: Ints) -> list[Ints]:
        """The variables of which one must be set where these values are read in this stage."""
        made = self.runs[stage, self.maker[values]]
        return [made] if stage == 0 else [made, self.on[stage - 1, values]]


class _Rows:
    """Linear constraints, gathered."""

    def __init__(self, variables: int) -> None:
        self.variables, self.number = variables, 0
        self.row: list[Ints] = []
        self.column: list[Ints] = []
        self.weight: list[Floats] = []
        self.low: list[Floats] = []
        self.high: list[Floats] = []

    def add(self, columns: Ints, weights: Ints | Floats, low: float, high: float) -> None:
        """For each row of `columns`: the weighted sum of these variables lies between low and high."""
        count, width = columns.shape
        self.row.append(np.repeat(np.arange(self.number, self.number + count), width))
        self.column.append(columns.reshape(-1))
        self.weight.append(np.asarray(weights, float).reshape(-1))
        self.low.append(np.full(count, low))
        self.high.append(np.full(count, high))
        self.number += count

    def least(self, terms: list[Ints]) -> None:
        """One of the terms is set, element by element."""
        columns = np.stack(terms, axis=1)
        self.add(columns, np.ones_like(columns), 1, np.inf)

    def less(self, left: Ints, terms: list[Ints]) -> None:
        """Where the left is set one of the terms is, element by element."""
        columns = np.stack((left, *terms), axis=1)
        weights = np.ones_like(columns)
        weights[:, 0] = -1
        self.add(columns, weights, 0, np.inf)

    def constraints(self) -> LinearConstraint:
        """All of them."""
        where = (np.concatenate(self.row), np.concatenate(self.column))
        matrix = csr_array((np.concatenate(self.weight), where), shape=(self.number, self.variables))
        return LinearConstraint(matrix, np.concatenate(self.low), np.concatenate(self.high))


def _numbers(items: Ints, count: int) -> Ints:
    found = np.full(count, -1)
    found[items] = np.arange(len(items))
    return found
