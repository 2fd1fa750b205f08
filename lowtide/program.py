"""A plan is a program of four instructions; recompute, order, in-place, layout and offload are arrangements of them."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
from typing import Any, get_args

from lowtide import files
from lowtide.errors import FileError
from lowtide.files.shapes import Absent, Misshapen, Shape, amount, flag, many, maybe, record, row, text, whole, word
from lowtide.graph import Graph, Place
from lowtide.rewrites import REWRITE, Rewrite, encode_rewrite


@dataclass(frozen=True, slots=True)
class Run:
    """Run the op; what it makes goes to these offsets of the arena, or sits on a value that dies here."""

    op: int
    at: tuple[int, ...] = ()  # offset of each value made, then of the temporaries; -1: outside the arena; (): no arena
    over: tuple[tuple[int, int], ...] = ()  # (made, read): made takes the bytes of read, which is gone then
    again: bool = False  # repeats an earlier run: replays its random numbers, leaves its lasting updates alone


@dataclass(frozen=True, slots=True)
class Free:
    """The bytes of the value in this place may be used again."""

    value: int
    place: Place = "device"


@dataclass(frozen=True, slots=True)
class Copy:
    """Start to copy the value: to the device from where it is, or from the device to another place."""

    value: int
    to: Place
    at: int = -1  # offset in the arena when `to` is the device; -1: outside


@dataclass(frozen=True, slots=True)
class Wait:
    """From here on the copy of the value in this place may be read."""

    value: int
    place: Place


Instruction = Run | Free | Copy | Wait


@dataclass(frozen=True)
class Program:
    """Instructions for the graph with this fingerprint; `arena` is the size of the block that offsets point into."""

    graph: str
    instructions: tuple[Instruction, ...]
    arena: int = 0  # bytes

    @property
    def copies(self) -> bool:
        """Whether anything is copied to another place, or from there."""
        return any(isinstance(item, Copy) for item in self.instructions)

    def show(self, graph: Graph, *, around: int | None = None) -> str:
        """The program as a person reads it, or only the lines around one instruction."""
        numbers = range(len(self.instructions))
        if around is not None:
            numbers = range(max(0, around - 3), min(len(self.instructions), around + 4))
        width = len(str(len(self.instructions)))
        return "\n".join(
            f"{'>' if number == around else ' '} {number:{width}} {show(self.instructions[number], graph)}"
            for number in numbers
        )

    def save(self, path: str | os.PathLike[str], *, force: bool = False) -> None:
        """Save to one text file."""
        files.save(path, "program", _encode_program(self), force=force)

    @staticmethod
    def load(path: str | os.PathLike[str], graph: Graph) -> Program:
        """Load what `save` wrote, for this graph; of a saved plan, its program."""
        return _decode_program(files.load(path, "program"), path, graph)


@dataclass(frozen=True)
class Plan:
    """A program with what it promises."""

    program: Program
    budget: int | None  # bytes of the whole step; None: as little as needed without recomputation
    peak: int  # bytes, predicted
    seconds: float  # of one step, predicted
    base_seconds: float  # of the step without recomputation
    bound_seconds: float  # of one step: no program without copies within the budget is quicker
    least_bound: int  # bytes: no program has a lower peak
    planning_seconds: float
    rewrites: tuple[Rewrite, ...] = ()  # that changed the captured step before it was planned; files may not say

    @property
    def bound(self) -> float:
        """The least overhead that any program without copies within the budget can have, as the same fraction."""
        return self.bound_seconds / self.base_seconds - 1 if self.base_seconds else 0.0

    @property
    def overhead(self) -> float:
        """The added time as a fraction of the step's seconds without recomputation."""
        return self.seconds / self.base_seconds - 1 if self.base_seconds else 0.0

    def save(self, path: str | os.PathLike[str], *, force: bool = False) -> None:
        """Save to one text file: the program, and beside it what it promises."""
        promise = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "program"}
        promise["rewrites"] = [encode_rewrite(rewrite) for rewrite in self.rewrites]
        files.save(path, "program", {**_encode_program(self.program), "promise": promise}, force=force)

    @staticmethod
    def load(path: str | os.PathLike[str], graph: Graph) -> Plan:
        """Load what `save` wrote, for this graph; whether it still keeps its promise is for the judge to say."""
        data: Any = files.load(path, "program")
        program = _decode_program(data, path, graph)
        if "promise" not in data:
            raise FileError(f"{path} holds a program without what it promises.", hint="plan again.")
        promise = files.shaped(path, data["promise"], PROMISE, kind="plan", hint="plan again.")
        return Plan(program=program, **promise)


