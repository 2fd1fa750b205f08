"""Which lines of a program stand for which calls of an update: each works on every element alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from lowtide.graph import Arg, Op

Number = Arg  # a number, or a read of one that is known when the step runs


class Unknown(Exception):
    """A call that has no lines of its own."""


class Region(Protocol):
    """The ops that become one program, while it is written."""

    def tensor(self, arg: Arg) -> int | None:
        """The register of an argument that is a tensor; None: it is a number."""

    def take(self) -> int:
        """A register that nobody uses."""

    def give_back(self, register: int) -> None:
        """Let others use it."""

    def result(self, op: Op) -> int:
        """The register of the one tensor that a call makes."""

    def line(self, name: str, to: int, a: int = 0, b: int = 0, number: Number = None) -> None:
        """Write a line."""

    def calculate(self, name: str, op: Op, a: Arg, b: Arg = None, number: Number = None) -> None:
        """Write one line for a call: its result from one or two tensors, and a number."""


def _scaled(name: str) -> Callable[[Region, Op], None]:
    def lines(region: Region, op: Op) -> None:
        alpha = dict(op.kwargs).get("alpha", 1)
        if region.tensor(op.args[1]) is not None:
            region.calculate(name, op, op.args[0], op.args[1], alpha)
        elif name == "add" and alpha == 1:
            region.calculate("add number", op, op.args[0], number=op.args[1])
        else:
            raise Unknown

    return lines


def _product(name: str) -> Callable[[Region, Op], None]:
    def lines(region: Region, op: Op) -> None:
        if op.kwargs or len(op.args) != 2:
            raise Unknown
        if region.tensor(op.args[1]) is not None:
            region.calculate(name, op, op.args[0], op.args[1])
        else:
            region.calculate(f"{name} number", op, op.args[0], number=op.args[1])

    return lines


def _plus(name: str) -> Callable[[Region, Op], None]:
    """To add a product or a quotient, times a number."""

    def lines(region: Region, op: Op) -> None:
        value = dict(op.kwargs).get("value", 1)
        one, other, to = (region.tensor(arg) for arg in (op.args[1], op.args[2], op.args[0]))
        if one is None or other is None or to is None:
            raise Unknown
        scratch = region.take()
        region.line(name, scratch, one, other)
        region.line("add", region.result(op), to, scratch, value)
        region.give_back(scratch)

    return lines


def _one(name: str) -> Callable[[Region, Op], None]:
    def lines(region: Region, op: Op) -> None:
        if len(op.args) != 1:
            raise Unknown
        region.calculate(name, op, op.args[0])

    return lines


def _two(name: str) -> Callable[[Region, Op], None]:
    return lambda region, op: region.calculate(name, op, op.args[0], op.args[1])


LINES: dict[str, Callable[[Region, Op], None]] = {
    "aten.lerp.Scalar": lambda region, op: region.calculate("lerp", op, op.args[0], op.args[1], op.args[2]),
    "aten.maximum.default": _two("maximum"),
    "aten.minimum.default": _two("minimum"),
    "aten.maximum.out": _two("maximum"),
    "aten.minimum.out": _two("minimum"),
}
LINES |= {f"aten.{name}.Tensor": _scaled(line) for name, line in (("add", "add"), ("sub", "subtract"))}
LINES |= {f"aten.{name}.Tensor": _product(line) for name, line in (("mul", "multiply"), ("div", "divide"))}
LINES |= {f"aten.{name}.default": _plus(line) for name, line in (("addcmul", "multiply"), ("addcdiv", "divide"))}
LINES |= {
    f"aten.{name}.default": _one(line)
    for name, line in (("sqrt", "root"), ("neg", "negate"), ("abs", "absolute"), ("sign", "sign"), ("clone", "copy"))
}
LINES |= {f"{target.rpartition('.')[0]}_.{target.rpartition('.')[2]}": lines for target, lines in LINES.items()}
