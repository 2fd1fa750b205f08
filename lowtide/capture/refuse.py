"""Tensors of the caller that no graph can speak of are refused before anything is traced."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from lowtide import private
from lowtide.device import CPU
from lowtide.errors import CaptureError
from lowtide.private import FakeTensor
from lowtide.watch.memory import overlap, spans


def one_device(tensors: Mapping[str, torch.Tensor]) -> str:
    """The device of all these tensors, or the error that they have several."""
    homes: dict[str, str] = {}
    for name, tensor in tensors.items():
        homes.setdefault(str(tensor.device), name)
    if len(homes) > 1:
        listing = ", ".join(f"{name!r} on {device}" for device, name in homes.items())
        raise CaptureError(
            f"the step uses {len(homes)} devices: {listing}.", hint="move model and batch to one device."
        )
    return next(iter(homes), CPU.name)


def refuse_odd(tensors: Mapping[str, torch.Tensor], *, hooked: bool = False) -> None:
    """Refuse tensors that are not plain, dense and, unless they may have some, free of hooks."""
    for name, tensor in tensors.items():
        if isinstance(tensor, FakeTensor) or private.is_traceable_wrapper_subclass(tensor):
            kind = f"{type(tensor).__module__}.{type(tensor).__name__}"
            raise CaptureError(
                f"{name!r} is a {kind}, a tensor subclass that stands for other tensors.",
                hint="lowtide plans plain tensors; convert it to torch.Tensor first.",
            )
        if tensor.layout is not torch.strided:
            raise CaptureError(f"{name!r} has layout {tensor.layout}.", hint="lowtide plans dense tensors only.")
        if tensor.grad_fn is not None:
            raise CaptureError(
                f"{name!r}, of shape {tuple(tensor.shape)}, has a history (grad_fn): it belongs to an earlier step.",
                hint="detach it before you pass it to the step.",
            )
        if not hooked and (private.gradient_hooks(tensor) or private.accumulation_hooks(tensor)):
            raise CaptureError(
                f"{name!r} has a hook, which runs Python code that lowtide cannot repeat.",
                hint="remove the hook; with lowtide.fit its work can be done in the step, after backward().",
            )


def refuse_overlaps(tensors: Mapping[str, torch.Tensor]) -> None:
    """Refuse two tensors of the caller that lie over each other: a graph of separate storages can't say it."""
    if (pair := overlap(spans(tensors))) is not None:
        raise CaptureError(
            f"{pair[0]!r} and {pair[1]!r} are two tensors in the same memory.",
            hint="tie them as one parameter (a.weight = b.weight), or give each its own: other.data = "
            "other.data.clone().",
        )
