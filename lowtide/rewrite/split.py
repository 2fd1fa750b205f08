"""Large ops in parts: convolutions, matrix products and their backwards along examples, where one op is the floor.

A region is one large op, with cheap neighbours whose results nobody else reads. What couples examples runs between the
regions as it is, so batch norms stay exact. A convolution's backward is first taken apart: the gradient of its weights
and that of what it read are made one after the other, and need no third tensor at the same time.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from lowtide.aten import SEPARABLE
from lowtide.errors import UsageError
from lowtide.graph import Graph, Op
from lowtide.kernels import is_product
from lowtide.resized import Resized
from lowtide.rewrite.again import made_again
from lowtide.rewrite.axis import PIECE, Axis, Coupled, axis_of
from lowtide.rewrite.editor import Editor
from lowtide.rewrite.merge import merged
from lowtide.rewrite.norm_halves import large_norms, norm_halves
from lowtide.rewrite.parts import split as in_parts
from lowtide.rewrite.pieces import in_pieces, large_wholes
from lowtide.rewrite.region import Refusal, region, splittable
from lowtide.rewrites import Setting

FINEST = 16  # parts at most: more calls cost more time than their temporaries are worth
AGAIN = "again"  # behind a share and a slash: activations are made again in the parts of the backward
RUNGS = (0.5, 0.25, 0.125, f"0.125/{AGAIN}")  # of what the largest op needs: ops that need more are split


def read_setting(told: object) -> tuple[float, bool]:
    """The share of what the largest op needs from which on ops are split, and whether activations are made again."""
    share, slash, manner = str(told).partition("/")
    try:
        found = float(share)
    except ValueError:
        found = 0.0
    if not 0 < found < 1 or manner != (AGAIN if slash else ""):
        raise UsageError(
            f"{told!r} does not say which ops are large.",
            hint=f'write allow="split:0.25" for a quarter of what the largest op needs, or "split:0.125/{AGAIN}".',
        )
    return found, bool(manner)


def large_ops(graph: Graph, told: object, resized: Resized) -> Graph:
    """The graph with all ops in parts that need more than a share of what the largest one needs."""
    share, again = read_setting(told)
    limit = share * _most(graph)
    whole = _separated(graph, limit)
    limit = share * _most(whole)
    names = large_norms(whole, limit), large_wholes(whole, limit) if again else frozenset()
    ready, sizes = _divided(whole, *names), _alike(resized, *names)
    try:
        axis = axis_of(ready, sizes)
        if again:
            axis = axis_of(made_again(axis, [ops for ops, _ in _wanted(axis, limit)]), sizes)
    except Coupled as error:
        return replace(graph, notes=(*graph.notes, f"no op is split: {error}."))
    regions = [(region(axis, ops), parts) for ops, parts in _wanted(axis, limit)]
    if not regions and ready is whole:
        return graph
    done = f"{len(regions)} large ops run in parts; gradients are those of the whole batch, up to rounding."
    return replace(in_parts(axis, regions), notes=(*graph.notes, done))


def shares(graph: Graph, resized: Resized) -> list[Setting]:
    """From which size on ops may be split."""
    return list(RUNGS) if resized.examples > 1 else []


def _divided(graph: Graph, norms: frozenset[str], wholes: frozenset[str]) -> Graph:
    """The graph with these batch norms in halves, and the results of these ops in pieces."""
    return norm_halves(in_pieces(graph, wholes), norms)


def _alike(resized: Resized, norms: frozenset[str], wholes: frozenset[str]) -> Resized:
    """The step at other sizes, divided in the same way."""
    key = f"halves of {' '.join(sorted(norms))}, pieces of {' '.join(sorted(wholes))}"
    if key not in resized.known:
        at = cache(lambda size: _divided(merged(resized.at(size)), norms, wholes))
        divided = _divided(merged(resized.graph), norms, wholes)
        resized.known[key] = replace(resized, graph=divided, at=at, known={})
    found = resized.known[key]
    assert isinstance(found, Resized)
    return found


def _most(graph: Graph) -> int:
    return max((_need(graph, op) for op in graph.ordinary if graph.ops[op].phase != "update"), default=0)


def _wanted(axis: Axis, limit: float) -> list[tuple[set[int], int]]:
    """The large products with their neighbours, and in how many parts each is to run."""
    graph, may, taken = axis.graph, splittable(axis), set[int]()
    needs = {op: _need(graph, op) for op in sorted(may) if is_product(graph.ops[op].target)}
    found = []
    for op in sorted(needs, key=lambda op: -needs[op]):
        if needs[op] > limit and op not in taken:
            ops = _divisible(axis, op, _with_neighbours(axis, op, may - taken))
            if ops and taken.isdisjoint(ops):
                found.append((ops, min(FINEST, axis.examples, 2 * round(needs[op] / limit))))
                taken |= ops
    return found


def _divisible(axis: Axis, op: int, wanted: set[int]) -> set[int]:
    """What of an op and its neighbours runs in parts: those that couple examples are left out, one after the other."""
    while op in wanted:
        try:
            return {*region(axis, wanted).ops}
        except Coupled as error:
            at = error.op if isinstance(error, Refusal) else op
            wanted = wanted - {at} if at in wanted else {op} if len(wanted) > 1 else set()
    return set()


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
    return not is_product(graph.ops[op].target) and not graph.effects[op]


def _same(graph: Graph, one: int, other: int) -> bool:
    return graph.ops[one].phase == graph.ops[other].phase


def _separated(graph: Graph, limit: float) -> Graph:
    """The graph with one op for each result of a separable backward that needs more than so many bytes."""
    editor = Editor(graph)
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
