"""The update of a parameter in one pass over memory: what an optimizer calls one after the other becomes one call.

Momentum, moments and the parameter are each read and written once, with every rounding of torch's loop. Each parameter
has a call of its own, so that its gradient ends there.
"""

from __future__ import annotations

import struct
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from lowtide.graph import Arg, Graph, Op, Read
from lowtide.kernels.chains import CHAIN, LINES, REGISTERS, WORDS
from lowtide.rewrite.editor import Editor
from lowtide.rewrite.joining import Joining
from lowtide.rewrite.seeing import Other, Seeing
from lowtide.rewrites import Setting


def joined_updates(graph: Graph, without: Setting = None) -> Graph:
    """The graph with one call for each update; `without` names calls that stay torch's, with a plus between them."""
    left = frozenset(str(without or "").split("+"))
    if graph.device != "cpu":
        return graph
    editor, seeing, joining = Editor(graph), Seeing(graph), Joining(graph)
    found = False
    for members in _groups(graph, seeing):
        if len(members) < 2 or left & {graph.ops[index].name for index in members}:
            continue
        try:
            call = _Update(graph, seeing, members).call()
        except Other:
            continue
        if not joining.join(members):
            continue
        for index in members:
            editor.take_out(index)
        editor.put(members[-1], 0, members[-1], call)
        found = True
    return editor.reordered() if found else graph


def _groups(graph: Graph, seeing: Seeing) -> list[list[int]]:
    """Calls of updates that work on each element, together with those that read what they make."""
    leader: dict[int, int] = {}

    def lead(index: int) -> int:
        while leader[index] != index:
            index = leader[index]
        return index

    for index in graph.ordinary:
        if not _is_line(graph, seeing, index):
            continue
        leader[index] = index
        for value in graph.reads[index]:
            if graph.maker[value] in leader:
                leader[lead(graph.maker[value])] = index
    found: defaultdict[int, list[int]] = defaultdict(list)
    for index in leader:
        found[lead(index)].append(index)
    return list(found.values())


