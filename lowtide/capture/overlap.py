"""Parameters and buffers that share memory, which a graph of separate storages can't say."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

import torch

from lowtide.errors import CaptureError


def refuse_overlaps(tensors: Mapping[str, torch.Tensor]) -> None:
    """Refuse two tensors of the caller that lie over each other in memory."""
    spans = sorted((*_span(tensor), name) for name, tensor in tensors.items() if tensor.numel() and _has_memory(tensor))
    for (_, end, one), (start, _, other) in pairwise(spans):
        if start < end:
            raise CaptureError(
                f"{one!r} and {other!r} are two tensors in the same memory.",
                hint="tie them as one parameter (a.weight = b.weight), or give each its own: other.data = "
                "other.data.clone().",
            )


def _has_memory(tensor: torch.Tensor) -> bool:
    return tensor.device.type != "meta" and tensor.layout is torch.strided


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """The first byte of a tensor, and the one behind its last."""
    start = tensor.data_ptr()
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (last + 1) * tensor.element_size()
