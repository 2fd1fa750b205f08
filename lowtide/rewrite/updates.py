"""Updates of tensors in parts, a block at a time: what an optimizer does to each element becomes one op.

The floats of a weight, of its state and of all that lies between would be temporaries of the weight's size. Where every
call of an update works on each element alone, they become lines of a short program, which `lowtide.update` runs on
registers of a block. Other updates stay as they are, with whole temporaries.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from lowtide.forms import PACK, UNPACK, UPDATE
from lowtide.graph import Arg, Graph, Op, Read, Value
from lowtide.kernels.forms import REGISTERS
from lowtide.kernels.forms_plain import INSTRUCTIONS
from lowtide.kernels.shapes import Shapes
from lowtide.rewrite.accumulate import accumulated
from lowtide.rewrite.editor import Editor
from lowtide.rewrite.forms import order_of
from lowtide.rewrite.lines import LINES, Number, Unknown


def fused(graph: Graph) -> Graph:
    """The graph whose updates of tensors in parts are one op each, as far as they can be."""
    if not any(op.target in (UNPACK, PACK) for op in graph.ops):
        return graph  # as it was captured: every bit is eager's
    graph = accumulated(graph)
    editor, shapes = Editor(graph), Shapes(graph.values, graph.views)
    for members in _components(graph, shapes):
        try:
            update = _Region(graph, shapes, members).update()
        except Unknown:
            continue
        for index in update.replaced:
            editor.take_out(index)
        editor.put(members[-1], 0, members[-1], update.op)
    return without_unread(editor).reordered()


def _components(graph: Graph, shapes: Shapes) -> list[list[int]]:
    """Ops that work on each element of tensors of one size, and share some; with at least one that packs."""
    group: dict[int, int] = {}  # value -> the first op that has it
    leader = list(range(len(graph.ops)))

    def lead(op: int) -> int:
        while leader[op] != op:
            op = leader[op]
        return op

    members = [
        index for index in graph.ordinary if graph.ops[index].target == PACK or elementwise(graph, shapes, index)
    ]
    known = set(members)
    for index in members:
        op = graph.ops[index]
        tensors = [op.args[4].value] if op.target == PACK and isinstance(op.args[4], Read) else _tensors(graph, op)
        for value in tensors:
            if graph.maker[value] in known:
                leader[lead(index)] = lead(group.setdefault(value, index))
    found: defaultdict[int, list[int]] = defaultdict(list)
    for index in members:
        found[lead(index)].append(index)
    return [some for some in found.values() if any(_has_parts(graph, index) for index in some)]


def _has_parts(graph: Graph, index: int) -> bool:
    """Whether an op packs, or reads what was unpacked."""
    makers = [graph.maker[value] for value in graph.reads[index]]
    unpacked = any(maker >= 0 and graph.ops[maker].target == UNPACK for maker in makers)
    return unpacked or graph.ops[index].target == PACK


def _tensors(graph: Graph, op: Op) -> list[int]:
    return [value for value in (*op.reads, *op.makes) if graph.values[value].kind != "scalar"]


def elementwise(graph: Graph, shapes: Shapes, index: int) -> bool:
    """Whether a call of an update works on each element alone, on tensors of one size."""
    op = graph.ops[index]
    if op.phase != "update" or op.target not in LINES or op.channels:
        return False
    seen = [shapes.tensor(read) for read in op.arguments() if shapes.is_tensor(read)]
    made = [graph.values[value] for value in op.makes]
    sizes = {tuple(tensor.shape) for tensor in seen} | {value.shape for value in made}
    floats = all(str(tensor.dtype) == "torch.float32" for tensor in seen) and all(v.dtype == "float32" for v in made)
    return len(sizes) == 1 and floats and () not in sizes


def as_it_is(graph: Graph, shapes: Shapes, read: Read) -> Read:
    """A read without its view, where what is seen through that is the value as it lies."""
    if read.view is None:
        return read
    seen, value = shapes.tensor(read), graph.values[read.value]
    same = (tuple(seen.shape), tuple(seen.stride()), seen.storage_offset()) == (value.shape, value.stride, 0)
    return Read(read.value) if same and f"torch.{value.dtype}" == str(seen.dtype) else read


@dataclass
class _Fused:
    """An update that stands for others."""

    op: Op
    replaced: list[int]


@dataclass
class _Operand:
    """A tensor that is stored: its parts or, where it is plain, itself."""

    values: int
    others: list[int] = field(default_factory=list)
    kind: int = 0
    updates: list[tuple[int, int]] = field(default_factory=list)


class _Region:
    """Ops that become one: the program, and what it is given."""

    def __init__(self, graph: Graph, shapes: Shapes, members: list[int]) -> None:
        self.graph, self.shapes, self.members = graph, shapes, members
        self.inside = set(members)
        self.packs = [graph.ops[index] for index in members if graph.ops[index].target == PACK]
        self.ops = [index for index in members if graph.ops[index].target != PACK]
        self.code: list[int] = []
        self.numbers: list[Number] = []
        self.stored: list[_Operand] = []
        self.seen: list[Read] = []
        self.register: dict[int | Read, int] = {}  # value, or read from outside -> where it is now
        self.free = list(range(REGISTERS))[::-1]
        self.last: dict[int, int] = {}
        self.place = 0  # of the op whose lines are written
        self.masks: set[Arg] = {pack.args[2] for pack in self.packs}
        self.in_parts: set[int] = set()  # values of operands that are there in parts
        self.whole = self._whole()

    def _whole(self) -> Value:
        """What all tensors of the region are like."""
        for index in self.members:
            for value in self.graph.reads[index]:
                maker = self.graph.maker[value]
                if maker >= 0 and self.graph.ops[maker].target == UNPACK:
                    return self.graph.values[value]
        dense = self.packs[0].args[4]
        assert isinstance(dense, Read)
        return self.graph.values[dense.value]

    def update(self) -> _Fused:
        """The one op."""
        finals = self._finals()
        for place, index in enumerate(self.ops):
            for value in self.graph.reads[index]:
                self.last[value] = place
        for value in finals:
            self.last[value] = len(self.ops)
        for place, index in enumerate(self.ops):
            self.place = place
            LINES[self.graph.ops[index].target](self, self.graph.ops[index])
            self._let_go(self.place)
        for value, operand in finals.items():
            number = self._operand(operand)
            self.line("store", number, self._at(Read(value)))
        (mask,) = self.masks if len(self.masks) == 1 else (False,)
        if mask is False or (mask is not None and any(item.values not in self.in_parts for item in self.stored)):
            raise Unknown
        first = self.graph.ops[self.members[-1]]
        op = Op(
            name=f"update_{(self.packs or [first])[0].name.removeprefix('pack_')}",
            target=UPDATE,
            args=(
                tuple(Read(item.values) for item in self.stored),
                tuple(Read(part) for item in self.stored for part in item.others),
                tuple(item.kind for item in self.stored),
                mask,
                tuple(self.seen),
                self.whole.shape,
                order_of(self.whole),
                tuple(self.numbers),
                tuple(self.code),
            ),
            updates=tuple(pair for item in self.stored for pair in item.updates),
            phase=first.phase,
            module=first.module,
            source=first.source,
        )
        return _Fused(op, self.members)

    def _finals(self) -> dict[int, _Operand]:
        """What must be stored in the end; raise where something else is seen outside."""
        graph, found = self.graph, dict[int, _Operand]()
        for pack in self.packs:
            assert isinstance(pack.args[4], Read)
            found[pack.args[4].value] = self._parts(pack.args, pack.updates)
        for index in self.ops:
            op = graph.ops[index]
            for value in op.makes:
                outside = [reader for reader in graph.readers[value] if reader not in self.inside]
                if graph.values[value].storage in graph.lasting_storages and not self._is_written(value):
                    if outside and min(outside) < self.members[-1]:
                        raise Unknown
                    found[value] = self._plain(value)
                elif outside or value in graph.required:
                    raise Unknown
            for _, old in op.updates:
                if graph.maker[old] not in self.inside and not self._may_write(old):
                    raise Unknown
        return found

    def _may_write(self, value: int) -> bool:
        """Whether a value that comes from outside may be written to: it is loaded, and stored in the end."""
        maker = self.graph.maker[value]
        lasting = self.graph.values[value].storage in self.graph.lasting_storages
        return lasting or (maker >= 0 and self.graph.ops[maker].target == UNPACK)

    def _parts(self, args: tuple[Arg, ...], updates: Iterable[tuple[int, int]]) -> _Operand:
        values, scales, _, counter, *_ = args
        assert isinstance(values, Read)
        self.in_parts.add(values.value)
        others = [part.value for part in (scales, counter) if isinstance(part, Read)]
        kind = (scales is not None) + 2 * (counter is not None)
        return _Operand(values.value, others, kind, list(updates))

    def _plain(self, final: int) -> _Operand:
        """A float tensor of the caller's that is written to, from the content on that it has before."""
        storage = self.graph.values[final].storage
        written = (old for index in self.ops for _, old in self.graph.ops[index].updates)
        first = next(old for old in written if self.graph.values[old].storage == storage)
        value = self.graph.values[first]
        contiguous = order_of(value) == tuple(range(len(value.shape))) == order_of(self.whole)
        if not contiguous or value.form != "plain":
            raise Unknown
        return _Operand(first, updates=[(final, first)])

    def _operand(self, wanted: _Operand) -> int:
        for number, item in enumerate(self.stored):
            if item.values == wanted.values:
                self.stored[number].updates = wanted.updates or item.updates
                self.stored[number].others, self.stored[number].kind = wanted.others, wanted.kind
                return number
        self.stored.append(replace(wanted))
        return len(self.stored) - 1

    # What the lines of calls are made with.

    def line(self, name: str, to: int, a: int = 0, b: int = 0, number: Number = None) -> None:
        """Write a line."""
        which = INSTRUCTIONS.index(name)
        self.code += [which, to, a, b, 0 if number is None else self._number(number)]

    def _number(self, number: Number) -> int:
        if isinstance(number, bool) or not isinstance(number, int | float | Read):
            raise Unknown
        number = float(number) if isinstance(number, int) else number
        if number not in self.numbers:
            self.numbers.append(number)
        return self.numbers.index(number)

    def take(self) -> int:
        """A register that nobody uses."""
        if not self.free:
            raise Unknown
        return self.free.pop()

    def give_back(self, register: int) -> None:
        """Let others use it."""
        self.free.append(register)

    def _at(self, read: Read) -> int:
        """Where a tensor is: in a register, loaded if it comes from outside."""
        read, value = as_it_is(self.graph, self.shapes, read), read.value
        if self.graph.maker[value] in self.inside:
            if read.view is not None or value not in self.register:
                raise Unknown
            return self.register[value]
        key: int | Read = value if read.view is None else read
        if key not in self.register:
            self.register[key] = self.take()
            maker = self.graph.maker[value]
            ours = self.graph.values[value].storage in self.graph.lasting_storages
            lasting = ours and read.view is None and self._is_written(value)
            if maker >= 0 and self.graph.ops[maker].target == UNPACK and read.view is None:
                self.line("load", self.register[key], self._operand(self._of_unpack(self.graph.ops[maker])))
            elif lasting:
                self.line("load", self.register[key], self._operand(_Operand(value)))
            else:
                if read not in self.seen:
                    self.seen.append(read)
                self.line("see", self.register[key], self.seen.index(read))
        return self.register[key]

    def _is_written(self, value: int) -> bool:
        return any(old == value for index in self.ops for _, old in self.graph.ops[index].updates)

    def _of_unpack(self, op: Op) -> _Operand:
        """The parts that an op unpacks: those of a pack of the region, or what is only read."""
        for pack in self.packs:
            if pack.args[:3] == op.args[:3]:
                return self._parts(pack.args, pack.updates)
        self.masks.add(op.args[2])
        return self._parts((*op.args[:3], None), ())

    def _let_go(self, place: int) -> None:
        """Give back the registers of what is not read any more."""
        for key in list(self.register):
            value = key.value if isinstance(key, Read) else key
            if self.last.get(value, -1) <= place:
                self.give_back(self.register.pop(key))

    def result(self, op: Op) -> int:
        """The register of the one tensor that a call makes; over what it writes to, where it does."""
        (made,) = op.makes
        if op.updates:
            old = op.updates[0][1]
            at = self._at(Read(old))
            if self.last.get(old, -1) > self.place:
                raise Unknown  # somebody still needs the old one
            self.register.pop(old)
            self.register[made] = at
        else:
            self.register[made] = self.take()
        return self.register[made]

    def tensor(self, arg: Arg) -> int | None:
        """The register of an argument that is a tensor; None: it is a number."""
        if isinstance(arg, Read) and self.shapes.is_tensor(arg):
            return self._at(arg)
        return None

    def calculate(self, name: str, op: Op, a: Arg, b: Arg = None, number: Number = None) -> None:
        """One line for a call: its result from one or two tensors, and a number."""
        first, second = self.tensor(a), 0 if b is None else self.tensor(b)
        if first is None or second is None:
            raise Unknown
        self.line(name, self.result(op), first, second, number)


def without_unread(editor: Editor) -> Editor:
    """Take out what unpacks for nobody any more."""
    read = {value for item in editor.placed.values() for value in item.op.reads} | {one.value for one in editor.outputs}
    for index, item in list(editor.placed.items()):
        if item.op.target == UNPACK and not read.intersection(item.op.makes):
            editor.take_out(index)
    return editor
