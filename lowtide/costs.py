"""What the ops of one graph cost on one machine: seconds, the bytes really allocated, and which may run in place."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from lowtide import files
from lowtide.errors import FileError
from lowtide.files.shapes import Absent, Misshapen, amount, many, record, row, text, whole, word
from lowtide.graph import Graph, Place

Origin = Literal["measured", "roofline"]
ALIGNMENT = 64  # bytes: of the CPU's arena, and where nothing else is said
Direction = Literal["out", "in"]  # of copies, as the device sees them


@dataclass(frozen=True, slots=True)
class Lane:
    """The engine that copies from the device to another place ("out"), or from there ("in")."""

    place: Place
    direction: Direction
    latency: float  # seconds that any copy takes, before its bytes
    rate: float  # bytes a second
    takes: float = 0.0  # the part of the compute engine's speed that it takes away while it copies


@dataclass(frozen=True, slots=True)
class Transfer:
    """What one copy took in a step, since it was asked for and the one before it was done."""

    place: Place
    direction: Direction
    nbytes: int
    seconds: float


@dataclass(frozen=True)
class Costs:
    """Costs of each op and value of the graph with this fingerprint."""

    graph: str  # fingerprint
    seconds: tuple[float, ...]  # for each op, one run
    arena_temporaries: tuple[int, ...]  # for each op, bytes that its temporaries need in one piece of the arena
    nbytes: tuple[int, ...]  # for each value, bytes really allocated
    in_place: tuple[tuple[tuple[int, int], ...], ...]  # for each op, pairs (made, read): made may sit on read's bytes
    origin: Origin
    machine: str  # processor, threads and library version, for people
    heap_temporaries: tuple[int, ...] = ()  # for each op, bytes that they take in the heap at their peak; (): as many
    lanes: tuple[Lane, ...] = ()  # what copies between the device and other places cost; one for each, at most
    staging: int = 0  # bytes of the device that copies go through, beside what a program with copies holds
    code: int = 0  # bytes of address space that libraries keep for what they compile for the ops, beside any budget
    alignment: int = ALIGNMENT  # bytes: every offset in the arena is a multiple of it
    differing: tuple[int, ...] | None = field(default=None, compare=False)  # ops without torch's bits; None: untried
    notes: tuple[str, ...] = field(default=(), compare=False)  # what could not be measured, and what stands in for it

    def persistent(self, graph: Graph) -> int:
        """The bytes that persist between steps: parameters, buffers, optimizer state, the batch."""
        return sum(self.nbytes[item.value] for item in graph.inputs if item.persistent)

    def elsewhere(self, graph: Graph) -> int:
        """Those of them that are in another place than the device."""
        return sum(self.nbytes[item.value] for item in graph.inputs if item.persistent and item.home != "device")

    def temporaries(self, op: int, *, placed: bool) -> int:
        """The bytes of an op's temporaries, in one piece of the arena or here and there in the heap."""
        return self.arena_temporaries[op] if placed or not self.heap_temporaries else self.heap_temporaries[op]

    def fewest_temporaries(self, op: int) -> int:
        """The bytes of an op's temporaries in an arena or in the heap, whichever are fewer."""
        return min(self.temporaries(op, placed=True), self.temporaries(op, placed=False))

    def save(self, path: str | os.PathLike[str], *, force: bool = False) -> None:
        """Save to one text file."""
        payload = {
            "graph": self.graph,
            "seconds": list(self.seconds),
            "arena_temporaries": list(self.arena_temporaries),
            "heap_temporaries": list(self.heap_temporaries),
            "nbytes": list(self.nbytes),
            "in_place": [[list(pair) for pair in pairs] for pairs in self.in_place],
            "origin": self.origin,
            "machine": self.machine,
            "lanes": [[lane.place, lane.direction, lane.latency, lane.rate, lane.takes] for lane in self.lanes],
            "staging": self.staging,
            "code": self.code,
            "alignment": self.alignment,
            "notes": list(self.notes),
        }
        files.save(path, "costs", payload, force=force)

    @staticmethod
    def load(path: str | os.PathLike[str], graph: Graph) -> Costs:
        """Load what `save` wrote, for this graph."""
        costs: Costs = files.shaped(path, files.load(path, "costs"), COSTS, kind="costs", hint="measure again.")
        if costs.graph != graph.fingerprint:
            raise FileError(
                f"{path} holds the costs of graph {costs.graph[:12]}, not of this one, {graph.fingerprint[:12]}.",
                hint="measure this graph.",
            )
        of_ops = (costs.seconds, costs.arena_temporaries, costs.heap_temporaries or costs.seconds, costs.in_place)
        if {len(row) for row in of_ops} - {len(graph.ops)} or len(costs.nbytes) != len(graph.values):
            raise FileError(
                f"{path} holds costs of {len(costs.seconds)} ops and {len(costs.nbytes)} values; "
                f"the graph has {len(graph.ops)} and {len(graph.values)}.",
                hint="measure again.",
            )
        if len({(lane.place, lane.direction) for lane in costs.lanes}) < len(costs.lanes):
            raise FileError(f"{path} holds no valid costs: two lanes are one engine.", hint="measure again.")
        for op, pairs in enumerate(costs.in_place):
            if not all(made in graph.makes[op] and read in graph.reads[op] for made, read in pairs):
                raise FileError(
                    f"{path} holds no valid costs: op {op} may not put {pairs} in place; it reads {graph.reads[op]} "
                    f"and makes {graph.makes[op]}.",
                    hint="measure again.",
                )
        return costs

    def __str__(self) -> str:
        total = sum(self.seconds)
        return (
            f"costs of graph {self.graph[:12]}, {self.origin} on {self.machine}: "
            f"{len(self.seconds)} ops, {total:.4g} s in all, "
            f"largest temporary {max(self.arena_temporaries, default=0)} B"
        )


