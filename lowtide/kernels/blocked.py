"""Ops on tensors in blocks of 16 channels: what stands between convolutions, without a conversion in between.

The convolutions are torch's own, which call oneDNN: there the layout saves what torch converts before and after each
of them. Each op has the bits of torch's on plain tensors where it was tried (see `trial`); `blocked_plain` says what
these are, and runs where a layout or a compiler is missing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lowtide.kernels import blocked_norm, opaque
from lowtide.kernels import blocked_plain as by_torch
from lowtide.kernels.opaque import BLOCK, closed, fresh, opened, refuse_unblocked, works
from lowtide.kernels.tried import Family, Own

_SIZES = "int[] stride, int[] padding, int[] dilation, bool transposed, int[] output_padding"
_WINDOW = "int[] kernel, int[] stride, int[] padding, int[] dilation, bool ceil_mode"
_MEAN_WINDOW = "int[] kernel, int[] stride, int[] padding, bool ceil_mode, bool count_include_pad, int? divisor"
CONVOLUTION, CONVOLUTION_BACKWARD = (f"lowtide.blocked_convolution{end}.default" for end in ("", "_backward"))
POOL, POOL_BACKWARD = (f"lowtide.blocked_pool{end}.default" for end in ("", "_backward"))
MEAN_POOL, MEAN_POOL_BACKWARD = (f"lowtide.blocked_mean_pool{end}.default" for end in ("", "_backward"))
CAT, CUT, SUM = (f"lowtide.blocked_{name}.default" for name in ("cat", "cut", "sum"))
TO_BLOCKED, FROM_BLOCKED = "lowtide.to_blocked.default", "lowtide.from_blocked.default"

aten = torch.ops.aten


# ------------------------------------------------------------------------------------------------- layouts and products


def to_blocked(x: Tensor) -> Tensor:
    """A plain tensor in blocks."""
    _demand(x.dim() == 4 and x.shape[1] % BLOCK == 0 and x.numel() > 0, f"no blocks of {list(x.shape)}")
    return opaque.blocked(x)


def from_blocked(x: Tensor, images: int) -> Tensor:
    """A blocked tensor in plain order."""
    refuse_unblocked(x, images)
    return opened(x, images).to_dense() if x.dtype is torch.float32 and works() else opaque.plain(x, images)


def convolution(x: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> Tensor:
    """A convolution; `blocked` says of what it reads and of what it makes whether it is in blocks."""
    *sizes, images, is_blocked = rest
    if not works():
        return by_torch.convolution(x, weight, bias, *rest)
    read = opened(x, images) if is_blocked[0] else x.to_mkldnn()
    made = aten.convolution.default(read, weight, bias, *sizes, 1)
    return closed(made) if is_blocked[1] else made.to_dense()


def convolution_backward(
    gradient: Tensor, x: Tensor, weight: Tensor, bias_sizes: list[int] | None, *rest: Any
) -> by_torch.Gradients:
    """The gradients of what a convolution reads, of its weight and of its bias, as the mask asks for them."""
    *sizes, mask, images, is_blocked = rest
    if not works():
        return by_torch.convolution_backward(gradient, x, weight, bias_sizes, *rest)
    seen = opened(gradient, images) if is_blocked[1] else gradient.contiguous().to_mkldnn()
    read = opened(x, images) if is_blocked[0] else x.to_mkldnn()
    made = aten.convolution_backward.default(seen, read, weight, bias_sizes, *sizes, 1, mask)
    first, *others = (tensor if wanted else None for tensor, wanted in zip(made, mask, strict=True))
    if first is not None:
        first = closed(first) if is_blocked[0] else first.to_dense()
    one, two = (None if other is None else other.to_dense() if other.is_mkldnn else other for other in others)
    return first, one, two


# ------------------------------------------------------------------------------------------------- windows and channels


def pool(x: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    """The largest of each window, and where in its plane it is: torch's kernel for channels that come last."""
    *sizes, images = rest
    refuse_unblocked(x, images)
    made: tuple[Tensor, Tensor] = aten.max_pool2d_with_indices.default(x, *sizes)
    return made


def pool_backward(gradient: Tensor, indices: Tensor, size: list[int], *rest: Any) -> Tensor:
    """The gradient of what windows were taken of."""
    *sizes, images = rest
    unread = _unread(gradient, size, images)
    made: Tensor = aten.max_pool2d_with_indices_backward.default(gradient, unread, *sizes, indices)
    return made


def mean_pool(x: Tensor, *rest: Any) -> Tensor:
    """The mean of each window: torch's kernel for channels that come last."""
    *sizes, images = rest
    refuse_unblocked(x, images)
    made: Tensor = aten.avg_pool2d.default(x, *sizes)
    return made


def mean_pool_backward(gradient: Tensor, size: list[int], *rest: Any) -> Tensor:
    """The gradient of what means were taken of."""
    *sizes, images = rest
    made: Tensor = aten.avg_pool2d_backward.default(gradient, _unread(gradient, size, images), *sizes)
    return made


def _unread(gradient: Tensor, size: list[int], images: int) -> Tensor:
    """What torch asks for its sizes alone, without contents."""
    channels = refuse_unblocked(gradient, images)[1]
    return fresh(gradient, (images, channels, size[0], size[1]))


