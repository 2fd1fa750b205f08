"""Products with sparse weights straight from their values: layers whose dense weight is never made.

The forward, the gradient of the input and that of the weight are ops of their own; the last one makes the gradient of
the values. What reads it as a whole is an elementwise update that ends at the same mask, so that zeros elsewhere change
nothing; where a gradient goes anywhere else, as into the norm that clips it, it stays dense. Sums of such gradients are
sums of their values. Convolutions whose weight is too small to be sparse take the same kernels, with all of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from lowtide.aten import ADD
from lowtide.forms import PACK, UNPACK
from lowtide.graph import Arg, Graph, Op, Read, Value, View
from lowtide.kernels import sparse
from lowtide.kernels.shapes import Shapes
from lowtide.rewrite.accumulate import plain_add, sums
from lowtide.rewrite.editor import Editor
from lowtide.rewrite.updates import as_it_is, elementwise, without_unread

LEAST = 4096  # elements of a weight: smaller ones, and vectors, matter more than they weigh
CONVOLUTION, CONVOLUTION_BACKWARD = "aten.convolution.default", "aten.convolution_backward.default"
MM, ADDMM, TRANSPOSE = "aten.mm.default", "aten.addmm.default", "aten.t.default"


@dataclass(frozen=True)
class Weight:
    """A parameter that is there as values and a mask or, where it is small, as it is."""

    values: int
    mask: int | None
    room: int  # of a gradient's values
    shape: tuple[int, ...]
    stride: tuple[int, ...]


def with_kernels(graph: Graph, rooms: Mapping[str, int]) -> Graph:
    """The graph whose sparse weights are multiplied from their values, as far as there are kernels for it.

    `rooms` says for each weight, by its name, how many values its gradient has room for.
    """
    if sparse.library() is None:
        return graph
    return _summed(_Products(graph, rooms).write())


class _Products:
    """Replaces ops that read a sparse weight, or make its gradient."""

    def __init__(self, graph: Graph, rooms: Mapping[str, int]) -> None:
        self.graph, self.editor = graph, Editor(graph)
        self.shapes = Shapes(graph.values, graph.views)
        self.weights: dict[int, Weight] = {}  # by the value that is the dense one
        names = {item.value: str(item.path[0]) for item in graph.inputs}
        for op in graph.ops:
            if op.target == UNPACK and (found := _weight(graph, op, names, rooms)) is not None:
                self.weights[op.makes[0]] = found
        self.masks = {one.mask: one for one in self.weights.values() if one.mask is not None}
        for item in graph.inputs:
            value = graph.values[item.value]
            if _small(value) and item.value not in self.weights:
                room = math.prod(value.shape)
                self.weights[item.value] = Weight(item.value, None, room, value.shape, value.stride)

    def write(self) -> Graph:
        ways: dict[str, Callable[[int, Op], None]] = {
            CONVOLUTION: self.convolution,
            CONVOLUTION_BACKWARD: self.convolution_backward,
            MM: self.product,
            ADDMM: self.product,
        }
        for index in self.graph.ordinary:
            op = self.graph.ops[index]
            if op.target in ways and not op.kwargs and not op.updates and not op.channels and not op.forgotten:
                ways[op.target](index, op)
        return self.editor.reordered()

    def convolution(self, index: int, op: Op) -> None:
        given, weight, bias, *window, transposed, _, groups = op.args
        found = self.of(weight)
        if found is None or transposed or groups != 1 or not self.suits(found, window) or not self.plain(op.makes):
            return
        assert isinstance(weight, Read)
        args = (given, *self.parts(found), bias, found.shape, *window)
        self.editor.change(index, replace(op, target=sparse.CONVOLUTION, args=args))

    def convolution_backward(self, index: int, op: Op) -> None:
        gradient, given, weight, _, *window, transposed, _, groups, _ = op.args
        found = self.of(weight)
        if found is None or transposed or groups != 1 or not self.suits(found, window) or not self.plain(op.makes):
            return
        of_input, of_weight, of_bias = op.outputs
        if of_weight is not None and found.mask is not None and self.reached(of_weight) != found.mask:
            return
        assert isinstance(given, Read)
        self.editor.take_out(index)
        if of_weight is not None:
            args = (gradient, given, self.parts(found)[1], found.room, found.shape, *window)
            self.gradient(index, op, sparse.CONVOLUTION_WEIGHT, args, of_weight, found)
        if of_bias is not None:
            self.put(index, op, "bias", "aten.sum.dim_IntList", (gradient, (0, 2, 3)), of_bias)
        if of_input is not None:  # last: then it may lie on the incoming gradient
            size = tuple(self.shapes.tensor(given).shape)
            args = (gradient, *self.parts(found), size, found.shape, *window)
            self.put(index, op, "input", sparse.CONVOLUTION_INPUT, args, of_input)

    def product(self, index: int, op: Op) -> None:
        """A matrix product with a weight, with one transposed, or of two matrices to the gradient of a weight."""
        *bias, given, weight = op.args
        found = self.of(weight)
        if not isinstance(given, Read) or not isinstance(weight, Read) or not self.plain(op.makes):
            return
        if found is not None and found.mask is not None and len(found.shape) == 2:
            seen = self.shapes.tensor(weight)
            if (tuple(seen.shape), tuple(seen.stride())) == (found.shape[::-1], found.stride[::-1]):
                if self.is_vector(bias, found.shape[0]):
                    forward = (given, *self.parts(found), bias[0] if bias else None, found.shape)
                    self.editor.change(index, replace(op, target=sparse.LINEAR, args=forward))
            elif (tuple(seen.shape), tuple(seen.stride())) == (found.shape, found.stride) and not bias:
                backward = (given, *self.parts(found), found.shape)
                self.editor.change(index, replace(op, target=sparse.LINEAR_INPUT, args=backward))
        elif found is None and not bias:
            mask = self.reached(op.makes[0])
            known = self.masks.get(-1 if mask is None else mask)
            made = self.graph.values[op.makes[0]]
            if known is not None and (made.shape, made.stride) == (known.shape, known.stride):
                turned = Read(given.value, self.editor.view(View(given.view, TRANSPOSE)))
                self.editor.take_out(index)
                args = (turned, weight, self.parts(known)[1], known.room, known.shape)
                self.gradient(index, op, sparse.LINEAR_WEIGHT, args, op.makes[0], known)

    def of(self, arg: Arg) -> Weight | None:
        return self.weights.get(arg.value) if isinstance(arg, Read) else None

    def parts(self, weight: Weight) -> tuple[Read, Read | None]:
        return Read(weight.values), None if weight.mask is None else Read(weight.mask)

    def is_vector(self, bias: list[Arg], length: int) -> bool:
        """Whether a bias, if there is one, is one number for each row of the weight."""
        return not bias or (isinstance(bias[0], Read) and tuple(self.shapes.tensor(bias[0]).shape) == (length,))

    def suits(self, weight: Weight, window: list[Arg]) -> bool:
        """Whether a convolution is one that the kernels know."""
        sides = [tuple(side) if isinstance(side, tuple) else () for side in window]
        return sparse.fits(weight.shape, *sides)  # type: ignore[arg-type]

    def plain(self, values: tuple[int, ...]) -> bool:
        """Whether results are floats that follow each other, as the kernels make them."""
        return all(_contiguous(one) and one.dtype == "float32" for one in map(self.graph.values.__getitem__, values))

    def reached(self, value: int) -> int | None:
        """The one mask at which all ends that is made of a gradient, element by element; None: there is more to it."""
        graph, found, left = self.graph, set[int](), [value]
        seen = {value}
        while left:
            one = left.pop()
            if one in graph.required or graph.values[one].storage in graph.lasting_storages:
                return None
            for index in graph.readers[one]:
                op = graph.ops[index]
                reads = [read for read in op.arguments() if read.value == one]
                if any(as_it_is(graph, self.shapes, read).view is not None for read in reads):
                    return None
                if op.target == PACK and isinstance(op.args[2], Read):
                    found.add(op.args[2].value)
                elif plain_add(graph, op) or elementwise(graph, self.shapes, index):
                    left += [new for new in op.makes if new not in seen]
                    seen.update(op.makes)
                else:
                    return None
        return found.pop() if len(found) == 1 else None

    def gradient(self, index: int, op: Op, target: str, args: tuple[Arg, ...], dense: int, weight: Weight) -> None:
        """The gradient of the values, and the dense one made of it, which nobody may want in the end."""
        if weight.mask is None:
            self.put(index, op, "weight", target, args, dense)
            return
        like = replace(self.graph.values[dense], name=f"{self.graph.values[dense].name} values", form="sparse")
        made = self.editor.value(replace(like, eager_end=-1))
        self.put(index, op, "weight", target, args, made)
        self.put(index, op, "dense", UNPACK, (Read(made), None, Read(weight.mask), weight.shape, weight.stride), dense)

    def put(self, index: int, op: Op, name: str, target: str, args: tuple[Arg, ...], made: int) -> None:
        call = replace(op, name=f"{op.name}_{name}", target=target, args=args, outputs=(made,), updates=())
        self.editor.put(index, 0, index, call)


def _weight(graph: Graph, op: Op, names: Mapping[int, str], rooms: Mapping[str, int]) -> Weight | None:
    """The sparse parameter that an op makes dense."""
    values, _, mask, *_ = op.args
    if not isinstance(values, Read) or not isinstance(mask, Read) or graph.values[values.value].kind != "parameter":
        return None
    dense = graph.values[op.makes[0]]
    found = Weight(values.value, mask.value, rooms[names[values.value]], dense.shape, dense.stride)
    return found if _contiguous(dense) else None


def _small(value: Value) -> bool:
    """Whether this is a convolution's weight that is too small to be sparse: torch's kernels would allocate more."""
    plain = value.kind == "parameter" and value.form == "plain" and value.dtype == "float32" and _contiguous(value)
    return plain and len(value.shape) == 4 and 0 < math.prod(value.shape) < LEAST


def _contiguous(value: Value) -> bool:
    count = 1
    for size, step in zip(reversed(value.shape), reversed(value.stride), strict=True):
        if size != 1 and step != count:
            return False
        count *= size
    return True


def _summed(graph: Graph) -> Graph:
    """Sums of gradients that are there as values become sums of values, but for those that a state takes up."""
    taken = {index for one in sums(graph) for index in one.adds}
    editor = Editor(graph)
    compact: dict[int, tuple[Read, Op]] = {}  # dense value -> its values, and the op that makes it of them
    for index in graph.ordinary:
        op = graph.ops[index]
        if op.target == UNPACK and isinstance(op.args[0], Read) and graph.values[op.args[0].value].kind == "gradient":
            compact[op.makes[0]] = op.args[0], op
        terms = [arg.value for arg in op.args if isinstance(arg, Read)]
        if index in taken or not plain_add(graph, op) or any(term not in compact for term in terms):
            continue
        (one, unpack), (other, again) = (compact[term] for term in terms)
        if unpack.args[1:] != again.args[1:]:
            continue
        made = editor.value(replace(editor.values[one.value], eager_end=-1))
        editor.take_out(index)
        editor.put(index, 0, index, replace(op, target=ADD, args=(one, other), outputs=(made,)))
        dense = replace(unpack, name=f"{op.name}_dense", args=(Read(made), *unpack.args[1:]), outputs=op.outputs)
        editor.put(index, 1, index, dense)
        compact[op.makes[0]] = Read(made), dense
    return without_unread(editor).reordered()
