"""Whether a graph holds together: every index points somewhere, and all that is written into source is what it seems.

Loading a file and generating code both rest on this, and so it holds for graphs that were made by hand as well.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from keyword import iskeyword
from typing import Any, get_args

from lowtide.aten import OTHER_ELEMENTS, STRIDED
from lowtide.graph import GENERATOR, OPAQUE, Alternative, Arg, Constant, Form, Graph, Op, Place, Read, View
from lowtide.graph.targets import DEVICE, DTYPES, refusal, unknown_constant

DEPTH = 8  # of lists in an argument
LEAST, MOST = -(2**63), 2**64 - 1  # whole numbers that torch takes
CHANNEL = re.compile(r"generator|handover|check|group:(0|[1-9][0-9]{0,3})")
PLAIN = (type(None), bool, float, complex, str)


class Unsound(ValueError):
    """What is wrong with a graph."""


def first_fault(graph: Graph) -> str | None:
    """The first thing that is wrong with the graph, in words."""
    try:
        _Inspector(graph).inspect()
    except Unsound as fault:
        return str(fault)
    return None


def foreign(graph: Graph, namespaces: Collection[str]) -> str | None:
    """The first call that is not of these namespaces, in words."""
    for target in dict.fromkeys([*(op.target for op in graph.ops), *(view.target for view in graph.views)]):
        if (why := refusal(target, namespaces=namespaces)) is not None:
            return why
    return None


class _Inspector:
    """Walks a graph once, in the order in which its ops run."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.called: set[str] = set()  # targets that may be called
        self.elements = [0] * len(graph.views)  # that a storage must have for the view, of its value's dtype
        self.nbytes = [0] * len(graph.views)  # that it must have beside that, whatever the dtype
        self.alike = [True] * len(graph.views)  # whether the view has elements of the value's dtype

    def inspect(self) -> None:
        graph = self.graph
        if type(graph.device) is not str or not DEVICE.fullmatch(graph.device):
            raise Unsound(f"{ascii(graph.device)[:60]} is no device")
        if not _count(graph.generator_bytes):
            raise Unsound("a generator has no such number of bytes")
        for number, value in enumerate(graph.values):
            if not all(map(_count, (value.nbytes, value.storage, *value.shape, *value.stride))):
                raise Unsound(f"%{number} has sizes that no tensor has")
            if value.dtype not in DTYPES:
                raise Unsound(f"%{number} has no dtype: {ascii(value.dtype)[:60]}")
            if value.form not in get_args(Form):
                raise Unsound(f"%{number} has no form: {_briefly(value.form)}")
        for number, view in enumerate(graph.views):
            self.inspect_view(number, view)
        self.inspect_order()
        self.inspect_homes()
        for number, value in enumerate(graph.values):
            if type(value.eager_end) is not int or not -1 <= value.eager_end < len(graph.ops):
                raise Unsound(f"%{number} ends after op {ascii(value.eager_end)[:60]}, of {len(graph.ops)}")
        for number, row in enumerate(graph.alternatives):
            self.inspect_alternative(row, f"alternative {number}")

    def inspect_view(self, number: int, view: View) -> None:
        where, parent = f"view {number}", view.parent
        if parent is not None and not (type(parent) is int and 0 <= parent < number):
            raise Unsound(f"{where} sees no earlier view")
        if view.item is not None and not (type(view.item) is int and LEAST <= view.item <= MOST):
            raise Unsound(f"{where} takes item {ascii(view.item)[:60]}")
        self.inspect_target(view.target, where)
        for arg in view.args:
            self.inspect_arg(arg, where, reads=False)
        if parent is not None:
            self.elements[number], self.nbytes[number] = self.elements[parent], self.nbytes[parent]
            self.alike[number] = self.alike[parent]
        reach = _reach(view.target, (None, *view.args), where)
        wanted = self.elements if self.alike[number] else self.nbytes
        wanted[number] = max(wanted[number], reach)
        if view.target in OTHER_ELEMENTS:
            self.alike[number] = False

    def inspect_order(self) -> None:
        """Every value is made once before it is read."""
        graph = self.graph
        inputs = {item.value for item in graph.inputs}
        if not all(type(value) is int and 0 <= value < len(graph.values) for value in inputs):
            raise Unsound(f"inputs {ascii(list(inputs))[:60]}, of {len(graph.values)} values")
        made = set(inputs)
        for index, op in enumerate(graph.ops):
            where = f"op {index} {ascii(op.name)[1:-1][:40]}"
            self.inspect_call(op, where, made)
            if op.optional and (op.updates or op.channels):
                raise Unsound(f"{where} is optional, but updates values or draws from the generator or the like")
            if not op.optional and index not in graph.ordinary:
                raise Unsound(f"{where} is not optional, but comes after ops that are")
            for value in op.makes:
                if not self.exists(value) or value in (inputs if op.optional else made):
                    raise Unsound(f"{where} makes %{value}, which exists already or has no entry")
                made.add(value)
        for output in graph.outputs:
            if output.value not in made:
                raise Unsound(f"output %{output.value} is never made")
            self.inspect_seen(Read(output.value, output.view), f"output %{output.value}")

    def inspect_homes(self) -> None:
        """What the caller holds is in one place that there is; a number is in none but the program."""
        graph, homes = self.graph, dict[int, str]()
        storages = {graph.values[item.value].storage: item.home for item in graph.inputs}
        for item in graph.ends:
            value = graph.values[item.value]
            if item.home not in get_args(Place) or (value.kind == "scalar" and item.home != "device"):
                raise Unsound(f"%{item.value} has no home: {_briefly(item.home)}")
            known = storages.get(value.storage, homes.setdefault(item.value, item.home))
            if known != item.home:
                raise Unsound(f"%{item.value} has two homes: {known} and {item.home}")

    def inspect_alternative(self, row: Alternative, where: str) -> None:
        """A row names what exists, and its ops lead from the value to the keeper and back, or to what readers make."""
        graph, ops = self.graph, self.graph.ops
        named = (*row.restore, *(op for pair in row.instead for op in pair), *((row.store,) if row.store != -1 else ()))
        if not self.exists(row.value) or not self.exists(row.keeper) or row.place not in get_args(Place):
            raise Unsound(f"{where} is of {_briefly(row.value)}, {_briefly(row.keeper)} and {_briefly(row.place)}")
        if not all(type(op) is int and 0 <= op < len(ops) for op in named):
            raise Unsound(f"{where} names ops {_briefly(named)}, of {len(ops)}")
        what = f"{where} of %{row.value}"
        if row.keeper == row.value:
            if row.place == "device" or named:
                raise Unsound(f"{what} is kept as itself, which is in another place and takes no ops")
            return
        if not row.restore and not row.instead:
            raise Unsound(f"{what} has no way back from %{row.keeper}")
        reads, makes = graph.reads, graph.makes
        if row.store == -1 and graph.maker[row.keeper] not in (-1, *graph.ordinary):
            raise Unsound(f"{what} keeps %{row.keeper}, which no ordinary op makes")
        if row.store != -1 and not (
            ops[row.store].optional and row.value in reads[row.store] and row.keeper in makes[row.store]
        ):
            raise Unsound(f"{what} is stored by op {row.store}, which does not make %{row.keeper} of it when asked to")
        if row.restore and (row.value not in makes[row.restore[-1]] or row.keeper not in reads[row.restore[0]]):
            raise Unsound(f"{what} is restored by ops {row.restore}, which do not make it of %{row.keeper}")
        for reader, op in row.instead:
            if reader not in graph.readers[row.value] or not ops[op].optional or set(makes[op]) != set(makes[reader]):
                raise Unsound(f"{what} has op {op} instead of op {reader}, which does not stand in for it")
            if row.keeper not in reads[op] or row.value in reads[op]:
                raise Unsound(f"{what} has op {op} instead of op {reader}, which does not read %{row.keeper} alone")

    def inspect_call(self, op: Op, where: str, made: set[int]) -> None:
        self.inspect_target(op.target, where)
        channels = op.channels
        if not all(type(channel) is str and CHANNEL.fullmatch(channel) for channel in channels):
            raise Unsound(f"{where} is in channels {_briefly(channels)}, which are none")
        if len(set(channels)) < len(channels) or GENERATOR in channels[1:]:
            raise Unsound(f"{where} is in channels {_briefly(channels)}: each is named once, the generator first")
        names = [name for name, _ in op.kwargs]
        if len(set(names)) < len(names) or not all(map(_identifier, names)):
            raise Unsound(f"{where} has arguments with names that can't be written: {ascii(names)[:60]}")
        for arg in (*op.args, *(arg for _, arg in op.kwargs)):
            self.inspect_arg(arg, where)
        for read in op.arguments():
            if read.value not in made:
                raise Unsound(f"{where} reads %{read.value} before it is made")
            self.inspect_seen(read, where)
        for _, old in op.updates:
            if old not in made:
                raise Unsound(f"{where} updates %{old} before it is made")
        reach = _reach(op.target, op.args, where)
        if reach and isinstance(seen := op.args[0], Read):
            value = self.graph.values[seen.value]
            alike = seen.view is None or self.alike[seen.view]
            if reach * (DTYPES[value.dtype] if alike else 1) > value.nbytes:
                raise Unsound(f"{where} sees {reach} elements of %{seen.value}, which has {value.nbytes} bytes")

    def inspect_seen(self, read: Read, where: str) -> None:
        """A view that exists, and that ends where the storage of the value ends."""
        view, value = read.view, self.graph.values[read.value]
        if view is None:
            return
        if value.form in OPAQUE:
            raise Unsound(f"{where} sees %{read.value} through a view, but it is {value.form}")
        if type(view) is not int or not 0 <= view < len(self.graph.views):
            raise Unsound(f"{where} reads through view {ascii(view)[:60]}, of {len(self.graph.views)}")
        needed = max(self.elements[view] * DTYPES[value.dtype], self.nbytes[view])
        if needed > value.nbytes:
            raise Unsound(f"{where} sees {needed} bytes of %{read.value}, which has {value.nbytes}")

    def inspect_target(self, target: str, where: str) -> None:
        if target not in self.called:
            if (why := refusal(target)) is not None:
                raise Unsound(f"{where}: {why}")
            self.called.add(target)

    def inspect_arg(self, arg: Arg, where: str, *, reads: bool = True, depth: int = 0) -> None:
        """An argument of the few kinds that there are; exactly these, since others may write themselves as anything."""
        if type(arg) in PLAIN:
            return
        match arg:
            case int() if type(arg) is int:
                if not LEAST <= arg <= MOST:
                    raise Unsound(f"{where} has a number of {arg.bit_length()} bits")
            case Read(value):
                if not reads or not self.exists(value):
                    raise Unsound(
                        f"{where} reads %{ascii(value)[:60]}, of {len(self.graph.values) if reads else 'no'} values"
                    )
            case Constant(family, name):
                if (why := unknown_constant(family, name)) is not None:
                    raise Unsound(f"{where}: {why}")
            case tuple():
                if depth >= DEPTH:
                    raise Unsound(f"{where} has lists in lists, more than {DEPTH} deep")
                for item in arg:
                    self.inspect_arg(item, where, reads=reads, depth=depth + 1)
            case _:
                raise Unsound(f"{where} has an argument of type {type(arg).__name__}")

    def exists(self, value: Any) -> bool:
        return type(value) is int and 0 <= value < len(self.graph.values)


def _briefly(thing: Any) -> str:
    return ascii(thing)[:60]


def _identifier(name: Any) -> bool:
    return type(name) is str and name.isascii() and name.isidentifier() and not iskeyword(name)


def _count(number: Any) -> bool:
    return type(number) is int and 0 <= number < 2**63


def _reach(target: str, args: tuple[Arg, ...], where: str) -> int:
    """The elements that a storage must have for a call that says itself how to see it; 0 for all other calls."""
    place = STRIDED.get(target.rpartition(".")[0])
    if place is None:
        return 0
    match (*args[place : place + 3], None)[:3]:
        case tuple() as sizes, tuple() as strides, start if len(sizes) == len(strides):
            numbers: tuple[Any, ...] = (*sizes, *strides, start or 0)
        case _:
            raise Unsound(f"{where}: {target} has no sizes and strides")
    if not all(map(_count, numbers)):
        raise Unsound(f"{where}: {target} has sizes that no tensor has")
    if 0 in sizes:
        return 0
    last: int = numbers[-1] + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
    return last + 1
