"""The ops of a region written once for each part of the examples.

What the parts make for others is written into slices of one whole as soon as it is there, or added to the sum so far;
what they read of others are slices. Sizes among the arguments are those of the part, counts those of the whole.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

from lowtide.aten import LABELLED, SUM
from lowtide.graph import Arg, Constant, Graph, Op, Read, Value, View
from lowtide.kernels.probe import Grows, Link, Operand, at
from lowtide.rewrite.axis import Axis, Coupled
from lowtide.rewrite.editor import Editor
from lowtide.rewrite.region import Region
from lowtide.rewrites import name_part

Span = tuple[int, int]  # from one example up to another


def spans(examples: int, parts: int, together: int = 1) -> list[Span]:
    """The examples in so many parts, of two sizes at most, each of whole groups of so many."""
    groups = examples // together
    ends = [groups * number // parts * together for number in range(parts + 1)]
    return list(pairwise(ends))


def split(axis: Axis, regions: list[tuple[Region, int]]) -> Graph:
    """The graph with each region in so many parts."""
    editor = Editor(axis.graph)
    for found, parts in regions:
        together = axis.together(found.ops)
        _Writer(axis, editor, found).write(spans(axis.examples, min(parts, axis.examples // together), together))
    return editor.reordered()


def _at(shape: tuple[Any, ...], span: Span) -> tuple[int, ...]:
    return tuple(size.at(span[1] - span[0]) if isinstance(size, Grows) else size for size in shape)


class _Writer:
    """Writes one region in parts."""

    def __init__(self, axis: Axis, editor: Editor, region: Region) -> None:
        self.axis, self.graph, self.editor, self.region = axis, axis.graph, editor, region
        self.inside = {*region.ops, *region.fresh}
        self.anchor = region.ops[-1]
        self.parts: dict[int, int] = {}  # value -> what it is in the part that is written
        self.copies: dict[int, int] = {}  # value from outside -> its slice as a tensor of its own, in this part
        self.sums: dict[int, int] = {}  # value -> the sum so far
        self.wholes: dict[int, int] = {}  # value -> the whole so far
        self.totals: dict[int, int] = {}  # labelled loss -> what all labels weigh
        self.over = self.overlays()  # value from outside -> the one that is written over it, slice by slice
        self.number = 0

    def overlays(self) -> dict[int, int]:
        """Results that may take the bytes of what the region reads last: equal in all but the contents."""
        graph, found = self.graph, {}
        last = {value: op for op in self.region.ops for value in graph.reads[op] if value not in self.region.roles}
        free = {value for value, op in last.items() if self.consumed(value)}
        for op in self.region.ops:
            for made in graph.ops[op].outputs:
                if made is None or self.region.roles.get(made) != "axis" or not self.wanted(made):
                    continue
                for value in graph.reads[op]:
                    if value in free and last[value] == op and self.alike(value, made):
                        found[value] = made
                        free.discard(value)
                        break
        return found

    def consumed(self, value: int) -> bool:
        """Whether nobody reads a value of the step's own after the region."""
        first, item = self.region.ops[0], self.graph.values[value]
        readers = [op for op in self.graph.readers[value] if op not in self.inside]
        own = item.storage not in self.graph.lasting_storages and value not in self.graph.required
        return own and self.axis.dim(value) >= 0 and all(op < first for op in readers) and self.alone(item.storage)

    def alone(self, storage: int) -> bool:
        """Whether a storage holds one value only, ever."""
        return sum(item.storage == storage for item in self.graph.values) == 1

    def alike(self, one: int, other: int) -> bool:
        mine, its = (self.graph.values[value] for value in (one, other))
        same = (mine.dtype, mine.shape, mine.stride, mine.nbytes) == (its.dtype, its.shape, its.stride, its.nbytes)
        return same and self.axis.outer(one) == self.axis.outer(other) and self.alone(its.storage)

    def write(self, parts: list[Span]) -> None:
        """Take the ops out, and write them once for each part."""
        for op in self.region.ops:
            self.editor.take_out(op)
        for op in self.region.fresh:
            self.room(op)
        for op in self.region.labelled:
            self.totals[op] = self.total(op)
        for self.number, span in enumerate(parts):
            self.parts, self.copies = {}, {}
            for op in self.region.ops:
                self.part(op, span, last=self.number == len(parts) - 1)

    def part(self, op: int, span: Span, *, last: bool) -> None:
        """One op for one part."""
        item, examples = self.graph.ops[op], span[1] - span[0]
        kept = "none" if op in self.region.labelled else self.region.behaviours[op].kept
        args, kwargs = self.axis.template(op)
        given = tuple(self.argument(op, at(arg, examples, self.axis.examples, kept), span) for arg in args)
        named = tuple(
            (key, self.argument(op, at(arg, examples, self.axis.examples, kept), span)) for key, arg in kwargs
        )
        outputs = tuple(None if value is None else self.made(value) for value in item.outputs)
        if op in self.region.labelled:
            given = (*given[: (place := LABELLED[item.target][2])], SUM, *given[place + 1 :])
        updates = tuple((self.updated(new, old, span), self.parts[old]) for new, old in item.updates)
        call = replace(
            item, name=name_part(item.name, self.number), args=given, kwargs=named, outputs=outputs, updates=updates
        )
        self.put(op, call)
        self.parts |= {
            value: one
            for value, one in zip(item.outputs, outputs, strict=True)
            if value is not None and one is not None
        }
        self.parts |= {new: one for (new, _), (one, _) in zip(item.updates, updates, strict=True)}
        if op in self.region.labelled:
            self.weighed(op)
        self.hand_over(op, span, last=last)

    def made(self, value: int) -> int:
        """A new value for a result in this part; what is the same in all of them is that of the first for others."""
        if self.region.roles.get(value) == "same" and not self.number and value not in self.totals.values():
            return value
        return self.editor.value(self.editor.values[value])

    def updated(self, new: int, old: int, span: Span) -> int:
        """The value that is there once an op has written over another."""
        item, sized = self.editor.values[self.parts[old]], self.axis.sized[new]
        assert sized is not None
        seen = replace(item, shape=_at(sized.shape, span), stride=_at(sized.stride, span))
        self.editor.values.append(replace(seen, name=self.graph.values[new].name))
        return len(self.editor.values) - 1

    def hand_over(self, op: int, span: Span, *, last: bool) -> None:
        """Let others have what a part made."""
        item = self.graph.ops[op]
        results = () if op in self.region.labelled else self.region.behaviours[op].results
        made = (*item.outputs, *(new for new, _ in item.updates))
        for place, value in enumerate(made):
            if value is None or value not in self.parts:
                continue
            role = self.region.roles.get(value)
            if results and (seen := results[place]) is not None and seen.share:
                share = (span[1] - span[0]) / self.axis.examples
                self.parts[value] = self.simple(
                    op, "mul.Scalar", (Read(self.parts[value]), share), self.graph.values[value]
                )
            if not self.wanted(value):
                continue
            if role == "partial":
                self.add(op, value, last=last)
            elif role == "axis":
                self.join(op, value, span, last=last)

    def wanted(self, value: int) -> bool:
        """Whether anybody outside of the region reads it."""
        return value in self.graph.required or any(op not in self.inside for op in self.graph.readers[value])

    def add(self, op: int, value: int, *, last: bool) -> None:
        """Add a term to the sum so far."""
        term = self.parts[value]
        if value not in self.sums:
            self.sums[value] = term
            return
        into = value if last else self.editor.value(self.graph.values[value])
        self.call(op, "add.Tensor", (Read(self.sums[value]), Read(term)), into)
        self.sums[value] = into

    def join(self, op: int, value: int, span: Span, *, last: bool) -> None:
        """Write a slice into the whole."""
        item = self.graph.values[value]
        below = next((one for one, made in self.over.items() if made == value), None)
        if value not in self.wholes and below is not None:
            storage = self.graph.values[below].storage
            self.editor.values[value] = replace(self.editor.values[value], storage=storage)
            self.wholes[value] = below
        elif value not in self.wholes:
            self.wholes[value] = self.content(value)
            dtype = ("dtype", Constant("dtype", item.dtype))
            args = (item.shape, item.stride)
            self.call(op, "empty_strided.default", args, self.wholes[value], kwargs=(dtype,))
        before, after = self.wholes[value], value if last else self.content(value)
        outer = self.axis.outer(value)
        into = Read(before, self.slice(value, span))
        part = Read(self.parts[value], None if outer == 1 else self.blocks(value, span[1] - span[0]))
        name = f"{self.graph.ops[op].name}_join{self.number}_{value}"
        copy = Op(name, "aten.copy_.default", (into, part), (), (None,), ((after, before),))
        self.put(op, self.like(op, copy))
        self.wholes[value] = after

    def content(self, value: int) -> int:
        """A value for what the storage of another holds before."""
        self.editor.values.append(self.editor.values[value])
        return len(self.editor.values) - 1

    def argument(self, op: int, arg: Any, span: Span) -> Arg:
        """An argument in this part."""
        if isinstance(arg, tuple):
            return tuple(self.argument(op, item, span) for item in arg)
        return self.read(op, arg, span) if isinstance(arg, Operand) else arg

    def read(self, op: int, arg: Operand, span: Span) -> Read:
        """What a call sees of a value in this part: its own, a slice of the whole, or what is the same for all."""
        value = arg.place
        if value in self.parts:
            return Read(self.parts[value], self.views(None, arg.chain, span))
        if self.axis.dim(value) < 0:
            return Read(value, self.views(None, arg.chain, span))
        sized = self.axis.sized[value]
        assert sized is not None
        cut, outer = self.slice(value, span), self.axis.outer(value)
        here = self.wholes.get(self.over.get(value, -1), value)  # what is left of it: later parts are as they were
        if outer == 1 and all(isinstance(step, int) for step in sized.stride):
            return Read(here, self.views(cut, arg.chain, span))
        if value not in self.copies:  # its examples are not one after the other
            form = Constant("memory_format", "contiguous_format")
            self.copies[value] = self.simple(
                op, "clone.default", (Read(here, cut),), self.graph.values[value], kwargs=(("memory_format", form),)
            )
        whole = None if outer == 1 else self.editor.view(View(None, "aten.view.default", (_at(sized.shape, span),)))
        return Read(self.copies[value], self.views(whole, arg.chain, span))

    def slice(self, value: int, span: Span) -> int:
        """A view of some examples of a value; where they repeat in blocks, with these as an axis of their own."""
        sized, outer = self.axis.sized[value], self.axis.outer(value)
        if sized is None or sized.dim < 0:
            raise Coupled(f"{self.graph.values[value].name} can't be put together of parts")
        each = sized.shape[sized.dim]
        assert isinstance(each, Grows)
        parent = None if outer == 1 else self.blocks(value, self.axis.examples)
        dim, inner = sized.dim + (outer > 1), each.each // outer
        return self.editor.view(View(parent, "aten.slice.Tensor", (dim, inner * span[0], inner * span[1])))

    def blocks(self, value: int, examples: int) -> int:
        """A view of a value of so many examples with its blocks as an axis of their own."""
        sized, outer = self.axis.sized[value], self.axis.outer(value)
        assert sized is not None
        shape = _at(sized.shape, (0, examples))
        split = (*shape[: sized.dim], outer, shape[sized.dim] // outer, *shape[sized.dim + 1 :])
        return self.editor.view(View(None, "aten.view.default", (split,)))

    def views(self, parent: int | None, chain: tuple[Link, ...], span: Span) -> int | None:
        """The views of a chain for a part."""
        examples = span[1] - span[0]
        for link in chain:
            args = tuple(at(arg, examples, examples, "none") for arg in link.args)
            parent = self.editor.view(View(parent, link.target, args, link.item))
        return parent

    def room(self, op: int) -> None:
        """Let what only makes room for a draw do so without what it took the sizes from."""
        item = self.graph.ops[op]
        made = self.graph.values[item.makes[0]]
        kwargs = (("dtype", Constant("dtype", made.dtype)),)
        self.editor.change(
            op, replace(item, target="aten.empty_strided.default", args=(made.shape, made.stride), kwargs=kwargs)
        )

    def total(self, op: int) -> int:
        """What all labels that count weigh, as the loss would find it."""
        item = self.graph.ops[op]
        labels, weights, _, ignored = LABELLED[item.target]
        target, weight, left_out = item.args[labels], item.args[weights], item.args[ignored]
        loss, into = item.outputs  # who divides by the total outside of the region needs that of all labels
        assert loss is not None
        seen = self.graph.values[loss]
        into = self.editor.value(replace(seen, name="sum")) if into is None else into
        counts = self.simple(op, "ne.Scalar", (target, left_out), seen, early=True)
        dtype = (("dtype", Constant("dtype", seen.dtype)),)
        if weight is None:
            self.call(op, "sum.default", (Read(counts),), into, kwargs=dtype, early=True)
            return into
        known = self.simple(op, "clamp_min.default", (target, 0), seen, early=True)
        each = self.simple(op, "take.default", (weight, Read(known)), seen, early=True)
        weighed = self.simple(op, "mul.Tensor", (Read(each), Read(counts)), seen, early=True)
        self.call(op, "sum.default", (Read(weighed),), into, kwargs=dtype, early=True)
        return into

    def weighed(self, op: int) -> None:
        """Divide the loss of a part by what all labels weigh; that is what the backward divides by, too."""
        loss, total = self.graph.ops[op].outputs
        assert loss is not None
        args = (Read(self.parts[loss]), Read(self.totals[op]))
        self.parts[loss] = self.simple(op, "div.Tensor", args, self.graph.values[loss])
        if total is not None:
            self.parts[total] = self.totals[op]

    def simple(
        self,
        op: int,
        name: str,
        args: tuple[Arg, ...],
        seen: Value,
        *,
        kwargs: tuple[Any, ...] = (),
        early: bool = False,
    ) -> int:
        """A plain call of one result, which is a new value."""
        made = self.editor.value(replace(seen, name=name.split(".")[0]))
        self.call(op, name, args, made, kwargs=kwargs, early=early)
        return made

    def call(
        self, op: int, name: str, args: tuple[Arg, ...], made: int, *, kwargs: tuple[Any, ...] = (), early: bool = False
    ) -> None:
        number = self.editor.count
        call = Op(f"{self.graph.ops[op].name}_{name.split('.')[0]}_{number}", f"aten.{name}", args, kwargs, (made,))
        self.put(op, self.like(op, call), early=early)

    def like(self, op: int, call: Op) -> Op:
        item = self.graph.ops[op]
        return replace(call, phase=item.phase, module=item.module, source=item.source)

    def put(self, op: int, call: Op, *, early: bool = False) -> None:
        self.editor.put(self.region.ops[0] if early else self.anchor, -1 if early else self.number, op, call)
