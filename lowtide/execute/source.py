"""A program as Python source: one line an op, explicit `del`, loops where it is long, nothing decided while it runs.

Before each op it writes the number of its instruction into `at[0]`: the allocator reads it there, and so does who wants
to know how far a step came that failed. A step with a handover is a generator, which yields there, and where results
leave. A collective is started where its op is, and waited for before the first instruction that is about what it makes.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch

from lowtide import kernels
from lowtide.device import Device
from lowtide.errors import ProgramError
from lowtide.execute.departures import Departure
from lowtide.execute.loops import roll
from lowtide.execute.slots import goes_home
from lowtide.graph import Arg, Constant, Graph, Op, Output, Read
from lowtide.kernels import collectives
from lowtide.private import bare_kernel
from lowtide.program import Copy, Free, Program, Run, Wait, exists

FILE = "<lowtide program>"  # as which tracebacks name it


def generate(
    graph: Graph,
    program: Program,
    device: Device,
    stops: Iterable[Departure] = (),
    dismissed: Mapping[int, tuple[int, ...]] | None = None,
) -> tuple[Callable[..., Any], str]:
    """The function that runs the program on a list of inputs, with the device's own kernels, and its source.

    At each of the stops it yields what leaves there, and after the instructions given it lets go of what is dismissed;
    in place of both it returns None at its end. Lists that come and go at a yield are for the receiver to clear.
    """
    if program.graph != graph.fingerprint:
        raise ProgramError("wrong graph", "the program belongs to another graph than the captured step.")
    if graph.fault is not None:
        raise ProgramError("unsound", f"the graph can't be run: {graph.fault}.")
    for output in graph.outputs:
        if output.home != "device" and output.role != "input":
            what = f"%{output.value} {graph.values[output.value].name} is to be on the {output.home}"
            raise ProgramError("away from home", f"{what}; only what becomes of an input can be left there.")
    for number, instruction in enumerate(program.instructions):
        if not exists(instruction, graph):
            raise ProgramError("no such", f"instruction {number} names what the graph lacks.", instruction=number)
    writer = _Writer(graph, program, device, stops, dismissed or {})
    source = writer.write()
    namespace = dict(writer.names)
    exec(compile(source, FILE, "exec"), namespace)
    return namespace["run"], source


@dataclass
class _Tensor:
    """A variable that holds a value, and the variables that hold views of it."""

    name: str
    views: dict[Any, str] = field(default_factory=dict)


@dataclass
class _Home:
    """The caller's own storage of an input."""

    name: str  # the variable that holds it
    content: int  # the value whose content is there; it stays when the value is freed, for nobody else writes there
    persistent: bool  # the caller still holds it after the step
    comes: int = -1  # the last instruction that copies a value back to it


