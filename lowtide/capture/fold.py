"""Values that depend on no batch, parameter or draw: what a step makes of Python's own numbers is known at once.

Its code may look into such a tensor as it likes: a count of positions, a mask that a model makes for itself.
"""

from __future__ import annotations

from typing import Any

import torch

from lowtide.capture.books import Books
from lowtide.graph import Arg, Constant, Op, Read
from lowtide.kernels import constant, overload
from lowtide.private import without_modes

LARGEST = 2**24  # bytes of a tensor that is made for real while a step is traced


class Unknown(Exception):
    """A value depends on what is known only when the step runs."""


class Fold:
    """Makes such values for real, from what the recorder has written down so far."""

    def __init__(self, ops: list[Op], books: Books) -> None:
        self.ops, self.books = ops, books
        self.known: dict[int, torch.Tensor] = {}  # values made of Python's numbers, and what was made of them
        self._makers: dict[int, int] = {}
        self._seen = 0  # ops whose results are among the makers

    def number(self, read: Read) -> Any:
        """The one number in a tensor; None where nobody knows it yet."""
        found = self.tensor(read)
        with without_modes():
            return None if found is None else found.item()

    def tensor(self, read: Read) -> torch.Tensor | None:
        """What is in a tensor; None where nobody knows it yet."""
        for index in range(self._seen, len(self.ops)):
            self._makers |= dict.fromkeys(self.ops[index].makes, index)
        self._seen = len(self.ops)
        try:
            with without_modes(), torch.no_grad():
                return self._read(read)
        except (Unknown, RecursionError):
            return None

    def call(self, func: Any, args: tuple[Arg, ...], kwargs: tuple[tuple[str, Arg], ...]) -> Any:
        """What a call returns on what is recorded so; None where nobody knows it yet."""
        self.tensor(Read(-1))
        try:
            with without_modes(), torch.no_grad():
                return func(*(self._argument(arg) for arg in args), **{key: self._argument(arg) for key, arg in kwargs})
        except (Unknown, RecursionError):
            return None

    def _read(self, read: Read) -> torch.Tensor:
        made = self._value(read.value)
        if read.view is None:
            return made
        view = self.books.views[read.view]
        seen = overload(view.target)(self._read(Read(read.value, view.parent)), *map(self._argument, view.args))
        found: torch.Tensor = seen if view.item is None else seen[view.item]
        return found

    def _value(self, value: int) -> torch.Tensor:
        if value in self.known:
            return self.known[value]
        maker = self._makers.get(value)
        if maker is None or self.books.values[value].nbytes > LARGEST or self.books.values[value].kind == "scalar":
            raise Unknown
        op = self.ops[maker]
        if op.channels or op.target.startswith(("operator.", "lowtide.")):
            raise Unknown
        # What is written over is another value afterwards, so a copy of it is written to.
        copies = {old: (new, self._value(old).clone()) for new, old in op.updates}
        held = {old: self.known.get(old) for old in copies}
        self.known |= {old: tensor for old, (_, tensor) in copies.items()}
        try:
            arguments = [self._argument(arg) for arg in op.args]
            results = overload(op.target)(*arguments, **{key: self._argument(arg) for key, arg in op.kwargs})
        finally:
            for old, before in held.items():
                if before is None:
                    del self.known[old]
                else:
                    self.known[old] = before
        self.known |= dict(copies.values())
        listed = list(results) if isinstance(results, (tuple, list)) else [results]
        self.known |= {made: tensor for made, tensor in zip(op.outputs, listed, strict=False) if made is not None}
        return self.known[value]

    def _argument(self, arg: Arg) -> Any:
        match arg:
            case Read():
                return self._read(arg)
            case Constant(family, name):
                return constant(family, name)
            case tuple():
                return [self._argument(item) for item in arg]
            case _:
                return arg
