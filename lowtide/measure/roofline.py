"""Costs by arithmetic instead of by the clock: for machines that are not here and sizes that do not fit."""

from __future__ import annotations

from typing import Any

import torch

from lowtide import device, kernels
from lowtide.aten import ELEMENTWISE, LSTM_BACKWARD, RECURRENT
from lowtide.costs import Costs, lanes
from lowtide.graph import Graph, Read
from lowtide.kernels import sparse
from lowtide.kernels.shapes import Shapes
from lowtide.private import flop_registry

FLOPS = 1e11  # floating point operations a second
BANDWIDTH = 1e10  # bytes a second
LAUNCH = 1e-6  # seconds that any call takes


def roofline(graph: Graph, *, flops: float = FLOPS, bandwidth: float = BANDWIDTH) -> Costs:
    """Estimate each op as the larger of its arithmetic and its traffic; bytes as declared, no temporaries."""
    work = Demand(graph)
    seconds, in_place = [], []
    for index, op in enumerate(graph.ops):
        if op.target.startswith("operator.") or op.target == kernels.HANDOVER:
            seconds.append(LAUNCH)
        else:
            moved = work.traffic(index)
            seconds.append(LAUNCH + max(work.arithmetic(index) / flops, moved / bandwidth))
        in_place.append(_pairs(graph, index))
    return Costs(
        graph=graph.fingerprint,
        seconds=tuple(seconds),
        arena_temporaries=(0,) * len(graph.ops),
        nbytes=tuple(value.nbytes for value in graph.values),
        in_place=tuple(in_place),
        origin="roofline",
        machine=f"{flops:.3g} operations and {bandwidth:.3g} bytes a second",
        lanes=lanes((("host", bandwidth), ("disk", bandwidth / 10))),
        alignment=device.of(graph.device).alignment,
    )


def traffic(graph: Graph) -> list[int]:
    """For each op the bytes that it reads and writes."""
    work = Demand(graph)
    known = [not (op.target.startswith("operator.") or op.target == kernels.HANDOVER) for op in graph.ops]
    return [work.traffic(index) if counts else 0 for index, counts in enumerate(known)]


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


class Demand:
    """What each op has to do, by the shapes of its arguments."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.shapes = Shapes(graph.values, graph.views)

    def traffic(self, index: int) -> int:
        """Bytes that the op reads and writes."""
        op = self.graph.ops[index]
        read = sum(_nbytes(self.shapes.tensor(item)) for item in op.arguments() if self.shapes.is_tensor(item))
        written = sum(self.graph.values[value].nbytes for value in op.outputs if value is not None)
        updated = {old for _, old in op.updates}
        return (
            read + written + sum(_nbytes(self.shapes.tensor(item)) for item in op.arguments() if item.value in updated)
        )

    def arithmetic(self, index: int) -> float:
        """Floating point operations of matrix products, convolutions and attention; 0 for all other ops."""
        return self.counted(index) or 0.0

    def counted(self, index: int) -> float | None:
        """The same; None where no rule counts them."""
        op = self.graph.ops[index]
        if op.target in RECURRENT:
            return self.recurrent(index)
        if sparse.is_product(op.target):
            made = self.shapes.tensor(Read(op.makes[0]))
            return sparse.operations(op.target, [self.shapes.argument(arg) for arg in op.args], made)
        own = kernels.TRIED.get(op.target)
        if own is not None and own.operations is not None:
            return own.operations([self.shapes.argument(arg) for arg in op.args])
        if op.target.startswith("operator."):
            return None
        packet = kernels.overload(op.target).overloadpacket
        if packet not in flop_registry:
            return None
        args = [self.shapes.argument(arg) for arg in op.args]
        kwargs = {key: self.shapes.argument(arg) for key, arg in op.kwargs}
        results = [None if value is None else self.shapes.tensor(Read(value)) for value in op.outputs]
        result = results[0] if kernels.returns_one(op.target) else tuple(results)
        try:
            return float(flop_registry[packet](*args, **kwargs, out_val=result))
        except (AssertionError, RuntimeError, TypeError, ValueError):  # torch counts other arguments than these
            return None

    def recurrent(self, index: int) -> float:
        """Two operations for each weight, time step and sequence; the backward has twice as many."""
        op = self.graph.ops[index]
        tensors = [self.shapes.tensor(item) for item in op.arguments() if self.shapes.is_tensor(item)]
        weights = sum(tensor.numel() for tensor in tensors[1:3])
        steps = tensors[0].shape[0] * tensors[0].shape[1]
        return 2.0 * weights * steps * (2 if op.target == LSTM_BACKWARD else 1)


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
