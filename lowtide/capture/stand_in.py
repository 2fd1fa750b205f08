"""Fake tensors inside the caller's own objects, for as long as the step is traced.

The Python objects stay the same, so whoever holds a parameter (the model, the optimizer, a closure, a list of flat
weights) sees the stand-in; only the tensor behind the object is another one until it is put back.
"""

from __future__ import annotations

import contextlib
import gc
import signal
import threading
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
    private.swap_tensor_impl(one, other)  # first: it raises before it has changed anything
    one.__class__, other.__class__ = other.__class__, one.__class__
    one.__dict__, other.__dict__ = other.__dict__, one.__dict__


@contextlib.contextmanager
def stand_ins(tensors: list[torch.Tensor], fake_mode: FakeTensorMode) -> Iterator[None]:
    """Each of these tensor objects is fake inside the block, and itself again after it."""
    fakes = [fake_like(tensor, fake_mode) for tensor in tensors]
    swapped: list[tuple[torch.Tensor, torch.Tensor]] = []
    try:
        torch.clear_autocast_cache()  # it knows the weights that were cast by the tensors behind the objects
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
        with _uninterrupted():
            _put_back(swapped)


def _put_back(swapped: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Make every stand-in itself again; where torch does not let one go, its holders get the tensor as a new object."""
    torch.clear_autocast_cache()
    stuck: list[tuple[torch.Tensor, torch.Tensor]] = []
    for tensor, real in reversed(swapped):
        try:
            _swap(tensor, real)
        except (RuntimeError, TypeError):
            stuck.append((tensor, real))
    if not stuck:
        return
    gc.collect()  # what refers to a stand-in may be dead already
    why: Exception | None = None
    lost = 0
    for tensor, real in stuck:
        try:
            _swap(tensor, real)
        except (RuntimeError, TypeError) as error:
            why, lost = error, lost + 1
            _hand_over(tensor, real)
    if why is not None:
        raise CaptureError(
            f"{lost} tensors of the model could not be put back into their own objects after the step was traced: "
            f"something holds a low-level reference to their stand-ins: {why}",
            hint="the model and the optimizer have them as new objects, with all they held. Whatever else kept the old "
            "objects (a closure, a tuple) must take the new ones from the model.",
        ) from why


def _hand_over(old: torch.Tensor, new: torch.Tensor) -> None:
    """Put a tensor into each dict and list that holds another, as key, value or item, in the same order."""
    for holder in gc.get_referrers(old):
        if isinstance(holder, list):
            holder[:] = [new if item is old else item for item in holder]
        elif isinstance(holder, dict):
            items = [(new if key is old else key, new if item is old else item) for key, item in holder.items()]
            holder.clear()
            holder.update(items)


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Let Ctrl-C wait until the block is done."""
    if threading.current_thread() is not threading.main_thread():  # only the main thread is ever interrupted
        yield
        return
    heard: list[int] = []
    usual = signal.signal(signal.SIGINT, lambda number, _: heard.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, usual)
        if heard:
            signal.raise_signal(signal.SIGINT)
