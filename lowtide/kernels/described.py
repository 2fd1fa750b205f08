"""What a call makes of tensors without contents, where torch describes that wrongly."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

ALIGNED = 16  # bytes: rows of what a grouped product makes begin at multiples of these


def _grouped_product(
    one: torch.Tensor,
    other: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Torch's own description wants bfloat16; its kernel for the processor does not."""
    rows, columns = one.shape[-2], other.shape[-1]
    ends = [] if offs is None else [offs.shape[0]]
    groups = ends if (one.dim(), other.dim()) == (2, 2) else list(one.shape[:1]) if other.dim() == one.dim() else []
    each = ALIGNED // one.dtype.itemsize
    step = -(-columns // each) * each
    strides = [rows * step, step, 1] if groups else [step, 1]
    return one.new_empty_strided([*groups, rows, columns], strides, dtype=out_dtype or one.dtype)


def _laid_out(call: Any, as_if: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    """A call whose first result is laid out in another way than torch says."""

    def described(*args: Any, **kwargs: Any) -> Any:
        made = call(*args, **kwargs)
        first, others = (made[0], tuple(made[1:])) if isinstance(made, tuple) else (made, None)
        first = None if first is None else as_if(*args).to(first.dtype)
        return first if others is None else (first, *others)

    return described


def _asked_by(place: int) -> Callable[..., torch.Tensor]:
    """As the argument at this place asks for: with its channels last where they are so in it, else in plain order."""

    def made(*args: Any) -> torch.Tensor:
        tensor = args[place]
        last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(tensor.dim())
        plain = last is None or not tensor.is_contiguous(memory_format=last) or tensor.is_contiguous()
        fresh: torch.Tensor = tensor.new_empty(tensor.shape)
        return fresh if plain or last is None else fresh.to(memory_format=last)

    return made


def _plain(*args: Any) -> torch.Tensor:
    """In plain order, with the sizes of the second argument."""
    fresh: torch.Tensor = args[1].new_empty(args[1].shape)
    return fresh


def _paired(place: int) -> Callable[..., torch.Tensor]:
    """As a sum of the first argument and the one at this place."""
    return lambda *args: torch.ops.aten.add.Tensor(args[0], args[place])


def _alike(*args: Any) -> torch.Tensor:
    return torch.empty_like(args[1])


aten = torch.ops.aten
LAYOUTS: Mapping[Any, Callable[..., torch.Tensor]] = {
    aten.native_batch_norm.default: _asked_by(0),
    aten.native_batch_norm_backward.default: _asked_by(1),
    aten.native_layer_norm_backward.default: _plain,
    aten._log_softmax_backward_data.default: _plain,
    aten.mse_loss_backward.default: _plain,
    aten.smooth_l1_loss_backward.default: _plain,
    aten.huber_loss_backward.default: _plain,
    aten.binary_cross_entropy_backward.default: _alike,
    aten.hardswish_backward.default: _paired(1),
    aten.hardtanh_backward.default: _paired(1),
    aten.softplus_backward.default: _paired(1),
    aten.elu_backward.default: _paired(5),
}
DESCRIBED: Mapping[Any, Callable[..., Any]] = {
    aten._grouped_mm.default: _grouped_product,
    **{call: _laid_out(call, layout) for call, layout in LAYOUTS.items()},
}


def described(call: Any) -> Callable[..., Any]:
    """The call itself, or what describes it better."""
    found: Callable[..., Any] = DESCRIBED.get(call, call)
    return found
