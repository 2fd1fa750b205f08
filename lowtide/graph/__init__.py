"""A training step as data: the ops of one step, in the order in which eager runs them, and the values between them.

A *value* is the content of one storage at one time. An op that writes over a storage makes a new value of the same
storage, so every value has one maker and never changes (single assignment), and the mutation of a parameter is as
explicit as a matrix product. A *view* (transpose, slice, reshape) is no value: it is a way in which an op reads one.

Eager runs the *ordinary* ops. After them come *optional* ones, which a program may run or not: they make new values, or
make bit for bit what an ordinary op makes, from other arguments.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from lowtide import files

Kind = Literal[
    "parameter",
    "buffer",
    "state",  # of the optimizer
    "gradient",  # of a parameter
    "batch",
    "constant",  # a tensor that the step reads and nobody registered
    "activation",  # made by the forward, or by code around the optimizer
    "activation gradient",  # made by the backward, not the gradient of a parameter
    "scalar",  # a Python number that is known only when the step runs
]
Phase = Literal["forward", "backward", "update"]
Role = Literal["result", "gradient", "buffer", "input"]
Place = Literal["device", "host", "disk"]  # where bytes are; a budget is of the device's
Form = Literal["plain", "blocked", "packed", "sparse", "sharded"]  # how bytes stand for elements
GENERATOR, HANDOVER = "generator", "handover"  # channels: random numbers; code that is not in the step
OPAQUE: frozenset[Form] = frozenset({"blocked", "packed", "sparse"})  # forms that no view can read


@dataclass(frozen=True, slots=True)
class Read:
    """An argument: this value, seen through this view (None: as it was made)."""

    value: int
    view: int | None = None


@dataclass(frozen=True, slots=True)
class Constant:
    """An argument that is a name of the tensor library: `Constant("dtype", "float32")`."""

    family: str
    name: str


Arg = None | bool | int | float | complex | str | Read | Constant | tuple["Arg", ...]


@dataclass(frozen=True, slots=True)
class View:
    """How a tensor is seen: call `target` on the parent's tensor and these arguments; take `item` of a list."""

    parent: int | None
    target: str
    args: tuple[Arg, ...] = ()
    item: int | None = None


@dataclass(frozen=True, slots=True)
class Value:
    """The content of one storage at one time."""

    name: str
    nbytes: int  # of the whole storage, as declared; Costs knows what is really allocated
    kind: Kind
    storage: int  # values of one storage are its contents at different times
    dtype: str = "float32"
    shape: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()
    eager_end: int = -1  # the op after which eager lets go of it; -1: never, within the step
    form: Form = "plain"


@dataclass(frozen=True, slots=True)
class Op:
    """One call: what it reads, what it makes, and what it does besides."""

    name: str
    target: str  # "aten.mm.default"; only capture, measure and execute know how to call it
    args: tuple[Arg, ...] = ()
    kwargs: tuple[tuple[str, Arg], ...] = ()
    outputs: tuple[int | None, ...] = ()  # a value for each result of the call; None: no tensor, or not a new one
    updates: tuple[tuple[int, int], ...] = ()  # (new, old): the call writes over old's storage; new is there then
    detachable: bool = False  # given None for what it updates it returns the same outputs, so it may run again
    channels: tuple[str, ...] = ()  # "generator", "handover", "group:0": what it does besides, in which order matters
    optional: bool = False  # eager does not run it; what it makes may be what an ordinary op makes too
    forgotten: str = ""  # the function of lowtide.recompute whose second run it is part of; it stays as it is
    phase: Phase = "forward"
    module: str = ""  # path of the innermost module: "layer1.0.conv2"
    source: str = ""  # "train.py:42", the innermost line that is not the tensor library's

    @property
    def reads(self) -> tuple[int, ...]:
        """The values that the call reads, each once, in argument order."""
        found = dict.fromkeys(read.value for read in self.arguments())
        return tuple(found)

    @property
    def makes(self) -> tuple[int, ...]:
        """The values that exist after the call: its outputs, then what it updated."""
        return tuple(v for v in self.outputs if v is not None) + tuple(new for new, _ in self.updates)

    @property
    def random(self) -> bool:
        """Whether it draws from the generator: it may run again, with the state that it was drawn from."""
        return GENERATOR in self.channels

    def arguments(self) -> Iterator[Read]:
        """Every tensor argument, also those in lists."""
        yield from _reads_in(self.args)
        for _, arg in self.kwargs:
            yield from _reads_in(arg)


