"""Ops on tensors in blocks of 16 channels: what stands between convolutions, without a conversion in between.

The convolutions are torch's own, which call oneDNN: there the layout saves what torch converts before and after each
of them. Each op has the bits of torch's on plain tensors where it was tried (see `trial`); `blocked_plain` says what
these are, and runs where a layout or a compiler is missing.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lowtide import native
from lowtide.kernels import blocked_plain as by_torch
from lowtide.kernels import opaque
from lowtide.kernels.opaque import BLOCK, Sizes, closed, fresh, opened, refuse_unblocked, works

SOURCE = Path(__file__).with_name("blocked.cpp")
FLAGS = ("-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-Wno-psabi", "-ldl")
ROUNDINGS = (
    15,
    *(number for number in range(16) if number != 15),
)  # of torch's batch norm and its gradient, as blocked.cpp numbers them
_SIZES = "int[] stride, int[] padding, int[] dilation, bool transposed, int[] output_padding"
_WINDOW = "int[] kernel, int[] stride, int[] padding, int[] dilation, bool ceil_mode"
_MEAN_WINDOW = "int[] kernel, int[] stride, int[] padding, bool ceil_mode, bool count_include_pad, int? divisor"
SCHEMAS = (
    "to_blocked(Tensor x) -> Tensor",
    "from_blocked(Tensor x, int images) -> Tensor",
    f"blocked_convolution(Tensor x, Tensor weight, Tensor? bias, {_SIZES}, int images, bool[] blocked) -> Tensor",
    f"blocked_convolution_backward(Tensor gradient, Tensor x, Tensor weight, int[]? bias_sizes, {_SIZES}, bool[] mask, "
    "int images, bool[] blocked) -> (Tensor, Tensor, Tensor)",
    "blocked_norm(Tensor x, Tensor? weight, Tensor? bias, Tensor(a!)? running_mean, Tensor(b!)? running_var, "
    "float momentum, float eps, Tensor? added, bool rectified, int images) -> (Tensor, Tensor, Tensor)",
    "blocked_norm_backward(Tensor gradient, Tensor x, Tensor? weight, Tensor? bias, Tensor mean, Tensor scale, "
    "Tensor? result, bool again, float eps, int images) -> (Tensor, Tensor, Tensor)",
    f"blocked_pool(Tensor x, {_WINDOW}, int images) -> (Tensor, Tensor)",
    f"blocked_pool_backward(Tensor gradient, Tensor indices, int[] size, {_WINDOW}, int images) -> Tensor",
    f"blocked_mean_pool(Tensor x, {_MEAN_WINDOW}, int images) -> Tensor",
    f"blocked_mean_pool_backward(Tensor gradient, int[] size, {_MEAN_WINDOW}, int images) -> Tensor",
    "blocked_cat(Tensor[] parts, int images) -> Tensor",
    "blocked_cut(Tensor x, int start, int stop, int images) -> Tensor",
)
CONVOLUTION, CONVOLUTION_BACKWARD = (f"lowtide.blocked_convolution{end}.default" for end in ("", "_backward"))
NORM, NORM_BACKWARD = (f"lowtide.blocked_norm{end}.default" for end in ("", "_backward"))
POOL, POOL_BACKWARD = (f"lowtide.blocked_pool{end}.default" for end in ("", "_backward"))
MEAN_POOL, MEAN_POOL_BACKWARD = (f"lowtide.blocked_mean_pool{end}.default" for end in ("", "_backward"))
CAT, CUT = "lowtide.blocked_cat.default", "lowtide.blocked_cut.default"
TO_BLOCKED, FROM_BLOCKED = "lowtide.to_blocked.default", "lowtide.from_blocked.default"

aten = torch.ops.aten
_POINTER, _INT, _DOUBLE = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double
_COUNTS = [(name, _INT) for name in ("images", "channels", "image")]


class _Norm(ctypes.Structure):
    _fields_ = (
        *((name, _POINTER) for name in ("input", "weight", "bias", "added", "running_mean", "running_var")),
        *((name, _POINTER) for name in ("out", "mean", "scale")),
        *_COUNTS,
        *((name, _DOUBLE) for name in ("momentum", "epsilon")),
        *((name, _INT) for name in ("rectified", "fused")),
    )


class _Back(ctypes.Structure):
    _fields_ = (
        *((name, _POINTER) for name in ("gradient", "input", "weight", "bias", "mean", "scale", "result")),
        *((name, _POINTER) for name in ("out", "weight_gradient", "bias_gradient")),
        *_COUNTS,
        *((name, _INT) for name in ("again", "fused")),
    )


SIGNATURES: native.Signatures = {
    "lowtide_blocked_norm": ([_POINTER, _INT], None),
    "lowtide_blocked_norm_backward": ([_POINTER, _INT], None),
}


@cache
def library() -> ctypes.CDLL | None:
    """Our kernels; None where they can't be compiled or loaded."""
    try:
        return native.library(
            SOURCE, SIGNATURES, what="batch norm in blocks", flags=FLAGS, depends=(torch.__version__,)
        )
    except native.NativeUnavailable:  # the arena has said so
        return None


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
        return by_torch.convolution(x, weight, bias, *sizes, images=images, is_blocked=is_blocked)
    read = opened(x, images) if is_blocked[0] else x.to_mkldnn()
    made = aten.convolution.default(read, weight, bias, *sizes, 1)
    return closed(made) if is_blocked[1] else made.to_dense()


