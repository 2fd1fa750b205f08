"""Inputs in parts: how a graph says that a parameter, a state or a batch is there in another form than floats.

The input is replaced by one for each part, whose path is the old one with the part's name behind it. An op makes the
floats of the parts, and another one the parts of the floats where the step changes them.
"""

from __future__ import annotations

from dataclasses import dataclass

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


@dataclass(frozen=True)
class Layout:
    """How the elements of a tensor are stored."""

    dtype: str  # of the values
    count: int | None = None  # of elements that are stored, where a mask says which; None: all
    scaled: bool = False  # a scale for each block
    counted: bool = False  # a counter, for what is rounded by chance
    channel: int | None = None  # of bytes: the dimension with steps and zeros of its own; -1: one for all


def layout_of(graph: Graph, whole: Whole) -> Layout:
    """How a graph wants an input in parts."""
    values = graph.values[whole.values[VALUES]]
    readers = [op for op in graph.ops if any(read.value == whole.values[VALUES] for read in op.arguments())]
    channels = [op.args[-1] for op in readers if op.target == FROM_BYTES]
    return Layout(
        values.dtype,
        values.shape[0] if values.form == "sparse" else None,
        SCALES in whole.values,
        COUNTER in whole.values,
        int(channels[0]) if channels else None,  # type: ignore[arg-type]
    )


def wholes(graph: Graph) -> tuple[Whole, ...]:
    """The inputs that are there in parts."""
    found: dict[tuple[str, Path], Whole] = {}
    for place, item in enumerate(graph.inputs):
        if is_part(graph, item):
            kind, part = graph.values[item.value].kind, str(item.path[-1])
            whole = found.setdefault((kind, item.path[:-1]), Whole(kind, item.path[:-1], {}, {}))
            whole.inputs[part], whole.values[part] = place, item.value
    return tuple(found.values())
