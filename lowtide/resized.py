"""The same step with other numbers of examples, captured when somebody asks: what passes that split a step compare."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

from lowtide import tree
from lowtide.graph import Graph

Capture = Callable[[tuple[Any, ...]], Graph]


@dataclass(frozen=True)
class Resized:
    """A captured step, and how to capture it with fewer examples, or with fewer of what its examples are rows of."""

    graph: Graph  # the step as it is
    examples: int  # that it has
    at: Callable[[int], Graph]  # the captured graph with so many
    along: Callable[[], tuple[Resized, ...]] = tuple  # the step with shorter rows, tokens for one; what may be tried
    known: dict[str, Any] = field(default_factory=dict, compare=False)  # what was found out about it


def resizable(graph: Graph, batch: tuple[Any, ...], capture: Callable[[tuple[Any, ...]], Graph]) -> Resized | None:
    """A captured step at other sizes of its batch; None where nobody knows what an example is."""
    count = examples_of(batch)
    if count is None:
        return None
    at = cache(lambda size: capture(resized(batch, size)))
    return Resized(graph, count, at, cache(partial(_shorter, graph, batch, capture)))


def _shorter(graph: Graph, batch: tuple[Any, ...], capture: Callable[[tuple[Any, ...]], Graph]) -> tuple[Resized, ...]:
    """The step with shorter rows of tokens: those of each length, and those that are read from the second token on."""
    tensors = [leaf for leaf in tree.flatten(batch)[0] if len(_shape(leaf)) > 1]
    tokens = [leaf for leaf in tensors if not leaf.is_floating_point() and leaf.shape[1] > 2]
    lengths = dict.fromkeys(leaf.shape[1] for leaf in tokens)
    return tuple(
        Resized(graph, length - more, cache(partial(_capture_shorter, batch, capture, length, more)))
        for length in reversed(lengths)
        for more in (0, 1)
    )


def _capture_shorter(
    batch: tuple[Any, ...], capture: Callable[[tuple[Any, ...]], Graph], length: int, more: int, size: int
) -> Graph:
    """The step whose rows of this length have so many tokens, besides those that are only read or only told."""
    leaves, structure = tree.flatten(batch)
    shorter = [
        _places(leaf, size + more, 1) if len(_shape(leaf)) > 1 and leaf.shape[1] == length else leaf for leaf in leaves
    ]
    return capture(tuple(structure.build(shorter)))


def _shape(leaf: Any) -> tuple[int, ...]:
    """The sizes of a tensor or an array; an object of another kind has none, whatever it answers."""
    kind: Any = type(leaf)
    return getattr(leaf, "shape", ()) if tree.is_leaf(kind) else ()


def examples_of(batch: tuple[Any, ...]) -> int | None:
    """How many examples a batch has: the first size that its tensors share; None where they do not."""
    leaves, _ = tree.flatten(batch)
    sizes = {leaf.shape[0] for leaf in leaves if len(_shape(leaf))}
    return sizes.pop() if len(sizes) == 1 else None


def resized(batch: tuple[Any, ...], size: int) -> tuple[Any, ...]:
    """A batch of so many examples: the first of these, over and over where there are fewer."""
    leaves, structure = tree.flatten(batch)
    return tuple(structure.build([_places(leaf, size, 0) if len(_shape(leaf)) else leaf for leaf in leaves]))


def _places(leaf: Any, size: int, dim: int) -> Any:
    """So many places of a tensor along a dimension: the first ones, over and over where there are fewer."""
    count, before = leaf.shape[dim], (slice(None),) * dim
    if size > count:
        return leaf[(*before, [place % count for place in range(size)])]
    return leaf[(*before, slice(size))].contiguous() if dim else leaf[:size]
