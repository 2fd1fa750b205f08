"""How far the gradients of a rewritten step are from those of the step itself: both run on a batch, op by op.

Nothing of the caller's is changed: the ops of the update do not run, and what others write to is a copy.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch

from lowtide import kernels, private
from lowtide.captured import Captured
from lowtide.execute import Batch
from lowtide.execute.binding import Binding
from lowtide.graph import Arg, Constant, Graph, Read
from lowtide.rewrite import apply
from lowtide.rewrites import Rewrite

Wanted = dict[tuple[str, int], int]  # op of the update and place among what it reads, or output -> value


def with_errors(captured: Captured, batch: Batch, rewrites: Iterable[Rewrite]) -> tuple[Rewrite, ...]:
    """The rewrites, with the error of each lossy one alone: the part of the gradient's norm by which it is off.

    Nothing is measured where a step has other inputs than the captured one, hands over to code that is not in it, or
    draws numbers of Python.
    """
    found = tuple(rewrites)
    lossy = [one for one in found if one.exactness == "lossy"]
    if not lossy or not _measurable(captured):
        return found
    state = torch.get_rng_state()
    whole = _gradients(captured, captured.graph, batch, state)
    errors: dict[str, float] = {}
    for one in lossy:
        graph = apply(captured.graph, [one]).graph
        if [item.path for item in graph.inputs] == [item.path for item in captured.graph.inputs]:
            errors[one.name] = distance(_gradients(captured, graph, batch, state), whole)
    torch.set_rng_state(state)
    return tuple(replace(one, error=errors.get(one.name, one.error)) for one in found)


def error_of(captured: Captured, graph: Graph, batch: Batch) -> float | None:
    """The part of the gradient's norm by which it is off after these rewrites; None where that can't be measured."""
    if not _measurable(captured) or [item.path for item in graph.inputs] != [one.path for one in captured.graph.inputs]:
        return None
    state = torch.get_rng_state()
    whole = _gradients(captured, captured.graph, batch, state)
    found = _gradients(captured, graph, batch, state)
    torch.set_rng_state(state)
    return distance(found, whole) if found.keys() == whole.keys() else None


def _measurable(captured: Captured) -> bool:
    """Whether the ops of a step can run apart from it."""
    return not captured.guards.draws and not any("handover" in op.channels for op in captured.graph.ops)


def distance(found: dict[tuple[str, int], Any], whole: dict[tuple[str, int], Any]) -> float:
    """The norm of the difference of all gradients, as a part of the norm of all gradients."""
    off = sum(float((found[key].double() - whole[key].double()).square().sum()) for key in whole)
    norm = sum(float(whole[key].double().square().sum()) for key in whole)
    return math.sqrt(off / norm) if norm else math.sqrt(off)


def _gradients(captured: Captured, graph: Graph, batch: Batch, state: torch.Tensor) -> dict[tuple[str, int], Any]:
    """What the forward and the backward hand to the update, and the gradients that the step leaves behind."""
    binding = Binding(replace(captured, graph=graph))
    given = binding.hold()
    binding.fill(given, batch.leaves)
    torch.set_rng_state(state)
    before = [op for op in graph.ordinary if graph.ops[op].phase != "update"]
    written = {old for op in before for _, old in graph.ops[op].updates}
    values: dict[int, Any] = {}
    for item, thing in zip(graph.inputs, given, strict=True):
        tensor = thing.detach() if isinstance(thing, torch.Tensor) else thing
        values[item.value] = tensor.clone() if item.value in written and isinstance(tensor, torch.Tensor) else tensor
    wanted = _wanted(graph, before)
    with private.below_autograd():
        _run(graph, before, values, kept=set(wanted.values()))
    return {key: values[value] for key, value in wanted.items()}


def _wanted(graph: Graph, before: list[int]) -> Wanted:
    made = {value for op in before for value in graph.makes[op] if graph.values[value].kind == "gradient"}
    found: Wanted = {}
    for op in graph.ordinary:
        if graph.ops[op].phase == "update":
            places = enumerate(graph.reads[op])
            found |= {(graph.ops[op].name, place): value for place, value in places if value in made}
    left = (item for item in graph.outputs if item.role == "gradient" and item.value in made)
    return found | {(str(item.path), -1): item.value for item in left}


def _run(graph: Graph, ops: list[int], values: dict[int, Any], kept: set[int]) -> None:
    """Run ops in their order, and let go of each value after the last one that reads it."""
    left = Counter(value for op in ops for value in graph.reads[op])
    for index in ops:
        op = graph.ops[index]
        args = [_argument(graph, arg, values) for arg in op.args]
        kwargs = {key: _argument(graph, arg, values) for key, arg in op.kwargs}
        returned = kernels.kernel(op.target)(*args, **kwargs)
        results = (returned,) if kernels.returns_one(op.target) else tuple(returned)
        values |= {value: made for value, made in zip(op.outputs, results, strict=False) if value is not None}
        values |= {new: values[old] for new, old in op.updates}
        del args, kwargs, returned, results
        for value in graph.reads[index]:
            left[value] -= 1
            if not left[value] and value not in kept:
                values.pop(value, None)
        for value in graph.makes[index]:
            if not left[value] and value not in kept:
                values.pop(value, None)


def _argument(graph: Graph, arg: Arg, values: dict[int, Any]) -> Any:
    match arg:
        case Read(value, view):
            return _seen(graph, values[value], view, values)
        case Constant(family, name):
            return kernels.constant(family, name)
        case tuple():
            return [_argument(graph, item, values) for item in arg]
        case _:
            return arg


def _seen(graph: Graph, tensor: Any, view: int | None, values: dict[int, Any]) -> Any:
    if view is None:
        return tensor
    item = graph.views[view]
    parent = _seen(graph, tensor, item.parent, values)
    found = kernels.kernel(item.target)(parent, *(_argument(graph, arg, values) for arg in item.args))
    return found if item.item is None else found[item.item]
