"""Stand-ins while a step is traced: whoever refers to them, no fake is left in the model."""

from __future__ import annotations

import copy
import signal
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from twins import assert_same, everything

import lowtide
from lowtide import private
from lowtide.capture import capture
from lowtide.capture.stand_in import stand_ins


def no_fakes(model: nn.Module, optimizer: Any = None) -> None:
    tensors = [*model.parameters(), *model.buffers()]
    for group in optimizer.param_groups if optimizer is not None else ():
        tensors += group["params"]
    assert not any(isinstance(tensor, FakeTensor) for tensor in tensors)
    assert all(tensor.untyped_storage().data_ptr() for tensor in tensors)


def classify(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def recipe() -> tuple[nn.Module, Any, tuple[Tensor, Tensor]]:
    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    return model, torch.optim.SGD(model.parameters(), lr=0.1), (torch.randn(6, 8), torch.randint(3, (6,)))


def test_a_cast_that_autocast_remembers() -> None:
    """Autocast keeps casts until its outermost block ends, by a weak reference to the tensor that was cast."""
    model, optimizer, example = recipe()
    before = copy.deepcopy(everything(model, optimizer))

    def step(*args: Any) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            classify(*args)
            return classify(*args)

    capture(step, model, optimizer, example)
    no_fakes(model, optimizer)
    capture(step, model, optimizer, example)
    no_fakes(model, optimizer)
    assert_same(before, everything(model, optimizer))


def test_a_cast_of_the_real_weights_before() -> None:
    model, _, _ = recipe()
    weight = model[0].weight
    with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=True):
        torch.mm(torch.empty(0, 8), weight)  # the weight is cast; nothing is multiplied
        fake_mode = FakeTensorMode()
        with fake_mode, stand_ins([weight], fake_mode):
            torch.mm(weight, weight)
        with fake_mode, stand_ins([weight], fake_mode):
            torch.mm(weight, weight)
    no_fakes(model)


def test_a_low_level_reference_to_a_stand_in_leaves_no_fake() -> None:
    model, optimizer, (x, _) = recipe()
    optimizer.state[model[0].weight]["momentum_buffer"] = torch.ones(8, 8)
    expected, weight = model.eval()(x), model[0].weight
    held: list[Any] = []
    fake_mode = FakeTensorMode()
    with (
        pytest.raises(lowtide.CaptureError, match="1 tensors of the model could not be put back") as caught,
        stand_ins(list(model.parameters()), fake_mode),
    ):
        held.append(torch._C._WeakTensorRef(model[0].weight))
    assert "new objects" in str(caught.value.hint)
    no_fakes(model, optimizer)
    assert model[0].weight is not weight
    assert model[0].weight is optimizer.param_groups[0]["params"][0]
    assert torch.equal(optimizer.state[model[0].weight]["momentum_buffer"], torch.ones(8, 8))
    assert isinstance(model[0].weight, nn.Parameter)
    assert torch.equal(model(x), expected)


def test_a_low_level_reference_that_is_dead_by_then_is_no_hindrance() -> None:
    model, _, _ = recipe()
    fake_mode = FakeTensorMode()
    with stand_ins(list(model.parameters()), fake_mode):
        circle: list[Any] = [torch._C._WeakTensorRef(model[0].weight)]
        circle.append(circle)
        del circle
    no_fakes(model)


def test_an_interruption_while_they_are_put_back_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _, _ = recipe()
    usual = signal.signal(signal.SIGINT, signal.default_int_handler)
    swap = private.swap_tensor_impl
    fake_mode = FakeTensorMode()
    try:
        with pytest.raises(KeyboardInterrupt), stand_ins(list(model.parameters()), fake_mode):

            def interrupted(one: Tensor, other: Tensor) -> None:
                signal.raise_signal(signal.SIGINT)
                swap(one, other)

            monkeypatch.setattr(private, "swap_tensor_impl", interrupted)
    finally:
        signal.signal(signal.SIGINT, usual)
    no_fakes(model)
