"""A graph and its costs as arrays: what the planner's inner loops work on."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lowtide import native
from lowtide.costs import Costs
from lowtide.graph import Alternative, Graph, Place
from lowtide.plan import plain
from lowtide.plan.compiled import REFUSED, answered, compiled
from lowtide.plan.in_place import Pair, pairs

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Bytes = npt.NDArray[np.uint8]
Flags = npt.NDArray[np.bool_]

SOURCE = Path(__file__).with_name("search.cpp")
INT, REAL = ctypes.c_int64, ctypes.c_double
INTS, REALS, FLAGS = ctypes.POINTER(INT), ctypes.POINTER(REAL), ctypes.POINTER(ctypes.c_uint8)


class _Problem(ctypes.Structure):
    """The struct of the same name in problem.hpp."""

    _fields_ = [
        ("ops", INT),
        ("values", INT),
        *((name, INTS) for name in ("read_start", "reads", "make_start", "makes")),
        *((name, INTS) for name in ("over_start", "over_made", "over_read", "bytes", "maker", "killer", "temporaries")),
        ("seconds", REALS),
        *((name, INTS) for name in ("row_start", "keeper", "store_start", "stores", "restore_start", "restores")),
        *((name, INTS) for name in ("instead_start", "instead_of", "instead_op")),
        *((name, FLAGS) for name in ("required", "pinned", "repeatable", "optional", "restoring", "once")),
        ("tokens", INT),
        *(("fetch", INTS), ("away", INTS), ("kind", FLAGS), ("lane", INTS), ("transfer", REALS)),
        *(("lanes", INT), ("latency", REALS), ("takes", REALS)),
    ]


PROBLEM = ctypes.POINTER(_Problem)
SIGNATURES: native.Signatures = {
    "lowtide_problem_fits": ([PROBLEM, *(INT,) * 7], INT),
    "lowtide_profile": ([PROBLEM, INTS, INT, INTS], INT),
    "lowtide_shave": ([PROBLEM, INTS, INT, INT, INT, INT, REAL, REAL, REALS, INT, REAL, INT, INTS, INTS], INT),
    "lowtide_retime": ([PROBLEM, INTS, INT, INT, REALS], INT),
    "lowtide_tidy": ([PROBLEM, INTS, INT, INT, INT], INT),
    "lowtide_search": ([PROBLEM, INTS, INTS, INTS, INT, INT, INT, INT, INT, REAL, REAL], INT),
}


@cache
def library() -> ctypes.CDLL | None:
    """The compiled inner loops, or None: then those of `plain` do."""
    return compiled(SOURCE, SIGNATURES)


class Row(NamedTuple):
    """A way to be without a value for a while, as the loops follow it."""

    value: int
    keeper: int  # what is kept instead
    stores: Sequence[int]  # ops that make the keeper, in order; none: it is made anyway
    restores: Sequence[int]  # ops that make the value again, in order
    instead: Sequence[tuple[int, int]]  # readers, and the ops that read the keeper in their place


@dataclass(frozen=True)
class Rows:
    """Rows as arrays, in the order of their values."""

    start: Ints  # of each value
    keeper: Ints  # of each row, and so on
    store_start: Ints
    stores: Ints
    restore_start: Ints
    restores: Ints
    instead_start: Ints
    instead_of: Ints
    instead_op: Ints


def tabled(rows: Iterable[Row], values: int) -> Rows:
    """The rows of so many values as arrays."""
    ranked = sorted(rows, key=lambda row: row.value)
    store_start, stores = ragged([row.stores for row in ranked])
    restore_start, restores = ragged([row.restores for row in ranked])
    instead_start, _ = ragged([row.instead for row in ranked])
    pairs_instead = [pair for row in ranked for pair in row.instead]
    return Rows(
        start=np.searchsorted([row.value for row in ranked], np.arange(values + 1)).astype(np.int64),
        keeper=np.array([row.keeper for row in ranked], np.int64),
        store_start=store_start,
        stores=stores,
        restore_start=restore_start,
        restores=restores,
        instead_start=instead_start,
        instead_of=np.array([reader for reader, _ in pairs_instead], np.int64),
        instead_op=np.array([op for _, op in pairs_instead], np.int64),
    )


@dataclass(frozen=True)
class Move:
    """A copy as an op of a sequence: it starts, or it has arrived."""

    kind: int  # SEND, LEAVE or FETCH
    value: int
    place: Place  # the other one: where the value goes, or comes from


@dataclass(frozen=True)
class Copies:
    """The ops of a problem that are copies: they stand behind those of the graph, their tokens behind its values."""

    moves: tuple[Move, ...]
    tokens: int  # the first of the values that are tokens
    fetch: Ints  # of each value: the op that copies it back; -1
    away: Ints  # and the token that it needs; -1
    kind: Bytes  # of each op: RUN, or what its move is
    lane: Ints  # of each op that is a copy: its engine, by number
    transfer: Floats  # of each op that is a copy: seconds for its bytes
    latency: Floats  # of each engine: seconds before the bytes
    takes: Floats  # of each engine: the part of compute's speed that it takes


RUN, SEND, LEAVE, FETCH = range(4)  # what an op of a sequence is: one of the graph, or a part of a copy


def no_copies(ops: int, values: int) -> Copies:
    """Of a problem all of whose ops are those of the graph."""
    none = np.full(values, -1, np.int64)
    flags, numbers, reals_ = np.zeros(ops, np.uint8), np.zeros(ops, np.int64), np.zeros(ops)
    return Copies((), values, none, none, flags, numbers, reals_, np.zeros(0), np.zeros(0))


@dataclass(frozen=True)
class Problem:
    """What may run when, and what it costs; bytes that are there all the time are in `persistent`, not in `nbytes`."""

    graph: Graph
    costs: Costs
    persistent: int  # bytes of the inputs
    read_start: Ints
    reads: Ints
    make_start: Ints
    makes: Ints
    over_start: Ints
    over_made: Ints
    over_read: Ints
    nbytes: Ints
    maker: Ints
    killer: Ints
    temporaries: Ints
    seconds: Floats
    rows: tuple[Alternative, ...]  # of the graph whose keepers are on the device, by value
    table: Rows  # these, and those that copies make
    required: Bytes
    pinned: Bytes
    repeatable: Bytes
    optional: Bytes
    restoring: Bytes  # optional ops that make a value again from what was kept instead of it
    once: Bytes  # values that only a first run makes
    copies: Copies

    @cached_property
    def read_rows(self) -> list[list[int]]:
        """For each op the values that it reads."""
        return _rows(self.read_start, self.reads)

    @cached_property
    def make_rows(self) -> list[list[int]]:
        """For each op the values that it makes."""
        return _rows(self.make_start, self.makes)

    @cached_property
    def over_rows(self) -> list[list[Pair]]:
        """For each op the pairs (made, read) where it may work in place."""
        made, read = (_rows(self.over_start, flat) for flat in (self.over_made, self.over_read))
        return [list(zip(*pair, strict=True)) for pair in zip(made, read, strict=True)]

    @cached_property
    def struct(self) -> _Problem:
        """The arrays as the inner loops read them."""
        ops, values, flat = len(self.seconds), len(self.nbytes), len(self.over_made)
        table, copies, lanes = self.table, self.copies, len(self.copies.latency)
        rows = len(table.keeper)
        made = _Problem(
            ops,
            values,
            *(item for start, row in _flat(self) for item in (ints(start, ops + 1), ints(row))),
            ints(self.over_start, ops + 1),
            *(ints(array, flat) for array in (self.over_made, self.over_read)),
            *(ints(array, values) for array in (self.nbytes, self.maker, self.killer)),
            ints(self.temporaries, ops),
            reals(self.seconds, ops),
            *(ints(table.start, values + 1), ints(table.keeper, rows)),
            *(ints(table.store_start, rows + 1), ints(table.stores)),
            *(ints(table.restore_start, rows + 1), ints(table.restores)),
            ints(table.instead_start, rows + 1),
            *(ints(array, len(table.instead_of)) for array in (table.instead_of, table.instead_op)),
            *(_flags(array, count) for array, count in _kinds(self)),
            copies.tokens,
            *(ints(array, values) for array in (copies.fetch, copies.away)),
            *(_flags(copies.kind, ops), ints(copies.lane, ops), reals(copies.transfer, ops)),
            *(lanes, reals(copies.latency, lanes), reals(copies.takes, lanes)),
        )
        inner = library()
        if inner is not None:
            lengths = map(len, (table.keeper, table.stores, table.restores, table.instead_of))
            answered(inner.lowtide_problem_fits(made, len(self.reads), len(self.makes), flat, *lengths))
        return made

    def peak(self, sequence: Ints) -> int:
        """The most bytes in use, the persistent ones included, when the ops run in this sequence."""
        return self.persistent + int(self.profile(sequence).max(initial=0))

    def profile(self, sequence: Ints) -> Ints:
        """The bytes in use during each run, without the persistent ones."""
        inner = library()
        if inner is None:
            return plain.profile(self, sequence)
        bytes_ = np.zeros(len(sequence), np.int64)
        answered(inner.lowtide_profile(self.struct, ints(sequence), len(sequence), ints(bytes_)))
        return bytes_

    def allows(self, sequence: Ints) -> bool:
        """Whether no run reads an input after the op that writes over it for good."""
        order = [int(op) for op in sequence]
        first = {op: place for place, op in reversed(list(enumerate(order)))}
        reads = {op: [int(v) for v in self.reads[self.read_start[op] : self.read_start[op + 1]]] for op in set(order)}
        never = len(order)
        ends = {
            op: min((first[k] for v in reads[op] if (k := int(self.killer[v])) >= 0), default=never) for op in reads
        }
        return all(place <= ends[op] for place, op in enumerate(order))

    def time(self, sequence: Ints) -> float:
        """The seconds of all runs, and what copies take from them while they run; not what is waited for."""
        return float(self.seconds[sequence].sum())

    def retimed(self, sequence: Ints, budget: int) -> tuple[Ints, float]:
        """The sequence with its copies as early and as late as there is room, and its seconds."""
        if not len(self.copies.latency):
            return sequence, self.time(sequence)
        inner = library()
        assert inner is not None, "a problem with copies is made only where its loops are compiled"
        found, seconds = sequence.copy(), np.zeros(1)
        own = budget - self.persistent
        length = answered(inner.lowtide_retime(self.struct, ints(found), len(found), own, reals(seconds, 1)))
        return found[:length].copy(), float(seconds[0])


def ints(array: Ints, length: int | None = None) -> Any:
    """The address of an array of integers, which has this length."""
    return _address(array, np.int64, length).data_as(INTS)


def reals(array: Floats, length: int) -> Any:
    """The address of an array of numbers, which has this length."""
    return _address(array, np.float64, length).data_as(REALS)


def _flags(array: Bytes, length: int) -> Any:
    return _address(array, np.uint8, length).data_as(FLAGS)


def _address(array: npt.NDArray[Any], kind: Any, length: int | None) -> Any:
    if array.dtype != kind or not array.flags.c_contiguous or length not in (None, len(array)):
        answered(REFUSED)
    return array.ctypes


def _flat(problem: Problem) -> tuple[tuple[Ints, Ints], ...]:
    """The rows of the ops, by where each begins."""
    return (problem.read_start, problem.reads), (problem.make_start, problem.makes)


def _kinds(problem: Problem) -> tuple[tuple[Bytes, int], ...]:
    """The flags of values and ops, with how many there are."""
    ops, values = len(problem.seconds), len(problem.nbytes)
    of_ops = ((array, ops) for array in (problem.pinned, problem.repeatable, problem.optional, problem.restoring))
    return (problem.required, values), *of_ops, (problem.once, values)


def problem(graph: Graph, costs: Costs) -> Problem:
    """The arrays of a graph with its costs."""
    lasting = graph.device_storages
    killer = np.full(len(graph.values), -1, np.int64)
    over = [pairs(graph, costs, op) for op in range(len(graph.ops))]
    reads, repeatable = [], []
    once = np.zeros(len(graph.values), np.uint8)
    for index, op in enumerate(graph.ops):
        # A repeated run leaves lasting updates alone; a first run that has some is pinned, so its order is kept. What
        # it updates elsewhere must come for it all the same.
        detached = op.detachable and all(graph.values[old].storage in lasting for _, old in graph.effects[index])
        repeatable.append(graph.repeatable(index) and (detached or not graph.effects[index]))
        reads.append(graph.reads_of(index, again=detached))
        for new, old in graph.effects[index]:
            killer[old], once[new] = index, 1
    # Rows whose keepers are in other places cost copies, which run beside the ops: no sum over a sequence prices them.
    rows = sorted((row for row in graph.alternatives if row.place == "device"), key=lambda row: row.value)
    restoring = np.zeros(len(graph.ops), np.uint8)
    for row in rows:
        restoring[[op for op in row.restore if graph.ops[op].optional and row.value in graph.makes[op]]] = 1
    nbytes = [0 if value.storage in lasting else size for value, size in zip(graph.values, costs.nbytes, strict=True)]
    read_start, flat_reads = ragged(reads)
    make_start, flat_makes = ragged(graph.makes)
    over_start, _ = ragged(over)
    return Problem(
        graph=graph,
        costs=costs,
        persistent=sum(costs.nbytes[item.value] for item in graph.inputs if item.home == "device"),
        read_start=read_start,
        reads=flat_reads,
        make_start=make_start,
        makes=flat_makes,
        over_start=over_start,
        over_made=np.array([made for rows in over for made, _ in rows], np.int64),
        over_read=np.array([read for rows in over for _, read in rows], np.int64),
        nbytes=np.array(nbytes, np.int64),
        maker=np.array(graph.maker, np.int64),
        killer=killer,
        temporaries=np.array(costs.arena_temporaries, np.int64),
        seconds=np.array(costs.seconds, np.float64),
        rows=tuple(rows),
        table=tabled(map(as_row, rows), len(graph.values)),
        required=np.array([value in graph.required for value in range(len(graph.values))], np.uint8),
        pinned=np.array([bool(graph.effects[i] or op.channels) for i, op in enumerate(graph.ops)], np.uint8),
        repeatable=np.array(repeatable, np.uint8),
        optional=np.array([op.optional for op in graph.ops], np.uint8),
        restoring=restoring,
        once=once,
        copies=no_copies(len(graph.ops), len(graph.values)),
    )


def as_row(row: Alternative) -> Row:
    """A row of the graph as the loops follow it."""
    return Row(row.value, row.keeper, [row.store] if row.store >= 0 else [], row.restore, row.instead)


def ragged(rows: Any) -> tuple[Ints, Ints]:
    """Rows one after the other: where each begins, and what is in them."""
    start = np.zeros(len(rows) + 1, np.int64)
    start[1:] = np.cumsum([len(row) for row in rows])
    return start, np.array([item for row in rows for item in row], np.int64).reshape(-1)


def _rows(start: Ints, flat: Ints) -> list[list[int]]:
    items, ends = flat.tolist(), start.tolist()
    return [items[first:end] for first, end in pairwise(ends)]