def _is_line(graph: Graph, seeing: Seeing, index: int) -> bool:
    """Whether a call of an update does the same to every element, and sees all elements in the order of memory."""
    op = graph.ops[index]
    if op.phase != "update" or _plain(op.target) not in CALLS or op.channels or op.forgotten or len(op.makes) != 1:
        return False
    reads = [read for read in op.arguments() if seeing.shapes.is_tensor(read)]
    made = graph.values[op.makes[0]]
    counts = {seeing.tensor(read).numel() for read in reads}
    whole = counts == {made.nbytes // 4} and made.dtype == "float32" and seeing.is_reshaped(Read(op.makes[0]))
    return whole and all(seeing.is_reshaped(read) for read in reads)


@dataclass
class _Update:
    """Calls that become one."""

    graph: Graph
    see: Seeing
    members: list[int]
    read: list[Read] = field(default_factory=list)
    written: dict[int, list[int]] = field(default_factory=dict)  # storage -> its contents, from before to the last
    numbers: list[Arg] = field(default_factory=list)
    places: dict[Arg | bytes, int] = field(default_factory=dict)  # a number, or its bits -> where it is
    code: list[int] = field(default_factory=list)
    register: dict[int, int] = field(default_factory=dict)  # value -> where it is

    def call(self) -> Op:
        """The one call; raise `Other` where there is none."""
        graph, inside = self.graph, set(self.members)
        self._refuse_outsiders(inside)
        last = {value: place for place, index in enumerate(self.members) for value in graph.reads[index]}
        for value in self._outside(inside):
            self._load(value)
        for place, index in enumerate(self.members):
            self._line(graph.ops[index])
            made = graph.ops[index].makes[0]
            keep = {contents[-1] for contents in self.written.values()}
            for value in list(self.register):
                if last.get(value, -1) <= place and value not in keep and value != made:
                    del self.register[value]
        for number, contents in enumerate(self.written.values()):
            self._write("store", number, self.register[contents[-1]])
        first = graph.ops[self.members[-1]]
        return replace(
            first,
            target=CHAIN,
            args=(
                tuple(self.read),
                tuple(Read(contents[0]) for contents in self.written.values()),
                tuple(self.code),
                tuple(self.numbers),
            ),
            kwargs=(),
            outputs=(),
            updates=tuple((contents[-1], contents[0]) for contents in self.written.values()),
        )

    def _refuse_outsiders(self, inside: set[int]) -> None:
        """What is made here is read here, or is what a tensor of the caller's ends as; nothing else comes between."""
        graph = self.graph
        for index in self.members:
            for new, old in graph.ops[index].updates:
                storage = graph.values[old].storage
                if storage in graph.lasting_storages:
                    self.written.setdefault(storage, [old]).append(new)
                elif graph.maker[old] not in inside:
                    raise Other
        lasting = {contents[-1] for contents in self.written.values()}
        for index in self.members:
            made = graph.ops[index].makes[0]
            outside = set(graph.readers[made]) - inside
            if made not in lasting and (outside or made in graph.required):
                raise Other
            if outside and min(outside) < self.members[-1]:
                raise Other
        if not self.written or any(graph.maker[contents[0]] in inside for contents in self.written.values()):
            raise Other
        waiting, seen = [graph.maker[value] for index in inside for value in graph.reads[index]], set[int]()
        while waiting:  # what makes the arguments may need nothing that is made here
            maker = waiting.pop()
            if maker > self.members[0] and maker not in inside and maker not in seen:
                seen.add(maker)
                makers = [graph.maker[value] for value in graph.reads[maker]]
                if inside.intersection(makers):
                    raise Other
                waiting += makers

    def _outside(self, inside: set[int]) -> list[int]:
        """The tensors that are there before."""
        graph = self.graph
        found: dict[int, Read] = {}  # as it is seen: its order in memory may be another than that of its dimensions
        for index in self.members:
            for read in graph.ops[index].arguments():
                if self.see.shapes.is_tensor(read) and graph.maker[read.value] not in inside:
                    found.setdefault(read.value, read)
        firsts = [contents[0] for contents in self.written.values()]
        self.read = [read for value, read in found.items() if value not in firsts]
        return [*(read.value for read in self.read), *firsts]

    def _load(self, value: int) -> None:
        firsts = [contents[0] for contents in self.written.values()]
        known = [read.value for read in self.read]
        place = known.index(value) if value in known else len(known) + firsts.index(value)
        self.register[value] = self._free()
        self._write("load", self.register[value], place)

    def _free(self) -> int:
        taken = set(self.register.values())
        found = next((number for number in range(REGISTERS) if number not in taken), None)
        if found is None:
            raise Other
        return found

    def _line(self, op: Op) -> None:
        name, tensors, number = CALLS[_plain(op.target)](self.see, op)
        registers = [self.register[read.value] for read in tensors]
        to = self._free()
        self.register[op.makes[0]] = to
        self._write(name, to, *registers, number=number)

    def _write(self, name: str, to: int, *registers: int, number: Arg = None) -> None:
        place = 0
        if number is not None:
            key = struct.pack("d", number) if isinstance(number, float) else number  # 0.0 equals -0.0
            place = self.places.setdefault(key, len(self.numbers))
            if place == len(self.numbers):
                self.numbers.append(number)
        self.code += [LINES.index(name), to, *registers, *([0] * (WORDS - 3 - len(registers))), place]


Found = tuple[str, list[Read], Arg]


def _plain(target: str) -> str:
    """A target without the mark of a call that writes over its first argument."""
    name, _, variant = target.rpartition(".")
    return f"{name.removesuffix('_')}.{variant}"


def _number(see: Seeing, arg: Arg) -> Arg:
    """A number, or one that is known when the step runs."""
    if isinstance(arg, Read) and not see.shapes.is_tensor(arg):
        return arg
    if isinstance(arg, bool) or not isinstance(arg, int | float):
        raise Other
    return float(arg)


def _tensor(see: Seeing, arg: Arg) -> Read:
    if not isinstance(arg, Read) or not see.shapes.is_tensor(arg):
        raise Other
    return arg


def _either(name: str, word: str | None) -> Callable[[Seeing, Op], Found]:
    """A call with a tensor or a number; `word` is what scales the tensor."""

    def found(see: Seeing, op: Op) -> Found:
        said = dict(op.kwargs)
        scale = _number(see, said.pop(word, 1.0)) if word is not None else None
        if said or len(op.args) != 2:
            raise Other
        first, second = _tensor(see, op.args[0]), op.args[1]
        if isinstance(second, Read) and see.shapes.is_tensor(second):
            return name, [first, second], scale
        if scale not in (None, 1.0):
            raise Other
        return f"{name} number", [first], _number(see, second)

    return found


def _three(name: str) -> Callable[[Seeing, Op], Found]:
    def found(see: Seeing, op: Op) -> Found:
        said = dict(op.kwargs)
        value = _number(see, said.pop("value", 1.0))
        if said or len(op.args) != 3:
            raise Other
        return name, [_tensor(see, arg) for arg in op.args], value

    return found


def _one(name: str) -> Callable[[Seeing, Op], Found]:
    return lambda see, op: (name, [_tensor(see, op.args[0])], None)


def _lerp(see: Seeing, op: Op) -> Found:
    return "lerp", [_tensor(see, op.args[0]), _tensor(see, op.args[1])], _number(see, op.args[2])


CALLS: dict[str, Callable[[Seeing, Op], Found]] = {
    "aten.add.Tensor": _either("add", "alpha"),
    "aten.mul.Tensor": _either("multiply", None),
    "aten.div.Tensor": _either("divide", None),
    "aten.addcmul.default": _three("add product"),
    "aten.addcdiv.default": _three("add quotient"),
    "aten.lerp.Scalar": _lerp,
    "aten.sqrt.default": _one("root"),
    "aten.neg.default": _one("negate"),
}
