"""What the schema of a call says, and what we know beyond it."""

from __future__ import annotations

from typing import Any

import torch

from lowtide import private
from lowtide.aten import UNDECLARED_WRITES


def name_of(func: Any) -> str:
    """The call as graphs name it."""
    return f"{func.namespace}.{private.base_name(func)}.{private.overload_name(func)}"


def written_by(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors that the call writes to."""
    found: list[torch.Tensor] = []
    undeclared = UNDECLARED_WRITES.get(name_of(func), ())
    for position, argument in enumerate(private.schema(func).arguments):
        declared = argument.alias_info is not None and argument.alias_info.is_write
        if not declared and position not in undeclared:
            continue
        given = args[position] if position < len(args) else kwargs.get(argument.name)
        if not declared and not args[5]:
            continue  # batch norm outside training leaves its statistics alone
        found += [item for item in (given if isinstance(given, (list, tuple)) else [given]) if item is not None]
    return found


def without_dropout(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call that may draw random numbers has its dropout at zero."""
    for position, argument in enumerate(private.schema(func).arguments):
        if argument.name == "dropout_p":
            given = args[position] if position < len(args) else kwargs.get("dropout_p", argument.default_value)
            return bool(given == 0)
    return False
