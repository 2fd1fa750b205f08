"""Batch norm over groups of examples as ops of a graph: examples of other groups have no say in what one becomes.

The sums over all examples that running statistics are made of come besides; they add up over parts of the batch.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from lowtide import native

SOURCE = Path(__file__).with_name("grouped.cpp")
FLAGS = ("-O3", "-ffp-contract=off", "-Wno-psabi", "-ldl")
NORM, BACKWARD, RUNNING = (
    f"lowtide.{name}.default" for name in ("grouped_norm", "grouped_norm_backward", "update_statistics")
)
SAVED, SUMS = 3, 3  # numbers for each example and channel, and for each channel

_POINTER, _INT, _DOUBLE = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double
_SIZES = [(name, _INT) for name in ("batch", "channels", "image", "group")]


class Norm(ctypes.Structure):
    _fields_ = (
        *((name, _POINTER) for name in ("input", "weight", "bias", "given_mean", "given_var", "out", "saved", "sums")),
        *_SIZES,
        *((name, _DOUBLE) for name in ("share", "epsilon")),
    )


class Back(ctypes.Structure):
    _fields_ = (
        *((name, _POINTER) for name in ("gradient", "input", "weight", "given_mean", "saved")),
        *((name, _POINTER) for name in ("out", "weight_gradient", "bias_gradient", "terms")),
        *_SIZES,
        ("share", _DOUBLE),
    )


SIGNATURES: native.Signatures = {
    "lowtide_grouped_norm": ([_POINTER, _INT], None),
    "lowtide_grouped_norm_backward": ([_POINTER, _INT], None),
}


def define(registry: torch.library.Library) -> None:
    """Add the ops to lowtide's."""
    given = "Tensor? mean, Tensor? var, int group, float share"
    made = "(Tensor, Tensor, Tensor)"
    registry.define(f"grouped_norm(Tensor input, Tensor? weight, Tensor? bias, {given}, float eps) -> {made}")
    registry.define(
        "grouped_norm_backward(Tensor gradient, Tensor input, Tensor? weight, Tensor? mean, Tensor saved, int group, "
        "float share) -> (Tensor, Tensor, Tensor)"
    )
    registry.define(
        "update_statistics(Tensor(a!) running_mean, Tensor(b!) running_var, Tensor sums, float momentum) -> Tensor(a!)"
    )
    registry.impl("grouped_norm", grouped_norm, "CPU")
    registry.impl("grouped_norm_backward", grouped_norm_backward, "CPU")
    registry.impl("update_statistics", update_statistics, "CPU")
    torch.library.register_fake("lowtide::grouped_norm", _empty, lib=registry)
    torch.library.register_fake("lowtide::grouped_norm_backward", _empty_gradients, lib=registry)
    torch.library.register_fake("lowtide::update_statistics", lambda mean, var, sums, momentum: mean, lib=registry)


def grouped_norm(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor | None,
    var: Tensor | None,
    group: int,
    share: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Normalise groups of examples: the result, what the backward needs of each example, and sums over all."""
    made = _empty(input, weight, bias, mean, var, group, share, eps)
    tensors = [address(tensor) for tensor in (input, weight, bias, mean, var, *made)]
    norm = Norm(*tensors, *sizes(input), group, share, eps)
    library().lowtide_grouped_norm(ctypes.byref(norm), torch.get_num_threads())
    return made


def grouped_norm_backward(
    gradient: Tensor, input: Tensor, weight: Tensor | None, mean: Tensor | None, saved: Tensor, group: int, share: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of the input, of the weight and of the bias; given statistics are constants."""
    made = _empty_gradients(gradient, input, weight, mean, saved, group, share)
    tensors = [address(tensor) for tensor in (gradient, input, weight, mean, saved, *made, None)]
    back = Back(*tensors, *sizes(input), group, share)
    library().lowtide_grouped_norm_backward(ctypes.byref(back), torch.get_num_threads())
    return made


def update_statistics(running_mean: Tensor, running_var: Tensor, sums: Tensor, momentum: float) -> Tensor:
    """Move running statistics towards those of all examples, as nn.BatchNorm does: the variance without bias."""
    mean = sums[0] / sums[2]
    var = (sums[1] / sums[2]).sub_(mean * mean).mul_(sums[2] / (sums[2] - 1))
    running_mean.mul_(1 - momentum).add_(mean, alpha=momentum)
    running_var.mul_(1 - momentum).add_(var, alpha=momentum)
    return running_mean


def fits(shape: tuple[int, ...], group: int) -> bool:
    """Whether a batch of these sizes is whole groups, each of more than one number a channel."""
    if len(shape) < 2 or group < 1 or shape[0] % group or 0 in shape:
        return False
    image = 1
    for size in shape[2:]:
        image *= size
    return group * image > 1


def _empty(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor | None,
    var: Tensor | None,
    group: int,
    share: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    _refuse([input], [weight, bias, mean, var], input, group)
    channels = input.shape[1]
    sums = input.new_empty((SUMS, channels), dtype=torch.float64)
    return input.new_empty(input.shape), input.new_empty((input.shape[0], channels, SAVED)), sums


def _empty_gradients(
    gradient: Tensor, input: Tensor, weight: Tensor | None, mean: Tensor | None, saved: Tensor, group: int, share: float
) -> tuple[Tensor, Tensor, Tensor]:
    _refuse([gradient, input, saved], [weight, mean], input, group)
    if gradient.shape != input.shape or tuple(saved.shape) != (input.shape[0], input.shape[1], SAVED):
        raise ValueError(f"no gradient {list(gradient.shape)} of {list(input.shape)} with {list(saved.shape)}")
    channels = input.shape[1]
    return input.new_empty(input.shape), input.new_empty(channels), input.new_empty(channels)


def _refuse(whole: list[Tensor], channels: list[Tensor | None], input: Tensor, group: int) -> None:
    there = [tensor for tensor in (*whole, *channels) if tensor is not None]
    plain = all(tensor.dtype is torch.float32 and tensor.is_contiguous() for tensor in there)
    wide = all(tensor is None or tuple(tensor.shape) == (input.shape[1],) for tensor in channels)
    if not plain or not wide or not fits(tuple(input.shape), group):
        raise ValueError(f"{input.dtype} {list(input.shape)} can't be normalised in groups of {group}")


def sizes(input: Tensor) -> tuple[int, int, int]:
    return input.shape[0], input.shape[1], input.numel() // (input.shape[0] * input.shape[1])


def address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


@cache
def library() -> ctypes.CDLL:
    return native.library(SOURCE, SIGNATURES, what="batch norm over groups", flags=FLAGS)
