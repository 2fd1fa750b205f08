"""What a kind of batch is made by, once the dataset and the sizes are known."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Make = Callable[[NDArray[np.int64], torch.Generator], Sequence[Tensor]]  # numbers of items, chance -> the leaves


@dataclass(frozen=True)
class Batches:
    """All batches that there are."""

    items: int  # images, sequences or sentence pairs in an epoch
    make: Make
    words: str  # what they are, for people