class _Writer:
    """Writes the source of one program."""

    def __init__(
        self,
        graph: Graph,
        program: Program,
        device: Device,
        stops: Iterable[Departure],
        dismissed: Mapping[int, tuple[int, ...]],
    ) -> None:
        self.stops = {stop.instruction: stop.outputs for stop in stops}
        self.dismissed = dismissed
        self.gone: set[int] = set()  # outputs that have left, by place
        self.graph = graph
        self.device = device
        self.program = program
        self.lines: list[str] = []
        self.names: dict[str, Any] = {}  # global name -> kernel or constant
        self.known: dict[Any, str] = {}  # kernel or constant -> its global name
        self.held: dict[int, _Tensor] = {}  # value on the device -> its variable
        self.count = 0
        self.homes: dict[int, _Home] = {}  # the caller's storages
        self.in_flight: dict[int, str] = {}  # value that a collective still makes -> the variable that it was given
        self.repeats: defaultdict[int, int] = defaultdict(int)  # random op -> repeated runs that are still to come
        for instruction in program.instructions:
            if isinstance(instruction, Run) and instruction.again and graph.ops[instruction.op].random:
                self.repeats[instruction.op] += 1

    def write(self) -> str:
        for item in self.graph.inputs:
            if item.home != "device":
                continue  # its place has it
            self.held[item.value] = _Tensor(self.fresh())
            storage = self.graph.values[item.value].storage
            self.homes[storage] = _Home(self.held[item.value].name, item.value, item.persistent)
        for number, instruction in enumerate(self.program.instructions):
            match instruction:
                case Copy(value, "device", -1) if self.graph.values[value].storage in self.homes:
                    self.homes[self.graph.values[value].storage].comes = number
        names = [self.held[item.value].name if item.home == "device" else "_" for item in self.graph.inputs]
        inputs = "".join(f"{name}, " for name in names)
        self.emit(f"({inputs}) = inputs" if inputs else "pass")
        self.emit("inputs.clear()")
        for number, instruction in enumerate(self.program.instructions):
            self.arrive(instruction)
            if isinstance(instruction, Run | Copy):
                self.emit(f"at[0] = {number}")
            match instruction:
                case Run(op) if self.graph.ops[op].target == kernels.HANDOVER:
                    self.hand_over(instruction, self.dismissed.get(number, ()))
                case Run():
                    self.run(instruction)
                case Free(value, "device"):
                    self.drop(value, number)
                case Free(value, place):
                    self.emit(f"places.free({value}, {place!r})")
                case Copy(value, "device", offset):
                    self.load(value, offset)
                case Copy(value, place) if goes_home(self.graph, value, place):
                    storage = self.graph.values[value].storage
                    self.emit(f"places.store_home({value}, {place!r}, {self.held[value].name}, {storage})")
                case Copy(value, place):
                    part = self.graph.values[value].storage in self.graph.lasting_storages
                    self.emit(f"places.store({number}, {value}, {place!r}, {self.held[value].name}, part={part})")
                case Wait(value, place):
                    self.emit(f"places.wait({value}, {place!r})")
            self.let_go(self.dismissed.get(number, ()))
            if number in self.stops:
                self.leave(self.stops[number])
        self.land(self.in_flight)
        results = ", ".join(
            self.read(Read(output.value, output.view)) if self.stays(place, output) else "None"
            for place, output in enumerate(self.graph.outputs)
        )
        self.emit(f"return [{results}]")
        lines, tables = roll(self.lines)
        self.names.update(tables)
        return "\n".join(["def run(inputs, generator, places, at):", *(f"  {line}" for line in lines), ""])

    def stays(self, place: int, output: Output) -> bool:
        return output.home == "device" and place not in self.gone

    def leave(self, places: tuple[int, ...]) -> None:
        """Yield outputs, and hold them no longer."""
        outputs = [self.graph.outputs[place] for place in places]
        self.land(output.value for output in outputs if output.value in self.in_flight)
        names = [self.read(Read(output.value, output.view)) for output in outputs]
        self.emit(f"given = [{', '.join(names)}]")
        for value in dict.fromkeys(output.value for output in outputs):
            tensor = self.held.pop(value)
            self.emit(f"del {', '.join([tensor.name, *tensor.views.values()])}")
        self.emit("yield given")
        self.emit("del given")
        self.gone.update(places)

    def hand_over(self, instruction: Run, dismissed: tuple[int, ...]) -> None:
        """Yield what the caller's code gets, hold on to what is read later, and take what it comes back with."""
        op, over = self.graph.ops[instruction.op], dict(instruction.over)
        updated = self.to_update(op, over, set())
        outputs, others = (self.argument(arg, updated, set()) for arg in op.args[1:3])
        self.emit(f"given = {outputs} + {others}")
        self.note_updates(op, over, set(), updated)
        self.let_go(dismissed)
        self.emit("given = yield given")
        results, _ = self.results(op, {})
        if results:
            self.emit(f"{results} = given")
        self.emit("given.clear()")
        self.emit("del given")
        if "_" in results.replace(",", " ").split():
            self.emit("del _")

    def let_go(self, places: tuple[int, ...]) -> None:
        """Hold outputs no longer that nobody waits for."""
        values = dict.fromkeys(self.graph.outputs[place].value for place in places if place not in self.gone)
        for value in [value for value in values if value in self.held]:
            tensor = self.held.pop(value)
            self.emit(f"del {', '.join([tensor.name, *tensor.views.values()])}")
        self.gone.update(places)

    def run(self, instruction: Run) -> None:
        """One op: make its arguments, call it, name what it returns."""
        op, again, over = self.graph.ops[instruction.op], instruction.again, dict(instruction.over)
        skipped = {old for _, old in self.graph.effects[instruction.op]} if again else set()
        updated = self.to_update(op, over, skipped)
        arguments = [self.argument(arg, updated, skipped) for arg in op.args]
        arguments += [f"{key}={self.argument(arg, updated, skipped)}" for key, arg in op.kwargs]
        results, onto = self.results(op, over)
        target = self.constant(kernels.kernel(op.target, self.device.own_kernel))
        if onto is not None:
            itself = arguments[0] == onto.name
            found = kernels.overwriter(op.target, itself=itself) or kernels.overwriter(op.target, itself=False)
            overload, out = found or _no_overwriter(op)
            target, results = self.constant(bare_kernel(overload)), ""
            arguments += [] if out is None else [f"{out}={onto.name}"]
        if op.target == collectives.ALL_REDUCE:
            target = self.constant(collectives.start)
            self.in_flight[op.updates[0][0]] = arguments[0]
        call = f"{target}({', '.join(arguments)})"
        self.draw(instruction, f"{results} = {call}" if results else call)
        if "_" in results.replace(",", " ").split():
            self.emit("del _")
        self.note_updates(op, over, skipped, updated)

    def to_update(self, op: Op, over: dict[int, int], skipped: set[int]) -> dict[int, _Tensor]:
        """For each value that the op changes the tensor that the call writes to: its own, or a copy."""
        changed = [(new, old) for new, old in op.updates if old not in skipped]
        return {old: self.held[old] if over.get(new) == old else self.clone(old) for new, old in changed}

    def note_updates(self, op: Op, over: dict[int, int], skipped: set[int], updated: dict[int, _Tensor]) -> None:
        """After the call, the tensors that it wrote to have the new values."""
        for new, old in op.updates:
            if old not in skipped:
                if over.get(new) == old:
                    del self.held[old]
                elif new in self.held:  # made a second time, and dropped
                    self.emit(f"del {', '.join([updated[old].name, *updated[old].views.values()])}")
                    continue
                self.held[new] = updated[old]
                home = self.homes.get(self.graph.values[old].storage)
                if home is not None and home.name == updated[old].name:
                    home.content = new

    def arrive(self, instruction: Run | Free | Copy | Wait) -> None:
        """Before an instruction: wait for what collectives still make of the values that it is about."""
        if self.in_flight:
            touched = self.graph.reads[instruction.op] if isinstance(instruction, Run) else (instruction.value,)
            self.land(value for value in touched if value in self.in_flight)

    def land(self, values: Iterable[int]) -> None:
        """Wait for the collectives that make these values."""
        for value in [*values]:
            self.emit(f"{self.constant(collectives.wait)}({self.in_flight.pop(value)})")

    def results(self, op: Op, over: dict[int, int]) -> tuple[str, _Tensor | None]:
        """The left side of the call, and the tensor that it must write to when its result sits on an argument."""
        names, onto = [], None
        for value in op.outputs:
            if value in over:
                onto = self.reshaped(over[value], value)
                del self.held[over[value]]
                self.held[value] = onto
            elif value is None or value in self.held:
                names.append("_")
            else:
                self.held[value] = _Tensor(self.fresh())
                names.append(self.held[value].name)
        if onto is not None and len(op.outputs) != 1:
            raise ProgramError("illegal in-place", f"{op.name} has several results; only a single one can be placed")
        if all(name == "_" for name in names):
            return "", onto
        return (names[0] if kernels.returns_one(op.target) else ", ".join(names) + ",") if names else "", onto

    def reshaped(self, old: int, new: int) -> _Tensor:
        """The memory of an old value as a tensor of the new value's sizes."""
        value, before = self.graph.values[new], self.held[old]
        if (value.shape, value.stride) == (self.graph.values[old].shape, self.graph.values[old].stride):
            return before
        made = _Tensor(self.fresh())
        view = self.constant(bare_kernel(torch.ops.aten.as_strided.default))
        self.emit(f"{made.name} = {view}({before.name}, {list(value.shape)}, {list(value.stride)}, 0)")
        made.views["before"] = before.name  # the old names go when the new value goes
        made.views.update((("before", key), name) for key, name in before.views.items())
        return made

    def draw(self, instruction: Run, line: str) -> None:
        """The call itself; a random one keeps the generator's state for its repetitions, or goes back to it."""
        op = instruction.op
        if not self.graph.ops[op].random or not (instruction.again or self.repeats[op]):
            self.emit(line)
        elif not instruction.again:
            self.emit(f"s{op} = generator.get_state()")
            self.emit(line)
        else:
            self.emit("now = generator.get_state()")
            self.emit(f"generator.set_state(s{op})")
            self.emit(line)
            self.emit("generator.set_state(now)")
            self.emit("del now")
            self.repeats[op] -= 1
            if not self.repeats[op]:
                self.emit(f"del s{op}")

    def clone(self, value: int) -> _Tensor:
        """A copy of a value that an op is about to write to while somebody still needs it."""
        made = _Tensor(self.fresh())
        clone = self.constant(bare_kernel(torch.ops.aten.clone.default))
        self.emit(f"{made.name} = {clone}({self.held[value].name})")
        return made

    def drop(self, value: int, now: int) -> None:
        """Let go of a value; the caller's own storage keeps its name while something will be copied back to it."""
        tensor, storage = self.held.pop(value), self.graph.values[value].storage
        names = [tensor.name, *tensor.views.values()]
        home = self.homes.get(storage)
        if home is not None and home.name == tensor.name:
            if not home.persistent:
                del self.homes[storage]
            elif home.comes > now:
                names.remove(home.name)
        if names:
            self.emit(f"del {', '.join(names)}")

    def load(self, value: int, offset: int) -> None:
        """Copy a value to the device: to the caller's own storage if it is of one and not for the arena, or anew."""
        home = self.homes.get(self.graph.values[value].storage) if offset < 0 else None
        if home is None:
            self.held[value] = _Tensor(self.fresh())
            self.emit(f"{self.held[value].name} = places.load({value})")
            return
        self.held[value] = _Tensor(home.name)
        if home.content != value:
            self.emit(f"places.load_home({value}, {home.name})")
            home.content = value

    def argument(self, arg: Arg, updated: dict[int, _Tensor], skipped: set[int]) -> str:
        """An argument as source."""
        match arg:
            case Read(value, view):
                if value in skipped:
                    return "None"
                return self.seen(updated.get(value) or self.held[value], view)
            case Constant(family, name):
                return self.constant(kernels.constant(family, name))
            case tuple():
                return "[" + ", ".join(self.argument(item, updated, skipped) for item in arg) + "]"
            case str() | complex():
                return self.constant(arg)
            case float() if not math.isfinite(arg):
                return self.constant(arg)
            case _:  # a number that is plain, and so written as it is
                return repr(arg)

    def read(self, read: Read) -> str:
        return self.seen(self.held[read.value], read.view)

    def seen(self, tensor: _Tensor, view: int | None) -> str:
        """The variable that holds this view of the tensor, made when it is first needed."""
        missing = []
        while view is not None and view not in tensor.views:
            missing.append(view)
            view = self.graph.views[view].parent
        name = tensor.name if view is None else tensor.views[view]
        for number in reversed(missing):
            name = self.see(tensor, number, name)
        return name

    def see(self, tensor: _Tensor, view: int, parent: str) -> str:
        """Make one view from its parent's variable."""
        item = self.graph.views[view]
        args = ", ".join([parent, *(self.argument(arg, {}, set()) for arg in item.args)])
        call = f"{self.constant(kernels.kernel(item.target, self.device.own_kernel))}({args})"
        if item.item is not None:
            whole = (item.parent, item.target, item.args)
            if whole not in tensor.views:
                tensor.views[whole] = self.fresh()
                self.emit(f"{tensor.views[whole]} = {call}")
            call = f"{tensor.views[whole]}[{item.item}]"
        tensor.views[view] = self.fresh()
        self.emit(f"{tensor.views[view]} = {call}")
        return tensor.views[view]

    def constant(self, thing: Any) -> str:
        """The global name of a kernel or constant."""
        key = (type(thing), repr(thing)) if isinstance(thing, str | float | complex) else thing  # 0.0 equals -0.0
        if key not in self.known:
            self.known[key] = f"k{len(self.known)}"
            self.names[self.known[key]] = thing
        return self.known[key]

    def fresh(self) -> str:
        self.count += 1
        return f"t{self.count}"

    def emit(self, line: str) -> None:
        self.lines.append(line)


def _no_overwriter(op: Op) -> NoReturn:
    raise ProgramError("illegal in-place", f"{op.name}: {op.target} cannot write its result over an argument")
