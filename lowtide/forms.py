"""Inputs in parts: how a graph says that a parameter, a state or a batch is there in another form than floats.

The input is replaced by one for each part, whose path is the old one with the part's name behind it. An op makes the
floats of the parts, and another one the parts of the floats where the step changes them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from lowtide.graph import OPAQUE, Graph, Input

BLOCK = 256  # elements to a scale
# What an input may consist of. A state has the mask of its parameter; steps and zeros are of bytes.
VALUES, SCALES, MASK, COUNTER, STEPS, ZEROS = "values", "scales", "mask", "counter", "steps", "zeros"
PARTS = (VALUES, SCALES, MASK, COUNTER, STEPS, ZEROS)
UNPACK, PACK, UPDATE, FROM_BYTES = (f"lowtide.{name}.default" for name in ("unpack", "pack", "update", "from_bytes"))

Path = tuple[str | int, ...]


@dataclass(frozen=True)
class Whole:
    """An input in parts: for each part its place among the graph's inputs, and its value."""

    kind: str  # of the values
    path: Path  # of the whole
    inputs: dict[str, int]  # part -> place among the inputs
    values: dict[str, int]  # part -> value

    @property
    def key(self) -> tuple[str, Path]:
        """What tells it from all others."""
        return self.kind, self.path


def is_part(graph: Graph, item: Input) -> bool:
    """Whether an input is a part of something."""
    return graph.values[item.value].form in OPAQUE and item.path[-1] in PARTS


@cache
def wholes(graph: Graph) -> tuple[Whole, ...]:
    """The inputs that are there in parts."""
    found: dict[tuple[str, Path], Whole] = {}
    for place, item in enumerate(graph.inputs):
        if is_part(graph, item):
            kind, part = graph.values[item.value].kind, str(item.path[-1])
            whole = found.setdefault((kind, item.path[:-1]), Whole(kind, item.path[:-1], {}, {}))
            whole.inputs[part], whole.values[part] = place, item.value
    return tuple(found.values())