@dataclass(frozen=True, slots=True)
class Input:
    """A value that is there before the step, and the path under which it is found in the caller's objects."""

    value: int
    path: tuple[str | int, ...]  # ("layer1.weight",), ("layer1.weight", "exp_avg"), (0, "input_ids"), ...
    persistent: bool = True  # the caller still holds it after the step; False: the step uses it up
    home: Place = "device"  # where it is before the step, and the last content of its storage after it


@dataclass(frozen=True, slots=True)
class Output:
    """A value that must be there after the step: a result, a gradient, a new buffer, or what became of an input."""

    value: int
    role: Role
    path: tuple[str | int, ...]
    view: int | None = None
    home: Place = "device"  # where it must be after the step


@dataclass(frozen=True, slots=True)
class Alternative:
    """While `value` is away, `keeper` is kept instead, and the same bits come back.

    They come back as the value itself, made again by `restore`, or as what its readers make, run `instead` of them.
    """

    value: int
    keeper: int  # a value: another one, or the value itself in another place
    place: Place = "device"  # where the keeper is
    store: int = -1  # the optional op that makes the keeper; -1: a copy does, or the step makes it anyway
    restore: tuple[int, ...] = ()  # ops that make the value again, in order; (): a copy does, or nobody has to
    instead: tuple[tuple[int, int], ...] = ()  # (reader, the optional op that reads the keeper in its place)


