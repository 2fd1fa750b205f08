"""A specimen: one call, cut out of its graph, with all that it takes to repeat it alone; equal calls are equal.

What a call costs does not depend on which time step of a sequence it reads, so all time steps are the first one here.
"""

from __future__ import annotations

from typing import Any

from lowtide.aten import OPAQUE, PART, SELECT, UNBIND
from lowtide.graph import Arg, Graph, Op, Read, View
from lowtide.graph.encode import encode_arg

Shift = dict[tuple[int, int | None, str, Arg], int]  # by how much parts of a tensor are moved to the front


def specimen(graph: Graph, index: int) -> dict[str, Any]:
    """The call as plain data: its arguments refer to tensors by their place in `tensors`."""
    op = graph.ops[index]
    places: dict[int, int] = {}
    views: dict[tuple[int, int], int] = {}  # (place, view of the graph) -> number of the view here
    args = tuple(0 if place == PART.get(op.target) else arg for place, arg in enumerate(op.args))
    arguments = [_localised(arg, places, views) for arg in (*args, *(arg for _, arg in op.kwargs))]
    shift = _shift(graph, views)
    return {
        "target": op.target,
        "args": [encode_arg(arg) for arg in arguments[: len(op.args)]],
        "kwargs": {key: encode_arg(arg) for (key, _), arg in zip(op.kwargs, arguments[len(op.args) :], strict=True)},
        "tensors": [_tensor(graph, value) for value in places],
        "views": {str(number): _chain(graph, *found, shift) for found, number in views.items()},
        "outputs": [None if value is None else _sizes(graph, value) for value in op.outputs],
        "written": sorted(places[old] for _, old in op.updates),
        "device": graph.device,
    }


def read_order(op: Op) -> tuple[int, ...]:
    """The value behind each place of a specimen's `tensors`."""
    return tuple(dict.fromkeys(read.value for read in op.arguments()))


def _localised(arg: Arg, places: dict[int, int], views: dict[tuple[int, int], int]) -> Arg:
    if isinstance(arg, Read):
        place = places.setdefault(arg.value, len(places))
        return Read(place, None if arg.view is None else views.setdefault((place, arg.view), len(views)))
    if isinstance(arg, tuple):
        return tuple(_localised(item, places, views) for item in arg)
    return arg


def _shift(graph: Graph, views: dict[tuple[int, int], int]) -> Shift:
    """For each tensor of which parts are read where the first of them begins."""
    found: Shift = {}
    for place, view in views:
        for number in _line(graph, view):
            part = _part(graph.views[number])
            if part is not None:
                key = _whole(place, graph.views[number])
                found[key] = min(part, found.get(key, part))
    return found


def _part(view: View) -> int | None:
    """Where in its parent a view begins that sees one of many equal parts."""
    part = view.item if view.target == UNBIND else view.args[1] if view.target == SELECT else None
    return part if isinstance(part, int) and part >= 0 else None


def _whole(place: int, view: View) -> tuple[int, int | None, str, Arg]:
    """What a view is a part of."""
    return place, view.parent, view.target, view.args[0] if view.args else None


def _line(graph: Graph, view: int) -> list[int]:
    """The views that lead from the tensor as made to this one."""
    found = [view]
    while (parent := graph.views[found[-1]].parent) is not None:
        found.append(parent)
    return found[::-1]


def _chain(graph: Graph, place: int, view: int, shift: Shift) -> list[Any]:
    """The calls that lead from the tensor as made to this view of it, all parts moved to the front."""
    calls: list[Any] = []
    for number in _line(graph, view):
        item = graph.views[number]
        args, chosen, part = item.args, item.item, _part(item)
        if part is not None:
            part -= shift[_whole(place, item)]
            args, chosen = (args, part) if item.target == UNBIND else ((args[0], part), None)
        calls.append([item.target, encode_arg(args), chosen])
    return calls


def _tensor(graph: Graph, value: int) -> Any:
    maker = graph.maker[value]
    if maker >= 0 and graph.ops[maker].target in OPAQUE:
        return {"from": specimen(graph, maker), "output": graph.ops[maker].outputs.index(value)}
    if graph.values[value].kind == "scalar":
        return "scalar"
    return _sizes(graph, value)


def _sizes(graph: Graph, value: int) -> list[Any]:
    item = graph.values[value]
    return [item.dtype, list(item.shape), list(item.stride), item.nbytes]
