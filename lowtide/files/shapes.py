"""What the fields of a file must look like, as data: a shape takes a piece of JSON and gives what it stands for.

A shape raises `Misshapen` with the path of the piece at fault, what was expected there and what was found. Nothing is
converted on the quiet: a flag is no number, and a number is no text.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args, get_origin, get_type_hints

LARGEST = 2**63 - 1  # of a whole number: what an int64 can hold
SHOWN = 60  # letters of what was found instead

Shape = Callable[[Any], Any]


class Misshapen(ValueError):
    """A piece of a file that is not what it should be; `path` leads to it, outermost step first."""

    def __init__(self, expected: str, found: Any) -> None:
        super().__init__(expected)
        self.expected, self.found = expected, found
        self.path: list[str | int] = []

    def __str__(self) -> str:
        steps = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in self.path).lstrip(".")
        found = _shown(self.found)
        return f"{steps or 'the whole'} should be {self.expected}, not {found}"


@dataclass(frozen=True)
class Absent:
    """A field that may be left out, and what it is then."""

    shape: Shape
    default: Any


def text(data: Any) -> str:
    """A text that can be printed anywhere: half a surrogate pair cannot."""
    if type(data) is not str or any("\ud800" <= letter <= "\udfff" for letter in data if letter > "\u00ff"):
        raise Misshapen("a text", data)
    return data


def flag(data: Any) -> bool:
    """True or false."""
    if type(data) is not bool:
        raise Misshapen("true or false", data)
    return data


def whole(least: int = 0, most: int = LARGEST) -> Shape:
    """A whole number within these limits."""

    def decode(data: Any) -> int:
        if type(data) is not int or not least <= data <= most:
            raise Misshapen(f"a whole number from {least} to {most}", data)
        return data

    return decode


def amount(data: Any) -> float:
    """A number of zero or more, such as seconds."""
    if type(data) not in (int, float) or not 0 <= data < 1e300:
        raise Misshapen("a number of zero or more", data)
    return float(data)


def real(data: Any) -> float:
    """Any finite number."""
    if type(data) not in (int, float) or not -1e300 < data < 1e300:
        raise Misshapen("a number", data)
    return float(data)


def word(words: Sequence[str]) -> Shape:
    """One of these words."""

    def decode(data: Any) -> str:
        if type(data) is not str or data not in words:
            raise Misshapen(f"one of {', '.join(words)}", data)
        return data

    return decode


BY_TYPE: Mapping[Any, Shape] = {str: text, bool: flag, int: whole(-LARGEST), float: real}


def maybe(shape: Shape) -> Shape:
    """This, or nothing."""
    return lambda data: None if data is None else shape(data)


def either(first: Shape, second: Shape) -> Shape:
    """This, or else that."""

    def decode(data: Any) -> Any:
        try:
            return first(data)
        except Misshapen:
            return second(data)

    return decode


def many(shape: Shape) -> Shape:
    """A list of these."""

    def decode(data: Any) -> tuple[Any, ...]:
        if type(data) is not list:
            raise Misshapen("a list", data)
        return tuple(_inside(shape, item, place) for place, item in enumerate(data))

    return decode


def row(*shapes: Shape, more: Sequence[Shape] = (), into: Callable[..., Any] = lambda *items: items) -> Shape:
    """A list with one of each, and what is made of them; those of `more` may be left out."""
    known = (*shapes, *more)

    def decode(data: Any) -> Any:
        if type(data) is not list or not len(shapes) <= len(data) <= len(known):
            raise Misshapen(f"a list of {len(shapes)}{f' to {len(known)}' if more else ''}", data)
        return into(*(_inside(known[place], item, place) for place, item in enumerate(data)))

    return decode


def record(fields: Mapping[str, Shape | Absent], *, into: Callable[..., Any] = dict) -> Shape:
    """An object with these fields and no others, and what is made of them."""
    needed = {name for name, shape in fields.items() if not isinstance(shape, Absent)}

    def decode(data: Any) -> Any:
        if type(data) is not dict or not needed <= data.keys() <= fields.keys():
            raise Misshapen(f"an object with {', '.join(fields)}", data)
        found = {}
        for name, shape in fields.items():
            if not isinstance(shape, Absent):
                found[name] = _inside(shape, data[name], name)
            else:
                found[name] = _inside(shape.shape, data[name], name) if name in data else shape.default
        return into(**found)

    return decode


def mapping(shape: Shape, *, key: Shape = text) -> Shape:
    """An object with any names, all of the same shape."""

    def decode(data: Any) -> dict[str, Any]:
        if type(data) is not dict:
            raise Misshapen("an object", data)
        return {key(name): _inside(shape, item, name) for name, item in data.items()}

    return decode


def fields_of(kind: type, **more: Shape) -> Shape:
    """An object with the fields of a dataclass, each by its type, and these besides."""
    types = get_type_hints(kind)
    return record({**{field.name: _of_type(types[field.name]) for field in dataclasses.fields(kind)}, **more})


def _of_type(kind: Any) -> Shape:
    if kind in BY_TYPE:
        return BY_TYPE[kind]
    inner = [part for part in get_args(kind) if part not in (type(None), Ellipsis)]
    assert len(inner) == 1, f"no shape for {kind}"
    return (many if get_origin(kind) is tuple else maybe)(_of_type(inner[0]))


def _inside(shape: Shape, data: Any, step: str | int) -> Any:
    try:
        return shape(data)
    except Misshapen as fault:
        fault.path.insert(0, step)
        raise


def _shown(data: Any) -> str:
    """The beginning of a piece of JSON, however large or deep it is."""
    if type(data) in (list, dict):
        return f"a list of {len(data)}" if type(data) is list else f"an object with {len(data)} fields"
    if type(data) is int and abs(data) > LARGEST:
        return f"a number of {data.bit_length()} bits"
    shown = ascii(data)
    return shown if len(shown) <= SHOWN else f"{shown[:SHOWN]}..."