@dataclass(frozen=True)
class Graph:
    """One training step; the order of `ops` is the order in which eager ran them."""

    ops: tuple[Op, ...]  # the ordinary ones, then the optional ones
    values: tuple[Value, ...]
    inputs: tuple[Input, ...]
    outputs: tuple[Output, ...]
    views: tuple[View, ...] = ()
    alternatives: tuple[Alternative, ...] = ()  # ways to be without a value for a while, bit for bit
    device: str = "cpu"
    generator_bytes: int = 0  # of one saved state of the random generator
    notes: tuple[str, ...] = field(default=(), compare=False)  # what capture wants the user to know

    @cached_property
    def reads(self) -> tuple[tuple[int, ...], ...]:
        """For each op the values that it reads."""
        return tuple(op.reads for op in self.ops)

    @cached_property
    def makes(self) -> tuple[tuple[int, ...], ...]:
        """For each op the values that it makes."""
        return tuple(op.makes for op in self.ops)

    @cached_property
    def ordinary(self) -> range:
        """The ops that eager runs, in its order."""
        return range(sum(not op.optional for op in self.ops))

    @cached_property
    def maker(self) -> tuple[int, ...]:
        """For each value the op that makes it, the ordinary one where there are several, or -1 for an input."""
        made = [-1] * len(self.values)
        for index, values in reversed(list(enumerate(self.makes))):
            for value in values:
                made[value] = index
        return tuple(made)

    @cached_property
    def readers(self) -> tuple[tuple[int, ...], ...]:
        """For each value the ordinary ops that read it, in order."""
        found: list[list[int]] = [[] for _ in self.values]
        for index in self.ordinary:
            for value in self.reads[index]:
                found[value].append(index)
        return tuple(map(tuple, found))

    @cached_property
    def lasting_storages(self) -> frozenset[int]:
        """The storages of the inputs: what is written there is seen after the step."""
        return frozenset(self.values[item.value].storage for item in self.inputs)

    @cached_property
    def device_storages(self) -> frozenset[int]:
        """Of these, the ones whose home is the device: their bytes are there all the time."""
        return frozenset(self.values[item.value].storage for item in self.inputs if item.home == "device")

    @cached_property
    def required(self) -> frozenset[int]:
        """The values that must be there when the step ends, each at its home."""
        return frozenset(output.value for output in self.outputs)

    @property
    def ends(self) -> tuple[Input | Output, ...]:
        """What the caller holds: the inputs, and the outputs."""
        return (*self.inputs, *self.outputs)

    @cached_property
    def home(self) -> tuple[Place, ...]:
        """For each value where the caller has it before or after the step; the device for all that never leave it."""
        found: dict[int, Place] = {output.value: output.home for output in self.outputs}
        storages = {self.values[item.value].storage: item.home for item in self.inputs}
        return tuple(storages.get(item.storage, found.get(value, "device")) for value, item in enumerate(self.values))

    @cached_property
    def outliving(self) -> frozenset[int]:
        """The values that the caller has on the device after the step, in memory of its own."""
        places = enumerate(zip(self.values, self.home, strict=True))
        lasting, required = self.lasting_storages, self.required
        return frozenset(
            number
            for number, (value, home) in places
            if home == "device" and (value.storage in lasting or number in required)
        )

    @cached_property
    def effects(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """For each op those of its updates that outlive the step."""
        lasting = self.lasting_storages
        return tuple(tuple(pair for pair in op.updates if self.values[pair[1]].storage in lasting) for op in self.ops)

    @cached_property
    def random(self) -> bool:
        """Whether the step draws from the generator."""
        return any(op.random for op in self.ops)

    @cached_property
    def waits(self) -> tuple[frozenset[int], ...]:
        """For each op those that must run before its first run, whatever the order of the others."""
        return waits(self.ops, self.effects)

    def forward_ends(self, order: Iterable[int]) -> int:
        """The place of the first op beyond the forward in an order of ops, where the backward begins; else its end."""
        place = -1
        for place, op in enumerate(order):
            if self.ops[op].phase != "forward":
                return place
        return place + 1

    def repeatable(self, op: int) -> bool:
        """Whether the op may run a second time, given what it reads."""
        item = self.ops[op]
        return (not self.effects[op] or item.detachable) and all(channel == GENERATOR for channel in item.channels)

    def ordered(self, one: int, other: int) -> bool:
        """Whether the first runs of two ops keep the graph's order: they share a channel, or one hands over.

        The code that a step hands over to may do anything, so what is in any channel stays before or after it.
        """
        first, second = self.ops[one].channels, self.ops[other].channels
        return bool(first and second) and (HANDOVER in first + second or not set(first).isdisjoint(second))

    def reads_of(self, op: int, *, again: bool) -> tuple[int, ...]:
        """The values that a run of the op reads; a repeated one leaves its lasting updates alone."""
        if not again or not self.effects[op]:
            return self.reads[op]
        left = {old for _, old in self.effects[op]}
        return tuple(value for value in self.reads[op] if value not in left)

    def makes_of(self, op: int, *, again: bool) -> tuple[int, ...]:
        """The values that a run of the op makes."""
        if not again or not self.effects[op]:
            return self.makes[op]
        left = {new for new, _ in self.effects[op]}
        return tuple(value for value in self.makes[op] if value not in left)

    @cached_property
    def fault(self) -> str | None:
        """Why no program of this graph can be run, whatever made it; None: what it names exists and may be called."""
        from lowtide.graph.sound import first_fault  # which reads what is defined here

        return first_fault(self)

    @cached_property
    def fingerprint(self) -> str:
        """A digest of the arithmetic: equal for equal steps, whatever file and line they come from."""
        from lowtide.graph.encode import encode_graph  # which reads what is defined here

        payload = encode_graph(self)
        for op in payload["ops"]:
            op.pop("source", None)
        payload.pop("notes", None)
        payload.pop("alternatives", None)
        return files.digest(payload)

    def __str__(self) -> str:
        from_inputs = [f"  {self.show(item.value)} <- {_path(item.path)}{_at(item.home)}" for item in self.inputs]
        lines = [f"graph of {len(self.ops)} ops and {len(self.values)} values", "inputs:", *from_inputs, "ops:"]
        lines += [f"  {self.show_op(index)}" for index in range(len(self.ops))]
        lines += ["outputs:"]
        for output in self.outputs:
            lines.append(f"  {self.show(output.value)} -> {output.role} {_path(output.path)}{_at(output.home)}")
        return "\n".join(lines)

    def show(self, value: int) -> str:
        """One value as a person reads it."""
        item = self.values[value]
        if item.kind == "scalar":
            return f"%{value} {item.name}: scalar"
        shape = "x".join(map(str, item.shape))
        form = "" if item.form == "plain" else f" {item.form}"
        return f"%{value} {item.name}: {item.kind} {item.dtype}[{shape}]{form} {item.nbytes} B"

    def show_op(self, index: int) -> str:
        """One op as a line of a program."""
        op = self.ops[index]
        made = ", ".join("_" if value is None else f"%{value}" for value in op.outputs)
        args = [_show_arg(arg) for arg in op.args] + [f"{key}={_show_arg(arg)}" for key, arg in op.kwargs]
        line = f"{op.name}: {made + ' = ' if made else ''}{op.target}({', '.join(args)})"
        line += "".join(f" updates %{old} to %{new}" for new, old in op.updates)
        line += " random" if op.random else ""
        line += "".join(f" in {channel}" for channel in op.channels if channel != GENERATOR)
        line += " optional" if op.optional else ""
        line += f" forgotten by {op.forgotten}" if op.forgotten else ""
        return line + f"  # {' '.join(filter(None, (op.phase, op.module, op.source)))}"

    def save(self, path: str | os.PathLike[str], *, force: bool = False) -> None:
        """Save to one text file."""
        from lowtide.graph.encode import encode_graph

        files.save(path, "graph", encode_graph(self), force=force)

    @staticmethod
    def load(path: str | os.PathLike[str], *, own: Collection[str] = ()) -> Graph:
        """Load what `save` wrote; a file may call torch's ops, and those of the namespaces named here."""
        from lowtide.graph.decode import read_graph  # which makes what is defined here

        return read_graph(path, own)


def waits(ops: Sequence[Op], over: Sequence[Iterable[tuple[int, int]]]) -> tuple[frozenset[int], ...]:
    """For each op those that must run before it: makers of what it reads, readers of what it writes over, channels.

    `over` has for each op the pairs (new, old) that count as written over. What is in a channel keeps the order that
    it has there, and what is in any stays before or after a handover.
    """
    maker: dict[int, int] = {}
    readers: dict[int, list[int]] = {}
    for index, op in enumerate(ops):
        for value in op.makes:
            maker.setdefault(value, index)
        for value in () if op.optional else op.reads:
            readers.setdefault(value, []).append(index)
    found = []
    last: dict[str, int] = {}  # channel -> the op that was the last in it
    for index, op in enumerate(ops):
        before = {maker.get(value, -1) for value in op.reads}
        before.update(*(readers.get(old, ()) for _, old in over[index]))
        channels = last.keys() if HANDOVER in op.channels else {*op.channels, HANDOVER} if op.channels else set()
        before |= {last[channel] for channel in channels if channel in last}
        last |= dict.fromkeys(op.channels, index)
        found.append(frozenset(before - {-1, index}))
    return tuple(found)


def _reads_in(arg: Arg) -> Iterator[Read]:
    if isinstance(arg, Read):
        yield arg
    elif isinstance(arg, tuple):
        for item in arg:
            yield from _reads_in(item)


def _path(path: tuple[str | int, ...]) -> str:
    return " ".join(map(str, path))


def _at(home: Place) -> str:
    return "" if home == "device" else f" on {home}"


def _show_arg(arg: Arg) -> str:
    match arg:
        case Read(value, None):
            return f"%{value}"
        case Read(value, view):
            return f"%{value}~{view}"
        case Constant(_, name):
            return name
        case tuple():
            return "[" + ", ".join(map(_show_arg, arg)) + "]"
        case _:
            return repr(arg)
