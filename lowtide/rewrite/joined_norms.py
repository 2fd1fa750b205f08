"""A batch norm in blocks takes in what stands around it: one op, and one pass over memory, for several.

Forward it takes in the sum and the ReLU behind it; backward the sum of two gradients before it and the mask of the
ReLU. A concatenation that batch norms alone read is never made: they read its parts. Sums of channels of two tensors
read these where they are. Bits are those of the ops one by one, for every number is rounded where these round it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from lowtide.aten import ADD, RELU, RELU_BACKWARD, RELU_ITSELF
from lowtide.graph import Arg, Graph, Op, Read
from lowtide.kernels import blocked as ops
from lowtide.kernels.blocked_norm import NORM, NORM_BACKWARD
from lowtide.kernels.opaque import BLOCK
from lowtide.rewrite.editor import Editor
from lowtide.rewrite.joining import Joining
from lowtide.rewrites import Setting

ADDS = (ADD, "aten.add_.Tensor")
RELUS = (RELU, RELU_ITSELF)
PARTS = {NORM: 0, NORM_BACKWARD: 2}  # which argument is what is normalised


def joined(graph: Graph, without: Setting = None) -> Graph:
    """The graph with batch norms in blocks that do more at once; `without` names ops that stay as they are."""
    if not any(op.target == NORM for op in graph.ops):
        return graph
    return _Joining(graph, frozenset(str(without or "").split("+"))).run()


@dataclass(frozen=True)
class _Behind:
    """A batch norm that has taken in a ReLU."""

    norm: Op  # as it was
    added: bool


class _Joining:
    """A graph, of whose ops some are joined, one after the other."""

    def __init__(self, graph: Graph, without: frozenset[str]) -> None:
        self.graph, self.editor, self.joining = graph, Editor(graph), Joining(graph)
        self.ops = {  # those that may be joined, as they are by now
            index: op for index in graph.ordinary if not (op := graph.ops[index]).forgotten and op.name not in without
        }
        self.rectified: dict[int, _Behind] = {}  # by the ReLU's result
        self.overwriters = {old: index for index, op in enumerate(graph.ops) for _, old in op.updates}
        self.changed = False

    def run(self) -> Graph:
        self._each(ops.CAT, self._parts)
        self._each(NORM, self._forward)
        self._each(NORM_BACKWARD, self._backward)
        self._each(ADD, self._sum)
        return self.editor.reordered() if self.changed else self.graph

    def _each(self, target: str, rule: Callable[[int, Op], None]) -> None:
        for index in self.graph.ordinary:
            op = self.ops.get(index)
            if op is not None and op.target == target:
                rule(index, op)

    # ---- the rules

    def _parts(self, index: int, op: Op) -> None:
        """A concatenation that only batch norms read."""
        (made,), parts = op.outputs, op.args[0]
        assert isinstance(parts, tuple)
        if made is None or made in self.graph.required or not all(map(self._lasts, parts)):
            return
        readers = [self.ops.get(reader) for reader in self.graph.readers[made]]
        if not readers or not all(one is not None and _normalises(one, made) for one in readers):
            return
        for reader in self.graph.readers[made]:
            one = self.ops[reader]
            place = PARTS[one.target]
            self._put(reader, replace(one, args=(*one.args[:place], parts, *one.args[place + 1 :])))
        self._take_out(index)

    def _forward(self, index: int, op: Op) -> None:
        """What is added to a result, and the ReLU behind it."""
        chain, made, added = [index], op.outputs[0], None
        adding = self._only_reader(made, ADDS)
        if adding is not None and (two := self._terms(adding)) is not None and two[0].value == made != two[1].value:
            added = two[1]
            chain.append(adding)
            made = self.ops[adding].makes[0]
        rectifying = self._only_reader(made, RELUS)
        if rectifying is not None:
            chain.append(rectifying)
            made = self.ops[rectifying].makes[0]
        if len(chain) > 1 and self.joining.join(chain):
            if made is not None and rectifying is not None:
                self.rectified[made] = _Behind(op, added is not None)
            args = (*op.args[:7], added, rectifying is not None, *op.args[9:])
            self._join(chain, chain[-1], replace(op, args=args, outputs=(made, *op.outputs[1:])))

    def _backward(self, index: int, op: Op) -> None:
        """The mask of a ReLU before it, and the sum of two gradients before that."""
        gradient, _, parts, weight, _, mean, scale, _, _, _, *rest = op.args
        chain, place, counted = [index], index, None
        bias: Arg = None
        result: Arg = None
        again = False
        masking = self._maker(gradient, (RELU_BACKWARD,))
        if masking is not None and (seen := self._mask(masking)) is not None:
            assert isinstance(gradient, Read)
            chain.append(masking)
            if self.graph.readers[gradient.value] != (index,) or gradient.value in self.graph.required:
                place, counted = masking, gradient.value
            gradient, result = seen
            behind = self.rectified.get(seen[1].value)
            if behind is not None and not behind.added:
                made = tuple(None if value is None else Read(value) for value in behind.norm.outputs[1:])
                same = (*behind.norm.args[:2], *made) == (parts, weight, mean, scale)
                if same and self._is_there(behind.norm.args[2], index):
                    again, bias, result = True, behind.norm.args[2], None
        more: Arg = None
        adding = self._maker(gradient, ADDS)
        if adding is not None and (two := self._terms(adding)) is not None:
            assert isinstance(gradient, Read)
            if self._only_reader(gradient.value, (RELU_BACKWARD, NORM_BACKWARD)) == chain[-1]:
                gradient, more = two
                chain.append(adding)
        if len(chain) > 1 and self.joining.join(chain):
            args = (gradient, more, parts, weight, bias, mean, scale, result, again, counted is not None, *rest)
            self._join(chain, place, replace(op, args=args, outputs=(*op.outputs[:3], counted)))

    def _sum(self, index: int, op: Op) -> None:
        """A sum of which a part of the channels of a tensor is read: it is not copied first."""
        two = self._terms(index)
        cuts = [] if two is None else [self._maker(read, (ops.CUT,)) for read in two]
        number = next((one for one in cuts if one is not None), None)
        if two is None or number is None:
            return
        images = self.ops[number].args[3]
        assert isinstance(images, int)
        reads, starts = [], []
        for read, cut in zip(two, cuts, strict=True):
            args = (read, 0) if cut is None else self.ops[cut].args
            if not self._lasts(args[0]):
                return
            reads.append(args[0])
            starts.append(args[1])
        channels = self.graph.values[two[0].value].shape[0] // images * BLOCK
        self._put(index, replace(op, target=ops.SUM, args=(*reads, tuple(starts), channels, images)))
        for cut in cuts:
            if cut is not None and not self._is_read(self.ops[cut].outputs[0]):
                self._take_out(cut)

    # ---- what rules ask

    def _only_reader(self, value: int | None, targets: tuple[str, ...]) -> int | None:
        """The op of these that reads a blocked value, if nothing else does."""
        if value is None or value in self.graph.required or not self._is_blocked(value):
            return None
        readers = self.graph.readers[value]
        reader = self.ops.get(readers[0]) if len(readers) == 1 else None
        return readers[0] if reader is not None and reader.target in targets else None

    def _maker(self, read: Arg, targets: tuple[str, ...]) -> int | None:
        """The op of these that makes what is read in blocks, as a whole."""
        if not isinstance(read, Read) or read.view is not None or not self._is_blocked(read.value):
            return None
        maker = self.graph.maker[read.value]
        op = self.ops.get(maker)
        return maker if op is not None and op.target in targets else None

    def _terms(self, adding: int) -> tuple[Read, Read] | None:
        """The two tensors that are added as they are, and may be read later than that."""
        op = self.ops[adding]
        if op.kwargs or len(op.args) != 2 or not all(self._lasts(arg, adding) for arg in op.args):
            return None
        one, other = op.args
        assert isinstance(one, Read)
        assert isinstance(other, Read)
        alike = self.graph.values[one.value].shape == self.graph.values[other.value].shape
        return (one, other) if alike else None

    def _mask(self, masking: int) -> tuple[Read, Read] | None:
        """The gradient and the result of a ReLU, if both may be read later."""
        gradient, result, threshold = self.ops[masking].args
        if threshold != 0 or not self._lasts(gradient) or not self._lasts(result):
            return None
        assert isinstance(gradient, Read)
        assert isinstance(result, Read)
        return gradient, result

    def _lasts(self, arg: Arg, but: int = -1) -> bool:
        """Whether a whole blocked value is read that no op but this one writes over."""
        if not isinstance(arg, Read) or arg.view is not None or not self._is_blocked(arg.value):
            return False
        return self.overwriters.get(arg.value, but) == but

    def _is_there(self, arg: Arg, index: int) -> bool:
        """Whether nothing has written over what is read, if anything is, when an op runs that did not read it."""
        return not isinstance(arg, Read) or self.overwriters.get(arg.value, index + 1) > index

    def _is_blocked(self, value: int) -> bool:
        return self.graph.values[value].form == "blocked"

    def _is_read(self, value: int | None) -> bool:
        """Whether any op still reads a value, as the ops are by now."""
        if value is None or value in self.graph.required:
            return value is not None
        return any(
            value in self.editor.placed[one].op.reads for one in self.graph.readers[value] if one in self.editor.placed
        )

    # ---- what rules do

    def _join(self, chain: list[int], place: int, op: Op) -> None:
        """Let one op stand in the place of one of several."""
        for index in chain:
            if index != place:
                self._take_out(index)
        self._put(place, op)

    def _put(self, index: int, op: Op) -> None:
        self.editor.change(index, op)
        self.ops[index], self.changed = op, True

    def _take_out(self, index: int) -> None:
        self.editor.take_out(index)
        del self.ops[index]


def _normalises(op: Op, value: int) -> bool:
    """Whether an op is a batch norm that reads this value as what it normalises, and not otherwise."""
    once = [read.value for read in op.arguments()].count(value) == 1
    return op.target in PARTS and once and op.args[PARTS[op.target]] == (Read(value),)
