"""Offload: values that may wait in another place, and state and parameters that live there.

Both passes only say what may be elsewhere. Which value goes, when, and whether it is made again instead is for the
planner to say; every bit stays what it was.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import get_args

from lowtide.errors import UsageError
from lowtide.graph import Alternative, Graph, Input, Kind, Place

SMALLEST = 2**16  # bytes: a smaller copy takes longer to begin than to run
IDLE = 4  # ops between two uses of a value: with fewer, no copy there and back could be hidden
LEAVING: tuple[Kind, ...] = ("state", "parameter")  # what moves out, in this order


def setting(place: Place, nbytes: int | None = None) -> str:
    """What a pass is told: the place, and so many bytes at the most."""
    return place if nbytes is None else f"{place} {nbytes}"


def read_setting(told: str) -> tuple[Place, int | None]:
    """The place and the bytes that a setting names."""
    place, _, nbytes = told.partition(" ")
    if place not in get_args(Place) or place == "device" or (nbytes and not nbytes.isdecimal()):
        raise UsageError(
            f"{told!r} is no place to offload to.", hint='name one: "disk" or "host", and bytes behind it.'
        )
    return place, int(nbytes) if nbytes else None  # type: ignore[return-value]


def may_wait(graph: Graph, told: str) -> Graph:
    """The graph with a row for each value that is worth a copy: the values that are idle for longest first."""
    place, most = read_setting(told)
    ranked = sorted(((_idle(graph, value), value) for value in _movable(graph)), key=lambda pair: (-pair[0], pair[1]))
    rows, total = [], 0
    for idle, value in ranked:
        nbytes = graph.values[value].nbytes
        if idle >= IDLE and (most is None or total + nbytes <= most):
            rows.append(Alternative(value, value, place))
            total += nbytes
    rows.sort(key=lambda row: row.value)
    return replace(graph, alternatives=graph.alternatives + tuple(rows)) if rows else graph


def moved_out(graph: Graph, told: str) -> Graph:
    """The graph whose optimizer state, then parameters, of so many bytes live in another place; the largest first."""
    place, most = read_setting(told)
    left = float("inf") if most is None else most
    moved: set[int] = set()  # storages
    for item in sorted(filter(lambda item: _may_leave(graph, item), graph.inputs), key=lambda item: _rank(graph, item)):
        if left <= 0:
            break
        moved.add(graph.values[item.value].storage)
        left -= graph.values[item.value].nbytes

    def home(value: int, now: Place) -> Place:
        return place if graph.values[value].storage in moved else now

    inputs = tuple(replace(item, home=home(item.value, item.home)) for item in graph.inputs)
    outputs = tuple(replace(item, home=home(item.value, item.home)) for item in graph.outputs)
    return replace(graph, inputs=inputs, outputs=outputs)


def leaving_bytes(graph: Graph) -> tuple[int, ...]:
    """The bytes that can move out: of each kind, in the order in which they do."""
    can = [graph.values[item.value] for item in graph.inputs if _may_leave(graph, item)]
    return tuple(sum(value.nbytes for value in can if value.kind == kind) for kind in LEAVING)


def _may_leave(graph: Graph, item: Input) -> bool:
    value = graph.values[item.value]
    return value.kind in LEAVING and item.persistent and value.nbytes >= SMALLEST and item.home == "device"


def _rank(graph: Graph, item: Input) -> tuple[int, int, int]:
    value = graph.values[item.value]
    return LEAVING.index(value.kind), -value.nbytes, item.value


def _movable(graph: Graph) -> list[int]:
    """The values that an op of the step makes and that do not outlive it, and are not too small."""
    lasting = graph.lasting_storages
    return [
        value
        for value, item in enumerate(graph.values)
        if item.nbytes >= SMALLEST
        and item.kind != "scalar"
        and item.storage not in lasting
        and value not in graph.required
        and graph.maker[value] in graph.ordinary
    ]


def _idle(graph: Graph, value: int) -> int:
    """The most ops between two uses of a value, as eager runs them."""
    uses = (graph.maker[value], *graph.readers[value])
    return max((after - before for before, after in pairwise(uses)), default=0)
