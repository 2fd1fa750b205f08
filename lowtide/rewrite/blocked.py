"""Values between convolutions stay in the layout of the library that computes them: blocks of 16 channels.

Torch converts what each convolution reads and makes, a fifth to a third of its time. Here the ops in between work on
blocked values, and conversions are ops of their own at the borders, which a plan may place, and run again, as it likes.
The convolutions are the same ones, and so are the bits; `measure` tries that for each call on the machine it is for.
What has no rule, or other sizes than whole blocks, is read in plain order.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from lowtide.aten import ADD, RELU, RELU_BACKWARD, RELU_ITSELF
from lowtide.graph import Arg, Form, Graph, Op, Read, Value
from lowtide.kernels import blocked as ops
from lowtide.kernels.blocked_norm import NORM, NORM_BACKWARD
from lowtide.kernels.opaque import BLOCK, Sizes, held, strides, works
from lowtide.kernels.shapes import Shapes
from lowtide.rewrite.editor import Editor
from lowtide.rewrites import Setting

ADD_ITSELF = "aten.add_.Tensor"
ELEMENTWISE = (RELU, RELU_ITSELF, RELU_BACKWARD, ADD, ADD_ITSELF)  # they do the same to every element, wherever it is


def blocked(graph: Graph, without: Setting = None) -> Graph:
    """The graph with blocked values between convolutions; as it is where the layout is not the library's here.

    `without` names ops that stay torch's own, with a plus between them.
    """
    if graph.device != "cpu" or not any(op.target == "aten.convolution.default" for op in graph.ops) or not works():
        return graph
    return _Blocking(graph, frozenset(str(without or "").split("+"))).run()


class _Blocking:
    """A graph, of whose ops some get blocked values, one after the other."""

    def __init__(self, graph: Graph, without: frozenset[str]) -> None:
        self.without = without
        self.graph, self.editor = graph, Editor(graph)
        self.shapes = Shapes(graph.values, graph.views)
        self.sizes: dict[int, Sizes] = {}  # of blocked values, as if they were plain
        self.plain: dict[int, int] = {}  # a blocked value in plain order
        self.copies: dict[Read, int] = {}  # what is read of a value, in blocks
        self.stuck = {graph.values[value].storage for value in graph.required} | graph.lasting_storages
        for op in graph.ops:  # what is written to by others stays as they see it
            usual = op.target in (RELU_ITSELF, ADD_ITSELF) and not op.forgotten and op.name not in without
            if not (usual and self._alike(op)):
                self.stuck |= {graph.values[old].storage for _, old in op.updates}

    def run(self) -> Graph:
        for index in self.graph.ordinary:
            op = self.graph.ops[index]
            rule = RULES.get(op.target)
            if op.forgotten or op.name in self.without or rule is None or not rule(self, index, op):
                self._leave(index, op)
        return self.editor.reordered() if self.sizes else self.graph

    # ---- the rules: each changes an op, or says that it can't

    def convolution(self, index: int, op: Op) -> bool:
        x, weight, bias, *sizes, groups = op.args
        (made,) = op.outputs
        if groups != 1 or not isinstance(x, Read) or made is None or not self._reads_images(x, weight):
            return False
        both = (self._whole_blocks(x), self._fits(made))
        if not (both[1] or (both[0] and self._is_blocked(x))) or not self._contiguous(made):
            return False
        args = (self._in_blocks(x, index) if both[0] else self._in_order(x, index), weight, bias, *sizes)
        self._change(index, op, ops.CONVOLUTION, (*args, self._images(x), both), (made,) if both[1] else ())
        return True

    def convolution_backward(self, index: int, op: Op) -> bool:
        gradient, x, weight, bias, *sizes, groups, mask = op.args
        if groups != 1 or not isinstance(gradient, Read) or not isinstance(x, Read):
            return False
        both, made = (self._whole_blocks(x), self._whole_blocks(gradient)), op.outputs[0]
        if not any(both) or not self._reads_images(x, weight) or not self._reads_images(gradient, weight):
            return False
        if made is not None and not (self._fits(made) if both[0] else self._contiguous(made)):
            return False
        if not self._contiguous_read(x) or not (self._is_blocked(x) or self._is_blocked(gradient)):
            return False
        seen = self._in_blocks(gradient, index) if both[1] else self._in_order(gradient, index)
        read = self._in_blocks(x, index) if both[0] else self._in_order(x, index)
        args = (seen, read, weight, bias, *sizes, mask, self._images(x), both)
        self._change(index, op, ops.CONVOLUTION_BACKWARD, args, (made,) if both[0] else ())
        return True

    def norm(self, index: int, op: Op) -> bool:
        x, weight, bias, mean, var, training, momentum, eps = op.args
        if training is not True or not self._is_blocked(x) or not self._fits(op.outputs[0]):
            return False
        args = ((self._in_blocks(x, index),), weight, bias, mean, var, momentum, eps, None, False, self._images(x))
        self._change(index, op, NORM, args, op.outputs[:1])
        return True

    def norm_backward(self, index: int, op: Op) -> bool:
        gradient, x, weight, _, _, mean, scale, training, eps, mask = op.args
        if training is not True or mask != (True, True, True) or not self._is_blocked(x):
            return False
        if not self._whole_blocks(gradient) or not self._fits(op.outputs[0]):
            return False
        seen, read = self._in_blocks(gradient, index), self._in_blocks(x, index)
        args = (seen, None, (read,), weight, None, mean, scale, None, False, False, eps, self._images(x))
        self._change(index, replace(op, outputs=(*op.outputs, None)), NORM_BACKWARD, args, op.outputs[:1])
        return True

    def elementwise(self, index: int, op: Op) -> bool:
        reads = [arg for arg in op.args if isinstance(arg, Read)]
        made = op.makes[0] if len(op.makes) == 1 else None
        if made is None or not self._alike(op) or not self._fits(made) or not any(map(self._is_blocked, reads)):
            return False
        if op.updates and not self._is_blocked(op.args[0]):
            return False
        args = tuple(self._in_blocks(arg, index) if isinstance(arg, Read) else arg for arg in op.args)
        self._change(index, op, op.target, args, (made,))
        return True

    def pool(self, index: int, op: Op) -> bool:
        x, kernel, *rest = tuple[Any, ...](op.args)
        usual: tuple[Any, ...] = ((), (0, 0), (1, 1), False)
        stride, padding, dilation, ceil = (*rest, *usual[len(rest) :])
        if not self._is_blocked(x) or not all(map(self._fits, op.outputs)):
            return False
        args = (self._in_blocks(x, index), kernel, stride or kernel, padding, dilation, ceil, self._images(x))
        self._change(index, op, ops.POOL, args, op.outputs)
        return True

    def pool_backward(self, index: int, op: Op) -> bool:
        gradient, _, *sizes, where = op.args
        if not self._is_blocked(where) or not self._whole_blocks(gradient) or not self._fits(op.outputs[0]):
            return False
        size = self.graph.values[op.makes[0]].shape[2:]
        args = (self._in_blocks(gradient, index), where, size, *sizes, self._images(gradient))
        self._change(index, op, ops.POOL_BACKWARD, args, op.outputs)
        return True

    def mean_pool(self, index: int, op: Op) -> bool:
        x, kernel, *rest = tuple[Any, ...](op.args)
        usual: tuple[Any, ...] = ((), (0, 0), False, True, None)
        stride, padding, ceil, counts, divisor = (*rest, *usual[len(rest) :])
        if not self._is_blocked(x) or not self._fits(op.outputs[0]):
            return False
        args = (self._in_blocks(x, index), kernel, stride or kernel, padding, ceil, counts, divisor, self._images(x))
        self._change(index, op, ops.MEAN_POOL, args, op.outputs)
        return True

    def mean_pool_backward(self, index: int, op: Op) -> bool:
        gradient, x, kernel, stride, *sizes = op.args
        if not self._is_blocked(x) or not self._whole_blocks(gradient) or not self._fits(op.outputs[0]):
            return False
        size = self.graph.values[op.makes[0]].shape[2:]
        args = (self._in_blocks(gradient, index), size, kernel, stride or kernel, *sizes, self._images(gradient))
        self._change(index, op, ops.MEAN_POOL_BACKWARD, args, op.outputs)
        return True

    def cat(self, index: int, op: Op) -> bool:
        parts, *rest = op.args
        if not isinstance(parts, tuple) or rest not in ([1], [-3]) or not self._fits(op.outputs[0]):
            return False
        if not all(map(self._whole_blocks, parts)) or not any(map(self._is_blocked, parts)):
            return False
        args = (tuple(self._in_blocks(part, index) for part in parts), self._images(parts[0]))
        self._change(index, op, ops.CAT, args, op.outputs)
        return True

    # ---- what rules ask

    def _is_blocked(self, arg: Arg) -> bool:
        return isinstance(arg, Read) and arg.value in self.sizes

    def _whole_blocks(self, arg: Arg) -> bool:
        """Whether what is read are images of floats whose channels are whole blocks."""
        if not isinstance(arg, Read) or not self.shapes.is_tensor(arg):
            return False
        shape = self.shapes.tensor(arg).shape
        floats = self.graph.values[arg.value].dtype == "float32"
        return floats and len(shape) == 4 and shape[1] % BLOCK == 0 and 0 not in shape

    def _fits(self, value: int | None) -> bool:
        """Whether a value that is made may be blocked."""
        if value is None:
            return False
        item = self.graph.values[value]
        known = item.dtype in ("float32", "int64") and len(item.shape) == 4 and 0 not in item.shape
        return known and item.shape[1] % BLOCK == 0 and self._contiguous(value) and item.storage not in self.stuck

    def _contiguous(self, value: int) -> bool:
        item = self.graph.values[value]
        return _in_plain_order(item) and item.nbytes == math.prod(item.shape) * (8 if item.dtype == "int64" else 4)

    def _contiguous_read(self, read: Read) -> bool:
        return self.shapes.tensor(read).is_contiguous()

    def _reads_images(self, x: Read, weight: Arg) -> bool:
        """Whether these are images and a weight of a convolution over them, of floats in plain order."""
        if not isinstance(weight, Read) or not all(self.graph.values[r.value].dtype == "float32" for r in (x, weight)):
            return False
        seen = self.shapes.tensor(x)
        return seen.dim() == 4 and 0 not in seen.shape and self.shapes.tensor(weight).is_contiguous()

    def _alike(self, op: Op) -> bool:
        """Whether all tensors of a call have the same sizes, so that it matters to no element where it is."""
        reads = [arg for arg in op.args if isinstance(arg, Read)]
        if op.kwargs and not all(type(arg) in (int, float) for _, arg in op.kwargs):
            return False
        if not all(map(self._whole_blocks, reads)) or (op.updates and reads[0].view is not None):
            return False
        if any(isinstance(arg, tuple) for arg in op.args):
            return False
        shapes = {tuple(self.shapes.tensor(read).shape) for read in reads}
        return shapes == {self.graph.values[made].shape for made in op.makes}

    def _images(self, arg: Arg) -> int:
        assert isinstance(arg, Read)
        return int(self.shapes.tensor(arg).shape[0])

    # ---- what rules do

    def _change(self, index: int, op: Op, target: str, args: tuple[Any, ...], made: tuple[int | None, ...]) -> None:
        """Let an op be another one, whose results `made` are blocked."""
        self.editor.change(index, replace(op, target=target, args=args))
        for value in made:
            if value is not None:
                item = self.graph.values[value]
                images, channels, height, width = item.shape
                self.sizes[value] = (images, channels, height, width)
                shape = held(self.sizes[value])
                self.editor.values[value] = replace(item, shape=shape, stride=strides(shape), form="blocked")

    def _leave(self, index: int, op: Op) -> None:
        """Let an op read all in plain order."""
        args = tuple(self._in_order(arg, index) for arg in op.args)
        kwargs = tuple((key, self._in_order(arg, index)) for key, arg in op.kwargs)
        self.editor.change(index, replace(op, args=args, kwargs=kwargs))

    def _in_order(self, arg: Arg, index: int) -> Arg:
        """An argument with all that is blocked in it in plain order."""
        if isinstance(arg, tuple):
            return tuple(self._in_order(item, index) for item in arg)
        if not isinstance(arg, Read) or arg.value not in self.sizes:
            return arg
        if arg.value not in self.plain:
            args = (Read(arg.value), self.sizes[arg.value][0])
            self.plain[arg.value] = self._put(index, "plain", ops.FROM_BLOCKED, args, arg.value)
        return Read(self.plain[arg.value], arg.view)

    def _in_blocks(self, arg: Arg, index: int) -> Read:
        """What is read of a value, in blocks."""
        assert isinstance(arg, Read)
        if arg.view is None and arg.value in self.sizes:
            return arg
        if arg not in self.copies:
            if (span := self._channels(arg)) is not None:
                args: tuple[Arg, ...] = (Read(arg.value), *span, self.sizes[arg.value][0])
                self.copies[arg] = self._put(index, "cut", ops.CUT, args, arg.value)
            else:
                args = (self._in_order(arg, index),)
                self.copies[arg] = self._put(index, "blocked", ops.TO_BLOCKED, args, arg.value)
        return Read(self.copies[arg])

    def _channels(self, read: Read) -> tuple[int, int] | None:
        """From which channel to before which a view of a blocked value sees it, if it sees whole blocks."""
        if read.view is None or read.value not in self.sizes:
            return None
        view, channels = self.graph.views[read.view], self.sizes[read.value][1]
        match (view.parent, view.target, *view.args):
            case (None, "aten.slice.Tensor", 1, int(start), int(stop)) if view.item is None:
                stop = min(stop, channels)
                return (start, stop) if 0 <= start < stop and start % BLOCK == stop % BLOCK == 0 else None
        return None

    def _put(self, index: int, how: str, target: str, args: tuple[Arg, ...], of: int) -> int:
        """Add an op before this one that makes a value of another: that value."""
        item, beside = self.graph.values[of], self.graph.ops[index]
        kind = item.kind if item.kind in ("activation", "activation gradient") else "activation"
        form: Form = "plain" if target == ops.FROM_BLOCKED else "blocked"
        made = self.editor.value(replace(item, name=f"{how} {item.name}", kind=kind, eager_end=-1, form=form))
        name = f"{how}_{item.name.replace(' ', '_')}_{made}"
        where: dict[str, Any] = {"phase": beside.phase, "module": beside.module, "source": beside.source}
        self.editor.put(index, 0, index, Op(name=name, target=target, args=args, outputs=(made,), **where))
        return made


def _in_plain_order(item: Value) -> bool:
    return item.stride == tuple(math.prod(item.shape[place + 1 :]) for place in range(len(item.shape)))


RULES: dict[str, Callable[[_Blocking, int, Op], bool]] = {
    "aten.convolution.default": _Blocking.convolution,
    "aten.convolution_backward.default": _Blocking.convolution_backward,
    "aten.native_batch_norm.default": _Blocking.norm,
    "aten.native_batch_norm_backward.default": _Blocking.norm_backward,
    "aten.max_pool2d_with_indices.default": _Blocking.pool,
    "aten.max_pool2d_with_indices_backward.default": _Blocking.pool_backward,
    "aten.avg_pool2d.default": _Blocking.mean_pool,
    "aten.avg_pool2d_backward.default": _Blocking.mean_pool_backward,
    "aten.cat.default": _Blocking.cat,
    **dict.fromkeys(ELEMENTWISE, _Blocking.elementwise),
}
