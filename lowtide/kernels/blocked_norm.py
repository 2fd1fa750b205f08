"""Batch norm of tensors in blocks, with what stands around it: parts that are read as one, a sum, and the ReLU behind.

One pass over memory does what takes torch several, and rounds each number where torch does. How torch rounds inside of
its batch norm here is tried when it is first asked for; `blocked_plain` says what comes out.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lowtide import native
from lowtide.kernels import blocked_plain as by_torch
from lowtide.kernels import opaque
from lowtide.kernels.opaque import Sizes, fresh, refuse_unblocked, works
from lowtide.kernels.tried import Own, same_bits

SOURCE = Path(__file__).with_name("blocked_norm.cpp")
FLAGS = (  # as quick as -O3, in a fifth of the time that it compiles
    *("-O2", "-ftree-vectorize", "-fvect-cost-model=dynamic", "-ffp-contract=off"),
    *("-fno-math-errno", "-fno-trapping-math", "-Wno-psabi", "-ldl"),
)
ROUNDINGS = (15, *range(15))  # of torch's batch norm and its gradient, as blocked_norm.cpp numbers them
NORM, NORM_BACKWARD = (f"lowtide.blocked_norm{end}.default" for end in ("", "_backward"))

_POINTER, _INT, _DOUBLE = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double
_COUNTS = [(name, _INT) for name in ("images", "channels", "image")]


class _Part(ctypes.Structure):
    _fields_ = (("start", _POINTER), ("channels", _INT))


class _Norm(ctypes.Structure):
    _fields_ = (
        *((name, _POINTER) for name in ("parts", "weight", "bias", "added", "running_mean", "running_var")),
        *((name, _POINTER) for name in ("out", "mean", "scale")),
        *_COUNTS,
        *((name, _DOUBLE) for name in ("momentum", "epsilon")),
        *((name, _INT) for name in ("rectified", "fused")),
    )


class _Back(ctypes.Structure):
    _fields_ = (
        *((name, _POINTER) for name in ("parts", "gradient", "more", "weight", "bias", "mean", "scale", "result")),
        *((name, _POINTER) for name in ("out", "counted", "weight_gradient", "bias_gradient")),
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
    """Batch norm over the batch of all parts as one, what is added to it and the ReLU behind: result, means, scales."""
    sizes = _checked(images, parts, (added,), (weight, bias, running_mean, running_var))
    rounding = _rounding()
    given = (parts, weight, bias, running_mean, running_var, momentum, eps, added, rectified)
    return by_torch.norm(*given, images) if rounding is None else _norm(rounding, sizes, *given)


def _norm(
    rounding: int, sizes: Sizes, parts: Sequence[Tensor], weight: Any, bias: Any, mean: Any, var: Any, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    momentum, eps, added, rectified = rest
    x, rows = parts[0], _rows(parts, sizes)
    made = fresh(x, sizes), x.new_empty(sizes[1]), x.new_empty(sizes[1])
    tensors = map(_address, (weight, bias, added, mean, var, *made))
    task = _Norm(ctypes.addressof(rows), *tensors, *_counts(sizes), momentum, eps, rectified, rounding)
    compiled = library()
    assert compiled is not None
    compiled.lowtide_blocked_norm(ctypes.byref(task), torch.get_num_threads())
    return made


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
) -> by_torch.NormGradients:
    """The gradients of batch norm, of its weight and bias, and where it `keeps` that: the gradient that it counted.

    Another gradient may be added to the one that is given (`more`). Where there was a ReLU behind, its result says what
    counts, or is made `again`.
    """
    sizes = _checked(images, parts, (gradient, more, result), (weight, bias, mean, scale))
    rounding = _rounding()
    given: tuple[Any, ...] = (gradient, more, parts, weight, bias, mean, scale, result, again, keeps)
    return (
        by_torch.norm_backward(*(*given, eps, images)) if rounding is None else _norm_backward(rounding, sizes, *given)
    )


def _norm_backward(
    rounding: int, sizes: Sizes, gradient: Tensor, more: Tensor | None, parts: Sequence[Tensor], *rest: Any
) -> by_torch.NormGradients:
    *read, again, keeps = rest
    rows = _rows(parts, sizes)
    counted = fresh(gradient, sizes) if keeps else None
    made = fresh(gradient, sizes), gradient.new_empty(sizes[1]), gradient.new_empty(sizes[1])
    tensors = map(_address, (gradient, more, *read, made[0], counted, *made[1:]))
    task = _Back(ctypes.addressof(rows), *tensors, *_counts(sizes), again, rounding)
    compiled = library()
    assert compiled is not None
    compiled.lowtide_blocked_norm_backward(ctypes.byref(task), torch.get_num_threads())
    return (*made, counted)


def _get_ready() -> None:
    """Find out what the ops ask for when they run, before a step does: it allocates."""
    if works():
        _rounding()


@cache
def _rounding() -> int | None:
    """How torch rounds inside of batch norm here, as our kernels number it; None where they do not give its bits."""
    return None if library() is None else next(filter(_exact, ROUNDINGS), None)


def _exact(rounding: int) -> bool:
    generator = torch.Generator().manual_seed(1)
    for sizes in ((2, 16, 5, 7), (4, 32, 8, 8), (3, 16, 2, 3)):
        x, gradient = (torch.randn(sizes, generator=generator, dtype=torch.float32) * 3 + 1 for _ in range(2))
        x, gradient = opaque.blocked(x), opaque.blocked(gradient)
        mine = [torch.rand(sizes[1], generator=generator, dtype=torch.float32) for _ in range(4)]
        theirs = [tensor.clone() for tensor in mine]
        rest = (0.1, 1e-5, None, True)
        made = _norm(rounding, sizes, (x,), *mine, *rest)
        all_: tuple[Any, ...] = ((x,), *theirs, *rest, sizes[0])
        expected = by_torch.norm(*all_)
        back: tuple[Any, ...] = (gradient, None, (x,), mine[0], mine[1], *expected[1:], None, True, False)
        gradients = _norm_backward(rounding, sizes, *back)
        wanted = by_torch.norm_backward(*(*back, 1e-5, sizes[0]))
        if not same_bits((*made, *mine, *gradients), (*expected, *theirs, *wanted)):
            return False
    return True


def _checked(
    images: int, parts: Sequence[Tensor], others: Sequence[Tensor | None], channels: Sequence[Tensor | None]
) -> Sizes:
    """The sizes of all parts as one, which all others have; anything that our kernels can't read is refused."""
    each = [refuse_unblocked(part, images) for part in parts]
    planes = {sizes[2:] for sizes in each}
    _demand(len(planes) == 1, f"parts of sizes {each} do not belong together")
    ((height, width),) = planes
    found = (images, sum(sizes[1] for sizes in each), height, width)
    unlike = [sizes for other in others if other is not None and (sizes := refuse_unblocked(other, images)) != found]
    _demand(not unlike, f"sizes {unlike} do not belong to {found}")
    there = [tensor for tensor in (*parts, *others, *channels) if tensor is not None]
    _demand(all(tensor.dtype is torch.float32 for tensor in there), "numbers are no float32")
    wide = all(t is None or (tuple(t.shape) == (found[1],) and t.is_contiguous()) for t in channels)
    _demand(wide and images * height * width > 1, f"not one number for each of {found[1]} channels")
    return found


