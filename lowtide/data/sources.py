"""The batch of each training step, by its number alone: a run that is taken up again sees what it would have seen."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lowtide import tree
from lowtide.data.batches import Batches
from lowtide.data.datasets import find
from lowtide.data.images import image_batches
from lowtide.data.store import Stored, opened
from lowtide.data.tokens import pair_batches, text_batches
from lowtide.data.wanted import Wanted, wanted


@dataclass(frozen=True)
class Source:
    """The batches of a dataset, shaped like an example; call it with the number of a step, from 0."""

    name: str
    description: str  # one line for people
    seed: int
    items: int  # in an epoch
    size: int  # items in a batch
    batches: Batches
    leaves: Sequence[Tensor]  # of the example
    structure: tree.Tree  # of the example

    def __call__(self, step: int) -> tuple[Any, ...]:
        """Make the batch of this step: the next items of the epochs, each of which has an order of its own."""
        numbers = [self._item(number) for number in range(step * self.size, (step + 1) * self.size)]
        made = self.batches.make(np.array(numbers), _chance(self.seed, "step", step))
        leaves = [_shaped(leaf, value) for leaf, value in zip(self.leaves, made, strict=True)]
        batch: tuple[Any, ...] = self.structure.build(leaves)
        return batch

    def _item(self, number: int) -> int:
        epoch, place = divmod(number, self.items)
        return int(_order(self.seed, epoch, self.items)[place])


def source(name: str, target: str, example: tuple[Any, ...], *, seed: int = 0, held_out: bool = False) -> Source:
    """Make the batches of a dataset for a target with this example; those held out are for tests."""
    dataset = find(name)
    leaves, structure = tree.flatten(example)
    want = wanted(dataset, target, leaves)
    part = "test" if held_out else "train"
    batches = _batches(opened(dataset), part, want, leaves)
    return Source(
        name=name,
        description=f"{name}: {batches.words}",
        seed=seed,
        items=batches.items,
        size=leaves[0].size(0),
        batches=batches,
        leaves=tuple(leaves),
        structure=structure,
    )


def _batches(stored: Stored, part: str, want: Wanted, leaves: Sequence[Tensor]) -> Batches:
    if stored.dataset.content == "images":
        return image_batches(stored, part, want.kind, leaves, want.limits)
    if stored.dataset.content == "text":
        return text_batches(stored, part, want.kind, leaves, want.limits)
    return pair_batches(stored, part, leaves, want.limits)


@lru_cache(maxsize=4)
def _order(seed: int, epoch: int, items: int) -> NDArray[np.int64]:
    """The order of the items in an epoch."""
    return torch.randperm(items, generator=_chance(seed, "epoch", epoch)).numpy()


def _chance(seed: int, what: str, number: int) -> torch.Generator:
    """A generator of its own for each seed and each step or epoch; the global one is left alone."""
    mixed = hashlib.sha256(f"{seed} {what} {number}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(mixed[:4], "big"))


def _shaped(leaf: Tensor, value: Tensor) -> Tensor:
    """The value with the dtype, strides and device of the example's leaf."""
    made = torch.empty_strided(leaf.size(), leaf.stride(), dtype=leaf.dtype, device=leaf.device)
    return made.copy_(value)
