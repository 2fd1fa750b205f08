"""The batch as bytes: floats in 256 steps, whole numbers in 32 bits.

What differs: pixels that were bytes once come back as they were, up to rounding, and so do all numbers of a grid of up
to 256 places a channel; others are off by half a step of the range of their channel. Whole numbers stay what they are.
"""

from __future__ import annotations

import math
from dataclasses import replace

from lowtide.aten import CAST
from lowtide.errors import UsageError
from lowtide.forms import FROM_BYTES, STEPS, VALUES, ZEROS
from lowtide.graph import Arg, Constant, Graph, Input, Op, Read, Value, View
from lowtide.graph.targets import DTYPES
from lowtide.rewrite.editor import Editor
from lowtide.rewrites import Setting

LEAST = 256  # elements: what is smaller stays as it is
CHANNELS = 64  # in the second dimension at most, for it to have steps and zeros of its own
SLICE = "aten.slice.Tensor"


def input8(graph: Graph, setting: Setting) -> Graph:
    """The graph whose batch is there as bytes."""
    if setting is not None:
        raise UsageError(f"input8 has no setting {setting!r}.", hint="write input8 alone.")
    editor = Editor(graph)
    written = {graph.values[old].storage for op in graph.ops for _, old in op.updates}
    shown = {output.value for output in graph.outputs}
    for item in graph.inputs:
        value = graph.values[item.value]
        if value.kind != "batch" or value.form != "plain" or value.storage in written or item.value in shown:
            continue
        if math.prod(value.shape) < LEAST or not _contiguous(value) or item.home != "device":
            continue
        if value.dtype == "float32":
            _Bytes(editor, item).divide()
        elif value.dtype == "int64":
            _Narrow(editor, item).divide()
    return graph if tuple(editor.inputs) == graph.inputs else editor.reordered()


class _Division:
    """Replaces one input by its parts."""

    def __init__(self, editor: Editor, item: Input) -> None:
        self.editor, self.graph, self.item = editor, editor.graph, item
        self.whole = editor.graph.values[item.value]
        editor.inputs.remove(item)
        editor.released.add(item.value)

    def part(self, name: str, dtype: str, length: int) -> int:
        """A new input."""
        nbytes = length * DTYPES[dtype]
        value = replace(self.whole, name=f"{self.whole.name} {name}", dtype=dtype, shape=(length,), stride=(1,))
        number = self.editor.value(replace(value, nbytes=nbytes, form="packed", eager_end=-1))
        self.editor.inputs.append(Input(number, (*self.item.path, name)))
        return number

    def call(self, name: str, target: str, reader: int, args: tuple[Arg, ...], made: int, **more: Arg) -> None:
        """An op before its first reader."""
        beside = self.graph.ops[reader]
        op = Op(name.replace(" ", "_"), target, args, tuple(more.items()), (made,))
        op = replace(op, phase=beside.phase, module=beside.module, source=beside.source)
        self.editor.put(reader, -2, reader, op)


class _Bytes(_Division):
    """Floats as bytes; a slice of the examples is made alone where only that is read."""

    def divide(self) -> None:
        whole = self.whole
        channel = 1 if len(whole.shape) > 2 and whole.shape[1] <= CHANNELS else -1
        channels = whole.shape[1] if channel > 0 else 1
        values = self.part(VALUES, "uint8", math.prod(whole.shape))
        parts = (Read(values), Read(self.part(STEPS, "float32", channels)), Read(self.part(ZEROS, "float32", channels)))
        made: dict[tuple[int, int], int] = {}
        for index in self.graph.readers[self.item.value]:
            op = self.editor.placed[index].op
            for read in [read for read in op.arguments() if read.value == self.item.value]:
                first, last, rest = self._slice(read.view)
                if (first, last) not in made:
                    shape = (last - first, *whole.shape[1:])
                    made[first, last] = number = (
                        self.item.value if last - first == whole.shape[0] else self.editor.value(whole)
                    )
                    args = (*parts, shape, whole.stride, first * math.prod(whole.shape[1:]), channel)
                    self.call(f"from_bytes_{whole.name}_{first}_{last}", FROM_BYTES, index, args, number)
                op = _with(op, read, Read(made[first, last], rest))
            self.editor.change(index, op)

    def _slice(self, view: int | None) -> tuple[int, int, int | None]:
        """Which examples a view sees, and the view of these."""
        chain: list[View] = []
        while view is not None:
            chain.append(self.editor.views[view])
            view = chain[-1].parent
        count = self.whole.shape[0]
        match chain[-1] if chain else None:
            case View(None, "aten.slice.Tensor", (0, int(first), int(last)), None):
                chain.pop()
            case _:
                first, last = 0, count
        parent = None
        for one in reversed(chain):
            parent = self.editor.view(replace(one, parent=parent))
        return first, min(last, count), parent


class _Narrow(_Division):
    """Whole numbers with 32 bits."""

    def divide(self) -> None:
        readers = self.graph.readers[self.item.value]
        values = self.part(VALUES, "int32", math.prod(self.whole.shape))
        self.editor.values[values] = replace(
            self.editor.values[values], shape=self.whole.shape, stride=self.whole.stride
        )
        if readers:
            name, dtype = f"widen_{self.whole.name}", Constant("dtype", self.whole.dtype)
            self.call(name, CAST, readers[0], (Read(values),), self.item.value, dtype=dtype)


def _with(op: Op, old: Read, new: Read) -> Op:
    def swap(arg: Arg) -> Arg:
        if isinstance(arg, tuple):
            return tuple(map(swap, arg))
        return new if arg == old else arg

    kwargs = tuple((key, swap(arg)) for key, arg in op.kwargs)
    return replace(op, args=tuple(map(swap, op.args)), kwargs=kwargs)


def _contiguous(value: Value) -> bool:
    expected = tuple(math.prod(value.shape[place:]) for place in range(1, 1 + len(value.shape)))
    return value.stride == expected and value.nbytes == math.prod(value.shape) * DTYPES[value.dtype]
