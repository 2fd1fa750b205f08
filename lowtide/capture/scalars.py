"""Python numbers that are known only when the step runs: recorded as ops, replayed as eager computes them.

The tensor library carries such numbers as `torch.SymFloat` around a node; the nodes here write arithmetic down, of
integers too, which torch would ask for their values.
Numbers that the caller has (hyperparameters, attributes, draws) have a value now: comparisons are
answered from it, and the answer is remembered. Decisions that depend on the data are refused, but for the larger or
smaller of two numbers, which is a number like any other.
"""

from __future__ import annotations

import builtins
import operator
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import reduce
from typing import Any, NoReturn

import torch

from lowtide.errors import CaptureError
from lowtide.guards import APPLY, Comparison, Expression
from lowtide.private import symbolic

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
ALWAYS_FLOAT = ("truediv",)
TEXT = "turns a number into text that is known only when the step runs"
LATER = "a number that is known only when the step runs"
ASIDE = 'or plan the parts of the model that have none of it: lowtide.attach(model, budget, fallback="modules").'


class ScalarNode:
    """A number of the running step, known by its value in the graph; or a constant that is about to meet one."""

    # Integers are those that came as such, and what sums and products make of them.
    def __init__(
        self,
        value: int | None,
        record: Callable[[str, tuple[Any, ...]], Any],
        refuse: Callable[[str], NoReturn],
        *,
        integer: bool = False,
        constant: float | int | None = None,
        hint: float | int | None = None,
        expression: Expression | None = None,
        comparisons: list[Comparison] | None = None,
    ) -> None:
        self.value, self.record, self.refuse, self.integer = value, record, refuse, integer
        self.constant = constant
        self.hint = hint  # what it is now, where that does not depend on the data
        self.expression = Expression(None, constant=constant) if constant is not None else expression
        self.comparisons = comparisons if comparisons is not None else []

    def is_int(self) -> bool:
        return False

    def is_float(self) -> bool:
        return True

    is_bool = is_constant = is_int

    def wrap_float(self, number: float) -> ScalarNode:
        return ScalarNode(
            None,
            self.record,
            self.refuse,
            integer=float(number).is_integer(),
            constant=number,
            hint=number,
            comparisons=self.comparisons,
        )

    wrap_int = wrap_bool = wrap_float

    def bool_(self) -> bool:
        return _AnswerNode(self, "ne", self.wrap_float(0)).bool_()

    def guard_float(self, file: str, line: int) -> float:
        """The number itself: the program is then one for this number only."""
        if self.hint is None:
            self.refuse("needs the number behind a tensor")
        _AnswerNode(self, "eq", self.wrap_float(self.hint)).bool_()
        return self.hint

    guard_int = guard_bool = guard_float

    def __getattr__(self, name: str) -> Any:
        if name in UNARY:
            return lambda: self.record(f"operator.{UNARY[name]}", (self,))
        if name in BINARY:
            return lambda other: self.record(f"operator.{BINARY[name]}", (self, other))
        if name in COMPARISONS:
            return lambda other: _AnswerNode(self, name, other)
        if name.startswith("_"):
            raise AttributeError(name)
        return lambda *_: self.refuse(f"calls {name} on {LATER}")

    def _graph_repr(self) -> NoReturn:
        self.refuse(TEXT)


class _AnswerNode:
    """The answer to a comparison: known for numbers that the caller has, refused for data."""

    def __init__(self, node: ScalarNode, comparison: str, other: ScalarNode) -> None:
        self.node, self.comparison, self.other = node, comparison, other

    def is_int(self) -> bool:
        return False

    is_float = is_constant = is_int

    def is_bool(self) -> bool:
        return True

    def bool_(self) -> bool:
        node, other = self.node, self.other
        if node.hint is None or other.hint is None:
            node.refuse("decides something by a number that depends on the data")
        assert node.expression is not None
        assert other.expression is not None
        answer = bool(getattr(operator, self.comparison)(node.hint, other.hint))
        node.comparisons.append(Comparison(node.expression, self.comparison, other.expression, answer))
        return answer

    def guard_bool(self, file: str, line: int) -> bool:
        return self.bool_()

    def expect_true(self, file: str, line: int) -> bool:
        return True  # torch's own sanity checks, such as a base of a power that is not negative


@contextmanager
def extremes() -> Iterator[None]:
    """A context in which max and min of numbers that depend on the data are written down rather than decided."""
    kept = {name: getattr(builtins, name) for name in ("max", "min")}
    thread = threading.get_ident()  # others go on beside it

    def noted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if len(args) > 1 and not kwargs and threading.get_ident() == thread and _depend_on_data(args):
                return reduce(lambda one, other: _extreme(name, one, other), args)
            return function(*args, **kwargs)

        return call

    try:
        for name, function in kept.items():
            setattr(builtins, name, noted(name, function))
        yield
    finally:
        for name, function in kept.items():
            setattr(builtins, name, function)


def _depend_on_data(args: tuple[Any, ...]) -> bool:
    """Whether all of these are numbers, and one is known only when the step runs."""
    numbers = [arg.node if isinstance(arg, torch.SymFloat) else arg for arg in args]
    later = any(isinstance(number, ScalarNode) and number.hint is None for number in numbers)
    return later and all(isinstance(number, ScalarNode) or type(number) in (int, float) for number in numbers)


def _extreme(name: str, one: Any, other: Any) -> Any:
    node = next(number.node for number in (one, other) if isinstance(number, torch.SymFloat))
    pair = tuple(item.node if isinstance(item, torch.SymFloat) else node.wrap_float(item) for item in (one, other))
    return symbolic(node.record(f"operator.{name}", pair))


def result_of(target: str, operands: tuple[ScalarNode, ...]) -> tuple[bool, Any, Expression | None]:
    """Of arithmetic: whether it gives an integer, its value now, and how it is computed; None where data has a say."""
    name = target.removeprefix("operator.")
    integer = all(node.integer for node in operands) and name not in ALWAYS_FLOAT
    if any(node.hint is None for node in operands):
        return integer, None, None
    expressions = tuple(node.expression for node in operands if node.expression is not None)
    return integer, APPLY[name](*(node.hint for node in operands)), Expression(name, expressions)


def refuse_data(what: str, where: str) -> NoReturn:
    """Raise the error for control flow that depends on the data, or text that does."""
    at = f"{where}: " if where else ""
    if what == TEXT:
        raise CaptureError(
            f"{at}the step {what}.", hint="return the number from the step, and format it after the step."
        )
    if what.endswith(LATER):
        raise CaptureError(
            f"{at}the step {what}.",
            hint="return the number from the step and do it after the step, or do it with tensor ops.",
        )
    raise CaptureError(
        f"{at}the step {what}, so its ops are not the same at every step.",
        hint=f"compute it with tensor ops (torch.where, masks, clamp), or move it out of the step.\n{ASIDE}",
    )
