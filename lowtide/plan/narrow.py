"""Narrow keeps: what the backward needs of a value, kept in a narrower dtype, with the same bits in the end.

`with_narrow` adds optional ops to a graph: a *pack* makes a narrow value of a wide one, others make of the narrow value
what the wide one is needed for. A program that runs none of them is the program that it was. A mask takes a byte an
element, as torch's bool does: eight elements to a byte would take several calls each way.
"""

from __future__ import annotations

import math
from dataclasses import replace

from lowtide.graph import Alternative, Constant, Graph, Op, Phase, Read, Value, View

WIDE = {"int64": 8, "float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}  # dtype -> bytes of an element
NARROW = {"bool": 1, "uint8": 1, "int16": 2, "int32": 4}
HOLDS = {"uint8": 2**8, "int16": 2**15, "int32": 2**31}  # dtype -> how many numbers from 0 on it has

CAST = "aten._to_copy.default"  # keeps sizes and strides; cast to bool, what is not zero is true, NaN included
DRAWS = frozenset({"aten.bernoulli_.float", "aten.bernoulli_.Tensor", "aten.bernoulli.default", "aten.bernoulli.p"})
QUOTIENTS = frozenset({"aten.div_.Scalar", "aten.div.Scalar"})
RELU, RELU_ITSELF, RELU_BACKWARD = "aten.relu.default", "aten.relu_.default", "aten.threshold_backward.default"
# Calls whose second result counts the elements of a plane of their argument, and the dimensions of that plane.
INDICES = {
    "aten.max_pool2d_with_indices.default": 2,
    "aten.max_pool3d_with_indices.default": 3,
    "aten.adaptive_max_pool2d.default": 2,
    "aten.adaptive_max_pool3d.default": 3,
}
# Calls whose kernels for the processor read the second argument for its sizes only.
SIZES_ONLY = frozenset(
    {
        "aten.max_pool2d_with_indices_backward.default",
        "aten.max_pool3d_with_indices_backward.default",
        "aten.adaptive_max_pool2d_backward.default",
        "aten.avg_pool2d_backward.default",
        "aten.avg_pool3d_backward.default",
        "aten._adaptive_avg_pool2d_backward.default",
        "aten._adaptive_avg_pool3d_backward.default",
    }
)


def with_narrow(graph: Graph) -> Graph:
    """The graph with a row of alternatives, and its ops, for every value that the backward reads and a rule covers."""
    graph = sizes_only(graph)
    longer = _Longer(graph)
    rows = list(graph.alternatives)
    for value, item in enumerate(graph.values):
        readers = [op for op in graph.readers[value] if graph.ops[op].phase == "backward"]
        stays = value in graph.required or item.storage in graph.lasting_storages
        if stays or not readers or graph.ops[graph.maker[value]].phase != "forward" or not _dense(item):
            continue
        if dtype := _mask(graph, value) or _index(graph, value):
            store, packed = longer.pack(value, dtype)
            row = Alternative(value, packed, store=store, restore=(longer.unpack(packed, value),))
        elif (drawn := _quotient(graph, value)) is not None:
            store, packed = longer.pack(value, "bool")
            restore = (longer.unpack(packed, drawn), graph.maker[value])
            row = Alternative(value, packed, store=store, restore=restore)
        elif all(_only_asks_for_zeros(graph, op, value) for op in readers):
            store, packed = longer.pack(value, "bool")
            instead = tuple((op, longer.swap(op, packed)) for op in readers)
            row = Alternative(value, packed, store=store, instead=instead)
        else:
            continue
        rows.append(row)
    return replace(graph, ops=tuple(longer.ops), values=tuple(longer.values), alternatives=tuple(rows))


def sizes_only(graph: Graph) -> Graph:
    """The graph without reads that only ask for sizes: the incoming gradient, seen with these sizes, answers as well.

    The calls make a gradient of the argument's sizes and layout, and add to it where the incoming gradient and the
    indices say; they read no element of the argument. What they see in its place has the layout of a contiguous one.
    """
    if graph.device != "cpu":  # kernels of other devices copy the argument first
        return graph
    views, ops = list(graph.views), list(graph.ops)
    for index, op in enumerate(graph.ops):
        if op.target in SIZES_ONLY and isinstance(gradient := op.args[0], Read):
            made = graph.values[graph.makes[index][0]]
            if made.stride == tuple(math.prod(made.shape[place:]) for place in range(1, 1 + len(made.shape))):
                views.append(View(gradient.view, "aten.as_strided.default", (made.shape, (0,) * len(made.shape), 0)))
                ops[index] = replace(op, args=(gradient, Read(gradient.value, len(views) - 1), *op.args[2:]))
    return replace(graph, ops=tuple(ops), views=tuple(views))


# The rules: each says when a narrow value has all the bits that matter of a wide one.


def _mask(graph: Graph, value: int) -> str | None:
    """A draw is 0 or 1, and so is what comes back from bool."""
    op = graph.ops[graph.maker[value]]
    return "bool" if op.target in DRAWS and _whole(op) else None


def _quotient(graph: Graph, value: int) -> int | None:
    """The draw of which this value is a quotient, as in dropout: draw / (1 - p).

    For 0 < 1 - p <= 1 the quotient of 1 is not zero, so the quotient cast to bool is the draw cast to bool. The draw is
    made again of that, and the quotient by the division that made it first.
    """
    op = graph.ops[graph.maker[value]]
    if op.target not in QUOTIENTS or not _whole(op) or not isinstance(op.args[1], float) or not 0 < op.args[1] <= 1:
        return None
    (drawn,) = graph.reads[graph.maker[value]]
    return drawn if graph.maker[drawn] >= 0 and _mask(graph, drawn) and _dense(graph.values[drawn]) else None


def _index(graph: Graph, value: int) -> str | None:
    """The smallest dtype that has every number from 0 to the elements of the plane."""
    op = graph.ops[graph.maker[value]]
    if op.target not in INDICES or op.outputs[1] != value or not _whole(op):
        return None
    (pooled,) = graph.reads[graph.maker[value]]
    plane = math.prod(graph.values[pooled].shape[-INDICES[op.target] :])
    return next((dtype for dtype, count in HOLDS.items() if plane <= count), None)


def _only_asks_for_zeros(graph: Graph, reader: int, value: int) -> bool:
    """Whether this is the backward of a ReLU, which asks only where the ReLU's result is zero.

    It gives 0 where `result <= 0` and the gradient elsewhere. A ReLU's result is NaN or at least zero, so cast to bool
    it is false just where `result <= 0`. The same call takes the mask too: it casts it to the gradient's dtype, which
    gives 0 and 1 (inside the call: temporaries, which are measured), and compares these with 0.
    """
    op, maker = graph.ops[reader], graph.ops[graph.maker[value]]
    if op.target != RELU_BACKWARD or op.args[2] != 0 or [read.value for read in op.arguments()].count(value) > 1:
        return False
    seen = op.args[1]
    if not isinstance(seen, Read) or seen.value != value or _reinterprets(graph, seen.view):
        return False
    written = maker.args[0] if maker.target == RELU_ITSELF else None
    return maker.target == RELU or (isinstance(written, Read) and written.view in (None, seen.view))


def _whole(op: Op) -> bool:
    """Whether the first argument is read as it was made."""
    return isinstance(op.args[0], Read) and op.args[0].view is None


def _reinterprets(graph: Graph, view: int | None) -> bool:
    """Whether a view takes the bytes for numbers of another dtype."""
    while view is not None:
        if graph.views[view].target == "aten.view.dtype":
            return True
        view = graph.views[view].parent
    return False


def _dense(value: Value) -> bool:
    """Whether the value has a wide dtype and fills its storage, in some order of the dimensions, which a cast keeps."""
    count = 1
    for stride, size in sorted(zip(value.stride, value.shape, strict=True)):
        if size != 1 and stride != count:
            return False
        count *= size
    return value.nbytes == count * WIDE.get(value.dtype, 0) > 0


class _Longer:
    """A graph that grows by optional ops."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.ops, self.values = list(graph.ops), list(graph.values)
        self.storage = max((value.storage for value in graph.values), default=0)  # the last one that is taken

    def pack(self, value: int, dtype: str) -> tuple[int, int]:
        """Let a value be cast to a narrow dtype: the op, and the narrow value."""
        wide, maker = self.values[value], self.graph.ops[self.graph.maker[value]]
        nbytes = wide.nbytes // WIDE[wide.dtype] * NARROW[dtype]
        self.storage += 1
        self.values.append(
            replace(wide, name=f"{dtype} {wide.name}", nbytes=nbytes, storage=self.storage, dtype=dtype, eager_end=-1)
        )
        packed = len(self.values) - 1
        return self._cast(f"pack_{maker.name}", value, packed, maker, "forward"), packed

    def unpack(self, packed: int, value: int) -> int:
        """Let the narrow value be cast to a wide one: the op."""
        maker = self.graph.ops[self.graph.maker[value]]
        return self._cast(f"unpack_{maker.name}", packed, value, maker, "backward")

    def swap(self, op: int, packed: int) -> int:
        """Let the same call read the narrow value as its second argument: the op."""
        item = self.graph.ops[op]
        seen = item.args[1]
        assert isinstance(seen, Read)
        args = (item.args[0], Read(packed, seen.view), *item.args[2:])
        self.ops.append(replace(item, name=f"{item.name}_of_mask", args=args, optional=True))
        return len(self.ops) - 1

    def _cast(self, name: str, read: int, made: int, beside: Op, phase: Phase) -> int:
        dtype = Constant("dtype", self.values[made].dtype)
        self.ops.append(
            Op(
                name=name,
                target=CAST,
                args=(Read(read),),
                kwargs=(("dtype", dtype),),
                outputs=(made,),
                optional=True,
                phase=phase,
                module=beside.module,
                source=beside.source,
            )
        )
        return len(self.ops) - 1
