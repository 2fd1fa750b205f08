"""Fake tensors inside the caller's own objects, for as long as the step is traced.

The Python objects stay the same, so whoever holds a parameter (the model, the optimizer, a closure, a list of flat
weights) sees the stand-in; only the tensor behind the object is another one until it is put back.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from lowtide import private
from lowtide.errors import CaptureError
from lowtide.private import FakeTensor, FakeTensorMode


def fake_like(tensor: torch.Tensor, fake_mode: FakeTensorMode) -> FakeTensor:
    """A fake tensor with the sizes, strides, type and device of a real one."""
    with private.without_dispatch():
        meta = torch.empty_strided(tuple(tensor.shape), tuple(tensor.stride()), dtype=tensor.dtype, device="meta")
    fake: torch.Tensor = FakeTensor(fake_mode, meta, tensor.device)
    with fake_mode:
        if isinstance(tensor, torch.nn.Parameter):
            fake = torch.nn.Parameter(fake, requires_grad=tensor.requires_grad)
        elif tensor.requires_grad:
            fake.requires_grad_()
    assert isinstance(fake, FakeTensor)
    return fake


def _swap(one: torch.Tensor, other: torch.Tensor) -> None:
    one.__class__, other.__class__ = other.__class__, one.__class__
    one.__dict__, other.__dict__ = other.__dict__, one.__dict__
    private.swap_tensor_impl(one, other)


@contextlib.contextmanager
def stand_ins(tensors: list[torch.Tensor], fake_mode: FakeTensorMode) -> Iterator[None]:
    """Each of these tensor objects is fake inside the block, and itself again after it."""
    fakes = [fake_like(tensor, fake_mode) for tensor in tensors]
    swapped: list[tuple[torch.Tensor, torch.Tensor]] = []
    try:
        for tensor, fake in zip(tensors, fakes, strict=True):
            try:
                _swap(tensor, fake)
            except (RuntimeError, TypeError) as error:
                raise CaptureError(
                    f"a tensor of shape {tuple(tensor.shape)} cannot be replaced while the step is traced: {error}",
                    hint="something holds a low-level reference to it, such as a compiled or distributed wrapper.",
                ) from error
            swapped.append((tensor, fake))
        yield
    finally:
        for tensor, stand_in in reversed(swapped):
            _swap(tensor, stand_in)
