"""Large ops in parts: convolutions, matrix products and their backwards along examples, where one op is the floor.

A region is one large op, with cheap neighbours whose results nobody else reads. What couples examples runs between the
regions as it is, so batch norms stay exact. A convolution's backward is first taken apart: the gradient of its weights
and that of what it read are made one after the other, and need no third tensor at the same time.
"""

from __future__ import annotations

from dataclasses import replace

from lowtide.aten import SEPARABLE
from lowtide.graph import Graph, Op
from lowtide.kernels import is_product
from lowtide.resized import Resized
from lowtide.rewrite.axis import PIECE, Axis, Coupled, axis_of
from lowtide.rewrite.editor import Editor
from lowtide.rewrite.norm_halves import norm_halves
from lowtide.rewrite.parts import split as in_parts
from lowtide.rewrite.region import Region, region, splittable

FINEST = 16  # parts at most: more calls cost more time than their temporaries are worth
RUNGS = (0.5, 0.25, 0.125)  # of what the largest op needs: ops that need more are split


def large_ops(graph: Graph, share: float, resized: Resized) -> Graph:
    """The graph with all ops in parts that need more than this share of what the largest one needs."""
    graph = _separated(graph, share)
    try:
        axis = axis_of(graph, resized)
    except Coupled as error:
        return replace(graph, notes=(*graph.notes, f"no op is split: {error}."))
    may = splittable(axis)
    needs = {op: _need(graph, op) for op in graph.ordinary if graph.ops[op].phase != "update"}
    limit = share * max(needs.values(), default=0)
    regions: list[tuple[Region, int]] = []
    taken: set[int] = set()
    for op in sorted(needs, key=lambda op: -needs[op]):
        if needs[op] <= limit or op not in may or op in taken or not is_product(graph.ops[op].target):
            continue
        wanted = _with_neighbours(axis, op, may - taken)
        for one in (wanted, {op}):
            try:
                found = region(axis, one)
            except Coupled:
                continue
            if found.ops and taken.isdisjoint(found.ops):
                regions.append((found, min(FINEST, resized.examples, 2 * round(needs[op] / limit))))
                taken |= {*found.ops}
            break
    halved = norm_halves(in_parts(axis, regions) if regions else graph, limit)
    if not regions and halved is graph:
        return graph
    done = f"{len(regions)} large ops run in parts; gradients are those of the whole batch, up to rounding."
    return replace(halved, notes=(*graph.notes, done))


def shares(graph: Graph, resized: Resized) -> list[float]:
    """From which size on ops may be split."""
    return list(RUNGS) if resized.examples > 1 else []


def _need(graph: Graph, op: int) -> int:
    """The bytes that an op reads and makes, without what the caller holds."""
    values = {*graph.reads[op], *graph.makes[op]}
    return sum(graph.values[v].nbytes for v in values if graph.values[v].storage not in graph.lasting_storages)


def _with_neighbours(axis: Axis, op: int, may: set[int]) -> set[int]:
    """An op with the cheap ops beside it whose values then are never whole."""
    graph, found = axis.graph, {op}
    while True:
        more = {graph.maker[value] for one in found for value in graph.reads[one] if axis.dim(value) >= 0}
        more = {one for one in more if one >= 0 and _only_for(graph, one, found)}
        made = [value for one in found for value in graph.makes[one] if axis.dim(value) >= 0]
        for value in made:
            readers = set(graph.readers[value])
            if value not in graph.required and readers and all(_cheap(graph, one) and one in may for one in readers):
                more |= readers
        more = {one for one in more if one in may and _cheap(graph, one) and _same(graph, one, op)} - found
        if not more:
            return found
        found |= more


def _only_for(graph: Graph, op: int, readers: set[int]) -> bool:
    return all(value not in graph.required and readers.issuperset(graph.readers[value]) for value in graph.makes[op])


def _cheap(graph: Graph, op: int) -> bool:
    item = graph.ops[op]
    return not is_product(item.target) and not item.updates


def _same(graph: Graph, one: int, other: int) -> bool:
    return graph.ops[one].phase == graph.ops[other].phase


def _separated(graph: Graph, share: float) -> Graph:
    """The graph with one op for each result of a separable backward that is large."""
    editor = Editor(graph)
    limit = share * max((_need(graph, op) for op in graph.ordinary if graph.ops[op].phase != "update"), default=0)
    changed = False
    for index in graph.ordinary:
        op = graph.ops[index]
        place = SEPARABLE.get(op.target)
        if place is None or _need(graph, index) <= limit:
            continue
        asked = op.args[place]
        assert isinstance(asked, tuple)
        if not asked[0] or not any(asked[1:]):
            continue
        changed = True
        editor.take_out(index)
        for step, mask in enumerate(((False, *asked[1:]), (True, False, False))):
            editor.put(index, step, index, _masked(op, place, mask, step))
    return editor.reordered() if changed else graph


def _masked(op: Op, place: int, mask: tuple[object, ...], step: int) -> Op:
    """The op that makes only these of its results."""
    outputs = tuple(value if asked else None for value, asked in zip(op.outputs, mask, strict=True))
    args = (*op.args[:place], mask, *op.args[place + 1 :])
    name = op.name if step else f"{op.name}{PIECE}weights"
    return replace(op, name=name, args=args, outputs=outputs)  # type: ignore[arg-type]
