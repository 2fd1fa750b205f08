"""Batch norm in halves: sums over all examples first, then each number on its own, over what it is made of.

The second halves are elementwise: their results may lie on their arguments, and a forward that runs again needs no
sums. The numbers are those of batch norm over one group, the whole batch.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from lowtide.kernels.grouped import SAVED, SUMS, Back, Norm, address, library, sizes

STATISTICS, APPLY, TERMS, SPREAD = (
    f"lowtide.norm_{name}.default" for name in ("statistics", "apply", "terms", "spread")
)
PAIR = 2  # numbers for each example and channel of which the gradient of the input is made


def define(registry: torch.library.Library) -> None:
    """Add the ops to lowtide's."""
    both = "Tensor gradient, Tensor input, Tensor? weight, Tensor saved"
    for name, arguments, results, function, fake in (
        ("statistics", "Tensor input, float eps", "(Tensor, Tensor)", statistics, _statistics),
        ("apply", "Tensor input, Tensor? weight, Tensor? bias, Tensor saved", "Tensor", apply, _like),
        ("terms", both, "(Tensor, Tensor, Tensor)", terms, _terms),
        ("spread", f"{both}, Tensor terms", "Tensor", spread, _like),
    ):
        registry.define(f"norm_{name}({arguments}) -> {results}")
        registry.impl(f"norm_{name}", function, "CPU")
        if results == "Tensor":
            registry.define(f"norm_{name}.out({arguments}, *, Tensor(a!) out) -> Tensor(a!)")
            registry.impl(f"norm_{name}.out", function, "CPU")
        torch.library.register_fake(f"lowtide::norm_{name}", fake, lib=registry)


def statistics(input: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """What both halves of the backward and the rest of the forward need of each example, and sums over all."""
    _refuse(input)
    saved, sums = _statistics(input, eps)
    tensors = map(address, (input, None, None, None, None, None, saved, sums))
    norm = Norm(*tensors, *sizes(input), input.shape[0], 1.0, eps)
    library().lowtide_grouped_norm(ctypes.byref(norm), torch.get_num_threads())
    return saved, sums


def apply(
    input: Tensor, weight: Tensor | None, bias: Tensor | None, saved: Tensor, *, out: Tensor | None = None
) -> Tensor:
    """The input normalised by known statistics; `out` may be the input."""
    made = _onto(out, input)
    tensors = map(address, (input, weight, bias, None, None, made, saved, None))
    norm = Norm(*tensors, *sizes(input), input.shape[0], 1.0, 0.0)
    library().lowtide_grouped_norm(ctypes.byref(norm), torch.get_num_threads())
    return made


def terms(gradient: Tensor, input: Tensor, weight: Tensor | None, saved: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of the weight and of the bias, and what that of the input is made of besides."""
    _refuse(gradient, input, saved)
    made = _terms(gradient, input, weight, saved)
    tensors = map(address, (gradient, input, weight, None, saved, None, *made))
    back = Back(*tensors, *sizes(input), input.shape[0], 1.0)
    library().lowtide_grouped_norm_backward(ctypes.byref(back), torch.get_num_threads())
    return made


def spread(
    gradient: Tensor, input: Tensor, weight: Tensor | None, saved: Tensor, terms: Tensor, *, out: Tensor | None = None
) -> Tensor:
    """The gradient of the input; `out` may be the gradient, or the input."""
    _refuse(gradient, saved, terms)
    made = _onto(out, input)
    tensors = map(address, (gradient, input, weight, None, saved, made, None, None, terms))
    back = Back(*tensors, *sizes(input), input.shape[0], 1.0)
    library().lowtide_grouped_norm_backward(ctypes.byref(back), torch.get_num_threads())
    return made


def _statistics(input: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    batch, channels = input.shape[:2]
    return input.new_empty((batch, channels, SAVED)), input.new_empty((SUMS, channels), dtype=torch.float64)


def _terms(gradient: Tensor, input: Tensor, weight: Tensor | None, saved: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    batch, channels = input.shape[:2]
    return input.new_empty(channels), input.new_empty(channels), input.new_empty((batch, channels, PAIR))


def _like(input: Tensor, *others: object) -> Tensor:
    return torch.empty_like(input)


def _onto(out: Tensor | None, input: Tensor) -> Tensor:
    """What the result is written to: a tensor like the input."""
    _refuse(input, *(() if out is None else (out,)))
    if out is None:
        return torch.empty_like(input)
    if out.shape != input.shape:
        raise ValueError(f"a result of {list(input.shape)} can't be written over {list(out.shape)}")
    return out


def _refuse(*tensors: Tensor) -> None:
    for one in tensors:
        if one.dtype is not torch.float32 or not one.is_contiguous():
            raise ValueError(f"{one.dtype} {list(one.shape)} can't be normalised in halves")
