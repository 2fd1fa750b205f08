"""Batch norm over groups of examples: with statistics of each group, a batch may run in parts of whole groups; lossy.

Each group of so many examples, in their order, is normalised by its own mean and variance (ghost batch norm: Hoffer
et al. 2017, arXiv 1705.08741). Running statistics are those of all examples, and change once a step, as eager's do.
The setting is the number of examples of a group, and behind a slash the share of the group's own statistics, the rest
being the running ones: "2/0.5".
"""

from __future__ import annotations

from dataclasses import replace

from lowtide.errors import UsageError
from lowtide.graph import Arg, Graph, Op, Read, Value
from lowtide.kernels.grouped import BACKWARD, NORM, RUNNING, SAVED, SUMS, fits
from lowtide.rewrite.editor import Editor

WHOLE, WHOLE_BACKWARD = "aten.native_batch_norm.default", "aten.native_batch_norm_backward.default"
FEWEST = 2  # groups of what is tried
INPUT, WEIGHT, BIAS, MEAN, VAR, TRAINS, MOMENTUM, EPSILON = range(8)  # arguments of the whole one


def read_setting(told: object) -> tuple[int, float]:
    """The examples of a group, and the share of their own statistics."""
    size, _, share = str(told).partition("/")
    try:
        found = int(size), float(share or 1)
    except ValueError:
        found = 0, 0.0
    if found[0] < 1 or not 0 < found[1] <= 1:
        raise UsageError(
            f"{told!r} is no number of examples whose statistics batch norm could use.",
            hint='write allow="microbatch,batch-statistics:5" for groups of 5, or "batch-statistics:5/0.5".',
        )
    return found


def sizes(graph: Graph) -> tuple[int, ...]:
    """Groups that may be tried, the largest first: half a batch is whole groups, too."""
    shapes = [_shape(graph, op) for op in graph.ops if trains(op)]
    batch = min((shape[0] for shape in shapes), default=0)
    return tuple(
        size
        for size in range(batch // FEWEST, 0, -1)
        if batch % (2 * size) == 0 and all(fits(shape, size) for shape in shapes)
    )


def grouped(graph: Graph, told: object) -> Graph:
    """The graph whose training batch norms are taken over groups of examples, where that can be."""
    size, share = read_setting(told)
    writer = Writer(graph, size, share)
    for index in graph.ordinary:
        if trains(graph.ops[index]) and writer.may(index):
            writer.write(index)
    return writer.editor.reordered() if writer.done else graph


class Writer:
    """Writes the graph with batch norms over groups."""

    def __init__(self, graph: Graph, size: int, share: float) -> None:
        self.graph, self.size, self.share = graph, size, share
        self.editor = Editor(graph)
        self.done = False

    def may(self, index: int) -> bool:
        """Whether a batch norm can be taken over groups: it reads whole tensors, and its backward what it saves."""
        op = self.graph.ops[index]
        saved = [value for value in op.outputs[1:] if value is not None]
        readers = {reader for value in saved for reader in self.graph.readers[value]}
        whole = all(self.graph.ops[reader].target == WHOLE_BACKWARD for reader in readers)
        kept = any(value in self.graph.required for value in saved)
        result = op.outputs[0]
        plain = result is not None and self.plain(op.args[INPUT]) and len(saved) == 2
        return plain and whole and not kept and fits(_shape(self.graph, op), self.size) and all(map(self.same, readers))

    def same(self, index: int) -> bool:
        """Whether a backward reads a whole tensor as its gradient, and as its input."""
        op = self.graph.ops[index]
        return self.plain(op.args[0]) and self.plain(op.args[1])

    def plain(self, arg: Arg) -> bool:
        return isinstance(arg, Read) and self.editor.shapes.tensor(arg).is_contiguous()

    def write(self, index: int) -> None:
        op = self.graph.ops[index]
        result, *saved = op.outputs
        assert result is not None
        batch, channels, *_ = _shape(self.graph, op)
        like = self.graph.values[result]
        note = self.value(like, f"{like.name} statistics", "float32", (batch, channels, SAVED))
        sums = self.value(like, f"{like.name} sums", "float64", (SUMS, channels))
        given = (op.args[MEAN], op.args[VAR]) if self.share < 1 else (None, None)
        args = (op.args[INPUT], op.args[WEIGHT], op.args[BIAS], *given, self.size, self.share, op.args[EPSILON])
        outputs = (result, note, sums)
        self.editor.change(index, replace(op, target=NORM, args=args, outputs=outputs, updates=(), detachable=False))
        for reader in {reader for value in saved if value is not None for reader in self.graph.readers[value]}:
            back = self.graph.ops[reader]
            read = (*back.args[:3], given[0], Read(note), self.size, self.share)
            self.editor.change(reader, replace(back, target=BACKWARD, args=read))
        if op.updates:
            self.update(index, op, sums)
        self.done = True

    def update(self, index: int, op: Op, sums: int) -> None:
        """Running statistics change at the end of the step: until then what they were is there to be read again."""
        last = len(self.graph.ordinary) - 1
        args = (op.args[MEAN], op.args[VAR], Read(sums), op.args[MOMENTUM])
        update = Op(f"{op.name}_statistics", RUNNING, args, outputs=(None,), updates=op.updates, phase="update")
        self.editor.put(last, 0, index, replace(update, module=op.module, source=op.source))

    def value(self, like: Value, name: str, dtype: str, shape: tuple[int, ...]) -> int:
        strides, count = [], 1
        for size in reversed(shape):
            strides.append(count)
            count *= size
        nbytes = count * (8 if dtype == "float64" else 4)
        return self.editor.value(
            replace(like, name=name, dtype=dtype, shape=shape, stride=tuple(reversed(strides)), nbytes=nbytes)
        )


def trains(op: Op) -> bool:
    return op.target == WHOLE and op.args[TRAINS] is True and isinstance(op.args[INPUT], Read)


def _shape(graph: Graph, op: Op) -> tuple[int, ...]:
    assert op.outputs[0] is not None
    return graph.values[op.outputs[0]].shape
