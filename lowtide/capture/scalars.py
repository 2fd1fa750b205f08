"""Python numbers that are known only when the step runs: recorded as ops, replayed in double as eager computes them."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, NoReturn

import torch

from lowtide.captured import Guard
from lowtide.errors import CaptureError

BINARY = ("add", "sub", "mul", "truediv", "floordiv", "pow", "mod")
UNARY = ("neg", "pos", "abs")
COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")


class ScalarNode:
    """What the tensor library carries for us: the value's number, and its hint when it is a hyperparameter."""

    def __init__(self, value: int, record: Callable[..., Scalar], refuse: Callable[[str], NoReturn]) -> None:
        self.value = value
        self.record = record
        self.refuse = refuse
        self.hint: float | None = None
        self.path: tuple[str | int, ...] = ()
        self.guards: list[Guard] = []

    def is_int(self) -> bool:
        return False

    def is_float(self) -> bool:
        return True

    def is_bool(self) -> bool:
        return False

    def is_constant(self) -> bool:
        return False

    def guard_float(self, file: str, line: int) -> NoReturn:
        self.refuse("needs the number behind a tensor")

    guard_int = guard_bool = guard_float

    def _graph_repr(self) -> str:
        return f"%{self.value}"

    __repr__ = __str__ = _graph_repr


class Scalar(torch.SymFloat):
    """A number of the running step: arithmetic on it becomes ops, and a decision on it is refused."""

    node: ScalarNode

    def __init__(self, node: ScalarNode) -> None:
        self.node = node

    def __bool__(self) -> bool:
        if self.node.hint is None:
            self.node.refuse("decides something by a number that depends on the data")
        return bool(self != 0)

    def __float__(self) -> float:
        self.node.refuse("needs the number behind a tensor")

    __int__ = __index__ = __round__ = __trunc__ = __float__

    def __hash__(self) -> int:
        return id(self.node)

    def __repr__(self) -> str:
        return repr(self.node)

    def __format__(self, spec: str) -> str:
        self.node.refuse("prints a number that is known only when the step runs")


def _install() -> None:
    def binary(name: str) -> None:
        target = f"operator.{name}"
        setattr(Scalar, f"__{name}__", lambda self, other: self.node.record(target, self, other))
        setattr(Scalar, f"__r{name}__", lambda self, other: self.node.record(target, other, self))

    def unary(name: str) -> None:
        setattr(Scalar, f"__{name}__", lambda self: self.node.record(f"operator.{name}", self))

    def comparison(name: str) -> None:
        compare = getattr(operator, name)

        def decide(self: Scalar, other: Any) -> bool:
            if self.node.hint is None or not isinstance(other, (int, float)):
                self.node.refuse("decides something by a number that depends on the data")
            answer = bool(compare(self.node.hint, other))
            self.node.guards.append(Guard(self.node.path, name, float(other), answer))
            return answer

        setattr(Scalar, f"__{name}__", decide)

    for name in BINARY:
        binary(name)
    for name in UNARY:
        unary(name)
    for name in COMPARISONS:
        comparison(name)


_install()


def refuse_data(what: str, where: str) -> NoReturn:
    """Raise the error for control flow that depends on the data."""
    raise CaptureError(
        f"{where or 'the step'}: {what}, so its ops are not the same at every step.",
        hint="compute it with tensor ops (torch.where, masks, clamp), or move it out of the step.",
    )
