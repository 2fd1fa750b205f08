"""Keep everything: the order and the in-place updates of eager, nothing run twice."""

from __future__ import annotations

from collections.abc import Sequence

from lowtide.aten import ADD
from lowtide.graph import Graph, Read
from lowtide.program import Free, Instruction, Program, Run

Pairs = tuple[tuple[int, int], ...]  # (made, read): what is made sits on the bytes of what is read


def keep_everything(graph: Graph) -> Program:
    """Run the ops as captured and free each value right after its last reader."""
    last = [readers[-1] if readers else graph.maker[value] for value, readers in enumerate(graph.readers)]
    return _in_order(graph, last)


def as_eager(graph: Graph) -> Program:
    """Run the ops as captured and free each value where eager PyTorch lets go of it: what the user has today.

    It is there to tell the bytes. Autograd adds up gradients in place, which a program may only do where that was
    measured to give the same bits; and where eager draws numbers again this copies from what is gone.
    """
    end = len(graph.ordinary) - 1
    last = [end if value.eager_end < 0 else value.eager_end for value in graph.values]
    last = [max(at, maker) for at, maker in zip(last, graph.maker, strict=True)]
    return _in_order(graph, last, [_summed(graph, last, op) for op in graph.ordinary])


def _summed(graph: Graph, last: list[int], op: int) -> Pairs:
    """The pair (sum, gradient), where autograd adds up gradients on top of one that nobody else holds."""
    item = graph.ops[op]
    if item.target != ADD or item.phase != "backward" or item.kwargs or len(item.args) != 2:
        return ()
    made = graph.values[item.makes[0]]
    for read in item.args:
        if isinstance(read, Read) and read.view is None and last[read.value] == op and graph.maker[read.value] >= 0:
            value = graph.values[read.value]
            if (value.shape, value.stride, value.dtype) == (made.shape, made.stride, made.dtype):
                return ((item.makes[0], read.value),)
    return ()


def _in_order(graph: Graph, last: list[int], sums: Sequence[Pairs] | None = None) -> Program:
    """The captured order, each value freed after the op `last[value]` unless it stays or is written over there."""
    persisting = {item.value for item in graph.inputs if item.persistent} | graph.required
    over = [tuple(pair for pair in graph.ops[op].updates if last[pair[1]] <= op) for op in graph.ordinary]
    for op, pairs in enumerate(sums or ()):
        over[op] += tuple(pair for pair in pairs if pair[1] not in persisting)
    overwritten = {old for pairs in over for _, old in pairs}
    made = {value for op in graph.ordinary for value in graph.makes[op]} | {item.value for item in graph.inputs}
    freed: list[list[int]] = [[] for _ in graph.ordinary]
    for value in sorted(made - persisting - overwritten):
        freed[last[value]].append(value)
    instructions: list[Instruction] = []
    for op in graph.ordinary:
        instructions.append(Run(op, over=over[op]))
        instructions += [Free(value) for value in freed[op]]
    return Program(graph.fingerprint, tuple(instructions))
