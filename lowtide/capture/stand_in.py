"""Fake tensors inside the caller's own objects, for as long as the step is traced.

The Python objects stay the same, so whoever holds a parameter (the model, the optimizer, a closure, a list of flat
weights) sees the stand-in; only the tensor behind the object is another one until it is put back.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

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


@contextlib.contextmanager
def unchanged_attributes(model: torch.nn.Module) -> Iterator[list[str]]:
    """Put back what the step assigns to attributes of modules; the list names what it assigned, tensors refused."""
    before = [(name, module, dict(module.__dict__)) for name, module in model.named_modules()]
    registries = [(registry, dict(registry)) for _, module, _ in before for registry in private.registries(module)]
    changed: list[str] = []
    try:
        yield changed
        for name, module, attributes in before:
            for key, now in module.__dict__.items():
                if key in attributes and attributes[key] is now:
                    continue
                full = f"{name}.{key}" if name else key
                if _holds_tensor(now):
                    raise CaptureError(
                        f"the step keeps a tensor in the attribute {full!r} for the next step.",
                        hint="register it as a buffer and write to it in place, or pass it in and return it.",
                    )
                changed.append(full)
    finally:
        for _, module, attributes in before:
            module.__dict__.clear()
            module.__dict__.update(attributes)
        for registry, items in registries:
            registry.clear()
            registry.update(items)


def _holds_tensor(thing: Any) -> bool:
    if isinstance(thing, torch.Tensor):
        return True
    if isinstance(thing, dict):
        return any(map(_holds_tensor, thing.values()))
    if isinstance(thing, (list, tuple)):
        return any(map(_holds_tensor, thing))
    return False
