"""Which bytes tensors lie in, and whether two of them lie in the same."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import pairwise

import torch

from lowtide.packed import Packed

Span = tuple[int, int, str]  # the first byte of a tensor, the one behind its last, and its name


def spans(tensors: Mapping[str, torch.Tensor]) -> list[Span]:
    """Where these tensors lie, by address; those without memory lie nowhere."""
    return sorted((*_span(tensor), name) for name, tensor in tensors.items() if tensor.numel() and _has_memory(tensor))


def overlap(found: Iterable[Span]) -> tuple[str, str] | None:
    """The names of two tensors that lie over each other in memory, if there are such."""
    for (_, end, one), (start, _, other) in pairwise(sorted(found)):
        if start < end:
            return one, other
    return None


def _has_memory(tensor: torch.Tensor) -> bool:
    return tensor.device.type != "meta" and tensor.layout is torch.strided and not isinstance(tensor, Packed)


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    start = tensor.data_ptr()
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (last + 1) * tensor.element_size()
