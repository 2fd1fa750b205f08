"""Attention in chunks of heads: what torch runs over the weights of all heads becomes one call.

A region begins at a softmax: before it a product of queries and keys, scaled and masked; behind it dropout and a
product with the values; in the backward the same way back. The products read copies that are made of one projection;
these are made a few heads at a time, too. Where somebody else reads values of it, or it is written otherwise, it stays.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

from lowtide.graph import Arg, Constant, Graph, Op, Read, Value
from lowtide.kernels.attention import BACKWARD, DROPPED, DROPPED_BACKWARD, PLAIN
from lowtide.kernels.attention_plain import APART, FLAT, JOINED, bits
from lowtide.rewrite.editor import Editor
from lowtide.rewrite.joining import Joining
from lowtide.rewrite.seeing import PRODUCT, Other, Seeing
from lowtide.rewrites import Setting

SOFTMAX, SAFE_SOFTMAX = "aten._softmax.default", "aten._safe_softmax.default"
SOFTMAX_BACKWARD = "aten._softmax_backward_data.default"
TIMES, DIVIDED = ("aten.mul.Scalar", "aten.mul.Tensor"), ("aten.div.Scalar", "aten.div.Tensor")
ADDED, HIDDEN = "aten.add.Tensor", "aten.masked_fill.Scalar"
EMPTY, DRAW, QUOTIENT = "aten.empty_like.default", "aten.bernoulli_.float", "aten.div_.Scalar"


def attention(graph: Graph, without: Setting = None) -> Graph:
    """The graph whose attention runs in chunks of heads; `without` names softmaxes that stay, with a plus between."""
    left = frozenset(str(without or "").split("+"))
    softmaxes = [op for op in graph.ordinary if graph.ops[op].target in (SOFTMAX, SAFE_SOFTMAX)]
    if graph.device != "cpu" or not softmaxes:
        return graph
    editor, seeing, joining = Editor(graph), Seeing(graph), Joining(graph)
    found = False
    for softmax in softmaxes:
        region = _Region(graph, seeing, softmax)
        try:
            region.find()
        except Other:
            continue
        if not left & {graph.ops[op].name for op in region.ops} and all(map(joining.join, region.ways())):
            found = region.write(editor) or found
    return editor.reordered() if found else graph


@dataclass
class _Operand:
    """What a product reads."""

    read: Read
    scale: float = 1.0
    copied: bool = False


@dataclass
class _Result:
    """Where what a product makes goes."""

    value: int
    layout: int = FLAT


@dataclass
class _Back:
    """The backward of a region."""

    name: int  # its softmax's
    gradient: _Operand
    results: tuple[_Result, ...]  # of query, key and value


@dataclass
class _Region:
    """The ops around one softmax."""

    graph: Graph
    see: Seeing
    softmax: int
    ops: set[int] = field(default_factory=set)
    mask: Read | None = None
    filling: float = 0.0
    scales: tuple[float, float] = (1.0, 1.0)  # scores are multiplied by the first, and divided by the second
    rate: float | None = None  # of what is kept
    draw: int = -1

    def find(self) -> None:
        """Find all ops of the region; raise `Other` where there is none."""
        graph, op = self.graph, self.graph.ops[self.softmax]
        safe = op.target == SAFE_SOFTMAX
        (made,) = op.outputs
        if made is None or op.args[1] not in (-1, len(graph.values[made].shape) - 1) or any(op.args[2:]) or op.kwargs:
            raise Other
        shape = graph.values[made].shape
        if len(shape) not in (3, 4) or graph.values[made].dtype != "float32":
            raise Other
        self.take(self.softmax)
        self.safe, self.weights = safe, made
        self.heads = shape[1] if len(shape) == 4 else shape[0]
        product = self.before(op.args[0])
        self.queries, self.keys = self.see.both(product)
        dropped, noise = self.dropout()
        self.find_products(product, dropped, noise)

    # ---- forward

    def before(self, arg: Arg) -> int:
        """The product that scores come from, and what is done to them on the way."""
        place = self.whole(arg)
        op = self.graph.ops[place]
        if op.target == ADDED and not op.kwargs and isinstance(op.args[1], Read):
            self.mask = self.masking(op.args[1], ("float32",))
        elif op.target == HIDDEN and isinstance(op.args[1], Read) and isinstance(op.args[2], int | float):
            self.mask, self.filling = self.masking(op.args[1], ("bool",)), float(op.args[2])
        if self.mask is not None:
            self.take(place)
            place = self.whole(op.args[0])
            op = self.graph.ops[place]
        if op.target in (*TIMES, *DIVIDED) and type(op.args[1]) in (int, float):
            number = float(op.args[1])  # type: ignore[arg-type]
            self.scales = (number, 1.0) if op.target in TIMES else (1.0, number)
            self.take(place)
            place = self.whole(op.args[0])
        self.take(place, PRODUCT)
        return place

    def masking(self, read: Read, dtypes: tuple[str, ...]) -> Read:
        seen, shape = self.see.tensor(read), self.graph.values[self.weights].shape
        fits = seen.dim() <= len(shape) and all(
            mine in (1, theirs) for mine, theirs in zip(tuple(seen.shape)[::-1], shape[::-1], strict=False)
        )
        if str(seen.dtype).removeprefix("torch.") not in dtypes or not fits or self.see.is_written(read.value):
            raise Other
        return read

    def dropout(self) -> tuple[int, int | None]:
        """What the values are weighted by, and the noise in it, if there is any."""
        readers = [op for op in self.graph.readers[self.weights] if self.graph.ops[op].phase == "forward"]
        times = [op for op in readers if self.graph.ops[op].target == TIMES[1]]
        if not times:
            return self.weights, None
        if len(times) != 1 or not set(readers) <= {times[0], *(op for op in readers if self.see.target(op) == EMPTY)}:
            raise Other
        op = self.graph.ops[times[0]]
        one, other = op.args
        if one != Read(self.weights) or not isinstance(other, Read) or other.view is not None:
            raise Other
        quotient = self.see.made_by(other.value, QUOTIENT)
        draw = self.see.made_by(self.see.old(quotient), DRAW)
        empty = self.see.made_by(self.see.old(draw), EMPTY)
        rate = (*self.graph.ops[draw].args, 0.5)[1]  # torch leaves out what it would take anyway
        if not isinstance(rate, float) or not 0 < rate <= 1 or self.graph.ops[quotient].args[1] != rate:
            raise Other
        if self.graph.ops[draw].kwargs:
            raise Other
        for place in (times[0], quotient, draw, empty):
            self.take(place)
        self.rate, self.draw = rate, draw
        (dropped,) = op.makes
        return dropped, other.value

    def find_products(self, scores: int, dropped: int, noise: int | None) -> None:
        """The products that follow, forward and backward."""
        mixing = [op for op in self.graph.readers[dropped] if self.graph.ops[op].phase == "forward"]
        mixing = [op for op in mixing if self.see.target(op) not in (EMPTY, TIMES[1])]
        if len(mixing) != 1:
            raise Other
        self.take(mixing[0], PRODUCT)
        weighted, values = self.see.both(mixing[0])
        if weighted.value != dropped or not self.see.is_reshaped(weighted):
            raise Other
        back = self.backward(scores, mixing[0], dropped, noise)
        gone = {made for op in self.ops for made in self.graph.ops[op].makes}
        kept = {self.graph.ops[mixing[0]].makes[0], *(self.graph.ops[op].makes[0] for op in back)}
        if any(set(self.graph.readers[value]) - self.ops or value in self.graph.required for value in gone - kept):
            raise Other
        reads = (self.queries, self.keys, values)
        if not gone.isdisjoint(read.value for read in reads):
            raise Other
        alone = [sum(read.value == other.value for other in reads) == 1 for read in reads]
        self.operands = [
            self.operand(reads[place], place) if alone[place] else _Operand(reads[place]) for place in range(3)
        ]
        self.mixed = self.result(self.graph.ops[mixing[0]].makes[0])
        self.back = None
        if back:
            results = []
            for number, product in enumerate(back):
                operand, made = self.operands[number], self.graph.ops[product].makes[0]
                scaled = self.scaled(made, operand.scale) if operand.scale != 1 else made
                if scaled is None:
                    operand.read, operand.scale = self.unscaled[number], 1.0
                results.append(self.result(made if scaled is None else scaled))
            self.back = _Back(self.last_softmax, self.operand(self.seen), tuple(results))
            self.ops |= set(self.absorbed(self.seen, self.back.gradient))
        self.ops |= {op for number, operand in enumerate(self.operands) for op in self.absorbed(reads[number], operand)}

    # ---- backward

    def backward(self, scores: int, mixing: int, dropped: int, noise: int | None) -> tuple[int, ...]:
        """The products of the gradients of query, key and value; nothing where there is no backward."""
        graph = self.graph
        readers = [op for op in graph.readers[self.weights] if graph.ops[op].phase == "backward"]
        if not readers and not [op for op in graph.readers[dropped] if graph.ops[op].phase == "backward"]:
            return ()
        softmaxes = [op for op in readers if self.see.target(op) == SOFTMAX_BACKWARD]
        of_values = [op for op in graph.readers[dropped] if self.see.target(op) == PRODUCT and op != mixing]
        if len(softmaxes) != 1 or len(of_values) != 1:
            raise Other
        (softmax,), (of_value,) = softmaxes, of_values
        op = graph.ops[softmax]
        if op.args[1] != Read(self.weights) or op.args[2] not in (-1, len(graph.values[self.weights].shape) - 1):
            raise Other
        if op.args[3] != Constant("dtype", "float32"):
            raise Other
        self.take(softmax)
        self.last_softmax = softmax
        self.take(of_value, PRODUCT)
        turned, self.seen = self.see.both(of_value)
        place = self.whole(op.args[0])
        if noise is not None:
            times = graph.ops[place]
            if times.target != TIMES[1] or times.args[1] != Read(noise):
                raise Other
            self.take(place)
            place = self.whole(times.args[0])
        self.take(place, PRODUCT)
        again, values = self.see.both(place)
        value = self.see.both(mixing)[1]
        if (
            again != self.seen
            or not self.see.is_turned(values, value)
            or not self.see.is_turned(turned, Read(dropped), flat=True)
        ):
            raise Other
        made = self.after(op.makes[0])
        return (*self.last_products(made), of_value)

    def after(self, value: int) -> int:
        """The gradient of the scores as the product made them."""
        if self.mask is not None and self.graph.values[self.mask.value].dtype == "bool":
            op = self.only(value, HIDDEN)
            if self.graph.ops[op].args[1:] != (self.mask, 0):
                raise Other
            value = self.graph.ops[op].makes[0]
        for number, targets in zip(self.scales, (TIMES, DIVIDED), strict=True):
            if number != 1:
                op = self.only(value, *targets)
                if self.graph.ops[op].args[1] != number:
                    raise Other
                value = self.graph.ops[op].makes[0]
        return value

    def only(self, value: int, *targets: str) -> int:
        """The one op that reads a value, which is of these."""
        readers = self.graph.readers[value]
        if len(readers) != 1 or self.see.target(readers[0]) not in targets:
            raise Other
        seen = self.graph.ops[readers[0]].args[0]
        if not isinstance(seen, Read) or seen.value != value or not self.see.is_reshaped(seen):
            raise Other
        self.take(readers[0])
        return readers[0]

    def last_products(self, value: int) -> tuple[int, int]:
        """The products of the gradients of query and key."""
        readers = self.graph.readers[value]
        if len(readers) != 2:
            raise Other
        of_query = of_key = -1
        for reader in readers:
            self.take(reader, PRODUCT)
            one, other = self.see.both(reader)
            if one.value == value and self.see.is_reshaped(one) and self.see.is_turned(other, self.keys):
                of_query = reader
            elif other.value == value and self.see.is_reshaped(other) and self.see.is_turned(one, self.queries):
                of_key = reader
        if -1 in (of_query, of_key):
            raise Other
        return of_query, of_key

    # ---- what is read, and what is made

    unscaled: dict[int, Read] = field(default_factory=dict)

    def operand(self, read: Read, place: int = -1) -> _Operand:
        """What a product reads: what its copy was made of, where only this region reads that copy, and as this only."""
        graph, clone = self.graph, self.graph.maker[read.value]
        if clone < 0 or not self.see.is_copy(clone) or not self.see.is_reshaped(read):
            return _Operand(read)
        source = graph.ops[clone].args[0]
        assert isinstance(source, Read)
        seen, columns = self.see.tensor(source), self.see.tensor(read)
        fits = seen.dim() == 4 and seen.shape[1] == self.heads and seen.shape[2:] == columns.shape[1:]
        if not (fits or seen.shape == columns.shape) or set(graph.readers[read.value]) - self.ops:
            return _Operand(read)
        if self.see.is_written(source.value) or read.value in graph.required:
            return _Operand(read)
        scale = graph.maker[source.value]
        if place in (0, 1) and scale >= 0 and (op := graph.ops[scale]).target in TIMES:  # of queries and keys
            inner, factor = op.args
            if not isinstance(inner, Read):
                return _Operand(source, copied=True)
            alone = graph.readers[source.value] == (clone,) and source.value not in graph.required
            whole = self.see.is_as_made(source) and not self.see.is_written(inner.value)
            if alone and whole and type(factor) is float and self.see.tensor(inner).shape == seen.shape:
                self.unscaled[place] = source
                return _Operand(inner, factor, copied=True)
        return _Operand(source, copied=True)

    def absorbed(self, read: Read, operand: _Operand) -> list[int]:
        """The ops that made an operand, which the call does itself."""
        if not operand.copied:
            return []
        clone = self.graph.maker[read.value]
        source = self.graph.ops[clone].args[0]
        assert isinstance(source, Read)
        return [clone, self.graph.maker[source.value]] if operand.scale != 1 else [clone]

    def result(self, value: int) -> _Result:
        """Where what a product made goes: into plain order with the heads beside each other, if that is next."""
        graph, readers = self.graph, self.graph.readers[value]
        layout = APART if len(graph.values[value].shape) == 4 else FLAT
        if len(readers) != 1 or not self.see.is_copy(readers[0]) or value in graph.required:
            return _Result(value, layout)
        read = graph.ops[readers[0]].args[0]
        assert isinstance(read, Read)
        seen, shape = self.see.tensor(read), graph.values[value].shape
        rows, columns = shape[-2:]
        heads, count = self.heads, graph.values[value].nbytes // (4 * self.heads * rows * columns)
        wanted = (count, rows, heads, columns), (heads * rows * columns, columns, rows * columns, 1)
        if (tuple(seen.shape), tuple(seen.stride())) != wanted or seen.storage_offset() != 0:
            return _Result(value, layout)
        self.ops.add(readers[0])
        made = graph.ops[readers[0]].outputs[0]
        assert made is not None
        return _Result(made, JOINED)

    def scaled(self, value: int, scale: float) -> int | None:
        """What a product made, multiplied: the value, if that is all that is done to it."""
        readers = self.graph.readers[value]
        if len(readers) != 1 or value in self.graph.required or self.see.target(readers[0]) not in TIMES:
            return None
        op = self.graph.ops[readers[0]]
        read, shape = op.args[0], self.graph.values[op.makes[0]].shape
        if op.args[1] != scale or not isinstance(read, Read) or not self.see.is_reshaped(read):
            return None
        if len(shape) not in (3, 4) or (len(shape) == 4 and shape[1] != self.heads):
            return None
        self.ops.add(readers[0])
        return op.makes[0]

    def take(self, index: int, target: str | None = None) -> None:
        """Let an op be a part of the region."""
        op = self.graph.ops[index]
        if op.forgotten or (target is not None and op.target != target):
            raise Other
        self.ops.add(index)

    def whole(self, arg: Arg) -> int:
        """The op that made what is read whole, which nobody else reads."""
        if not isinstance(arg, Read) or self.graph.maker[arg.value] < 0 or not self.see.is_reshaped(arg):
            raise Other
        if len(self.graph.readers[arg.value]) != 1 or len(self.graph.ops[self.graph.maker[arg.value]].makes) != 1:
            raise Other
        return self.graph.maker[arg.value]

    # ---- the calls

    def ways(self) -> list[set[int]]:
        """The ops of the forward and, where there is one, of the backward: of each, one call is made."""
        back = {op for op in self.ops if self.graph.ops[op].phase == "backward"}
        return [self.ops - back] if self.back is None else [self.ops - back, back]

    def write(self, editor: Editor) -> bool:
        """Put the calls in the place of the region, if they make what it makes."""
        graph, query, key, value = self.graph, *self.operands
        shared: tuple[Any, ...] = (
            *(operand.read for operand in (query, key, value)),
            self.mask,
            self.heads,
            (query.scale, key.scale, *self.scales),
            self.filling,
            (query.copied, key.copied, value.copied),
            self.safe,
        )
        first = graph.ops[self.softmax]
        mixed = self.mixed
        if self.rate is None:
            calls = [replace(first, target=PLAIN, args=(*shared, mixed.layout), kwargs=(), outputs=(mixed.value,))]
        else:
            kept = self.bits(editor)
            args = (*shared, self.rate, mixed.layout)
            channels = graph.ops[self.draw].channels
            outputs = (mixed.value, kept)
            calls = [replace(first, target=DROPPED, args=args, kwargs=(), outputs=outputs, channels=channels)]
        if self.back is not None:
            before = graph.ops[self.back.name]
            layouts = tuple(result.layout for result in self.back.results)
            made = tuple(result.value for result in self.back.results)
            rest = (*shared, *(() if self.rate is None else (self.rate,)), self.back.gradient.copied, layouts)
            seen = self.back.gradient.read
            args = (seen, *(() if self.rate is None else (Read(kept),)), *rest)
            target = BACKWARD if self.rate is None else DROPPED_BACKWARD
            calls.append(replace(before, target=target, args=args, kwargs=(), outputs=made))
        if not all(self.is_as_before(editor, call) for call in calls):
            return False
        places = [self.draw if self.draw >= 0 else self.softmax, *([] if self.back is None else [self.back.name])]
        for index in self.ops:
            editor.take_out(index)
        for place, call in zip(places, calls, strict=True):
            editor.put(place, 0, place, call)
        return True

    def bits(self, editor: Editor) -> int:
        """A value for what is kept of the weights: a bit for each."""
        item = self.graph.values[self.weights]
        count, rows, length = math.prod(item.shape[:-2]), item.shape[-2], bits(item.shape[-1])
        shape, stride = (count, rows, length), (rows * length, length, 1)
        like = replace(item, name=f"kept of {item.name}", dtype="uint8", shape=shape, stride=stride, eager_end=-1)
        return editor.value(replace(like, nbytes=math.prod(shape)))

    def is_as_before(self, editor: Editor, call: Op) -> bool:
        """Whether the results of a call have the sizes of the values that they become."""
        return all(
            value is not None
            and form is not None
            and (form.dtype, form.shape, form.stride, form.nbytes) == _sizes(editor.values[value])
            for value, form in zip(call.outputs, editor.shapes.made(call), strict=True)
        )


def _sizes(item: Value) -> tuple[Any, ...]:
    return item.dtype, item.shape, item.stride, item.nbytes
