"""Activations made again in the parts of a backward: what cheap ops make of kept values is never whole there.

Each region of a backward that reads such an activation gets a copy of the ops that make it, as ops of the backward,
whose results it alone reads: in parts, each makes its slice, uses it and drops it. The copies begin with values that
take no more bytes than what they make. Draws are read, and never drawn again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from lowtide.aten import COINS, QUOTIENTS, SIZES_ONLY
from lowtide.graph import Arg, Graph, Op, Read
from lowtide.kernels import is_product
from lowtide.rewrite.axis import PIECE, Axis, Coupled
from lowtide.rewrite.editor import Editor

NARROW = 0.25  # of the bytes of a draw of 0 or 1: what is kept of it
MOST = 1.3  # of the bytes of what is made again: what it may be made of, a draw with it
ALONE = 0.5  # of these: what of it is there for this alone
FAR = 2.5  # of these: where nobody looks further


@dataclass(frozen=True)
class _Chain:
    """The ops that make a value of others that are there."""

    ops: frozenset[int]
    sources: frozenset[int]


def made_again(axis: Axis, regions: list[set[int]]) -> Graph:
    """The graph in which these regions of the backward make activations by ops of their own, where that saves bytes."""
    backward = [ops for ops in regions if all(axis.graph.ops[op].phase == "backward" for op in ops)]
    return _Copier(axis, backward).copied()


class _Copier:
    """Finds what is made again, and writes it."""

    def __init__(self, axis: Axis, regions: list[set[int]]) -> None:
        self.axis, self.graph, self.regions = axis, axis.graph, regions
        graph = self.graph
        inside = set[int]().union(*regions)
        late = [op for op in graph.ordinary if graph.ops[op].phase == "backward"]
        self.read = {value for op in late for value in _contents(graph.ops[op])}
        self.kept = {value for op in late if op not in inside for value in _contents(graph.ops[op])}
        self.gone = {old for op in graph.ops if op.phase != "update" for _, old in op.updates}  # written over
        self.may: dict[int, bool] = {}
        self.editor = Editor(graph)

    def copied(self) -> Graph:
        """The graph with all copies; as it is where there are none."""
        done = False
        for number, ops in enumerate(self.regions):
            here = {value for op in ops for value in self.graph.reads[op]}
            chains = [chain for value in sorted(here) if (chain := self.chain(value, here)) is not None]
            if chains:
                self.write(ops, number, sorted(set[int]().union(*(chain.ops for chain in chains))))
                done = True
        return self.editor.reordered() if done else self.graph

    def chain(self, value: int, here: set[int]) -> _Chain | None:
        """The ops by which a region may make a value that it reads; None: it had better be kept."""
        whole, found = self.need([value]), None
        if not whole or self.axis.dim(value) < 0 or value in self.gone:
            return None
        for chain in self.chains(value):
            need = self.need(chain.sources - here)
            if need > FAR * whole:
                break
            alone = self.need(chain.sources - here - self.read)
            if need <= MOST * whole and alone <= ALONE * whole and chain.sources.isdisjoint(self.gone):
                found = chain
        return found

    def chains(self, value: int) -> Iterator[_Chain]:
        """Longer and longer ones that end with a value, as far as what they begin with need not be there anyway."""
        ops, sources = set[int](), {value}
        while True:
            makers = {self.graph.maker[one] for one in sources - self.kept}
            latest = max((op for op in makers if self.cheap(op)), default=-1)
            if latest < 0:
                return
            ops.add(latest)
            sources = (sources - {*self.graph.makes[latest]}) | {*self.graph.reads[latest]}
            yield _Chain(frozenset(ops), frozenset(sources))

    def cheap(self, op: int) -> bool:
        """Whether an op of the forward may run again, example by example."""
        if op < 0:
            return False
        if op not in self.may:
            item = self.graph.ops[op]
            plain = item.phase == "forward" and not item.channels and not item.forgotten and not self.graph.effects[op]
            self.may[op] = plain and not is_product(item.target) and self.alone(op)
        return self.may[op]

    def alone(self, op: int) -> bool:
        """Whether what an op makes of each example is made of that one."""
        try:
            found = self.axis.behaviour(op, {}).results
        except Coupled:
            return False
        return all(seen is None or (seen.role == "axis" and not seen.share) for seen in found)

    def need(self, values: Iterable[int]) -> float:
        """The bytes of values that are there for this."""
        lasting = self.graph.lasting_storages
        own = [value for value in values if self.graph.values[value].storage not in lasting]
        return sum(self.graph.values[value].nbytes * (NARROW if self.drawn(value) else 1) for value in own)

    def drawn(self, value: int) -> bool:
        """Whether a value is a draw of 0 or 1, or a quotient of one, as of dropout."""
        maker = self.graph.maker[value]
        if maker >= 0 and self.graph.ops[maker].target in QUOTIENTS:
            first = self.graph.ops[maker].args[0]
            maker = self.graph.maker[first.value] if isinstance(first, Read) else -1
        return maker >= 0 and self.graph.ops[maker].target in COINS

    def write(self, ops: set[int], number: int, makers: list[int]) -> None:
        """Copy these ops of the forward to the beginning of a region, and let it read what they make."""
        graph, editor, first = self.graph, self.editor, min(ops)
        copies: dict[int, int] = {}
        for maker in makers:
            item = graph.ops[maker]
            args = tuple(_copied(arg, copies) for arg in item.args)
            kwargs = tuple((key, _copied(arg, copies)) for key, arg in item.kwargs)
            updates = tuple((self.over(new, copies[old]), copies[old]) for new, old in item.updates)
            outputs = tuple(None if value is None else editor.value(graph.values[value]) for value in item.outputs)
            copies |= {value: copy for value, copy in zip(item.outputs, outputs, strict=True) if value is not None}  # type: ignore[misc]
            copies |= {new: copy for (new, _), (copy, _) in zip(item.updates, updates, strict=True)}
            name = f"{item.name}{PIECE}again{number}"
            copy = replace(item, name=name, args=args, kwargs=kwargs, outputs=outputs, updates=updates)
            editor.put(first, -1, first, replace(copy, phase="backward"))
        for op in ops:
            item = graph.ops[op]
            args = tuple(_copied(arg, copies) for arg in item.args)
            editor.change(op, replace(item, args=args, kwargs=tuple((k, _copied(a, copies)) for k, a in item.kwargs)))

    def over(self, new: int, copy: int) -> int:
        """The value that is there once an op has written over a copy."""
        editor = self.editor
        editor.values.append(replace(self.graph.values[new], storage=editor.values[copy].storage))
        return len(editor.values) - 1


def _contents(op: Op) -> set[int]:
    """The values of which a call reads more than sizes."""
    args = (op.args[0], *op.args[2:]) if op.target in SIZES_ONLY else op.args
    return {*replace(op, args=args).reads}


def _copied(arg: Arg, copies: dict[int, int]) -> Arg:
    if isinstance(arg, Read):
        return Read(copies.get(arg.value, arg.value), arg.view)
    return tuple(_copied(one, copies) for one in arg) if isinstance(arg, tuple) else arg
