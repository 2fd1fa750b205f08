"""Batches of made-up data, the same at every call; the global random generator is left alone."""

import torch
from torch import Tensor

from lowtide.errors import UsageError


def generator() -> torch.Generator:
    """Make the source of an example's numbers."""
    return torch.Generator().manual_seed(0)


def labelled_images(batch: int, size: int, classes: int) -> tuple[Tensor, Tensor]:
    """Make square colour images and one label for each."""
    source = generator()
    images = torch.randn(batch, 3, size, size, generator=source)
    return images, torch.randint(classes, (batch,), generator=source)


def labelled_frames(batch: int, length: int, width: int, classes: int) -> tuple[Tensor, Tensor]:
    """Make sequences of vectors and one label for each vector."""
    source = generator()
    frames = torch.randn(batch, length, width, generator=source)
    return frames, torch.randint(classes, (batch, length), generator=source)


def next_tokens(batch: int, length: int, vocabulary: int) -> tuple[Tensor, Tensor]:
    """Make token sequences, and the same sequences one token later."""
    tokens = torch.randint(vocabulary, (batch, length + 1), generator=generator())
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def gapped_tokens(batch: int, length: int, vocabulary: int) -> tuple[Tensor, Tensor, Tensor]:
    """Make token sequences with gaps (token 0), the mask of what is no padding, and labels (-100: no gap)."""
    check_vocabulary(vocabulary)
    tokens = torch.randint(1, vocabulary, (batch, length), generator=generator())
    mask = torch.ones_like(tokens)
    mask[1::2, length - length // 8 :] = 0
    gaps = torch.zeros_like(mask)
    gaps[:, ::7] = 1
    labels = tokens.masked_fill(gaps * mask == 0, -100)
    return tokens.masked_fill(gaps == 1, 0), mask, labels


def check_vocabulary(vocabulary: int) -> None:
    """Refuse a vocabulary that has nothing but the token kept for gaps and padding."""
    if vocabulary < 2:
        raise UsageError(f"a vocabulary of {vocabulary} has only the token for gaps", hint="use 2 or more")


def check_image_size(batch: int, size: int, shrink: int) -> None:
    """Refuse images of which a net that shrinks them this much would leave too little to normalise."""
    if size < shrink:
        raise UsageError(
            f"size={size} is too small for a net that makes images {shrink} times smaller",
            hint=f"use size={shrink} or more",
        )
    if batch == 1 and size < 2 * shrink:
        raise UsageError(
            f"batch=1 with size={size} leaves one number for each channel, and BatchNorm needs two",
            hint=f"use batch=2 or size={2 * shrink}",
        )
