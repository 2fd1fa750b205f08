"""A plan is a program of four instructions; recompute, order, in-place, layout and offload are arrangements of them."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from lowtide import files
from lowtide.errors import FileError
from lowtide.graph import Graph

Place = Literal["device", "host", "disk"]


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
    bound_seconds: float  # of one step: no program within the budget is quicker
    least_bound: int  # bytes: no program has a lower peak
    planning_seconds: float

    @property
    def bound(self) -> float:
        """The least overhead that any program within the budget can have, as the same fraction."""
        return self.bound_seconds / self.base_seconds - 1 if self.base_seconds else 0.0

    @property
    def overhead(self) -> float:
        """The extra time as a fraction of the step's seconds without recomputation."""
        return self.seconds / self.base_seconds - 1 if self.base_seconds else 0.0

    def save(self, path: str | os.PathLike[str], *, force: bool = False) -> None:
        """Save to one text file: the program, and beside it what it promises."""
        promise = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "program"}
        files.save(path, "program", {**_encode_program(self.program), "promise": promise}, force=force)

    @staticmethod
    def load(path: str | os.PathLike[str], graph: Graph) -> Plan:
        """Load what `save` wrote, for this graph; whether it still keeps its promise is for the judge to say."""
        data: Any = files.load(path, "program")
        program = _decode_program(data, path, graph)
        if "promise" not in data:
            raise FileError(f"{path} holds a program without what it promises.", hint="plan again.")
        try:
            told = data["promise"]
            return Plan(
                program=program,
                budget=None if told["budget"] is None else int(told["budget"]),
                peak=int(told["peak"]),
                seconds=float(told["seconds"]),
                base_seconds=float(told["base_seconds"]),
                bound_seconds=float(told["bound_seconds"]),
                least_bound=int(told["least_bound"]),
                planning_seconds=float(told["planning_seconds"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise FileError(f"{path} holds no valid plan: {error!r}", hint="plan again.") from error


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
    try:
        program = Program(str(data["graph"]), tuple(_decode(row) for row in data["instructions"]), int(data["arena"]))
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise FileError(f"{path} holds no valid program: {error!r}", hint="plan again.") from error
    if program.graph != graph.fingerprint:
        raise FileError(
            f"{path} is a program for graph {program.graph[:12]}, not for this one, {graph.fingerprint[:12]}.",
            hint="plan this graph.",
        )
    return program


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


def _decode(row: Any) -> Instruction:
    match row:
        case ["run", int(op), list(at), list(over), bool(again)]:
            return Run(op, tuple(map(int, at)), tuple((int(made), int(read)) for made, read in over), again)
        case ["free", int(value), str(place)]:
            return Free(value, _place(place))
        case ["copy", int(value), str(place), int(at)]:
            return Copy(value, _place(place), at)
        case ["wait", int(value), str(place)]:
            return Wait(value, _place(place))
        case _:
            raise ValueError(f"no instruction: {row!r}")


def _place(word: str) -> Any:
    if word not in get_args(Place):
        raise ValueError(f"{word!r} is no place")
    return word