def rewrites_of(path: str | os.PathLike[str]) -> tuple[Rewrite, ...]:
    """What a saved plan says was done to the captured step; nothing where the file is of before plans said so."""
    data: Any = files.load(path, "program")
    promise = data.get("promise") if isinstance(data, dict) else None
    rows = promise.get("rewrites", []) if isinstance(promise, dict) else []
    found: tuple[Rewrite, ...] = files.shaped(path, rows, many(REWRITE), kind="plan", hint="plan again.")
    return found


def show(instruction: Instruction, graph: Graph) -> str:
    """One instruction as a line."""
    match instruction:
        case Run(op, at, over, again):
            places = f" at {', '.join('outside' if offset < 0 else str(offset) for offset in at)}" if at else ""
            onto = "".join(f", %{made} over %{read}" for made, read in over)
            return f"run{' again' if again else ''} {graph.show_op(op)}{places}{onto}"
        case Free(value, place):
            return f"free %{value} {graph.values[value].name}" + ("" if place == "device" else f" on {place}")
        case Copy(value, to, offset):
            return f"copy %{value} {graph.values[value].name} to {to}" + ("" if offset < 0 else f" at {offset}")
        case Wait(value, place):
            return f"wait for %{value} {graph.values[value].name} on {place}"


def _encode_program(program: Program) -> dict[str, Any]:
    rows = [_encode(instruction) for instruction in program.instructions]
    return {"graph": program.graph, "arena": program.arena, "instructions": rows}


def _decode_program(data: Any, path: str | os.PathLike[str], graph: Graph) -> Program:
    """The program of a file, if it is one of this graph."""
    found = files.shaped(path, data, PROGRAM, kind="program", hint="plan again.")
    program = Program(found["graph"], found["instructions"], found["arena"])
    if program.graph != graph.fingerprint:
        raise FileError(
            f"{path} is a program for graph {program.graph[:12]}, not for this one, {graph.fingerprint[:12]}.",
            hint="plan this graph.",
        )
    for number, instruction in enumerate(program.instructions):
        if not exists(instruction, graph):
            raise FileError(
                f"{path} holds no valid program: instruction {number} is {instruction}; the graph has "
                f"{len(graph.ops)} ops, {len(graph.values)} values.",
                hint="plan again.",
            )
    return program


def exists(instruction: Instruction, graph: Graph) -> bool:
    """Whether an instruction is made of plain numbers and names, and the graph has what it names."""
    match instruction:
        case Run(op, _, over, again):
            values = [value for pair in over for value in pair]
            fine = type(op) is int and 0 <= op < len(graph.ops) and type(again) is bool
        case Free(value, place) | Copy(value, place) | Wait(value, place):
            values, fine = [value], type(place) is str and place in get_args(Place)
        case _:
            return False
    return fine and all(type(value) is int and 0 <= value < len(graph.values) for value in values)


def _encode(instruction: Instruction) -> list[Any]:
    match instruction:
        case Run(op, at, over, again):
            return ["run", op, list(at), [list(pair) for pair in over], again]
        case Free(value, place):
            return ["free", value, place]
        case Copy(value, to, at):
            return ["copy", value, to, at]
        case Wait(value, place):
            return ["wait", value, place]


def _instruction(data: Any) -> Instruction:
    """An instruction from JSON: its name, and what that has."""
    name = data[0] if type(data) is list and data else None
    if type(name) is not str or name not in INSTRUCTIONS:
        raise Misshapen(f"one of {', '.join(INSTRUCTIONS)}, with what it takes", data)
    made: Instruction = INSTRUCTIONS[name](data)
    return made


_number, _offset, _place = whole(), whole(-1), word(get_args(Place))
INSTRUCTIONS: dict[str, Shape] = {
    "run": row(
        *(text, _number, many(_offset), many(row(_number, _number)), flag),
        into=lambda _, *rest: Run(*rest),
    ),
    "free": row(text, _number, _place, into=lambda _, *rest: Free(*rest)),
    "copy": row(text, _number, _place, _offset, into=lambda _, *rest: Copy(*rest)),
    "wait": row(text, _number, _place, into=lambda _, *rest: Wait(*rest)),
}
PROGRAM = record(
    {
        "graph": text,
        "arena": _number,
        "instructions": many(_instruction),
        "promise": Absent(lambda data: data, None),
    }
)
PROMISE = record(
    {
        "budget": maybe(_number),
        "peak": _number,
        "seconds": amount,
        "base_seconds": amount,
        "bound_seconds": amount,
        "least_bound": _number,
        "planning_seconds": amount,
        "rewrites": Absent(many(REWRITE), ()),  # files from before there were any have none
    }
)
