"""The limits of this machine, and what of them each op of a step needs.

The rates are the costs of a few calls, the ops of a graph of their own: timed with the same care and kept in the same
book as those of a step, for the number of threads in use, with arguments that no cache holds any more.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from lowtide import device, kernels
from lowtide.aten import OVERWRITING, PATCHING, PICKING, SIZES_ONLY, UNWRITTEN
from lowtide.costs import Costs
from lowtide.graph import Graph, Input, Kind, Op, Read, Value
from lowtide.limits import USUAL, Limits, Work
from lowtide.measure.roofline import Demand
from lowtide.measure.surroundings import last_cache

SIDE = 2048  # rows and columns of the product: enough that its arithmetic takes all of its time
CACHES = 4  # times the bytes of the largest one, to be past it
PART = 8  # of the free memory: moved bytes are no more than one in so many
PRODUCT = "aten.mm.default"
MOVES = {  # calls that do next to nothing but move bytes -> how often those of a tensor
    "aten.sum.default": 1,
    "aten.clone.default": 2,
    "aten.neg_.default": 2,
    "aten.zero_.default": 1,
}


def probes(name: str, dtypes: Iterable[str]) -> Graph:
    """A graph of the calls whose costs on a device are its limits: a product in each dtype, and what moves bytes."""
    found = _Probes()
    for dtype in dict.fromkeys((USUAL, *dtypes)):
        found.add(PRODUCT, dtype, SIDE, SIDE)
    nbytes = min(CACHES * last_cache(), device.of(name).free_bytes() // PART)
    count = 2 ** (nbytes.bit_length() - 1) // 4  # the same tomorrow, when other bytes are free
    for target in MOVES:
        found.add(target, USUAL, count)
    inputs = tuple(Input(value, (value,)) for value in found.given)
    return Graph(tuple(found.ops), tuple(found.values), inputs, (), device=name)


def limits_of(probed: Graph, costs: Costs) -> Limits:
    """The limits that the costs of such a graph show."""
    operations, bandwidth = dict[str, float](), 0.0
    for op, reads, seconds in zip(probed.ops, probed.reads, costs.seconds, strict=True):
        value = probed.values[reads[0]]
        if op.target == PRODUCT:
            operations[value.dtype] = 2 * SIDE**3 / seconds
        else:
            bandwidth = max(bandwidth, MOVES[op.target] * value.nbytes / seconds)
    return Limits(operations, bandwidth, costs.machine)


class _Probes:
    """Calls on tensors of their own."""

    def __init__(self) -> None:
        self.ops: list[Op] = []
        self.values: list[Value] = []
        self.given: list[int] = []

    def add(self, target: str, dtype: str, *shape: int) -> None:
        """One call more: on two tensors where it is a product, else on one, which it may write over."""
        given = tuple(self._value(dtype, shape, "batch") for _ in range(2 if target == PRODUCT else 1))
        self.given += given
        args = tuple(map(Read, given))
        if target.endswith("_.default"):
            new = self._value(dtype, shape, "activation", self.values[given[0]].storage)
            self.ops.append(Op(target, target, args, outputs=(None,), updates=((new, given[0]),)))
        else:
            made = self._value(dtype, () if target == "aten.sum.default" else shape, "activation")
            self.ops.append(Op(target, target, args, outputs=(made,)))

    def _value(self, dtype: str, shape: tuple[int, ...], kind: Kind, storage: int | None = None) -> int:
        number = len(self.values)
        strides = tuple(math.prod(shape[place + 1 :]) for place in range(len(shape)))
        nbytes = math.prod(shape) * getattr(torch, dtype).itemsize
        place = number if storage is None else storage
        self.values.append(Value(f"v{number}", nbytes, kind, place, dtype, shape, strides))
        return number


def work(graph: Graph) -> tuple[Work, ...]:
    """What each op of a step has to do."""
    demand = Demand(graph)
    return tuple(
        Work(demand.counted(index), _dtype(graph, index), _least_bytes(demand, op))
        for index, op in enumerate(graph.ops)
    )


def _dtype(graph: Graph, index: int) -> str:
    """The dtype in which an op computes: of the first tensor that holds fractions."""
    values = (graph.values[value] for value in (*graph.reads[index], *graph.makes[index]) if value is not None)
    return next((value.dtype for value in values if value.dtype.startswith(("float", "bfloat", "complex"))), USUAL)


def _least_bytes(demand: Demand, op: Op) -> int:
    """The bytes that an op can't do without: each that it must read or write, once."""
    if op.target.startswith("operator.") or op.target in kernels.UNMEASURED | UNWRITTEN:
        return 0
    unread, patched = _unread(op), {old for _, old in op.updates if op.target in PATCHING}
    seen: dict[int, int] = {}  # value -> bytes of it that the op is given
    for item in dict.fromkeys(op.arguments()):
        if demand.shapes.is_tensor(item) and item.value not in patched:
            tensor = demand.shapes.tensor(item)
            shown = zip(tensor.shape, tensor.stride(), strict=True)
            nbytes = math.prod(size for size, step in shown if step or not size) * tensor.element_size()
            seen[item.value] = min(seen.get(item.value, 0) + nbytes, demand.graph.values[item.value].nbytes)
    read = sum(nbytes for value, nbytes in seen.items() if value not in unread)
    made = sum(demand.graph.values[value].nbytes for value in op.outputs if value is not None)
    return read + made + sum(seen.get(old, 0) for _, old in op.updates)


def _unread(op: Op) -> set[int]:
    """The values that an op is given and may leave unread."""
    if op.target in PICKING:
        return {read.value for read in op.arguments()}
    if op.target in SIZES_ONLY:
        return {read.value for read in op.args[1:2] if isinstance(read, Read)}
    return {old for _, old in op.updates} if op.target in OVERWRITING else set()