def declared(graph: Graph) -> Costs:
    """Costs that take the graph at its word: a second an op, the declared bytes, no temporaries, nothing in place."""
    return Costs(
        graph=graph.fingerprint,
        seconds=(1.0,) * len(graph.ops),
        arena_temporaries=(0,) * len(graph.ops),
        nbytes=tuple(value.nbytes for value in graph.values),
        in_place=((),) * len(graph.ops),
        origin="roofline",
        machine="unit",
    )


def lanes(bandwidth: Iterable[tuple[Place, float]]) -> tuple[Lane, ...]:
    """Engines with these bytes a second both ways, which start at once and take nothing from compute."""
    return tuple(
        Lane(place, direction, 0.0, rate) for place, rate in bandwidth for direction in get_args(Direction) if rate > 0
    )


def _costs(*, bandwidth: tuple[tuple[Place, float], ...], **rest: Any) -> Costs:
    """Costs from a file, which may be of the time when a place had one number."""
    return Costs(**rest) if rest["lanes"] or not bandwidth else Costs(**rest | {"lanes": lanes(bandwidth)})


def _positive(data: Any) -> float:
    if amount(data) <= 0:
        raise Misshapen("a number above zero", data)
    return amount(data)


def _part(data: Any) -> float:
    if amount(data) > 1:
        raise Misshapen("a number from 0 to 1", data)
    return amount(data)


_number, _pair = whole(), row(whole(), whole())
_away = word([place for place in get_args(Place) if place != "device"])
LANE = row(_away, word(get_args(Direction)), amount, _positive, _part, into=Lane)
COSTS = record(
    {
        "graph": text,
        "seconds": many(amount),
        "arena_temporaries": many(_number),
        "heap_temporaries": Absent(many(_number), ()),
        "nbytes": many(_number),
        "in_place": many(many(_pair)),
        "origin": word(get_args(Origin)),
        "machine": text,
        "lanes": Absent(many(LANE), ()),
        "bandwidth": Absent(many(row(_away, amount)), ()),
        "staging": Absent(_number, 0),
        "code": Absent(_number, 0),
        "alignment": Absent(whole(1), ALIGNMENT),
        "notes": many(text),
    },
    into=_costs,
)
