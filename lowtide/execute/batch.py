"""A batch as it is given: its leaves, and the key of what it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lowtide import tree
from lowtide.captured import Captured, TensorSpec
from lowtide.tree import Tree

PLAIN = frozenset({bool, int, float, complex, str, bytes, type(None)})  # leaves of these are part of the key

Key = tuple[Any, ...]  # the structure and, for each leaf, what a program can't do without knowing


@dataclass(frozen=True, eq=False, slots=True)
class Batch:
    """The leaves of a batch, its structure and its key."""

    leaves: list[Any]
    structure: Tree
    key: Key

    @classmethod
    def of(cls, arguments: tuple[Any, ...]) -> Batch:
        """The batch of these arguments."""
        leaves, structure = tree.flatten(arguments)
        return cls(leaves, structure, (structure, *[_known(leaf) for leaf in leaves]))


def key_of(captured: Captured) -> Key:
    """The key of the batches that a step was captured for."""
    return (captured.batch, *[_known_of(leaf) for leaf in captured.batch_leaves])


def is_settled(leaves: Sequence[Any]) -> bool:
    """Whether batches with the key of these leaves are alike in all that a program assumes about them."""
    return all(isinstance(leaf, TensorSpec) or type(leaf) in PLAIN for leaf in leaves)


def _known(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        try:
            stride = leaf.stride() if leaf.numel() > 1 else ()  # else it says nothing
            return leaf.shape, leaf.dtype, leaf.device, stride, leaf.requires_grad
        except RuntimeError:  # a sparse or nested one has none; whether it can be taken is for others to say
            return type(leaf)
    kind = type(leaf)
    if kind is float or kind is complex:
        return kind, leaf, repr(leaf)  # 0.0 equals -0.0, and makes other numbers
    return (kind, leaf) if kind in PLAIN else kind


def _known_of(leaf: Any) -> Any:
    """The same of a leaf as it is kept with a capture."""
    if isinstance(leaf, TensorSpec):
        stride = leaf.stride if torch.Size(leaf.shape).numel() > 1 else ()
        return leaf.shape, getattr(torch, leaf.dtype), torch.device(leaf.device), stride, leaf.requires_grad
    return _known(leaf)
