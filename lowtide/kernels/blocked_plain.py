"""What the ops on blocked tensors make, by torch's own kernels on plain copies: what they must equal to the bit.

It is what they are tried against, and what runs where they can't.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lowtide.kernels.opaque import BLOCK, blocked, plain

aten = torch.ops.aten
Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]
NormGradients = tuple[Tensor, Tensor, Tensor, Tensor | None]


def to_blocked(x: Tensor) -> Tensor:
    """Plain to blocked."""
    images, channels, height, width = x.shape
    cut = x.reshape(images, channels // BLOCK, BLOCK, height, width)
    return cut.permute(0, 1, 3, 4, 2).contiguous().flatten(0, 1).permute(0, 3, 1, 2)


def from_blocked(x: Tensor, images: int) -> Tensor:
    """Blocked to plain."""
    return x.contiguous().view(images, -1, *x.shape[2:])


def convolution(x: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> Tensor:
    """A convolution."""
    *sizes, images, is_blocked = rest
    made: Tensor = aten.convolution.default(plain(x, images) if is_blocked[0] else x, weight, bias, *sizes, 1)
    return blocked(made) if is_blocked[1] else made


def convolution_backward(
    gradient: Tensor, x: Tensor, weight: Tensor, bias_sizes: list[int] | None, *rest: Any
) -> Gradients:
    """The gradients of a convolution."""
    *sizes, mask, images, is_blocked = rest
    seen = plain(gradient, images) if is_blocked[1] else gradient
    read = plain(x, images) if is_blocked[0] else x
    first, *others = aten.convolution_backward.default(seen, read, weight, bias_sizes, *sizes, 1, mask)
    return (blocked(first) if mask[0] and is_blocked[0] else first, *others)


def norm(
    parts: Sequence[Tensor],
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
    eps: float,
    added: Tensor | None,
    rectified: bool,
    images: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Batch norm over the batch, with what is added to it and the ReLU behind it."""
    running = (running_mean, running_var)
    made, mean, scale = aten.native_batch_norm.default(_one(parts, images), weight, bias, *running, True, momentum, eps)
    made = made if added is None else made.add_(plain(added, images))
    return blocked(made.relu_() if rectified else made), mean, scale


def norm_backward(
    gradient: Tensor,
    more: Tensor | None,
    parts: Sequence[Tensor],
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    scale: Tensor,
    result: Tensor | None,
    again: bool,
    keeps: bool,
    eps: float,
    images: int,
) -> NormGradients:
    """The gradients of batch norm, and the gradient that counted behind the ReLU."""
    seen, read = plain(gradient, images), _one(parts, images)
    seen = seen if more is None else seen.add_(plain(more, images))
    if again:
        result = aten.native_batch_norm.default(read, weight, bias, None, None, True, 0.0, eps)[0]
    elif result is not None:
        result = plain(result, images)
    seen = seen if result is None else aten.threshold_backward.default(seen, result, 0)
    rest = (None, None, mean, scale, True, 0.0, [True, True, True])
    first, *others = aten.native_batch_norm_backward.default(seen, read, weight, *rest)
    one, two = (torch.zeros_like(mean) if other is None else other for other in others)
    return blocked(first), one, two, blocked(seen) if keeps else None


def _one(parts: Sequence[Tensor], images: int) -> Tensor:
    seen = [plain(part, images) for part in parts]
    return seen[0] if len(seen) == 1 else torch.cat(seen, 1)


def pool(x: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    """The largest of each window, and where it is."""
    *sizes, images = rest
    made, where = aten.max_pool2d_with_indices.default(plain(x, images), *sizes)
    return blocked(made), blocked(where)


def pool_backward(gradient: Tensor, where: Tensor, size: list[int], *rest: Any) -> Tensor:
    """The gradient of what windows were taken of."""
    *sizes, images = rest
    seen, places = plain(gradient, images), plain(where, images)
    unread = seen.new_empty((images, seen.shape[1], *size))
    return blocked(aten.max_pool2d_with_indices_backward.default(seen, unread, *sizes, places))


def mean_pool(x: Tensor, *rest: Any) -> Tensor:
    """The mean of each window."""
    *sizes, images = rest
    return blocked(aten.avg_pool2d.default(plain(x, images), *sizes))


def mean_pool_backward(gradient: Tensor, size: list[int], *rest: Any) -> Tensor:
    """The gradient of what means were taken of."""
    *sizes, images = rest
    seen = plain(gradient, images)
    unread = seen.new_empty((images, seen.shape[1], *size))
    return blocked(aten.avg_pool2d_backward.default(seen, unread, *sizes))


def cat(parts: list[Tensor], images: int) -> Tensor:
    """Channels one behind the other."""
    return blocked(torch.cat([plain(part, images) for part in parts], 1))


def cut(x: Tensor, start: int, stop: int, images: int) -> Tensor:
    """A part of the channels."""
    return blocked(plain(x, images)[:, start:stop])


def add_up(one: Tensor, other: Tensor, starts: Sequence[int], channels: int, images: int) -> Tensor:
    """The sum of as many channels of two tensors."""
    pairs = zip((one, other), starts, strict=True)
    first, second = (plain(tensor, images)[:, start : start + channels] for tensor, start in pairs)
    return blocked(first + second)
