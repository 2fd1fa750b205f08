"""What a call makes, found by calling it on tensors without contents: no shape rule is written down anywhere here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lowtide.graph import Arg, Constant, Op, Read, Value, View
from lowtide.kernels import constant, overload, returns_one
from lowtide.kernels.described import described

UNKNOWN = 0.5  # for a number that is known only when the step runs


@dataclass(frozen=True)
class Form:
    """A tensor that a call makes."""

    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    nbytes: int  # of the whole storage


class Shapes:
    """The values of a graph, which may grow meanwhile, as tensors without contents."""

    def __init__(self, values: Sequence[Value], views: Sequence[View]) -> None:
        self.values, self.views = values, views
        self.known: dict[tuple[Any, ...], torch.Tensor] = {}
        self._forms: dict[tuple[Any, ...], list[Form | None]] = {}  # by the call and what it reads

    def is_tensor(self, read: Read) -> bool:
        """Whether this is a tensor rather than a number."""
        return self.values[read.value].kind != "scalar"

    def tensor(self, read: Read) -> torch.Tensor:
        """What a call sees of a value."""
        value = self.values[read.value]
        key = (value.dtype, value.shape, value.stride, read.view)
        if key not in self.known:
            if read.view is None:
                dtype = getattr(torch, value.dtype)
                made = torch.empty_strided(value.shape, value.stride, dtype=dtype, device="meta")
            else:
                view = self.views[read.view]
                parent = self.tensor(Read(read.value, view.parent))
                made = overload(view.target)(parent, *(self.argument(arg) for arg in view.args))
                made = made if view.item is None else made[view.item]
            self.known[key] = made
        return self.known[key]

    def argument(self, arg: Arg) -> Any:
        """An argument as the call gets it."""
        match arg:
            case Read():
                # an alias: calls such as `transpose_` change what they are given
                return self.tensor(arg).detach() if self.is_tensor(arg) else UNKNOWN
            case Constant(family, name):
                return torch.device("meta") if family == "device" else constant(family, name)
            case tuple():
                return [self.argument(item) for item in arg]
            case _:
                return arg

    def made(self, op: Op) -> list[Form | None]:
        """What a call makes, for each of its results; None for what is no tensor."""
        key = (op.target, self._key(op.args), tuple((name, self._key(arg)) for name, arg in op.kwargs))
        if key not in self._forms:  # a step in many parts calls the same over and over
            args = [self.argument(arg) for arg in op.args]
            kwargs = {name: self.argument(arg) for name, arg in op.kwargs}
            results = described(overload(op.target))(*args, **kwargs)
            self._forms[key] = [_form(result) for result in ([results] if returns_one(op.target) else results or ())]
        return self._forms[key]

    def _key(self, arg: Arg) -> Any:
        """What a call sees of an argument, such that equal ones are seen alike: 1 is not 1.0."""
        match arg:
            case Read():
                value = self.values[arg.value]
                return (value.kind == "scalar", value.dtype, value.shape, value.stride, arg.view)
            case tuple():
                return tuple(map(self._key, arg))
            case _:
                return (type(arg), arg)


def _form(result: Any) -> Form | None:
    if not isinstance(result, torch.Tensor):
        return None
    dtype = str(result.dtype).removeprefix("torch.")
    return Form(dtype, tuple(result.shape), tuple(result.stride()), result.untyped_storage().nbytes())
