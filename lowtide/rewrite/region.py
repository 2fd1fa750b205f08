"""Which ops of a step run in parts, and what their values are there: slices, terms of a sum, or the same for all parts.

Ops that must run before any part does are left out of the region: draws, which are those of the whole batch, and what
depends on the batch alone where it is summed up (how many labels count, the sum of a mask).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from lowtide.aten import LABELLED, MEAN, UNWRITTEN
from lowtide.graph import Graph, Op, Read
from lowtide.kernels.probe import Behaviour, Role
from lowtide.rewrite.axis import Axis, Coupled

OUTER = frozenset({"batch", "constant", "scalar"})  # inputs that depend on the batch alone


@dataclass
class Region:
    """Ops that run in parts, in order."""

    ops: list[int] = field(default_factory=list)
    behaviours: dict[int, Behaviour] = field(default_factory=dict)  # of each op but the labelled ones
    labelled: set[int] = field(default_factory=set)  # losses that divide by what all labels weigh
    roles: dict[int, Role] = field(default_factory=dict)  # of each value that they make
    fresh: set[int] = field(default_factory=set)  # ops outside that only make room for draws


class Refusal(Coupled):
    """Why a step can't run in parts, with the op at fault."""

    def __init__(self, graph: Graph, op: int, why: str) -> None:
        item = graph.ops[op]
        where = " ".join(filter(None, (item.module, item.source)))
        super().__init__(f"{item.name} ({where}) couples the examples: {why}")
        self.op = op


def region(axis: Axis, wanted: Iterable[int]) -> Region:
    """The region of these ops and of those between them; raises a Refusal where examples are coupled."""
    inside, before = set(wanted), _early(axis)
    inside -= before
    while True:
        found = _Walk(axis, inside, before)
        again = found.walk()
        if again is None:
            return found.region
        inside -= again
        before |= again


class _Walk:
    """One attempt to run these ops in parts."""

    def __init__(self, axis: Axis, inside: set[int], before: set[int]) -> None:
        self.axis, self.graph, self.inside, self.before = axis, axis.graph, inside, before
        self.region = Region()
        self.after: dict[int, int] = {}  # value that is there after all parts only -> the op that made it so
        self.batch_only = batch_only(axis.graph)

    def walk(self) -> set[int] | None:
        """Go through the step; returns ops that must run before the region, with which to begin again."""
        last = max(self.inside, default=-1)
        for op in self.graph.ordinary:
            try:
                early = self.take(op, last)
            except Refusal:
                raise
            except Coupled as error:
                if op in self.batch_only:
                    return _with_ancestors(self.graph, {op})
                raise Refusal(self.graph, op, str(error)) from None
            if early:
                return early
        return None

    def take(self, op: int, last: int) -> set[int] | None:
        """Take an op into the region, or let it wait for the region's sums."""
        item, roles = self.graph.ops[op], self.region.roles
        late = next((value for value in item.reads if value in self.after), None)
        made_here = [value for value in item.reads if value in roles]
        if op not in self.inside:
            if op in self.before or item.random:
                return self.early(op, made_here)
            if late is None and made_here and op < last and item.phase != "update" and self.joins(op, made_here):
                return None
            if late is not None or made_here:
                self.after |= dict.fromkeys(item.makes, op)
            return None
        if late is not None:
            maker = self.graph.ops[self.after[late]]
            raise Coupled(f"it needs what {maker.name} makes of all of them ({maker.source})")
        outside = [old for _, old in item.updates if old not in roles]
        if outside:
            if made_here or self.lasting(outside):
                self.axis.behaviour(op, roles)
                raise Coupled("it writes over what others read as a whole")
            return {op}
        if item.target in LABELLED and item.args[LABELLED[item.target][2]] == MEAN:
            return self.labelled(op)
        self.put(op, self.axis.behaviour(op, roles))
        return None

    def lasting(self, values: list[int]) -> bool:
        return any(self.graph.values[value].storage in self.graph.lasting_storages for value in values)

    def early(self, op: int, made_here: list[int]) -> set[int] | None:
        """An op that runs before the region: what it reads is made there, too; a draw needs room and nothing else."""
        if self.graph.ops[op].target in UNWRITTEN:
            self.region.fresh |= {op} if made_here else set()
            return None
        for value in made_here:
            maker = self.graph.maker[value]
            if maker in self.batch_only:
                return _with_ancestors(self.graph, {maker})
            if self.graph.ops[maker].target not in UNWRITTEN:
                raise Coupled("what it draws depends on the examples")
            return {maker}
        return None

    def joins(self, op: int, made_here: list[int]) -> bool:
        """Whether an op on terms of sums makes such terms itself; then it is a part of the region."""
        item = self.graph.ops[op]
        if any(self.region.roles[value] == "axis" for value in made_here) or item.updates:
            return False
        try:
            self.put(op, self.axis.behaviour(op, self.region.roles))
        except Coupled:
            return False
        return True

    def labelled(self, op: int) -> set[int] | None:
        """A loss over the labels that count: the labels are there before, all of them."""
        item = self.graph.ops[op]
        labels, weights, _, _ = LABELLED[item.target]
        needed = [arg.value for arg in (item.args[labels], item.args[weights]) if isinstance(arg, Read)]
        makers = {self.graph.maker[value] for value in needed if value in self.region.roles}
        if makers:
            if not makers <= self.batch_only:
                raise Coupled("its labels depend on the model")
            return _with_ancestors(self.graph, makers)
        loss, total = item.outputs
        assert loss is not None
        self.region.roles[loss] = "partial"
        if total is not None:
            self.region.roles[total] = "same"
        self.region.ops.append(op)
        self.region.labelled.add(op)
        return None

    def put(self, op: int, found: Behaviour) -> None:
        item = self.graph.ops[op]
        made = (*item.outputs, *(new for new, _ in item.updates))
        for value, seen in zip(made, found.results, strict=True):
            if value is not None and seen is not None:
                self.region.roles[value] = seen.role
        self.axis.note(op, found)
        self.region.ops.append(op)
        self.region.behaviours[op] = found


