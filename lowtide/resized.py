"""The same step with other numbers of examples, captured when somebody asks: what passes that split a step compare."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from lowtide import tree
from lowtide.graph import Graph


@dataclass(frozen=True)
class Resized:
    """A captured step, and how to capture it with fewer examples."""

    graph: Graph  # the step as it is
    examples: int  # that it has
    at: Callable[[int], Graph]  # the captured graph with so many
    known: dict[str, Any] = field(default_factory=dict, compare=False)  # what was found out about it


def examples_of(batch: tuple[Any, ...]) -> int | None:
    """How many examples a batch has: the first size that its tensors share; None where they do not."""
    leaves, _ = tree.flatten(batch)
    sizes = {leaf.shape[0] for leaf in leaves if len(getattr(leaf, "shape", ()))}
    return sizes.pop() if len(sizes) == 1 else None


def resized(batch: tuple[Any, ...], size: int) -> tuple[Any, ...]:
    """A batch of so many examples: the first of these, over and over where there are fewer."""
    leaves, structure = tree.flatten(batch)
    return tuple(structure.build([_rows(leaf, size) if len(getattr(leaf, "shape", ())) else leaf for leaf in leaves]))


def _rows(leaf: Any, size: int) -> Any:
    return leaf[:size] if size <= leaf.shape[0] else leaf[[row % leaf.shape[0] for row in range(size)]]
