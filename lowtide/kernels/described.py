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


DESCRIBED: Mapping[Any, Callable[..., Any]] = {torch.ops.aten._grouped_mm.default: _grouped_product}


def described(call: Any) -> Callable[..., Any]:
    """The call itself, or what describes it better."""
    found: Callable[..., Any] = DESCRIBED.get(call, call)
    return found
