"""Packed activations: what the backward needs of the forward is kept at 16, 8 or 4 bits a number; lossy.

An op of the forward packs a value, one of the backward unpacks it, and the readers there see the result. Every op of
the forward itself sees the numbers as they were, so the loss is eager's; the gradients are not. The setting says which
values are packed:

- "all": each value that the backward reads. What asks only for zeros, the backward of a ReLU, gets them as they were.
- "products": results of matrix products, convolutions and the like, and sums of large values; what the backward reads
  beside them is made again, from the unpacked ones.
- "sums": sums of large values alone, such as the stream that residual blocks add to; all between is made again.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any, Literal, get_args

from lowtide.aten import COINS, EXPENSIVE, INDICES, QUOTIENTS, RELU
from lowtide.errors import UsageError
from lowtide.graph import Arg, Graph, Op, Read, Value
from lowtide.kernels import functional
from lowtide.kernels.blocks import GATE, PACK, SIGNS, UNPACK, dense, packed_bytes
from lowtide.rewrite.editor import Editor

Which = Literal["all", "products", "sums"]
WHICH: tuple[Which, ...] = get_args(Which)  # from the one that keeps most, and changes least, to the least
SMALLEST = 2**12  # bytes: below it the heads of blocks and the calls take more than is saved
LARGE = 2  # an operand is large that has at least one part in so many of the result's bytes
EXACT_ANYWAY = COINS | QUOTIENTS | frozenset(INDICES)  # makers of what `narrow` keeps in few bits, with all its bits


def read_setting(told: object) -> Which:
    """Which values a setting names."""
    found: Any = WHICH[0] if told is None else told
    if found not in WHICH:
        raise UsageError(f"there are no activations {told!r} to pack.", hint=f"name one of {', '.join(WHICH)}.")
    return found  # type: ignore[no-any-return]


def settings(graph: Graph) -> tuple[Which, ...]:
    """What may be tried, the mildest first."""
    return WHICH


def packed(graph: Graph, told: object, *, bits: int) -> Graph:
    """The graph in which the backward reads packed values, and what is made of them."""
    which = read_setting(told)
    return _Writer(graph, which, bits).write()


packed16, packed8, packed4 = (partial(packed, bits=bits) for bits in (16, 8, 4))


class _Writer:
    """Writes the graph with activations packed."""

    def __init__(self, graph: Graph, which: Which, bits: int) -> None:
        self.graph, self.which, self.bits = graph, which, bits
        self.editor = Editor(graph)
        self.known: dict[int, int] = {}  # value -> what the backward reads in its place; itself: it stays
        self.contents: dict[int, list[int]] = {}  # of storages
        for value, item in enumerate(graph.values):
            self.contents.setdefault(item.storage, []).append(value)
        self.anchor = 0  # the op of the backward before which new ones go

    def write(self) -> Graph:
        graph = self.graph
        for index in graph.ordinary:
            op = graph.ops[index]
            if op.phase != "backward":
                continue
            self.anchor = index
            there = {value: self.instead(value) for value in graph.reads[index] if self.wanted(value)}
            if any(old != new for old, new in there.items()):
                args, kwargs = (
                    _renamed(op.args, there),
                    tuple((key, _renamed_one(arg, there)) for key, arg in op.kwargs),
                )
                updates = tuple((new, there.get(old, old)) for new, old in op.updates)
                for old in {old for _, old in op.updates if there.get(old, old) != old}:
                    self.move_contents(old, there[old])
                self.editor.change(index, replace(op, args=args, kwargs=kwargs, updates=updates))
        if all(old == new for old, new in self.known.items()):
            return graph
        for old, new in self.known.items():
            if old != new:  # nobody in the backward needs it any more: eager would let go of it after its last reader
                value = self.editor.values[old]
                if value.eager_end >= 0:
                    self.editor.values[old] = replace(value, eager_end=graph.maker[old])
        return self.editor.reordered()

    def move_contents(self, old: int, new: int) -> None:
        """What the backward writes over a value is written over what it reads in its place."""
        for value in self.later(old):
            self.editor.values[value] = replace(self.editor.values[value], storage=self.editor.values[new].storage)

    def later(self, value: int) -> list[int]:
        """The other contents of a value's storage."""
        return [other for other in self.contents[self.graph.values[value].storage] if other != value]

    def movable(self, value: int) -> bool:
        """Whether nobody writes over a value in the backward, or the backward alone writes to its storage."""
        graph = self.graph
        makers = [graph.ops[graph.maker[other]].phase for other in self.later(value) if graph.maker[other] >= 0]
        return "backward" not in makers or {*makers} == {"backward"}

    def wanted(self, value: int) -> bool:
        """Whether a value that the backward reads is one that it may read in another form."""
        maker = self.graph.maker[value]
        return maker >= 0 and self.graph.ops[maker].phase == "forward" and self.large(value)

    def large(self, value: int) -> bool:
        """Whether it pays to pack a value, and that can be done."""
        item, graph = self.graph.values[value], self.graph
        return (
            item.kind != "scalar"
            and item.dtype == "float32"
            and item.nbytes >= SMALLEST
            and item.form == "plain"
            and item.storage not in graph.lasting_storages
            and value not in graph.required
            and dense(item.shape, item.stride)
            and item.nbytes == 4 * math.prod(item.shape)
            and graph.ops[graph.maker[value]].target not in EXACT_ANYWAY
            and self.movable(value)
        )

    def instead(self, value: int) -> int:
        """What the backward reads in place of a value: itself unpacked, or made again of what is, or itself."""
        if value not in self.known:
            self.known[value] = value  # until another is found
            self.known[value] = self.unpacked(value) if self.is_source(value) else self.again(value)
        return self.known[value]

    def is_source(self, value: int) -> bool:
        """Whether a value is packed itself."""
        index = self.graph.maker[value]
        op = self.graph.ops[index]
        if self.which == "all" or functional(op.target) is None or not self.repeats(index):
            return True
        if not EXPENSIVE.isdisjoint(op.target.split(".")[1].split("_")):
            return self.which == "products"
        floor = self.graph.values[value].nbytes // LARGE
        operands = {read.value for read in op.arguments() if self.graph.values[read.value].nbytes >= floor}
        return len(operands - self.given()) > 1

    def given(self) -> set[int]:
        """What the caller has before and after the step."""
        return {item.value for item in self.graph.inputs}

    def repeats(self, index: int) -> bool:
        """Whether an op may run again in the backward, on other arguments."""
        op = self.graph.ops[index]
        first = op.args[0] if op.args else None
        over = {old for _, old in op.updates} - {old for _, old in self.graph.effects[index]}
        whole = isinstance(first, Read) and first.view is None and over == {first.value}
        return self.graph.repeatable(index) and not op.channels and not op.forgotten and (not over or whole)

    def unpacked(self, value: int) -> int:
        """A value that is packed behind its maker and unpacked in the backward: what comes back."""
        item, index = self.graph.values[value], self.graph.maker[value]
        op, count = self.graph.ops[index], math.prod(item.shape)
        small = self.editor.value(
            replace(item, name=f"{self.bits}-bit {item.name}", nbytes=packed_bytes(count, self.bits), form="packed")
        )
        wide = self.editor.value(replace(item, name=f"unpacked {item.name}"))
        name = f"{op.name}_{value}"
        pack = Op(f"pack_{name}", PACK, (Read(value), self.bits), outputs=(small,))
        self.editor.put(index, 0, index, replace(pack, module=op.module, source=op.source))
        args: tuple[Arg, ...] = (Read(small), self.bits, item.shape, item.stride)
        unpack = Op(f"unpack_{name}", UNPACK, args, outputs=(wide,), phase="backward")
        self.editor.put(self.anchor, -2, self.anchor, replace(unpack, module=op.module, source=op.source))
        return wide

    def again(self, value: int) -> int:
        """A value made again of what its maker reads, unpacked; itself where that is as it was."""
        index = self.graph.maker[value]
        op = self.graph.ops[index]
        there = {read: self.instead(read) for read in self.graph.reads[index] if self.wanted(read)}
        if all(old == new for old, new in there.items()):
            return value
        plain = functional(op.target)
        assert plain is not None
        if plain == RELU and (gated := self.gated(value, there)) is not None:
            return gated
        gone = {old for _, old in self.graph.effects[index]}
        args = tuple(None if isinstance(arg, Read) and arg.value in gone else arg for arg in op.args)
        made = [self._copy(output) for output in (op.makes if plain != op.target else op.outputs)]
        kwargs = tuple((key, _renamed_one(arg, there)) for key, arg in op.kwargs)
        clone = replace(
            op,
            name=f"{op.name}_again",
            target=plain,
            args=_renamed(args, there),
            kwargs=kwargs,
            outputs=tuple(made),
            updates=(),
            detachable=False,
            phase="backward",
        )
        sizes = {new: self.editor.values[new] for new in made if new is not None}
        self.editor.put(self.anchor, -2, self.anchor, clone)
        for new, size in sizes.items():
            self.editor.values[new] = size
        place = (op.makes if plain != op.target else op.outputs).index(value)
        found = made[place]
        assert found is not None
        return found

    def gated(self, value: int, there: dict[int, int]) -> int | None:
        """The result of a ReLU made again with the signs that it had; None where its argument is laid out otherwise."""
        item, index = self.graph.values[value], self.graph.maker[value]
        op = self.graph.ops[index]
        argument = op.args[0]
        if not isinstance(argument, Read) or argument.view is not None:
            return None
        before = self.graph.values[argument.value]
        if (before.shape, before.stride) != (item.shape, item.stride):
            return None
        nbytes = -(-math.prod(item.shape) // 8)
        signs = self.editor.value(replace(item, name=f"signs of {item.name}", nbytes=nbytes, form="packed"))
        wide = self.editor.value(replace(item, name=f"{item.name} again"))
        pack = Op(f"signs_{op.name}", SIGNS, (Read(value),), outputs=(signs,))
        self.editor.put(index, 0, index, replace(pack, module=op.module, source=op.source))
        gate = Op(
            f"{op.name}_again", GATE, (Read(there[argument.value]), Read(signs)), outputs=(wide,), phase="backward"
        )
        self.editor.put(self.anchor, -2, self.anchor, replace(gate, module=op.module, source=op.source))
        return wide

    def _copy(self, value: int | None) -> int | None:
        if value is None:
            return None
        item: Value = self.graph.values[value]
        return self.editor.value(replace(item, name=f"{item.name} again"))


def _renamed(args: tuple[Arg, ...], names: dict[int, int]) -> tuple[Arg, ...]:
    return tuple(_renamed_one(arg, names) for arg in args)


def _renamed_one(arg: Arg, names: dict[int, int]) -> Arg:
    if isinstance(arg, Read):
        return Read(names.get(arg.value, arg.value), arg.view)
    return _renamed(arg, names) if isinstance(arg, tuple) else arg