def _early(axis: Axis) -> set[int]:
    """Ops on the batch alone that sum it up, and all that they need: they run before, on all examples."""
    graph = axis.graph
    sums = {
        op
        for op in batch_only(graph)
        if any(axis.dim(value) >= 0 for value in graph.reads[op])
        and any(axis.dim(made) < 0 for made in graph.makes[op])
    }
    return _with_ancestors(graph, sums)


def batch_only(graph: Graph) -> set[int]:
    """The ops that depend on the batch and on nothing of the model."""
    outer = {one.value for one in graph.inputs if graph.values[one.value].kind in OUTER}
    found = set()
    for op in graph.ordinary:
        if not graph.ops[op].channels and not graph.effects[op] and outer.issuperset(graph.reads[op]):
            found.add(op)
            outer |= set(graph.makes[op])
    return found


def _with_ancestors(graph: Graph, ops: set[int]) -> set[int]:
    found, waiting = set(ops), list(ops)
    while waiting:
        for value in graph.reads[waiting.pop()]:
            maker = graph.maker[value]
            if maker >= 0 and maker not in found:
                found.add(maker)
                waiting.append(maker)
    return found


def between(graph: Graph, ops: set[int]) -> set[int]:
    """The ops that need what these make, and make what these need."""
    after: set[int] = set()
    for op in graph.ordinary:
        if any(graph.maker[value] in after or graph.maker[value] in ops for value in graph.reads[op]):
            after.add(op)
    return after & _with_ancestors(graph, set(ops))


def splittable(axis: Axis) -> set[int]:
    """The ops of forward and backward that have the examples in them and may be a part of a region."""
    return {op for op in axis.graph.ordinary if _may(axis.graph.ops[op]) and axis.carries(op)}


def _may(op: Op) -> bool:
    return op.phase != "update" and not op.channels and not op.forgotten