def cat(parts: list[Tensor], images: int) -> Tensor:
    """Channels one behind the other: in an image, blocks lie one behind the other too."""
    each = [refuse_unblocked(part, images) for part in parts]
    made = fresh(parts[0], (images, sum(sizes[1] for sizes in each), *each[0][2:]))
    torch.cat([_rows(part, images) for part in parts], 1, out=_rows(made, images))
    return made


def cut(x: Tensor, start: int, stop: int, images: int) -> Tensor:
    """A part of the channels, from one to before another, both at the edges of blocks."""
    sizes = refuse_unblocked(x, images)
    _demand(0 <= start < stop <= sizes[1] and start % BLOCK == stop % BLOCK == 0, f"no blocks from {start} to {stop}")
    made, plane = fresh(x, (images, stop - start, *sizes[2:])), sizes[2] * sizes[3]
    _rows(made, images).copy_(_rows(x, images)[:, start * plane : stop * plane])
    return made


def add_up(one: Tensor, other: Tensor, starts: Sequence[int], channels: int, images: int) -> Tensor:
    """The sum of as many channels of two tensors, from one channel of each on."""
    seen = []
    for tensor, start in zip((one, other), starts, strict=True):
        sizes = refuse_unblocked(tensor, images)
        inside = 0 <= start < start + channels <= sizes[1] and start % BLOCK == channels % BLOCK == 0
        _demand(inside, f"no {channels} channels in blocks from {start} on, of {sizes[1]}")
        plane = sizes[2] * sizes[3]
        seen.append(_rows(tensor, images)[:, start * plane : (start + channels) * plane])
    made = fresh(one, (images, channels, sizes[2], sizes[3]))
    torch.add(*seen, out=_rows(made, images))
    return made


def _rows(tensor: Tensor, images: int) -> Tensor:
    """All numbers of each image in a row, as they lie in memory."""
    return tensor.as_strided((images, tensor.numel() // images), (tensor.numel() // images, 1))


def _demand(right: bool, otherwise: str) -> None:
    if not right:
        raise ValueError(f"a blocked op can't run: {otherwise}")


# ------------------------------------------------------------------------------------------------- registration, trial


def _fit_places(given: list[Any]) -> None:
    """Where the largest of windows is lies in the plane."""
    given[1] = torch.randint_like(given[1], given[2][0] * given[2][1])


def _operations(args: Sequence[Any], *, back: bool = False) -> float:
    """The operations of a convolution: two for each weight at each place, and as many again for each gradient."""
    weight, transposed = args[2 if back else 1], args[7 if back else 6]
    x, (stride, padding, dilation) = args[1 if back else 0], args[4:7] if back else args[3:6]
    if transposed:
        places = x.numel() / weight.shape[0]
    else:
        sides = zip(x.shape[2:], padding, dilation, weight.shape[2:], stride, strict=True)
        counts = ((size + 2 * pad - gap * (side - 1) - 1) // step + 1 for size, pad, gap, side, step in sides)
        places = float(args[10 if back else 8]) * math.prod(counts)
    return float(2.0 * weight.numel() * places * (sum(args[9][:2]) if back else 1))


OWN = (
    Own("to_blocked(Tensor x) -> Tensor", to_blocked, by_torch.to_blocked),
    Own("from_blocked(Tensor x, int images) -> Tensor", from_blocked, by_torch.from_blocked),
    Own(
        f"blocked_convolution(Tensor x, Tensor weight, Tensor? bias, {_SIZES}, int images, bool[] blocked) -> Tensor",
        convolution,
        by_torch.convolution,
        operations=_operations,
    ),
    Own(
        f"blocked_convolution_backward(Tensor gradient, Tensor x, Tensor weight, int[]? bias_sizes, {_SIZES}, "
        "bool[] mask, int images, bool[] blocked) -> (Tensor, Tensor, Tensor)",
        convolution_backward,
        by_torch.convolution_backward,
        operations=partial(_operations, back=True),
    ),
    Own(f"blocked_pool(Tensor x, {_WINDOW}, int images) -> (Tensor, Tensor)", pool, by_torch.pool),
    Own(
        f"blocked_pool_backward(Tensor gradient, Tensor indices, int[] size, {_WINDOW}, int images) -> Tensor",
        pool_backward,
        by_torch.pool_backward,
        belong=_fit_places,
    ),
    Own(f"blocked_mean_pool(Tensor x, {_MEAN_WINDOW}, int images) -> Tensor", mean_pool, by_torch.mean_pool),
    Own(
        f"blocked_mean_pool_backward(Tensor gradient, int[] size, {_MEAN_WINDOW}, int images) -> Tensor",
        mean_pool_backward,
        by_torch.mean_pool_backward,
    ),
    Own("blocked_cat(Tensor[] parts, int images) -> Tensor", cat, by_torch.cat),
    Own("blocked_cut(Tensor x, int start, int stop, int images) -> Tensor", cut, by_torch.cut),
    Own(
        "blocked_sum(Tensor one, Tensor other, int[] starts, int channels, int images) -> Tensor",
        add_up,
        by_torch.add_up,
    ),
    *blocked_norm.OWN,
)
FAMILY = Family(
    OWN,
    tuple(
        Path(__file__).with_name(name)
        for name in (
            *("blocked_norm.cpp", "statistics.hpp", "threads.hpp"),
            *("blocked.py", "blocked_norm.py", "blocked_plain.py", "opaque.py"),
        )
    ),
)
