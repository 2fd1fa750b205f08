"""Batch norms in halves: sums over all examples in one op, each number on its own in another, forward and backward.

The second op writes over what it is made of, so a backward needs two large tensors where torch's needs three. The
statistics are those of the whole batch, added up in double precision: what differs from torch's is rounding.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from lowtide.graph import Graph, Op, Read
from lowtide.kernels.norm_halves import APPLY, SPREAD, STATISTICS, TERMS
from lowtide.rewrite.statistics import BIAS, EPSILON, INPUT, WEIGHT, Writer, trains

THREE = 3  # large tensors that torch's backward needs: two gradients, and the input


def large_norms(graph: Graph, least: float) -> frozenset[str]:
    """The names of training batch norms that can be in halves, of values of so many bytes together."""
    writer = _writer(graph)
    return frozenset(graph.ops[index].name for index in graph.ordinary if _may(writer, index, least))


def norm_halves(graph: Graph, names: Collection[str]) -> Graph:
    """The graph with the batch norms of these names in halves, where that can be."""
    writer = _writer(graph)
    for index in graph.ordinary:
        if graph.ops[index].name in names and _may(writer, index, 0):
            _write(writer, index)
    return writer.editor.reordered() if writer.done else graph


def _writer(graph: Graph) -> Writer:
    batches = {graph.values[op.makes[0]].shape[0] for op in graph.ops if trains(op)}
    return Writer(graph, max(batches, default=1), 1.0)


def _may(writer: Writer, index: int, least: float) -> bool:
    return trains(writer.graph.ops[index]) and _is_large(writer.graph, index, least) and writer.may(index)


def _is_large(graph: Graph, index: int, least: float) -> bool:
    """Whether the backward of a batch norm needs so many bytes; in single precision, as our kernels are."""
    made = graph.values[graph.ops[index].makes[0]]
    return made.dtype == "float32" and THREE * made.nbytes > least


def _write(writer: Writer, index: int) -> None:
    graph, editor = writer.graph, writer.editor
    op = graph.ops[index]
    result, *saved = op.outputs
    assert result is not None
    like = graph.values[result]
    note, sums = (writer.value(like, f"{like.name} {name}", "float32", (1,)) for name in ("statistics", "sums"))
    readers = sorted({reader for value in saved if value is not None for reader in graph.readers[value]})
    plain = replace(op, updates=(), detachable=False)
    read = (op.args[INPUT], op.args[EPSILON])
    given = (op.args[INPUT], op.args[WEIGHT], op.args[BIAS], Read(note))
    editor.take_out(index)
    first = replace(plain, name=f"{op.name}_sums", target=STATISTICS, args=read, outputs=(note, sums))
    editor.put(index, 0, index, first)
    editor.put(index, 0, index, replace(plain, target=APPLY, args=given, outputs=(result,)))
    for reader in readers:
        _write_backward(writer, reader, graph.ops[reader], note)
    if op.updates:
        writer.update(index, op, sums)
    writer.done = True


def _write_backward(writer: Writer, index: int, back: Op, note: int) -> None:
    editor, like = writer.editor, writer.graph.values[back.makes[0]]
    of_input, of_weight, of_bias = back.outputs
    terms = writer.value(like, f"{like.name} terms", "float32", (1,))
    args = (*back.args[:3], Read(note))
    editor.take_out(index)
    sums = replace(back, name=f"{back.name}_sums", target=TERMS, args=args, outputs=(of_weight, of_bias, terms))
    editor.put(index, 0, index, sums)
    if of_input is not None:
        spread = replace(back, target=SPREAD, args=(*args, Read(terms)), outputs=(of_input,))
        editor.put(index, 0, index, spread)
