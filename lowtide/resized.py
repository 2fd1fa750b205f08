"""The same step with other numbers of examples, captured when somebody asks: what passes that split a step compare."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lowtide import tree
from lowtide.graph import Graph


@dataclass(frozen=True)
class Resized:
    """A captured step, and how to capture it with fewer examples."""

    examples: int  # of the step as it is
    at: Callable[[int], Graph]  # the captured graph with the first so many of them


def examples_of(batch: tuple[Any, ...]) -> int | None:
    """How many examples a batch has: the first size that its tensors share; None where they do not."""
    leaves, _ = tree.flatten(batch)
    sizes = {leaf.shape[0] for leaf in leaves if len(getattr(leaf, "shape", ()))}
    return sizes.pop() if len(sizes) == 1 else None


def first_of(batch: tuple[Any, ...], size: int) -> tuple[Any, ...]:
    """The first examples of a batch."""
    leaves, structure = tree.flatten(batch)
    return tuple(structure.build([leaf[:size] if len(getattr(leaf, "shape", ())) else leaf for leaf in leaves]))
