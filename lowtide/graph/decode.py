"""A graph from its file: the shape of every field, and then whether it all holds together."""

from __future__ import annotations

import os
from collections.abc import Collection
from typing import Any, get_args

from lowtide import files
from lowtide.errors import FileError
from lowtide.files.shapes import Absent, Misshapen, either, flag, many, mapping, maybe, record, row, text, whole, word
from lowtide.graph import (
    GENERATOR,
    Alternative,
    Arg,
    Constant,
    Form,
    Graph,
    Input,
    Kind,
    Op,
    Output,
    Phase,
    Place,
    Read,
    Role,
    Value,
    View,
)
from lowtide.graph.sound import DEPTH, LEAST, MOST, foreign
from lowtide.graph.targets import NAMESPACES

HINT = "capture the step again."
ODD_FLOATS = ("inf", "-inf", "nan")


def read_graph(path: str | os.PathLike[str], own: Collection[str]) -> Graph:
    """The graph of a file, which may call torch's ops and those of these namespaces."""
    graph: Graph = files.shaped(path, files.load(path, "graph"), GRAPH, kind="graph", hint=HINT)
    fault = graph.fault or foreign(graph, {*NAMESPACES, *own})
    if fault is not None:
        raise FileError(f"{path} holds no valid graph: {fault}.", hint=HINT)
    return graph


def decode_arg(data: Any, *, depth: int = 0) -> Arg:
    """An argument from JSON."""
    match data:
        case list() if depth <= DEPTH:
            return tuple(decode_arg(item, depth=depth + 1) for item in data)
        case {"read": read, **others} if not others:
            found: Arg = READ(read)
            return found
        case {"constant": constant, **others} if not others:
            named: Arg = CONSTANT(constant)
            return named
        case {"complex": str(written), **others} if not others:
            return _complex(written)
        case {"float": str(written), **others} if not others and written in ODD_FLOATS:
            return float(written)
        case int() if LEAST <= data <= MOST:
            return data
        case None | bool() | float():
            return data
        case str():
            return text(data)
        case _:
            raise Misshapen("an argument", data)


def _complex(written: str) -> complex:
    try:
        return complex(written)
    except (ValueError, OverflowError) as error:
        raise Misshapen("a complex number", written) from error


def _arguments(data: Any) -> tuple[Arg, ...]:
    if type(data) is not list:
        raise Misshapen("a list of arguments", data)
    return tuple(map(decode_arg, data))


def _named(data: Any) -> tuple[tuple[str, Arg], ...]:
    return tuple(mapping(decode_arg)(data).items())


def _op(*, random: bool, channels: tuple[str, ...], **rest: Any) -> Op:
    return Op(channels=(GENERATOR, *channels) if random else channels, **rest)


number = whole()
path_of = many(either(text, whole(-1)))
READ = row(number, maybe(number), into=Read)
CONSTANT = row(text, text, into=Constant)
VIEW = row(maybe(number), text, _arguments, maybe(number), into=View)
VALUE = row(
    *(text, number, word(get_args(Kind)), number, text, many(number), many(number), whole(-1)),
    more=(word(get_args(Form)),),
    into=Value,
)
_place = word(get_args(Place))
INPUT = row(number, path_of, flag, more=(_place,), into=Input)
OUTPUT = row(number, word(get_args(Role)), path_of, maybe(number), more=(_place,), into=Output)
OP = record(
    {
        "name": text,
        "target": text,
        "args": _arguments,
        "kwargs": _named,
        "outputs": many(maybe(number)),
        "updates": many(row(number, number)),
        "detachable": flag,
        "random": flag,
        "channels": Absent(many(text), ()),
        "optional": Absent(flag, False),
        "phase": word(get_args(Phase)),
        "module": text,
        "source": text,
    },
    into=_op,
)
ALTERNATIVE = row(
    *(number, number, _place, whole(-1), many(number), many(row(number, number))),
    into=Alternative,
)
GRAPH = record(
    {
        "device": text,
        "generator_bytes": number,
        "notes": many(text),
        "views": many(VIEW),
        "values": many(VALUE),
        "inputs": many(INPUT),
        "outputs": many(OUTPUT),
        "ops": many(OP),
        "alternatives": Absent(many(ALTERNATIVE), ()),
    },
    into=Graph,
)
