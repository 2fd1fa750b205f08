"""Costs by arithmetic instead of by the clock: for machines that are not here and sizes that do not fit."""

from __future__ import annotations

from typing import Any

import torch

from lowtide import kernels
from lowtide.costs import Costs
from lowtide.graph import Arg, Constant, Graph, Read
from lowtide.private import flop_registry

FLOPS = 1e11  # floating point operations a second
BANDWIDTH = 1e10  # bytes a second
LAUNCH = 1e-6  # seconds that any call takes

# Calls that write each element of the result after reading just the same element of their arguments.
ELEMENTWISE = frozenset(
    """
    aten.relu.default aten.gelu.default aten.silu.default aten.tanh.default aten.sigmoid.default aten.exp.default
    aten.sqrt.default aten.neg.default aten.hardtanh.default aten.leaky_relu.default aten.add.Tensor aten.add.Scalar
    aten.sub.Tensor aten.sub.Scalar aten.mul.Tensor aten.mul.Scalar aten.div.Tensor aten.div.Scalar
    aten.pow.Tensor_Scalar aten.addcmul.default aten.addcdiv.default aten.masked_fill.Scalar aten.where.self
    aten.threshold_backward.default aten.gelu_backward.default aten.silu_backward.default aten.tanh_backward.default
    aten.sigmoid_backward.default
    """.split()  # noqa: SIM905 - a list of one name a line says no more
)


def roofline(graph: Graph, *, flops: float = FLOPS, bandwidth: float = BANDWIDTH) -> Costs:
    """Estimate each op as the larger of its arithmetic and its traffic; bytes as declared, no temporaries."""
    shapes = _Shapes(graph)
    seconds, in_place = [], []
    for index, op in enumerate(graph.ops):
        if op.target.startswith("operator.") or op.target == kernels.TURN:
            seconds.append(LAUNCH)
        else:
            moved = shapes.traffic(index)
            seconds.append(LAUNCH + max(shapes.arithmetic(index) / flops, moved / bandwidth))
        in_place.append(_pairs(graph, index))
    return Costs(
        graph=graph.fingerprint,
        seconds=tuple(seconds),
        extra=(0,) * len(graph.ops),
        nbytes=tuple(value.nbytes for value in graph.values),
        in_place=tuple(in_place),
        origin="roofline",
        machine=f"{flops:.3g} operations and {bandwidth:.3g} bytes a second",
        bandwidth=(("host", bandwidth), ("disk", bandwidth / 10)),
    )


def _pairs(graph: Graph, index: int) -> tuple[tuple[int, int], ...]:
    op = graph.ops[index]
    if op.target not in ELEMENTWISE or op.outputs[0] is None:
        return ()
    made = graph.values[op.outputs[0]]
    seen = [read.value for read in op.arguments() if read.view is not None]  # otherwise than from its start, in order
    fitting = [read for read in dict.fromkeys(op.arguments()) if read.view is None and read.value not in seen]
    sizes = (made.dtype, made.shape, made.stride, made.nbytes)
    return tuple((op.outputs[0], read.value) for read in fitting if _sizes(graph, read.value) == sizes)


def _sizes(graph: Graph, value: int) -> tuple[Any, ...]:
    item = graph.values[value]
    return (item.dtype, item.shape, item.stride, item.nbytes)


class _Shapes:
    """The arguments of each op as tensors without contents."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.known: dict[tuple[Any, ...], torch.Tensor] = {}

    def traffic(self, index: int) -> int:
        """Bytes that the op reads and writes."""
        op = self.graph.ops[index]
        read = sum(_nbytes(self.tensor(item)) for item in op.arguments() if self.is_tensor(item))
        written = sum(self.graph.values[value].nbytes for value in op.outputs if value is not None)
        updated = {old for _, old in op.updates}
        return read + written + sum(_nbytes(self.tensor(item)) for item in op.arguments() if item.value in updated)

    def arithmetic(self, index: int) -> float:
        """Floating point operations of matrix products, convolutions and attention; 0 for all other ops."""
        op = self.graph.ops[index]
        if op.target.startswith("aten.mkldnn_rnn_layer"):
            return self.recurrent(index)
        packet = kernels.overload(op.target).overloadpacket
        if packet not in flop_registry:
            return 0.0
        args = [self.argument(arg) for arg in op.args]
        kwargs = {key: self.argument(arg) for key, arg in op.kwargs}
        made = [None if value is None else self.tensor(Read(value)) for value in op.outputs]
        result = made[0] if kernels.returns_one(op.target) else tuple(made)
        try:
            return float(flop_registry[packet](*args, **kwargs, out_val=result))
        except (AssertionError, RuntimeError, TypeError, ValueError):  # torch counts other arguments than these
            return 0.0

    def recurrent(self, index: int) -> float:
        """Two operations for each weight, time step and sequence; the backward has twice as many."""
        op = self.graph.ops[index]
        tensors = [self.tensor(item) for item in op.arguments() if self.is_tensor(item)]
        weights = sum(tensor.numel() for tensor in tensors[1:3])
        steps = tensors[0].shape[0] * tensors[0].shape[1]
        return 2.0 * weights * steps * (2 if "backward" in op.target else 1)

    def is_tensor(self, read: Read) -> bool:
        return self.graph.values[read.value].kind != "scalar"

    def tensor(self, read: Read) -> torch.Tensor:
        value = self.graph.values[read.value]
        key = (value.dtype, value.shape, value.stride, read.view)
        if key not in self.known:
            if read.view is None:
                dtype = getattr(torch, value.dtype)
                made = torch.empty_strided(value.shape, value.stride, dtype=dtype, device="meta")
            else:
                view = self.graph.views[read.view]
                parent = self.tensor(Read(read.value, view.parent))
                made = kernels.kernel(view.target)(parent, *(self.argument(arg) for arg in view.args))
                made = made if view.item is None else made[view.item]
            self.known[key] = made
        return self.known[key]

    def argument(self, arg: Arg) -> Any:
        match arg:
            case Read():
                return self.tensor(arg) if self.is_tensor(arg) else 0.5
            case Constant(family, name):
                return kernels.constant(family, name)
            case tuple():
                return [self.argument(item) for item in arg]
            case _:
                return arg


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
