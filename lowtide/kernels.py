"""From the names that a graph keeps to what torch has behind them."""

from __future__ import annotations

import operator
from typing import Any

import torch

from lowtide.errors import ProgramError

OPERATORS = frozenset({"add", "sub", "mul", "truediv", "floordiv", "pow", "mod", "neg", "pos", "abs"})
FAMILIES = frozenset({"dtype", "layout", "memory_format"})


def overload(target: str) -> Any:
    """The overload of torch.ops that a target names, such as `aten.mm.default`."""
    namespace, name, variant = target.split(".")
    try:
        return getattr(getattr(getattr(torch.ops, namespace), name), variant)
    except AttributeError as error:
        raise ProgramError("no such", f"this torch has no op {target}") from error


def kernel(target: str) -> Any:
    """What the generated code calls for a target."""
    namespace, _, name = target.partition(".")
    if namespace == "operator":
        if name not in OPERATORS:
            raise ProgramError("no such", f"no scalar op {target}")
        return getattr(operator, name)
    return overload(target)._op


def returns_one(target: str) -> bool:
    """Whether the call returns one thing rather than a tuple or a list."""
    if target.startswith("operator."):
        return True
    returns = overload(target)._schema.returns
    return len(returns) == 1 and str(returns[0].type) != "List[Tensor]"


def writes_to_out(target: str) -> Any:
    """The overload that writes its one result to `out=`, or None."""
    if target.startswith("operator.") or not target.startswith("aten."):
        return None
    functional = overload(target)
    packet = getattr(torch.ops.aten, functional._opname)
    expected = [(a.name, str(a.type)) for a in functional._schema.arguments]
    for name in packet.overloads():
        schema = getattr(packet, name)._schema
        outs = [a for a in schema.arguments if a.is_out]
        if len(outs) == 1 and [(a.name, str(a.type)) for a in schema.arguments if not a.is_out] == expected:
            return getattr(packet, name), outs[0].name
    return None


def constant(family: str, name: str) -> Any:
    """A name of the tensor library."""
    if family == "device":
        return torch.device(name)
    if family not in FAMILIES:
        raise ProgramError("no such", f"no constant of family {family}")
    return getattr(torch, name)
