"""Keep everything: the order and the in-place updates of eager, nothing run twice."""

from __future__ import annotations

from lowtide.graph import Graph
from lowtide.program import Free, Instruction, Program, Run


def keep_everything(graph: Graph) -> Program:
    """Run the ops as captured and free each value right after its last reader."""
    last = [readers[-1] if readers else graph.maker[value] for value, readers in enumerate(graph.readers)]
    return _in_order(graph, last)


def as_eager(graph: Graph) -> Program:
    """Run the ops as captured and free each value where eager PyTorch lets go of it: what the user has today.

    Where eager draws numbers again this only tells the bytes and can't run: it copies from what is gone.
    """
    end = len(graph.ordinary) - 1
    last = [end if value.eager_end < 0 else value.eager_end for value in graph.values]
    return _in_order(graph, [max(at, maker) for at, maker in zip(last, graph.maker, strict=True)])


def _in_order(graph: Graph, last: list[int]) -> Program:
    """The captured order, each value freed after the op `last[value]` unless it stays or is written over there."""
    staying = {item.value for item in graph.inputs if item.stays} | graph.required
    over = [tuple(pair for pair in op.updates if last[pair[1]] <= number) for number, op in enumerate(graph.ops)]
    overwritten = {old for pairs in over for _, old in pairs}
    made = {value for op in graph.ordinary for value in graph.makes[op]} | {item.value for item in graph.inputs}
    freed: list[list[int]] = [[] for _ in graph.ordinary]
    for value in sorted(made - staying - overwritten):
        freed[last[value]].append(value)
    instructions: list[Instruction] = []
    for op in graph.ordinary:
        instructions.append(Run(op, over=over[op]))
        instructions += [Free(value) for value in freed[op]]
    return Program(graph.fingerprint, tuple(instructions))
