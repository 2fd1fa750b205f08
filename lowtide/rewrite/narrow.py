"""Narrow keeps: what the backward needs of a value, kept in a narrower dtype, with the same bits in the end.

`narrow` adds optional ops to a graph: a *pack* makes a narrow value of a wide one, others make of the narrow value
what the wide one is needed for. A program that runs none of them is the program that it was. A mask takes a byte an
element, as torch's bool does: eight elements to a byte would take several calls each way.
"""

from __future__ import annotations

import math
from dataclasses import replace

from lowtide.aten import CAST, COINS, INDICES, QUOTIENTS, REINTERPRETING, RELU, RELU_BACKWARD, RELU_ITSELF
from lowtide.graph import Alternative, Constant, Graph, Op, Phase, Read, Value
from lowtide.rewrite.editor import Editor

WIDE = {"int64": 8, "float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}  # dtype -> bytes of an element
NARROW = {"bool": 1, "uint8": 1, "int16": 2, "int32": 4}
HOLDS = {"uint8": 2**8, "int16": 2**15, "int32": 2**31}  # dtype -> how many numbers from 0 on it has


def narrow(graph: Graph) -> Graph:
    """The graph with a row of alternatives, and its ops, for every value that the backward reads and a rule covers."""
    editor = Editor(graph)
    for value, item in enumerate(graph.values):
        readers = [op for op in graph.readers[value] if graph.ops[op].phase == "backward"]
        outlives = value in graph.required or item.storage in graph.lasting_storages
        if outlives or not readers or graph.ops[graph.maker[value]].phase != "forward" or not _dense(item):
            continue
        if dtype := _mask(graph, value) or _index(graph, value):
            store, packed = _pack(editor, value, dtype)
            row = Alternative(value, packed, store=store, restore=(_unpack(editor, packed, value),))
        elif (drawn := _quotient(graph, value)) is not None:
            store, packed = _pack(editor, value, "bool")
            restore = (_unpack(editor, packed, drawn), graph.maker[value])
            row = Alternative(value, packed, store=store, restore=restore)
        elif all(_only_asks_for_zeros(graph, op, value) for op in readers):
            store, packed = _pack(editor, value, "bool")
            instead = tuple((op, _swap(editor, op, packed)) for op in readers)
            row = Alternative(value, packed, store=store, instead=instead)
        else:
            continue
        editor.row(row)
    return editor.grown()


# The rules: each says when a narrow value has all the bits that matter of a wide one.


def _mask(graph: Graph, value: int) -> str | None:
    """A draw is 0 or 1, and so is what comes back from bool."""
    op = graph.ops[graph.maker[value]]
    return "bool" if op.target in COINS and _whole(op) else None


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
        if graph.views[view].target == REINTERPRETING:
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


def _pack(editor: Editor, value: int, dtype: str) -> tuple[int, int]:
    """Let a value be cast to a narrow dtype: the op, and the narrow value."""
    wide, maker = editor.values[value], editor.graph.ops[editor.graph.maker[value]]
    nbytes = wide.nbytes // WIDE[wide.dtype] * NARROW[dtype]
    packed = editor.value(replace(wide, name=f"{dtype} {wide.name}", nbytes=nbytes, dtype=dtype, eager_end=-1))
    return _cast(editor, f"pack_{maker.name}", value, packed, maker, "forward"), packed


def _unpack(editor: Editor, packed: int, value: int) -> int:
    """Let the narrow value be cast to a wide one: the op."""
    maker = editor.graph.ops[editor.graph.maker[value]]
    return _cast(editor, f"unpack_{maker.name}", packed, value, maker, "backward")


def _swap(editor: Editor, op: int, packed: int) -> int:
    """Let the same call read the narrow value as its second argument: the op."""
    item = editor.graph.ops[op]
    seen = item.args[1]
    assert isinstance(seen, Read)
    args = (item.args[0], Read(packed, seen.view), *item.args[2:])
    return editor.offer(replace(item, name=f"{item.name}_of_mask", args=args))


def _cast(editor: Editor, name: str, read: int, made: int, beside: Op, phase: Phase) -> int:
    return editor.offer(
        Op(
            name=name,
            target=CAST,
            args=(Read(read),),
            kwargs=(("dtype", Constant("dtype", editor.values[made].dtype)),),
            outputs=(made,),
            phase=phase,
            module=beside.module,
            source=beside.source,
        )
    )