def _rows(parts: Sequence[Tensor], sizes: Sizes) -> ctypes.Array[_Part]:
    """Where the parts are, and how many channels each has."""
    plane = sizes[0] * sizes[2] * sizes[3]
    return (_Part * len(parts))(*(_Part(part.data_ptr(), part.numel() // plane) for part in parts))


def _counts(sizes: Sizes) -> tuple[int, int, int]:
    images, channels, height, width = sizes
    return images, channels, height * width


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _demand(right: bool, otherwise: str) -> None:
    if not right:
        raise ValueError(f"a blocked op can't run: {otherwise}")


def _fit_statistics(given: list[Any]) -> None:
    """The statistics of a gradient are those of what was normalised."""
    parts, weight, bias, eps, images = given[2], given[3], given[4], given[10], given[11]
    _, given[5], given[6] = by_torch.norm(parts, weight, bias, None, None, 0.0, eps, None, False, images)


OWN = (
    Own(
        "blocked_norm(Tensor[] parts, Tensor? weight, Tensor? bias, Tensor(a!)? running_mean, Tensor(b!)? running_var, "
        "float momentum, float eps, Tensor? added, bool rectified, int images) -> (Tensor, Tensor, Tensor)",
        norm,
        by_torch.norm,
        ready=_get_ready,
    ),
    Own(
        "blocked_norm_backward(Tensor gradient, Tensor? more, Tensor[] parts, Tensor? weight, Tensor? bias, "
        "Tensor mean, Tensor scale, Tensor? result, bool again, bool keeps, float eps, int images) "
        "-> (Tensor, Tensor, Tensor, Tensor)",
        norm_backward,
        by_torch.norm_backward,
        belong=_fit_statistics,
        ready=_get_ready,
    ),
)
