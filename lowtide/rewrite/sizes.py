"""Reads that only ask for sizes, answered by what is there anyway: the argument itself need not be kept for them."""

from __future__ import annotations

import math
from dataclasses import replace

from lowtide.aten import SIZES_ONLY
from lowtide.graph import Graph, Read, View
from lowtide.rewrite.editor import Editor


def sizes_only(graph: Graph) -> Graph:
    """The graph without reads that only ask for sizes: the incoming gradient, seen with these sizes, answers as well.

    The calls make a gradient of the argument's sizes and layout, and add to it where the incoming gradient and the
    indices say; they read no element of the argument. What they see in its place has the layout of a contiguous one.
    """
    if graph.device != "cpu":  # kernels of other devices copy the argument first
        return graph
    editor = Editor(graph)
    for index in graph.ordinary:
        op = graph.ops[index]
        if op.target in SIZES_ONLY and isinstance(gradient := op.args[0], Read):
            made = graph.values[graph.makes[index][0]]
            if made.stride == tuple(math.prod(made.shape[place:]) for place in range(1, 1 + len(made.shape))):
                seen = View(gradient.view, "aten.as_strided.default", (made.shape, (0,) * len(made.shape), 0))
                args = (gradient, Read(gradient.value, editor.view(seen)), *op.args[2:])
                editor.change(index, replace(op, args=args))
    return editor.grown()
