"""The truth for small graphs: the quickest sequence within a budget, proven, or the proof that none fits.

A* (Hart, Nilsson and Raphael 1968) from the end of the step to its start, over what is still to be made. Seen from the
end, what is alive at a run is known, so there is nothing to decide but which op ran last, and never what to free. What
must still run at least once is the estimate of what is left. Everything that the judge allows is tried: any order, any
repeated run, results on dying arguments, optional ops, leaving out what nothing needs; saved states of the random
generator are counted. Only inputs that a step uses up count as persistent. States grow exponentially with what may be
worth recomputing: up to 24 ops take milliseconds, 50 to 60 mostly less than a second.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from lowtide import native
from lowtide.graph import Graph
from lowtide.plan.compiled import answered, compiled
from lowtide.plan.problem import INT, INTS, REAL, Ints, Problem, ints
from lowtide.plan.settings import EXACT_LONGEST, EXACT_STATES

SOURCE = Path(__file__).with_name("exact.cpp")
TICKS = 1e12  # of cost, for all seconds of the step
WORDS = (1, 2, 4, 8)  # the sizes of sets that are compiled, in 64 bits

WORD = ctypes.POINTER(ctypes.c_uint64)


class _Game(ctypes.Structure):
    """The struct of the same name in exact.cpp."""

    _fields_ = [
        *((name, INT) for name in ("moves", "items", "ops", "pairs", "words")),
        *((name, INTS) for name in ("op", "ticks", "weight", "pair_start", "pair_made", "pair_read", "pair_bytes")),
        *((name, INTS) for name in ("lazy", "bytes", "op_ticks")),
        *((name, WORD) for name in ("makes", "needs", "waits", "holds", "sole", "asks", "may", "lacks", "start")),
    ]


SIGNATURES: native.Signatures = {
    "lowtide_exact": ([ctypes.POINTER(_Game), INT, INT, REAL, INT, INTS, INT, INTS], INT),
}


@cache
def library() -> ctypes.CDLL | None:
    """The compiled search, or None: then nothing is proven."""
    return compiled(SOURCE, SIGNATURES)


@dataclass(frozen=True)
class Exact:
    """What is known about all sequences within a budget."""

    sequence: Ints | None  # the quickest; None: nothing fits, or it was not found
    bound_seconds: float  # no sequence within the budget is quicker; infinite if nothing fits
    proven: bool  # whether the search came to its end
    states: int  # that it met


@dataclass(frozen=True)
class Least:
    """What is known about the peaks of all sequences."""

    sequence: Ints | None  # one with the least peak; None: it was not found
    peak: int  # bytes, with the persistent ones; no sequence has less
    proven: bool  # whether the search came to its end


def exact(problem: Problem, budget: int, *, limit: int = EXACT_STATES, seconds: float = math.inf) -> Exact:
    """The quickest of all sequences within the budget; gives up after `limit` states or so many seconds."""
    found = _search(problem, budget - problem.persistent, limit, seconds, peak_only=False)
    if found.sequence is not None:
        return Exact(found.sequence, problem.time(found.sequence), True, found.states)
    return Exact(None, math.inf if found.ended else found.cost / _rate(problem), found.ended, found.states)


def least_peak(problem: Problem, *, limit: int = EXACT_STATES, seconds: float = math.inf) -> Least:
    """The least peak of all sequences, whatever time they take."""
    found = _search(problem, 0, limit, seconds, peak_only=True)
    return Least(found.sequence, problem.persistent + found.cost, found.ended)


def useful(problem: Problem) -> list[int]:
    """The ops that a sequence may need to run: all that the outputs and what is in channels depend on."""
    graph = problem.graph
    ops = {op for op, item in enumerate(graph.ops) if item.channels or graph.required.intersection(item.makes)}
    makers = _makers(graph)
    waiting = list(ops)
    while waiting:
        found = {maker for read in graph.reads[waiting.pop()] for maker in makers[read]} - ops
        ops |= found
        waiting += found
    return sorted(ops)


def _makers(graph: Graph) -> list[list[int]]:
    """For each value all ops that make it: one, and the optional ones."""
    makers: list[list[int]] = [[] for _ in graph.values]
    for op, values in enumerate(graph.makes):
        for value in values:
            makers[value].append(op)
    return makers


@dataclass(frozen=True)
class _Found:
    """What the compiled search answers."""

    sequence: Ints | None
    ended: bool
    cost: int  # ticks, or bytes of the peak: no sequence has less
    states: int


def _search(problem: Problem, budget: int, limit: int, seconds: float, *, peak_only: bool) -> _Found:
    game, inner = Game(problem), library()
    if inner is None or game.words > WORDS[-1]:
        return _Found(None, False, 0, 0)
    sequence, answer = np.zeros(EXACT_LONGEST * max(1, len(game.ops)), np.int64), np.zeros(2, np.int64)
    length = answered(
        inner.lowtide_exact(
            game.struct(), budget, limit, seconds, peak_only, ints(sequence), len(sequence), ints(answer)
        )
    )
    ops = np.array([game.moves[move].op for move in sequence[: max(0, length)]], np.int64)
    return _Found(ops if length >= 0 else None, length != -2, int(answer[0]), int(answer[1]))


def _rate(problem: Problem) -> float:
    """Ticks a second."""
    return TICKS / (float(problem.seconds.sum()) or 1.0)


@dataclass(frozen=True)
class Move:
    """One way to run an op; its sets of items are bits of an integer."""

    op: int
    makes: int
    needs: int
    waits: int  # what must be gone: flags of ops that may not run after it, a state of the generator that is not saved
    holds: int  # what must be there: flags of ops that run before it, the state that is saved
    weight: int  # bytes besides what is alive before it
    pairs: tuple[tuple[int, int, int], ...]  # (made, item read, bytes): made may take the bytes of what is read


class Game:
    """A problem as items that are to be made, and moves that make them, for exact.cpp.

    The items are the values of the step, a flag for each op whose first run is special, and saved states of the random
    generator. What outlives the step takes no bytes and is no item; who reads it looks at the flags of its writers.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem, graph = problem, problem.graph
        self.ops = useful(problem)
        read = graph.required.union(*(graph.reads[op] for op in self.ops))
        made = dict.fromkeys(value for op in self.ops for value in graph.makes[op])
        values = [value for value in made if value in read and not self._lasting(value)]
        flags = [op for op in self.ops if problem.pinned[op]]
        replayed = [op for op in self.ops if graph.ops[op].random and graph.repeatable(op) and graph.generator_bytes]
        keys = [*(("value", v) for v in values), *(("flag", op) for op in flags), *(("state", op) for op in replayed)]
        self.item = {key: number for number, key in enumerate(keys)}
        self.words = next((words for words in WORDS if 64 * words >= max(len(keys), len(self.ops))), 2 * WORDS[-1])
        self.moves = []
        for op in self.ops:
            self.moves.append(self._move(op))
            if op in replayed:
                self.moves.append(self._move(op, saving=True))
            if op in flags and problem.repeatable[op]:
                self.moves.append(self._move(op, again=True))

    def _lasting(self, value: int) -> bool:
        return self.problem.graph.values[value].storage in self.problem.graph.lasting_storages

    def _set(self, kind: str, members: Iterable[int]) -> int:
        """Those of the members that are items of this kind, as bits."""
        return sum(1 << self.item[kind, member] for member in set(members) if (kind, member) in self.item)

    def _move(self, op: int, *, again: bool = False, saving: bool = False) -> Move:
        """The first run of an op, a first run that saves the state of the random generator, or a repeated run."""
        problem, graph = self.problem, self.problem.graph
        reads, makes = graph.reads_of(op, again=again), graph.makes_of(op, again=again)
        lasting = [value for value in reads if self._lasting(value)]
        draws = graph.ops[op].random
        later = {int(problem.killer[value]) for value in lasting} - {op}
        if not again:
            later |= {other for other in self.ops if other > op and graph.ordered(op, other)}
        state = self._set("state", [op])
        return Move(
            op,
            makes=self._set("value", makes) | (0 if again else self._set("flag", [op])) | (state if saving else 0),
            needs=self._set("value", reads) | (state if again else 0),
            waits=self._set("flag", later) | (0 if again or saving else state),
            holds=self._set("flag", [op, *(graph.maker[value] for value in lasting)]) | (state if saving else 0),
            weight=int(problem.nbytes[list(makes)].sum())
            + problem.costs.fewest_temporaries(op)
            + (graph.generator_bytes if draws and (again or saving) else 0),
            pairs=tuple(
                (made, self.item["value", read], int(problem.nbytes[made])) for made, read in problem.over_rows[op]
            ),
        )

    def struct(self) -> _Game:
        """The arrays as exact.cpp reads them."""
        problem, graph = self.problem, self.problem.graph
        place = {op: number for number, op in enumerate(self.ops)}
        ticks = (problem.seconds * _rate(problem)).astype(np.int64)
        sizes = {
            "value": problem.nbytes,
            "flag": 0 * problem.temporaries,
            "state": 0 * problem.temporaries + graph.generator_bytes,
        }
        pairs = [pair for move in self.moves for pair in move.pairs]
        numbers = [
            [place[move.op] for move in self.moves],
            [ticks[move.op] for move in self.moves],
            [move.weight for move in self.moves],
            np.cumsum([0, *(len(move.pairs) for move in self.moves)]),
            *([pair[column] for pair in pairs] for column in range(3)),
            [not move.weight and move.makes == self._set("flag", [move.op]) != 0 for move in self.moves],
            [sizes[kind][index] for kind, index in self.item],
            ticks[self.ops],
        ]
        must, may = self._ancestors()
        makers = _makers(graph)
        sole = [value for value, ops in enumerate(makers) if len(ops) == 1]
        sole_items = self._set("value", sole) | self._set("flag", self.ops) | self._set("state", self.ops)
        sources = [makers[index] if kind == "value" else [index] for kind, index in self.item]
        asks = [set.intersection(*(must[op] for op in ops)) for ops in sources]
        sets = [
            *([getattr(move, name) for move in self.moves] for name in ("makes", "needs", "waits", "holds")),
            [sole_items],
            [sum(1 << place[op] for op in row) for row in asks],
            [sum(1 << place[op] for op in set.union(*(may[op] for op in ops))) for ops in sources],
            [self._set("flag", row) for row in asks],
            [self._set("value", graph.required) | self._set("flag", self.ops)],
        ]
        self.arrays: list[Any] = [np.array(row, np.int64) for row in numbers]
        self.arrays += [np.array([self._words(bits) for bits in row], np.uint64) for row in sets]
        pointers = [array.ctypes.data_as(INTS if array.dtype == np.int64 else WORD) for array in self.arrays]
        return _Game(len(self.moves), len(self.item), len(self.ops), len(pairs), self.words, *pointers)

    def _ancestors(self) -> tuple[dict[int, set[int]], dict[int, set[int]]]:
        """For each op itself and the ops that must have run before its first run, and that may have."""
        graph, makers = self.problem.graph, _makers(self.problem.graph)
        reads = {op: [makers[value] for value in graph.reads[op] if makers[value]] for op in self.ops}
        must, may = {op: set(self.ops) for op in self.ops}, {op: {op} for op in self.ops}
        changed = True
        while changed:
            changed = False
            for op in self.ops:
                always = {op}.union(*(set.intersection(*(must[maker] for maker in ops)) for ops in reads[op]))
                ever = {op}.union(*(may[maker] for ops in reads[op] for maker in ops))
                changed |= always != must[op] or ever != may[op]
                must[op], may[op] = always, ever
        return must, may

    def _words(self, bits: int) -> list[int]:
        return [bits >> 64 * word & (1 << 64) - 1 for word in range(self.words)]
