"""The momentum as the accumulator of a batch in parts: no sum of gradients is kept beside it.

Where a gradient is a sum of terms and all that an update does with it is to add it to a state, each term can be added
to the state as soon as it is there: what the update does to the state before comes before the first term, and all else
after the last one. The same numbers are added in another order.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from lowtide.aten import ADD
from lowtide.forms import PACK, UNPACK
from lowtide.graph import Graph, Op, Read
from lowtide.rewrite.editor import Editor

ADDS = (ADD, "aten.add_.Tensor")


@dataclass(frozen=True)
class Sum:
    """A gradient that is a sum, and the state that it is added to."""

    gradient: int  # the value that is the whole sum
    terms: tuple[int, ...]  # in the order in which they are there
    adds: tuple[int, ...]  # the ops that make the sum
    chain: tuple[int, ...]  # the ops from the gradient to the state
    view: int | None  # through which the first of them sees the gradient
    state: int  # what the state is then


def sums(graph: Graph) -> list[Sum]:
    """The gradients that a state can take up term by term."""
    states = {graph.values[item.value].storage for item in graph.inputs if graph.values[item.value].kind == "state"}
    states |= {graph.values[op.makes[0]].storage for op in graph.ops if op.target == UNPACK and _of_state(graph, op)}
    found = (_sum(graph, index, states) for index in graph.ordinary)
    return [one for one in found if one is not None]


def _sum(graph: Graph, index: int, states: set[int]) -> Sum | None:
    """The sum that ends with this op, if the update does nothing with it but to add it to a state."""
    op = graph.ops[index]
    if op.phase != "backward" or not plain_add(graph, op):
        return None
    (gradient,) = op.makes
    if graph.values[gradient].kind != "gradient" or gradient in graph.required:
        return None
    readers = graph.readers[gradient]
    if len(readers) != 1 or graph.ops[readers[0]].phase != "update":
        return None
    terms, adds, left = list[int](), list[int](), gradient
    while graph.maker[left] >= 0 and plain_add(graph, maker := graph.ops[graph.maker[left]]):
        if left != gradient and (len(graph.readers[left]) != 1 or left in graph.required):
            break
        adds.append(graph.maker[left])
        left, term = (arg.value for arg in maker.args if isinstance(arg, Read))
        terms.append(term)
    terms.append(left)
    if any(len(graph.readers[term]) != 1 or term in graph.required or graph.maker[term] < 0 for term in terms):
        return None
    reads = [read for read in graph.ops[readers[0]].arguments() if read.value == gradient]
    chain = _chain(graph, gradient, states)
    if chain is None or len(reads) != 1:
        return None
    return Sum(gradient, tuple(terms[::-1]), tuple(adds[::-1]), chain[0], reads[0].view, chain[1])


def plain_add(graph: Graph, op: Op) -> bool:
    """Whether a call adds two tensors of one size, as they are, to a new one."""
    reads = [arg for arg in op.args if isinstance(arg, Read)]
    if op.target != ADD or op.kwargs or len(op.args) != 2 or len(reads) != 2 or len(op.reads) != 2:
        return False
    shapes = {graph.values[read.value].shape for read in reads} | {graph.values[op.makes[0]].shape}
    return len(shapes) == 1 and all(read.view is None for read in reads)


def _chain(graph: Graph, gradient: int, states: set[int]) -> tuple[tuple[int, ...], int] | None:
    """The ops that add the gradient to a state, and what the state is then."""
    found, value = list[int](), gradient
    while True:
        if len(graph.readers[value]) != 1 or value in graph.required:
            return None
        (reader,) = graph.readers[value]
        op = graph.ops[reader]
        places = [place for place, arg in enumerate(op.args) if isinstance(arg, Read) and arg.value == value]
        alpha = dict(op.kwargs).get("alpha", 1)
        tensors = [arg for arg in op.args if isinstance(arg, Read) and graph.values[arg.value].kind != "scalar"]
        if op.target not in ADDS or len(places) != 1 or len(tensors) != 2 or set(dict(op.kwargs)) - {"alpha"}:
            return None
        if (places[0] == 1 and alpha != 1) or (op.updates and op.updates[0][1] == value):
            return None
        found.append(reader)
        (value,) = op.makes
        if graph.values[value].storage in states:
            later = [new for other in graph.readers[value] for new, old in graph.ops[other].updates if old == value]
            return None if later or not op.updates else (tuple(found), value)


def _of_state(graph: Graph, op: Op) -> bool:
    return isinstance(op.args[0], Read) and graph.values[op.args[0].value].kind == "state"


def accumulated(graph: Graph) -> Graph:
    """The graph whose states take up the terms of gradients one by one, where they can."""
    found = sums(graph)
    if not found:
        return graph
    editor = Editor(graph)
    for one in found:
        _Accumulation(editor, one).write()
    return editor.reordered()


class _Accumulation:
    """Rewrites one sum."""

    def __init__(self, editor: Editor, sum_: Sum) -> None:
        self.editor, self.graph, self.sum = editor, editor.graph, sum_
        self.early = min(self.graph.maker[term] for term in sum_.terms)
        self.steps = 0
        self.packed = self._packed()

    def _packed(self) -> tuple[int, Op] | None:
        """The op that packs the state, if it is there in parts."""
        for index in self.graph.readers[self.sum.state]:
            if self.graph.ops[index].target == PACK:
                return index, self.graph.ops[index]
        return None

    def write(self) -> None:
        graph, editor, one = self.graph, self.editor, self.sum
        for index in (*one.adds, *one.chain):
            editor.take_out(index)
        for index in self._before():
            op = editor.placed[index].op
            editor.take_out(index)
            self._put(self.early, index, op)
        content = self._first()
        if self.packed is not None:
            editor.take_out(self.packed[0])
            content = self._through_parts(content)
        for number, term in enumerate(one.terms):
            last = number == len(one.terms) - 1
            made = one.state if last and self.packed is None else self._content()
            template = graph.ops[one.chain[-1]]
            op = replace(
                template,
                name=f"{template.name}_term{number}",
                target="aten.add_.Tensor",
                args=(Read(content), Read(term, one.view)),
                kwargs=(),
                outputs=(None,),
                updates=((made, content),),
                phase="backward" if self.packed is None else template.phase,  # in place: nothing is gained by a program
            )
            self._put(graph.maker[term], graph.maker[term], op)
            content = made if self.packed is None else self._through_parts(made, last=last, anchor=graph.maker[term])

    def _before(self) -> list[int]:
        """The ops of the update that the state needs before the gradient is added to it, in order."""
        graph, one = self.graph, self.sum
        found, left = set[int](), [value for index in one.chain for value in graph.reads[index]]
        while left:
            maker = graph.maker[left.pop()]
            if maker < 0 or maker in found or maker in (*one.chain, *one.adds) or maker not in self.editor.placed:
                continue
            op = graph.ops[maker]
            if op.phase == "update" or (op.target == UNPACK and _of_state(graph, op)):
                found.add(maker)
                left += graph.reads[maker]
        return sorted(found)

    def _first(self) -> int:
        """What the state is before the first term: all that was added with the gradient is in it."""
        term: Read | None = None
        for index in self.sum.chain:
            op = self.graph.ops[index]
            made = op.makes[0]
            mine = {self.sum.gradient, *(self.graph.ops[other].makes[0] for other in self.sum.chain)}
            (other,) = [arg for arg in op.args if isinstance(arg, Read) and arg.value not in mine]
            alpha = dict(op.kwargs).get("alpha", 1)
            first = isinstance(op.args[0], Read) and op.args[0].value == other.value
            if term is None and (first or alpha == 1):
                term = other
            elif term is None:
                scaled = replace(op, name=f"{op.name}_alone", target="aten.mul.Tensor", args=(other, alpha), kwargs=())
                self._put(self.early, index, replace(scaled, outputs=(made,), updates=()))
                term = Read(made)
            elif made == self.sum.state:
                content = self._content()
                args = (other, term)
                self._put(self.early, index, replace(op, args=args, kwargs=(), updates=((content, other.value),)))
                return content
            else:
                self._put(self.early, index, replace(op, args=(other, term), kwargs=()))
                term = Read(made)
        assert term is not None
        return term.value

    def _content(self) -> int:
        """A new content of the state's storage."""
        editor = self.editor
        editor.values.append(replace(self.graph.values[self.sum.state], eager_end=-1))
        editor.released.add(len(editor.values) - 1)
        return len(editor.values) - 1

    def _through_parts(self, content: int, *, last: bool = False, anchor: int | None = None) -> int:
        """Pack a content and unpack it again: between terms there are only the parts."""
        assert self.packed is not None
        editor, (index, pack) = self.editor, self.packed
        anchor = self.early if anchor is None else anchor
        parts = getattr(self, "parts", {old: old for _, old in pack.updates})
        new = {}
        for final, old in pack.updates:
            if last:
                new[old] = final
            else:
                editor.values.append(replace(editor.values[old]))
                new[old] = len(editor.values) - 1
        args = tuple(self._part(arg, parts) for arg in pack.args[:4])
        updates = tuple((new[old], parts[old]) for _, old in pack.updates)
        name = f"{pack.name}_{self.steps}"
        self._put(anchor, index, replace(pack, name=name, args=(*args, Read(content), pack.args[5]), updates=updates))
        self.parts = new
        made = self.sum.state if last else editor.value(self.graph.values[self.sum.state])
        if last:  # a storage of its own, for it is read only
            editor.storage += 1
            editor.values[made] = replace(editor.values[made], storage=editor.storage)
            editor.released.add(made)
        if last and not [one for one in self.graph.readers[made] if one != index]:
            return made
        whole = self.graph.values[self.sum.state]
        again = Op(
            name=f"un{pack.name}_{self.steps}",
            target=UNPACK,
            args=(*(self._part(arg, new) for arg in pack.args[:3]), whole.shape, whole.stride),
            outputs=(made,),
            phase=pack.phase,
            module=pack.module,
            source=pack.source,
        )
        place = min(one for one in self.graph.readers[made] if one != index) if last else anchor
        self._put(place, index, again)
        return made

    def _part(self, arg: object, parts: dict[int, int]) -> Read | None:
        if not isinstance(arg, Read):
            return None
        return Read(parts.get(arg.value, arg.value))

    def _put(self, anchor: int, origin: int, op: Op) -> None:
        self.steps += 1
        self.editor.put(anchor, self.steps, origin, op)