def convolution_backward(
    gradient: Tensor, x: Tensor, weight: Tensor, bias_sizes: list[int] | None, *rest: Any
) -> by_torch.Gradients:
    """The gradients of what a convolution reads, of its weight and of its bias, as the mask asks for them."""
    *sizes, mask, images, is_blocked = rest
    if not works():
        given = (gradient, x, weight, bias_sizes, *sizes)
        return by_torch.convolution_backward(*given, mask=mask, images=images, is_blocked=is_blocked)
    seen = opened(gradient, images) if is_blocked[1] else gradient.contiguous().to_mkldnn()
    read = opened(x, images) if is_blocked[0] else x.to_mkldnn()
    made = aten.convolution_backward.default(seen, read, weight, bias_sizes, *sizes, 1, mask)
    first, *others = (tensor if wanted else None for tensor, wanted in zip(made, mask, strict=True))
    if first is not None:
        first = closed(first) if is_blocked[0] else first.to_dense()
    one, two = (None if other is None else other.to_dense() if other.is_mkldnn else other for other in others)
    return first, one, two


# ----------------------------------------------------------------------------------------------------------- batch norm


def norm(
    x: Tensor,
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
    """Batch norm over the batch, with what is added to it and the ReLU behind it: the result, the means, the scales."""
    given = (x, weight, bias, running_mean, running_var, momentum, eps, added, rectified, images)
    sizes = _checked(images, (x, added), (weight, bias, running_mean, running_var))
    rounding = _rounding()
    if rounding is None:
        return by_torch.norm(*given)
    return _norm(rounding, sizes, *given[:-1])


def _norm(
    rounding: int, sizes: Sizes, x: Tensor, weight: Any, bias: Any, mean: Any, var: Any, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    momentum, eps, added, rectified = rest
    made = fresh(x, sizes), x.new_empty(sizes[1]), x.new_empty(sizes[1])
    tensors = map(_address, (x, weight, bias, added, mean, var, *made))
    task = _Norm(*tensors, *_counts(sizes), momentum, eps, rectified, rounding)
    compiled = library()
    assert compiled is not None
    compiled.lowtide_blocked_norm(ctypes.byref(task), torch.get_num_threads())
    return made


def norm_backward(
    gradient: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    scale: Tensor,
    result: Tensor | None,
    again: bool,
    eps: float,
    images: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of batch norm; `again`: of a ReLU behind it, whose result is made again; else it may be given."""
    sizes = _checked(images, (gradient, x, result), (weight, bias, mean, scale))
    rounding = _rounding()
    if rounding is None:
        return by_torch.norm_backward(gradient, x, weight, bias, mean, scale, result, again, eps, images)
    return _norm_backward(rounding, sizes, again, gradient, x, weight, bias, mean, scale, result)


def _norm_backward(
    rounding: int, sizes: Sizes, again: bool, gradient: Tensor, *read: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    made = fresh(gradient, sizes), gradient.new_empty(sizes[1]), gradient.new_empty(sizes[1])
    tensors = map(_address, (gradient, *read, *made))
    task = _Back(*tensors, *_counts(sizes), again, rounding)
    compiled = library()
    assert compiled is not None
    compiled.lowtide_blocked_norm_backward(ctypes.byref(task), torch.get_num_threads())
    return made


def get_ready() -> None:
    """Find out what the ops ask for when they run, before a step does: it allocates."""
    if works():
        _rounding()


@cache
def _rounding() -> int | None:
    """How torch rounds inside of batch norm here, as blocked.cpp numbers it; None where ours does not give its bits."""
    return None if library() is None else next(filter(_exact, ROUNDINGS), None)


def _exact(rounding: int) -> bool:
    generator = torch.Generator().manual_seed(1)
    for sizes in ((2, 16, 5, 7), (4, 32, 8, 8), (3, 16, 2, 3)):
        x, gradient = (torch.randn(sizes, generator=generator, dtype=torch.float32) * 3 + 1 for _ in range(2))
        x, gradient = opaque.blocked(x), opaque.blocked(gradient)
        mine = [torch.rand(sizes[1], generator=generator, dtype=torch.float32) for _ in range(4)]
        theirs = [tensor.clone() for tensor in mine]
        rest = (0.1, 1e-5, None, True)
        made = _norm(rounding, sizes, x, *mine, *rest)
        all_: tuple[Any, ...] = (x, *theirs, *rest, sizes[0])
        expected = by_torch.norm(*all_)
        back = (gradient, x, mine[0], mine[1], *expected[1:], None)
        gradients = _norm_backward(rounding, sizes, True, *back)
        wanted = by_torch.norm_backward(*back, True, 1e-5, sizes[0])
        if not same_bits((*made, *mine, *gradients), (*expected, *theirs, *wanted)):
            return False
    return True


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


def _rows(tensor: Tensor, images: int) -> Tensor:
    """All numbers of each image in a row, as they lie in memory."""
    return tensor.as_strided((images, tensor.numel() // images), (tensor.numel() // images, 1))


# ------------------------------------------------------------------------------------------------------------ the trial

OPS: Mapping[str, tuple[Callable[..., Any], Callable[..., Any]]] = {  # ours, and torch's with the same arguments
    "to_blocked": (to_blocked, by_torch.to_blocked),
    "from_blocked": (from_blocked, by_torch.from_blocked),
    "blocked_convolution": (
        convolution,
        lambda *a: by_torch.convolution(*a[:-2], images=a[-2], is_blocked=a[-1]),
    ),
    "blocked_convolution_backward": (
        convolution_backward,
        lambda *a: by_torch.convolution_backward(*a[:-3], mask=a[-3], images=a[-2], is_blocked=a[-1]),
    ),
    "blocked_norm": (norm, by_torch.norm),
    "blocked_norm_backward": (norm_backward, by_torch.norm_backward),
    "blocked_pool": (pool, lambda *a: by_torch.pool(*a[:-1], images=a[-1])),
    "blocked_pool_backward": (pool_backward, lambda *a: by_torch.pool_backward(*a[:-1], images=a[-1])),
    "blocked_mean_pool": (mean_pool, lambda *a: by_torch.mean_pool(*a[:-1], images=a[-1])),
    "blocked_mean_pool_backward": (mean_pool_backward, lambda *a: by_torch.mean_pool_backward(*a[:-1], images=a[-1])),
    "blocked_cat": (cat, by_torch.cat),
    "blocked_cut": (cut, by_torch.cut),
}
TARGETS = frozenset(f"lowtide.{name}.default" for name in OPS)


def same_bits(mine: Iterable[Any], theirs: Iterable[Any]) -> bool:
    """Whether two rows of results are equal in sizes, strides and every bit."""
    return all(
        (one is None and other is None)
        or (
            one.shape == other.shape
            and one.stride() == other.stride()
            and torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))
        )
        for one, other in zip(mine, theirs, strict=True)
    )


# ---------------------------------------------------------------------------------------------------------- definitions


def define(registry: torch.library.Library) -> None:
    """Add the ops to lowtide's."""
    for written in SCHEMAS:
        registry.define(written)
    for name, (kernel, reference) in OPS.items():
        registry.impl(name, kernel, "CPU")
        torch.library.register_fake(f"lowtide::{name}", reference, lib=registry)


def is_product(target: str) -> bool:
    """Whether the call is a convolution."""
    return target in (CONVOLUTION, CONVOLUTION_BACKWARD)


def operations(target: str, args: Sequence[Any]) -> float:
    """The operations of a convolution: two for each weight at each place, and as many again for each gradient."""
    back = target == CONVOLUTION_BACKWARD
    weight, transposed = args[2 if back else 1], args[7 if back else 6]
    places = args[1 if back else 0].numel() / weight.shape[0] if transposed else None
    if places is None:
        x, (stride, padding, dilation) = args[1 if back else 0], args[4:7] if back else args[3:6]
        images = args[10 if back else 8]
        sides = (
            (size + 2 * pad - gap * (kernel - 1) - 1) // step + 1
            for size, pad, gap, kernel, step in zip(
                x.shape[2:], padding, dilation, weight.shape[2:], stride, strict=True
            )
        )
        places = float(images)
        for side in sides:
            places *= side
    return float(2.0 * weight.numel() * places * (sum(args[9][:2]) if back else 1))


def _checked(images: int, whole: Sequence[Tensor | None], channels: Sequence[Tensor | None]) -> Sizes:
    """The sizes that all of these agree on; anything that our kernels can't read is refused."""
    sizes = {refuse_unblocked(tensor, images) for tensor in whole if tensor is not None}
    _demand(len(sizes) == 1, f"sizes {sorted(sizes)} do not belong together")
    (found,) = sizes
    there = [tensor for tensor in (*whole, *channels) if tensor is not None]
    _demand(all(tensor.dtype is torch.float32 for tensor in there), "numbers are no float32")
    wide = all(t is None or (tuple(t.shape) == (found[1],) and t.is_contiguous()) for t in channels)
    _demand(wide and found[0] * found[2] * found[3] > 1, f"not one number for each of {found[1]} channels")
    return found


def _counts(sizes: Sizes) -> tuple[int, int, int]:
    images, channels, height, width = sizes
    return images, channels, height * width


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _demand(right: bool, otherwise: str) -> None:
    if not right:
        raise ValueError(f"a blocked op can't run: {otherwise}")
