"""What an op of ours that stands for torch's says of itself, so that it can be tried against torch's own.

An op is one `Own`; ops that are made of the same files are one `Family`, which `kernels` lists. Everything else asks
there: how the op is registered, what torch itself makes of the same arguments, and which answers of a trial still hold.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True)
class Own:
    """An op of ours: it takes no keywords, so that the same arguments go to its kernel and to torch's."""

    schema: str
    kernel: Callable[..., Any]
    reference: Callable[..., Any]  # torch's own kernels, given the same arguments: what ours must equal to the bit
    sizes: Callable[..., Any] | None = None  # the results as far as sizes go; None: the reference knows them, too
    belong: Callable[[list[Any]], None] = lambda given: None  # makes arguments fit each other that a trial made up
    operations: Callable[[Sequence[Any]], float] | None = None  # floating point ones, of what mixes many elements
    ready: Callable[[], None] = lambda: None  # does before a step what allocates when it is first done

    @property
    def name(self) -> str:
        """What torch knows it by."""
        return self.schema.partition("(")[0]

    @property
    def target(self) -> str:
        """What a graph calls it."""
        return f"lowtide.{self.name}.default"

    def define(self, registry: torch.library.Library) -> None:
        """Add the op to lowtide's."""
        registry.define(self.schema)
        registry.impl(self.name, self.kernel, "CPU")
        torch.library.register_fake(f"lowtide::{self.name}", self.sizes or self.reference, lib=registry)


@dataclass(frozen=True)
class Family:
    """Ops of ours that are made of the same files."""

    ops: tuple[Own, ...]
    files: tuple[Path, ...]  # with another letter in any of them all ops are tried, and measured, again

    @cached_property
    def made_of(self) -> str:
        """A digest of the files."""
        return hashlib.sha256(b"\0".join(path.read_bytes() for path in self.files)).hexdigest()


def same_bits(mine: Iterable[Any], theirs: Iterable[Any]) -> bool:
    """Whether two rows of results are equal in sizes, strides and every bit."""
    return all(
        (one is None and other is None)
        or (one.shape == other.shape and one.stride() == other.stride() and torch.equal(_bytes(one), _bytes(other)))
        for one, other in zip(mine, theirs, strict=True)
    )


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)
