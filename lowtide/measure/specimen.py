"""A specimen: one call, cut out of its graph, with all that it takes to repeat it alone; equal calls are equal."""

from __future__ import annotations

from typing import Any

from lowtide.graph import Arg, Graph, Op, Read, encode_arg

# The results of these calls have contents that nobody can make up; who reads them is measured behind the call itself.
OPAQUE = frozenset({"aten.mkldnn_rnn_layer.default"})


def specimen(graph: Graph, index: int) -> dict[str, Any]:
    """The call as plain data: its arguments refer to tensors by their place in `tensors`."""
    op = graph.ops[index]
    places: dict[int, int] = {}
    arguments = [_localised(arg, places) for arg in (*op.args, *(arg for _, arg in op.kwargs))]
    views: dict[int, list[Any]] = {}
    for read in op.arguments():
        if read.view is not None:
            views[read.view] = _chain(graph, read.view)
    return {
        "target": op.target,
        "args": [encode_arg(arg) for arg in arguments[: len(op.args)]],
        "kwargs": {key: encode_arg(arg) for (key, _), arg in zip(op.kwargs, arguments[len(op.args) :], strict=True)},
        "tensors": [_tensor(graph, value) for value in places],
        "views": {str(view): chain for view, chain in views.items()},
        "outputs": [None if value is None else _sizes(graph, value) for value in op.outputs],
        "written": sorted(places[old] for _, old in op.updates),
        "device": graph.device,
    }


def read_order(op: Op) -> tuple[int, ...]:
    """The value behind each place of a specimen's `tensors`."""
    return tuple(dict.fromkeys(read.value for read in op.arguments()))


def _localised(arg: Arg, places: dict[int, int]) -> Arg:
    if isinstance(arg, Read):
        return Read(places.setdefault(arg.value, len(places)), arg.view)
    if isinstance(arg, tuple):
        return tuple(_localised(item, places) for item in arg)
    return arg


def _chain(graph: Graph, view: int | None) -> list[Any]:
    """The calls that lead from the tensor as made to this view of it."""
    calls: list[Any] = []
    while view is not None:
        item = graph.views[view]
        calls.append([item.target, encode_arg(item.args), item.item])
        view = item.parent
    return calls[::-1]


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
