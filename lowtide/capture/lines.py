"""What a line of Python reads: the globals, cells and attributes that its instructions load, and what for.

Nothing runs here: the instructions of a code object say it all. A container that a line only adds to (`losses.append`,
`log["loss"] = ...`) is not read by it.
"""

from __future__ import annotations

import dis
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import CodeType
from typing import Literal

Use = Literal["read", "add", "add inside"]  # "add inside": to a container that is an item of this one

ADDERS = frozenset(("append", "appendleft", "extend", "add", "update"))  # methods that answer nothing
GLOBALS = frozenset(("LOAD_GLOBAL", "LOAD_NAME"))
CELLS = frozenset(("LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_DEREF"))
ATTRIBUTES = frozenset(("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR"))
STORES = {"STORE_ATTR": "attribute", "STORE_GLOBAL": "global", "STORE_NAME": "global", "STORE_DEREF": "cell"}
# How many items instructions take from the stack; of all others nothing is known here.
TAKEN = {
    "LOAD_CONST": 0,
    "LOAD_FAST": 0,
    "LOAD_FAST_CHECK": 0,
    "LOAD_FAST_BORROW": 0,
    "LOAD_GLOBAL": 0,
    "LOAD_DEREF": 0,
    "LOAD_ATTR": 1,
    "UNARY_NEGATIVE": 1,
    "FORMAT_SIMPLE": 1,
    "CONVERT_VALUE": 1,
    "FORMAT_WITH_SPEC": 2,
    "BINARY_OP": 2,
    "BINARY_SUBSCR": 2,
    "STORE_SUBSCR": 3,
}
FAR = 64  # instructions that are followed at most


@dataclass(frozen=True, slots=True)
class Load:
    """One name that a line loads."""

    kind: Literal["global", "cell", "attribute"]
    name: str
    use: Use
    then: tuple[str, ...]  # the attributes that are taken of it at once: of `F.relu(x)`, ("relu",)


@dataclass(frozen=True, slots=True)
class Store:
    """One name that a line stores to."""

    kind: Literal["global", "cell", "attribute"]
    name: str


@dataclass(frozen=True, slots=True)
class Line:
    """What the instructions of one line load and store."""

    loads: tuple[Load, ...]
    stores: tuple[Store, ...]
    imports: tuple[tuple[str, tuple[str, ...]], ...] = ()  # modules, and the names that are taken of each


@lru_cache(maxsize=16384)
def lines(code: CodeType) -> Mapping[int, Line]:
    """For each line number of a code object what stands there."""
    instructions = list(dis.get_instructions(code))
    loads: dict[int, list[Load]] = {}
    stores: dict[int, list[Store]] = {}
    imports: dict[int, list[tuple[str, tuple[str, ...]]]] = {}
    for place, instruction in enumerate(instructions):
        number = instruction.positions.lineno if instruction.positions is not None else None
        if number is None:
            continue
        loads.setdefault(number, [])
        if instruction.opname in STORES:
            stores.setdefault(number, []).append(Store(STORES[instruction.opname], instruction.argval))  # type: ignore[arg-type]
        if instruction.opname == "IMPORT_NAME":
            imports.setdefault(number, []).append((instruction.argval, _taken(instructions, place)))
        kind = _kind(instruction)
        if kind is not None:
            then = _attributes(instructions, place)
            loads[number].append(Load(kind, instruction.argval, _use(instructions, place), then))
    return {
        number: Line(tuple(found), tuple(stores.get(number, ())), tuple(imports.get(number, ())))
        for number, found in loads.items()
    }


@lru_cache(maxsize=16384)
def attributes(code: CodeType) -> frozenset[str]:
    """Every attribute that a code object may load, its strings included, for they may be names."""
    names = {item.argval for item in dis.get_instructions(code) if item.opname in ATTRIBUTES}
    return frozenset(names) | _strings(code.co_consts)


def _strings(constants: object) -> frozenset[str]:
    found: set[str] = set()
    for item in constants if isinstance(constants, (tuple, frozenset)) else ():
        if isinstance(item, str) and all(part.isidentifier() for part in item.split(".")):
            found.update(item.split("."))
        elif isinstance(item, (tuple, frozenset)):
            found |= _strings(item)
    return frozenset(found)


def _kind(instruction: dis.Instruction) -> Literal["global", "cell", "attribute"] | None:
    name = instruction.opname
    if name in GLOBALS:
        return "global"
    if name in CELLS:
        return "cell"
    return "attribute" if name in ATTRIBUTES else None


def _taken(instructions: list[dis.Instruction], place: int) -> tuple[str, ...]:
    """The names that are taken of the module that the instruction at this place imports."""
    found = []
    for instruction in instructions[place + 1 :]:
        if instruction.opname == "IMPORT_FROM":
            found.append(instruction.argval)
        elif not instruction.opname.startswith("STORE_"):
            break
    return tuple(found)


def _attributes(instructions: list[dis.Instruction], place: int) -> tuple[str, ...]:
    found = []
    for instruction in instructions[place + 1 :]:
        if instruction.opname not in ("LOAD_ATTR", "LOAD_METHOD"):
            break
        found.append(instruction.argval)
    return tuple(found)


def _use(instructions: list[dis.Instruction], place: int) -> Use:
    """What becomes of the container that the instruction at this place loads."""
    if _adds(instructions, place + 1):
        return "add"
    above = 0  # items on the stack above the container
    for number in range(place + 1, min(len(instructions), place + 1 + FAR)):
        instruction = instructions[number]
        taken = TAKEN.get(instruction.opname)
        if taken is None:
            return "read"
        if taken > above:
            if instruction.opname == "STORE_SUBSCR" and above == 1:
                return "add"
            inner = instruction.opname == "BINARY_SUBSCR" and above == 1 and _adds(instructions, number + 1)
            return "add inside" if inner else "read"
        above += dis.stack_effect(instruction.opcode, instruction.arg)
    return "read"


def _adds(instructions: list[dis.Instruction], place: int) -> bool:
    """Whether the instruction at this place takes a method that adds to a container."""
    if place >= len(instructions):
        return False
    instruction = instructions[place]
    return instruction.opname in ("LOAD_METHOD", "LOAD_ATTR") and instruction.argval in ADDERS
