"""Python numbers that are known only when the step runs: recorded as ops, replayed in double as eager computes them.

The tensor library carries such numbers as `torch.SymFloat` around a node; the nodes here write arithmetic down, answer
comparisons of hyperparameters from the value that they have now, and refuse every decision that depends on the data.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, NoReturn

import torch

from lowtide.captured import Guard
from lowtide.errors import CaptureError

# Method of a node -> the operator that the program runs.
BINARY = {
    "add": "add",
    "sub": "sub",
    "mul": "mul",
    "float_truediv": "truediv",
    "float_pow": "pow",
    "mod": "mod",
}
UNARY = {"neg": "neg", "pos": "pos"}
COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")


class ScalarNode:
    """A number of the running step, known by its value in the graph; or a constant that is about to meet one."""

    def __init__(
        self,
        value: int | None,
        record: Callable[[str, tuple[Any, ...]], torch.SymFloat],
        refuse: Callable[[str], NoReturn],
        *,
        constant: float | None = None,
        hint: float | None = None,
        path: tuple[str | int, ...] = (),
        guards: list[Guard] | None = None,
    ) -> None:
        self.value, self.record, self.refuse = value, record, refuse
        self.constant = constant
        self.hint = hint  # of a hyperparameter: its value now
        self.path = path
        self.guards = guards if guards is not None else []

    def is_int(self) -> bool:
        return False

    def is_float(self) -> bool:
        return True

    def is_bool(self) -> bool:
        return False

    def is_constant(self) -> bool:
        return False

    def wrap_float(self, number: float) -> ScalarNode:
        return ScalarNode(None, self.record, self.refuse, constant=number)

    wrap_int = wrap_bool = wrap_float

    def bool_(self) -> bool:
        return _AnswerNode(self, "ne", 0.0).bool_()

    def guard_float(self, file: str, line: int) -> NoReturn:
        self.refuse("needs the number behind a tensor")

    guard_int = guard_bool = guard_float

    def __getattr__(self, name: str) -> Any:
        if name in UNARY:
            return lambda: self.record(f"operator.{UNARY[name]}", (self,)).node
        if name in BINARY:
            return lambda other: self.record(f"operator.{BINARY[name]}", (self, other)).node
        if name in COMPARISONS:
            return lambda other: _AnswerNode(self, name, other.constant)
        if name.startswith("_"):
            raise AttributeError(name)
        return lambda *_: self.refuse(f"calls {name} on a number that is known only when the step runs")

    def _graph_repr(self) -> str:
        return f"%{self.value}"

    __repr__ = __str__ = _graph_repr


class _AnswerNode:
    """The answer to a comparison: known for hyperparameters, refused for data."""

    def __init__(self, node: ScalarNode, comparison: str, other: float | None) -> None:
        self.node, self.comparison, self.other = node, comparison, other

    def is_int(self) -> bool:
        return False

    is_float = is_constant = is_int

    def is_bool(self) -> bool:
        return True

    def bool_(self) -> bool:
        if self.node.hint is None or self.other is None:
            self.node.refuse("decides something by a number that depends on the data")
        answer = bool(getattr(operator, self.comparison)(self.node.hint, self.other))
        self.node.guards.append(Guard(self.node.path, self.comparison, float(self.other), answer))
        return answer

    def guard_bool(self, file: str, line: int) -> bool:
        return self.bool_()

    def expect_true(self, file: str, line: int) -> bool:
        return True  # torch's own sanity checks, such as a base of a power that is not negative


def refuse_data(what: str, where: str) -> NoReturn:
    """Raise the error for control flow that depends on the data."""
    raise CaptureError(
        f"{where + ': ' if where else ''}the step {what}, so its ops are not the same at every step.",
        hint="compute it with tensor ops (torch.where, masks, clamp), or move it out of the step.",
    )
