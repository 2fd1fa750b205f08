"""Copies as ops of a sequence, so that one search chooses among all ways to be without a value for a while.

A row of alternatives whose keeper is the value itself in another place becomes three ops: *send* starts to copy it
there, *leave* waits until it is there, *fetch* starts to copy it back. Tokens, values without bytes, tie them together.
To the search they are a store and a restore as any other row has them. An input that lives elsewhere has a fetch as its
maker, and what becomes of it is sent there. When each copy begins and is waited for is for `Problem.retimed` to say.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np

from lowtide.costs import Costs, Direction
from lowtide.engines import FLOOR
from lowtide.errors import UsageError
from lowtide.graph import Graph, Place
from lowtide.plan.problem import (
    FETCH,
    LEAVE,
    SEND,
    Bytes,
    Copies,
    Floats,
    Ints,
    Move,
    Problem,
    Row,
    as_row,
    problem,
    ragged,
    tabled,
)
from lowtide.program import Copy, Program, Run, Wait

Array = TypeVar("Array", Ints, Floats, Bytes)


def offers_copies(graph: Graph) -> bool:
    """Whether a program of this graph may copy to other places, or has to."""
    return lives_elsewhere(graph) or any(row.place != "device" for row in graph.alternatives)


def lives_elsewhere(graph: Graph) -> bool:
    """Whether the caller has something of the step in another place than the device."""
    return any(item.home != "device" for item in graph.ends)


def all_on_device(graph: Graph) -> Graph:
    """The graph as it would be with everything on the device: the same ops and values."""
    if not lives_elsewhere(graph):
        return graph
    inputs = tuple(replace(item, home="device") for item in graph.inputs)
    outputs = tuple(replace(item, home="device") for item in graph.outputs)
    return replace(graph, inputs=inputs, outputs=outputs)


def least_seconds(graph: Graph, costs: Costs, compute: float) -> float:
    """Seconds that no program takes less than whose ops take so many, with the copies of what lives elsewhere.

    A copy that runs beside ops takes its part of their speed, and one that is waited for takes all of it. What is
    updated must come, and go home again; what is only read may have readers that need not run.
    """
    sent = _sent_home(graph)
    new = {graph.values[value].storage for value in sent}
    moved: list[tuple[Place, Direction, int]] = [(place, "out", value) for value, place in sent.items()]
    moved += [
        (item.home, "in", item.value)
        for item in graph.inputs
        if item.home != "device" and graph.values[item.value].storage in new
    ]
    busy, taken = [0.0], 0.0
    for lane in costs.lanes:
        own = [costs.nbytes[value] for place, way, value in moved if (place, way) == (lane.place, lane.direction)]
        busy.append(len(own) * lane.latency + sum(own) / lane.rate)
        taken += lane.takes * busy[-1]
    together = sum(lane.takes for lane in costs.lanes)
    return max(*busy, compute + taken * min(1.0, (1 - FLOOR) / together if together else 1.0))


def copying(graph: Graph, costs: Costs, *, again: bool = True) -> Problem:
    """The arrays of a graph with its copies; without `again` no op runs twice, and nothing is kept narrow."""
    base = problem(graph, costs)
    rows = [as_row(row) for row in base.rows] if again else []
    if not again:
        base = replace(base, repeatable=np.zeros_like(base.repeatable))
    return _Wider(base, rows).widened()


def weave(arrays: Problem, sequence: Iterable[int]) -> Ints:
    """A sequence of the graph's ops with the copies that it can't do without: of what lives elsewhere."""
    fetch, sends = _home_moves(arrays)
    there: set[int] = set()
    found: list[int] = []
    for op in map(int, sequence):
        missing = [value for value in arrays.read_rows[op] if value in fetch and value not in there]
        there.update(missing)
        found += [*(fetch[value] for value in missing), op]
        found += [move for value in arrays.make_rows[op] for move in sends.pop(value, ())]  # a first run makes it
    return np.array(found, np.int64)


def sequence_of(arrays: Problem, program: Program) -> Ints:
    """The sequence that a program runs, with its copies."""
    first = len(arrays.graph.ops)
    number = {(move.kind, move.value, move.place): first + k for k, move in enumerate(arrays.copies.moves)}
    back = {move.value: first + k for k, move in enumerate(arrays.copies.moves) if move.kind == FETCH}
    found: list[int | None] = []
    for instruction in program.instructions:
        match instruction:
            case Run(op):
                found.append(op)
            case Copy(value, "device"):
                found.append(back.get(value))
            case Copy(value, place):
                found.append(number.get((SEND, value, place)))
            case Wait(value, place) if place != "device":
                found.append(number.get((LEAVE, value, place)))
    return np.array([op for op in found if op is not None], np.int64)


def _home_moves(arrays: Problem) -> tuple[dict[int, int], dict[int, list[int]]]:
    """For each input that lives elsewhere the op that fetches it; for what becomes of one, those that send it home."""
    graph, first = arrays.graph, len(arrays.graph.ops)
    fetch: dict[int, int] = {}
    sends: dict[int, list[int]] = {}
    for op, move in enumerate(arrays.copies.moves, first):
        if graph.home[move.value] == "device":
            continue
        if move.kind == FETCH:
            fetch[move.value] = op
        else:
            sends.setdefault(move.value, []).append(op)
    return fetch, sends


@dataclass
class _Wider:
    """A problem to which copies are added, one after the other."""

    base: Problem
    rows: list[Row]
    moves: list[Move] = field(default_factory=list)
    reads: list[list[int]] = field(default_factory=list)
    makes: list[list[int]] = field(default_factory=list)
    flags: list[tuple[bool, bool, bool]] = field(default_factory=list)  # repeatable, optional, restoring
    makers: list[int] = field(default_factory=list)  # of the tokens
    needed: list[bool] = field(default_factory=list)  # tokens that must be there at the end

    def widened(self) -> Problem:
        """The problem with a copy for each row of another place, and for what lives in one."""
        base, graph = self.base, self.base.graph
        values = len(graph.values)
        maker = base.maker.copy()
        fetch, away = np.full(values, -1, np.int64), np.full(values, -1, np.int64)
        for row in graph.alternatives:
            if row.place == "device" or graph.home[row.value] != "device" or not self._priced(row.place):
                continue
            gone, stores = self._send(row.value, row.place, optional=True)
            back = self._add(Move(FETCH, row.value, row.place), [gone], [row.value], (True, True, True))
            self.rows.append(Row(row.value, gone, stores, [back], []))
            if fetch[row.value] < 0:
                fetch[row.value], away[row.value] = back, gone
        for end in graph.ends:
            if end.home != "device" and not self._priced(end.home):
                raise UsageError(
                    f"no plan for %{end.value} {graph.values[end.value].name}, which lives on the {end.home}: "
                    "its costs say nothing about copies to there and back.",
                    hint="give the costs lanes for this place (measure.with_lanes).",
                )
        for item in graph.inputs:
            if item.home != "device" and graph.readers[item.value]:
                fetched = Move(FETCH, item.value, item.home)
                maker[item.value] = self._add(fetched, [], [item.value], (True, False, False))
        for value, place in _sent_home(graph).items():
            token, _ = self._send(value, place, optional=False)
            self.needed[token - values] = True
        return self._problem(maker, fetch, away)

    def _priced(self, place: Place) -> bool:
        return {(place, "out"), (place, "in")} <= {(lane.place, lane.direction) for lane in self.base.costs.lanes}

    def _send(self, value: int, place: Place, *, optional: bool) -> tuple[int, list[int]]:
        """The ops that copy a value to a place, and the token that says that it is there."""
        sent = self._token(1)
        gone = self._token(2)
        send = self._add(Move(SEND, value, place), [value], [sent], (False, optional, False))
        leave = self._add(Move(LEAVE, value, place), [value, sent], [gone], (False, optional, False))
        return gone, [send, leave]

    def _token(self, behind: int) -> int:
        """A token that the op makes that is added so much later."""
        self.makers.append(len(self.base.seconds) + len(self.moves) + behind - 1)
        self.needed.append(False)
        return len(self.base.nbytes) + len(self.makers) - 1

    def _add(self, move: Move, reads: list[int], makes: list[int], flags: tuple[bool, bool, bool]) -> int:
        self.moves.append(move)
        self.reads.append(reads)
        self.makes.append(makes)
        self.flags.append(flags)
        return len(self.base.seconds) + len(self.moves) - 1

    def _problem(self, maker: Ints, fetch: Ints, away: Ints) -> Problem:
        base, tokens, more = self.base, len(self.makers), len(self.moves)
        values, ops = len(base.nbytes), len(base.seconds)
        engine = {(lane.place, lane.direction): number for number, lane in enumerate(base.costs.lanes)}
        number = [engine[move.place, _direction(move)] for move in self.moves]
        nbytes = [base.costs.nbytes[move.value] for move in self.moves]
        lanes = [base.costs.lanes[k] for k in number]
        transfer = [size / lane.rate for size, lane in zip(nbytes, lanes, strict=True)]
        taken = [
            0.0 if move.kind == LEAVE else lane.takes * (lane.latency + seconds)
            for move, lane, seconds in zip(self.moves, lanes, transfer, strict=True)
        ]
        read_start, reads = ragged([*base.read_rows, *self.reads])
        make_start, makes = ragged([*base.make_rows, *self.makes])
        flags = np.array(self.flags, np.uint8).reshape(-1, 3)
        return replace(
            base,
            read_start=read_start,
            reads=reads,
            make_start=make_start,
            makes=makes,
            over_start=_longer(base.over_start, [int(base.over_start[-1])] * more),
            nbytes=_longer(base.nbytes, [0] * tokens),
            maker=_longer(maker, self.makers),
            killer=_longer(base.killer, [-1] * tokens),
            temporaries=_longer(base.temporaries, [0] * more),
            seconds=_longer(base.seconds, taken),
            table=tabled(self.rows, values + tokens),
            required=_longer(_on_device(base), self.needed),
            pinned=_longer(base.pinned, [0] * more),
            repeatable=_longer(base.repeatable, flags[:, 0]),
            optional=_longer(base.optional, flags[:, 1]),
            restoring=_longer(base.restoring, flags[:, 2]),
            once=_longer(base.once, [0] * tokens),
            copies=Copies(
                moves=tuple(self.moves),
                tokens=values,
                fetch=_longer(fetch, [-1] * tokens),
                away=_longer(away, [-1] * tokens),
                kind=_longer(np.zeros(ops, np.uint8), [move.kind for move in self.moves]),
                lane=_longer(np.zeros(ops, np.int64), number),
                transfer=_longer(np.zeros(ops), transfer),
                latency=np.array([lane.latency for lane in base.costs.lanes]),
                takes=np.array([lane.takes for lane in base.costs.lanes]),
            ),
        )


def _direction(move: Move) -> Direction:
    return "in" if move.kind == FETCH else "out"


def _sent_home(graph: Graph) -> dict[int, Place]:
    """What the step makes that must be elsewhere at its end: results, and the last content of what lives there."""
    last = {graph.values[item.value].storage: item.value for item in graph.inputs if item.home != "device"}
    for op in graph.ordinary:
        last |= {
            graph.values[new].storage: new for new, old in graph.ops[op].updates if graph.values[old].storage in last
        }
    wanted = (*last.values(), *(output.value for output in graph.outputs))
    return {value: graph.home[value] for value in wanted if graph.home[value] != "device" and graph.maker[value] >= 0}


def _on_device(base: Problem) -> Bytes:
    """The values that must be on the device at the end."""
    home = np.array([place == "device" for place in base.graph.home], np.uint8)
    return base.required * home


def _longer(array: Array, more: Any) -> Array:
    return np.concatenate((array, np.asarray(more, array.dtype)))
