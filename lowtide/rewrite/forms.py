"""Inputs of a step in other forms: parts in place of floats, an op that makes the floats, one that makes the parts.

What reads the input reads what `unpack` makes, which a program may make again wherever that is cheaper than to keep it.
What wrote to the input writes to a temporary value, and `pack` puts the last of it into the parts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from lowtide.forms import BLOCK, COUNTER, MASK, PACK, SCALES, UNPACK, VALUES, wholes
from lowtide.graph import Arg, Form, Graph, Input, Op, Output, Read, Value
from lowtide.graph.targets import DTYPES
from lowtide.rewrite.editor import Editor

LEAST = 1024  # elements: what is smaller stays as it is, for it saves nothing
MANY = 4  # ops that read a weight besides its update: a forward and a backward of more than two parts
WITH_SCALES = ("int8", "uint8")


@dataclass(frozen=True)
class Layout:
    """How the elements of an input are stored."""

    dtype: str = "float32"
    count: int | None = None  # of elements that are stored, where a mask says which; None: all
    by_chance: bool = True  # what is rounded is rounded by chance


def candidates(graph: Graph, kind: str) -> list[Input]:
    """The inputs of a kind that are floats without gaps, are no results of the step, and are worth it."""
    shown = {graph.values[output.value].storage for output in graph.outputs if output.role != "input"}
    return [
        item
        for item in graph.inputs
        if (value := graph.values[item.value]).kind == kind
        and item.home == "device"
        and value.storage not in shown
        and value.dtype == "float32"
        and value.form == "plain"
        and math.prod(value.shape) >= LEAST
        and _fills(value)
    ]


def in_parts(graph: Graph, chosen: Iterable[tuple[Input, Layout]], masks: dict[str, int] | None = None) -> Graph:
    """The graph with these inputs in parts; `masks` are those that other inputs of a parameter have already."""
    editor = Editor(graph)
    known = dict(masks or {})
    for item, layout in chosen:
        _Division(editor, item, layout, known).divide()
    return editor.reordered()


def order_of(value: Value) -> tuple[int, ...]:
    """The dimensions of a value as they lie in memory."""
    return tuple(sorted(range(len(value.shape)), key=lambda place: (-value.stride[place], -value.shape[place], place)))


def with_values(graph: Graph, kind: str, dtype: Callable[[int], str]) -> Graph:
    """The graph whose inputs in parts have their values in other dtypes, as is said of the floats that they make."""
    editor = Editor(graph)
    floats = {op.args[0]: op.makes[0] for op in graph.ops if op.target == UNPACK}
    for whole in wholes(graph):
        values = whole.values[VALUES]
        if whole.kind == kind and graph.values[values].dtype == "float32" and Read(values) in floats:
            _narrow(editor, values, whole.path, dtype(floats[Read(values)]), math.prod(graph.values[values].shape))
    return editor.grown()


def _narrow(editor: Editor, values: int, path: tuple[str | int, ...], dtype: str, count: int) -> None:
    """Let values that are stored as floats already be stored with fewer bits."""
    graph, item = editor.graph, editor.values[values]
    later = [new for op in graph.ops if op.target == PACK for new, old in op.updates if old == values]
    for value in (values, *later):
        editor.values[value] = replace(editor.values[value], dtype=dtype, nbytes=count * DTYPES[dtype])
    names = ((SCALES,) if dtype in WITH_SCALES else ()) + ((COUNTER,) if later else ())
    beside = {name: _part(editor, item, name, path) for name in names}
    for index in graph.ordinary:
        op = editor.placed[index].op
        if op.target not in (UNPACK, PACK) or op.args[0] != Read(values):
            continue
        args: list[Arg] = [*op.args]
        args[1] = _read(beside, SCALES)
        updates = op.updates
        if op.target == PACK:
            args[3] = _read(beside, COUNTER)
            updates += tuple((_next(editor, part), part) for part in beside.values())
            for new, old in updates[len(op.updates) :]:
                name = next(one.path for one in editor.inputs if one.value == old)
                editor.outputs.append(Output(new, "input", name))
        editor.change(index, replace(op, args=tuple(args), updates=updates))


def _part(editor: Editor, like: Value, name: str, path: tuple[str | int, ...]) -> int:
    """A new part of an input beside its values."""
    count = math.prod(like.shape)
    dtype, length = {SCALES: ("float32", -(-count // BLOCK)), COUNTER: ("int64", 1)}[name]
    value = replace(like, name=f"{' '.join(map(str, path))} {name}", dtype=dtype, shape=(length,), stride=(1,))
    number = editor.value(replace(value, nbytes=length * DTYPES[dtype], eager_end=-1))
    editor.inputs.append(Input(number, (*path, name)))
    return number


def _next(editor: Editor, part: int) -> int:
    """What a part is after it was written to."""
    editor.values.append(replace(editor.values[part]))
    return len(editor.values) - 1


class _Division:
    """Divides one input into parts."""

    def __init__(self, editor: Editor, item: Input, layout: Layout, masks: dict[str, int]) -> None:
        self.editor, self.graph, self.item, self.layout = editor, editor.graph, item, layout
        self.whole = self.graph.values[item.value]
        self.count = math.prod(self.whole.shape) if layout.count is None else layout.count
        self.masks = masks  # of parameters, by their names
        self.form: Form = "packed" if layout.count is None else "sparse"

    def divide(self) -> None:
        graph, editor, item = self.graph, self.editor, self.item
        contents = [value for value, one in enumerate(graph.values) if one.storage == self.whole.storage]
        final = contents[-1]
        editor.released.update(contents)
        editor.inputs.remove(item)
        parts = self._parts(written=final != item.value)
        self._unpack(parts)
        if final != item.value:
            self._pack(parts, final)

    def _parts(self, *, written: bool) -> dict[str, int]:
        """The parts, as inputs; what never changes needs no chance."""
        dtype, name = self.layout.dtype, str(self.item.path[0])
        found = {VALUES: self._add(VALUES, dtype, self.count)}
        if dtype in WITH_SCALES:
            found[SCALES] = self._add(SCALES, "float32", -(-self.count // BLOCK))
        if self.layout.count is not None:
            if name not in self.masks:
                self.masks[name] = self._add(MASK, "uint8", -(-math.prod(self.whole.shape) // 8))
            found[MASK] = self.masks[name]
        if written and dtype != "float32" and self.layout.by_chance:
            found[COUNTER] = self._add(COUNTER, "int64", 1)
        return found

    def _add(self, part: str, dtype: str, length: int) -> int:
        name = f"{self.whole.name} {part}"
        nbytes = length * DTYPES[dtype]
        value = replace(self.whole, name=name, dtype=dtype, shape=(length,), stride=(1,), nbytes=nbytes, form=self.form)
        number = self.editor.value(replace(value, eager_end=-1))
        self.editor.inputs.append(Input(number, (*self.item.path, part)))
        return number

    def _unpack(self, parts: dict[str, int]) -> None:
        """Make the floats before they are first read; where many ops read them, for each of these anew.

        Who makes them again is the planner's choice otherwise, but for many parts of a batch it would have to find out
        for every weight and part that nobody wants to keep it.
        """
        readers = self.graph.readers[self.item.value]
        updating = [index for index in readers if self.graph.ops[index].phase == "update"]
        others = [index for index in readers if index not in updating]
        if len(others) > MANY:
            for number, index in enumerate(others):
                made = self.editor.value(replace(self.whole, eager_end=-1))
                self._call(parts, index, made, f"_{number}")
                self.editor.change(index, _reading(self.editor.placed[index].op, self.item.value, made))
            readers = tuple(updating)
        if readers:
            self._call(parts, readers[0], self.item.value, "")

    def _call(self, parts: dict[str, int], index: int, made: int, suffix: str) -> None:
        reader = self.graph.ops[index]
        op = Op(
            name=f"unpack_{self.whole.name}{suffix}".replace(" ", "_"),
            target=UNPACK,
            args=(*(_read(parts, name) for name in (VALUES, SCALES, MASK)), self.whole.shape, self.whole.stride),
            outputs=(made,),
            phase=reader.phase,
            module=reader.module,
            source=reader.source,
        )
        self.editor.put(index, -2, index, op)

    def _pack(self, parts: dict[str, int], final: int) -> None:
        graph, editor = self.graph, self.editor
        maker = graph.maker[final]
        new = {part: _next(editor, value) for part, value in parts.items() if part != MASK}
        made = graph.ops[maker]
        op = Op(
            name=f"pack_{self.whole.name}".replace(" ", "_"),
            target=PACK,
            args=(
                *(_read(parts, name) for name in (VALUES, SCALES, MASK, COUNTER)),
                Read(final),
                order_of(self.whole),
            ),
            updates=tuple((new[part], parts[part]) for part in new),
            phase=made.phase,
            module=made.module,
            source=made.source,
        )
        last = max((maker, *graph.readers[final]))
        editor.put(last, 1, maker, op)
        editor.outputs = [one for one in editor.outputs if one.role != "input" or one.path != self.item.path]
        editor.outputs += [Output(value, "input", (*self.item.path, part)) for part, value in new.items()]


def _reading(op: Op, old: int, new: int) -> Op:
    """A call that reads another value in the place of one."""

    def swap(arg: Arg) -> Arg:
        if isinstance(arg, Read):
            return Read(new, arg.view) if arg.value == old else arg
        return tuple(map(swap, arg)) if isinstance(arg, tuple) else arg

    kwargs = tuple((key, swap(arg)) for key, arg in op.kwargs)
    return replace(op, args=tuple(map(swap, op.args)), kwargs=kwargs)


def _read(parts: dict[str, int], name: str) -> Read | None:
    return Read(parts[name]) if name in parts else None


def _fills(value: Value) -> bool:
    """Whether the elements of a value fill its storage, in some order of the dimensions."""
    count = 1
    for stride, size in sorted(zip(value.stride, value.shape, strict=True)):
        if size != 1 and stride != count:
            return False
        count *= size
    return value.nbytes == count * DTYPES[value.dtype]
