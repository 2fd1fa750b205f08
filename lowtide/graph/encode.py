"""A graph as JSON; `decode` reads it again."""

from __future__ import annotations

import math
from typing import Any

from lowtide.graph import GENERATOR, Alternative, Arg, Constant, Graph, Op, Place, Read


def encode_arg(arg: Arg) -> Any:
    """An argument as JSON."""
    match arg:
        case Read(value, view):
            return {"read": [value, view]}
        case Constant(family, name):
            return {"constant": [family, name]}
        case complex():
            return {"complex": repr(arg)}
        case float() if not math.isfinite(arg):
            return {"float": str(arg)}
        case tuple():
            return [encode_arg(item) for item in arg]
        case _:
            return arg


def encode_graph(graph: Graph) -> dict[str, Any]:
    """A graph as JSON; what is absent is as in files from before there was such a thing."""
    data: dict[str, Any] = {
        "device": graph.device,
        "generator_bytes": graph.generator_bytes,
        "notes": list(graph.notes),
        "views": [[v.parent, v.target, encode_arg(v.args), v.item] for v in graph.views],
        "values": [
            [v.name, v.nbytes, v.kind, v.storage, v.dtype, list(v.shape), list(v.stride), v.eager_end]
            + ([] if v.form == "plain" else [v.form])
            for v in graph.values
        ],
        "inputs": [[i.value, list(i.path), i.persistent, *_elsewhere(i.home)] for i in graph.inputs],
        "outputs": [[o.value, o.role, list(o.path), o.view, *_elsewhere(o.home)] for o in graph.outputs],
        "ops": [_encode_op(op) for op in graph.ops],
    }
    if graph.alternatives:
        data["alternatives"] = [_encode_alternative(row) for row in graph.alternatives]
    return data


def _elsewhere(home: Place) -> list[Place]:
    return [] if home == "device" else [home]


def _encode_alternative(row: Alternative) -> list[Any]:
    pairs = [list(pair) for pair in row.instead]
    return [row.value, row.keeper, row.place, row.store, list(row.restore), pairs]


def _encode_op(op: Op) -> dict[str, Any]:
    data: dict[str, Any] = {"name": op.name, "target": op.target, "args": encode_arg(op.args)}
    data["kwargs"] = {key: encode_arg(arg) for key, arg in op.kwargs}
    data["outputs"] = list(op.outputs)
    data["updates"] = [list(pair) for pair in op.updates]
    data["detachable"], data["random"] = op.detachable, op.random
    data["phase"], data["module"], data["source"] = op.phase, op.module, op.source
    if others := [channel for channel in op.channels if channel != GENERATOR]:
        data["channels"] = others
    if op.optional:
        data["optional"] = True
    if op.forgotten:
        data["forgotten"] = op.forgotten
    return data
