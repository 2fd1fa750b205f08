"""Optimizer state with 8 bits an element and a scale for each block of 256, rounded by chance after each update.

Codes are the square root of an element's part of the largest in its block, with a sign, or the fourth root where the
update takes roots of the state and divides by them, as of second moments: there what is not zero never becomes zero. A
state that takes up the parts of a batch one by one, as a momentum can, has 16 bits (bfloat16) and no scale, for it is
rounded once for each part.

What differs: an element is off by less than the distance of two codes, and by nothing on average.
"""

from __future__ import annotations

from lowtide.errors import UsageError
from lowtide.graph import Graph
from lowtide.rewrite.accumulate import sums
from lowtide.rewrite.forms import Layout, candidates, in_parts, with_values
from lowtide.rewrites import Setting

ROOTS = ("aten.sqrt.default", "aten.sqrt_.default", "aten.rsqrt.default")
THROUGH = ("add", "div", "mul", "maximum", "addcmul")  # what lies between a second moment and its root


def state8(graph: Graph, setting: Setting) -> Graph:
    """The graph whose optimizer state is stored with 8 bits an element."""
    if setting is not None:
        raise UsageError(f"state8 has no setting {setting!r}.", hint="write state8 alone.")
    taking = _taking(graph)
    chosen = [(item, Layout(_dtype(graph, item.value, taking))) for item in candidates(graph, "state")]
    divided = in_parts(graph, chosen) if chosen else graph
    taking = _taking(divided)
    return with_values(divided, "state", lambda value: _dtype(divided, value, taking))


def _taking(graph: Graph) -> set[int]:
    """The storages that take up the terms of a gradient."""
    return {graph.values[one.state].storage for one in sums(graph)}


def _dtype(graph: Graph, value: int, taking: set[int]) -> str:
    """How a state is stored: whether terms of a gradient are added to it, and whether the update takes its root."""
    if graph.values[value].storage in taking:
        return "bfloat16"
    storage, seen, left = graph.values[value].storage, set[int](), [value]
    while left:
        content = left.pop()
        if content in seen:
            continue
        seen.add(content)
        for op in (graph.ops[reader] for reader in graph.readers[content]):
            if op.target in ROOTS:
                return "uint8"
            tensors = [read for read in op.reads if graph.values[read].kind != "scalar"]
            if any(word in op.target for word in THROUGH):
                left += [new for new in op.makes if graph.values[new].storage == storage or tensors == [content]]
    return "int8"
