"""The head of a model and its loss in parts, forward and backward: the largest values before a loss are never whole.

Where there are fewer examples than parts, the tokens of all examples are divided instead.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from functools import cache

from lowtide.graph import Arg, Graph, Op, Read
from lowtide.resized import Resized
from lowtide.rewrite.axis import Axis, Coupled, axis_of
from lowtide.rewrite.editor import Editor
from lowtide.rewrite.merge import merged
from lowtide.rewrite.microbatch import RUNGS, rungs
from lowtide.rewrite.parts import split
from lowtide.rewrite.region import batch_only, between, region, splittable

NEAR = 8  # ops from the loss to the results that are looked for
LARGE = 0.5  # of the largest of them: what is smaller is where the region may end
WORTH = 0.25  # of the largest activation of the step: smaller ones are not worth it


def chunked_loss(graph: Graph, parts: int, resized: Resized) -> Graph:
    """The graph with its head and loss in so many parts; as it is, with a note, where examples are coupled there."""
    try:
        done = _divided(graph, parts, resized)
    except Coupled as error:
        return replace(graph, notes=(*graph.notes, f"head and loss are not split: {error}."))
    if done is None:
        return graph
    said = f"head and loss run in {parts} parts; gradients are those of the whole batch, up to rounding."
    return replace(done, notes=(*graph.notes, said))


def _divided(graph: Graph, parts: int, resized: Resized) -> Graph | None:
    """The graph with head and loss in parts, along tokens where examples run out; None: there is nothing to divide."""
    if parts > resized.examples:
        for sizes in resized.along():
            with suppress(Coupled):
                if (found := _in_parts(_with_labels(graph), parts, _labelled(sizes))) is not None:
                    return found
    return _in_parts(graph, min(parts, resized.examples), resized)


def _in_parts(graph: Graph, parts: int, resized: Resized) -> Graph | None:
    axis = axis_of(graph, resized)
    wanted = _head(axis)
    found = region(axis, wanted) if wanted else None
    if min(parts, resized.examples) < 2 or found is None or not found.ops:
        return None
    return split(axis, [(found, min(parts, resized.examples))])


def _labelled(resized: Resized) -> Resized:
    """The step with fewer tokens in which labels are values of their own, too."""
    if "labelled" not in resized.known:
        at = cache(lambda size: _with_labels(resized.at(size)))
        resized.known["labelled"] = replace(resized, graph=_with_labels(resized.graph), at=at, known={})
    found = resized.known["labelled"]
    assert isinstance(found, Resized)
    return found


def _with_labels(graph: Graph) -> Graph:
    """The graph in which what is seen of whole numbers of the batch is a value: labels are all tokens but the first."""
    given = {one.value for one in graph.inputs if graph.values[one.value].kind == "batch"}
    told = given.union(*(graph.ops[op].makes for op in batch_only(graph)))
    editor = Editor(graph)
    copies: dict[Arg, Arg] = {}
    for index in graph.ordinary:
        op = graph.ops[index]
        for read in op.arguments():
            value = graph.values[read.value]
            if read.view is not None and read not in copies and read.value in told and "int" in value.dtype:
                made = editor.value(replace(value, name="labels", kind="activation"))
                copy = Op(f"{op.name}_labels{len(copies)}", "aten.clone.default", (read,), outputs=(made,))
                editor.put(index, -1, index, replace(copy, phase=op.phase, module=op.module, source=op.source))
                copies[read] = Read(made)
        args = tuple(copies.get(arg, arg) for arg in op.args)
        if args != op.args:
            editor.change(index, replace(op, args=args))
    return editor.reordered() if copies else graph


def counts(graph: Graph, resized: Resized) -> list[int]:
    """Into how many parts head and loss may be split; none where that saves nothing, or examples are coupled there."""
    whole = merged(graph)
    found = rungs(resized.examples) if _has_head(whole, resized) else []
    if resized.examples < max(RUNGS) and any(
        _has_head(_with_labels(whole), _labelled(sizes)) for sizes in resized.along()
    ):
        found += [parts for parts in RUNGS if parts > resized.examples]
    return found


def _has_head(graph: Graph, resized: Resized) -> bool:
    try:
        return bool(_head(axis_of(graph, resized)))
    except Coupled:
        return False


def _head(axis: Axis) -> set[int]:
    """The ops around the largest values near the loss, and all between them; nothing where others are larger."""
    graph, may = axis.graph, splittable(axis)
    near = _near_the_loss(axis, may)
    nbytes = {value: graph.values[value].nbytes for op in may for value in graph.makes[op] if axis.dim(value) >= 0}
    largest = max((nbytes.get(value, 0) for op in near for value in graph.makes[op]), default=0)
    if not largest or largest < WORTH * max(nbytes.values()):
        return set()
    found = {op for op in near if any(nbytes.get(made, 0) >= LARGE * largest for made in graph.makes[op])}
    while True:
        values = {value for op in found for value in (*graph.reads[op], *graph.makes[op])}
        large = [value for value in values if nbytes.get(value, 0) >= LARGE * largest]
        more = {op for value in large for op in (graph.maker[value], *graph.readers[value])} & may
        if more <= found:
            return found | (between(graph, found) & may)
        found |= more


def _near_the_loss(axis: Axis, may: set[int]) -> set[int]:
    """The last ops of the forward with the examples in them: those that lead to the first ops of the backward."""
    graph = axis.graph
    backward = [op for op in graph.ordinary if graph.ops[op].phase == "backward" and op in may][:NEAR]
    found: set[int] = set()
    edge = set(backward)
    for _ in range(NEAR):
        edge = {graph.maker[value] for op in edge for value in graph.reads[op]} - found - {-1}
        edge = {op for op in edge if graph.ops[op].phase == "forward"}
        found |= edge
    return found & may
