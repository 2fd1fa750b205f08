"""How the loss uses a wrapped model's outputs: gradients of any layout, of some outputs only, or of none."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from twins import assert_same, everything, same

import lowtide


class Net(nn.Module):
    """Convolutions with statistics, draws, a counter, and a buffer that is replaced at each forward."""

    calls = 0
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.head = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Conv2d(8, 5, 1)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.count = self.count + 1
        self.calls += 1
        hidden = F.dropout(torch.relu(self.norm(self.first(x))), 0.2) * random.uniform(0.5, 1.5) * self.calls
        return self.head(hidden) / self.count, hidden.mean((2, 3))


X = torch.randn(4, 3, 17, 17, generator=torch.Generator().manual_seed(1))
LABELS = torch.arange(4 * 17 * 17).reshape(4, 17, 17) % 5
Loss = Callable[[tuple[Tensor, ...]], Tensor]
LOSSES: dict[str, Loss] = {
    "laid out as the outputs": lambda found: found[0].square().sum() + found[1].square().sum(),
    "contiguous": lambda found: F.cross_entropy(found[0], LABELS) + found[1].square().sum(),
    "one number for all": lambda found: found[0].sum() + found[1].sum(),
    "permuted": lambda found: found[0].permute(3, 0, 2, 1).contiguous().square().sum() + found[1].t().square().sum(),
    "of the first only": lambda found: F.cross_entropy(found[0], LABELS),
    "of the second only": lambda found: found[1].square().sum(),
}


def pair(make: Callable[[], nn.Module]) -> tuple[nn.Module, nn.Module]:
    """Two equal models."""
    torch.manual_seed(0)
    model = make()
    return model, copy.deepcopy(model)


def wrap(model: nn.Module, *example: Any, **options: Any) -> lowtide.Wrapped:
    return lowtide.wrap(model, example=example, costs="roofline", time_limit=0.1, **options)


def alike(model: nn.Module, net: lowtide.Wrapped, use: Callable[[Any], Any], seed: int) -> None:
    """The same use of both, from the same generators, leaves the same behind."""
    ends = []
    for one in (model, net):
        torch.manual_seed(seed)
        random.seed(seed)
        use(one)
        ends.append((torch.get_rng_state(), random.getstate()))
    assert same(ends[0][0], ends[1][0])
    assert ends[0][1] == ends[1][1]
    assert_same(everything(model, None), everything(net.unwrapped, None))
    assert getattr(model, "calls", 0) == getattr(net.unwrapped, "calls", 0)


@pytest.mark.parametrize("name", LOSSES)
def test_gradients_of_every_layout_are_taken_as_they_come(name: str) -> None:
    model, mirror = pair(lambda: Net().to(memory_format=torch.channels_last))  # type: ignore[call-overload]
    net = wrap(mirror, X)
    for seed in range(3):
        alike(model, net, lambda one: LOSSES[name](one(X)).backward(), seed)
    assert len(net.fitted._fits) <= 3  # planned for what came and for a counter of the model's own, and then no more
    alike(model, net, lambda one: LOSSES[name](one(X[:2].repeat(2, 1, 1, 1))).backward(), 4)


def test_losses_that_take_turns() -> None:
    model, mirror = pair(Net)
    net = wrap(mirror, X)
    for seed, name in enumerate([*LOSSES, *LOSSES]):
        alike(model, net, lambda one, name=name: LOSSES[name](one(X)).backward(), seed)  # type: ignore[misc]
    assert len(net.fitted._fits) <= len(LOSSES) + 1


def test_two_forwards_whose_gradients_come_otherwise() -> None:
    model, mirror = pair(Net)
    net = wrap(mirror, X)

    def use(one: Any) -> None:
        first, second = one(X), one(X + 1)
        (LOSSES["contiguous"](first) + LOSSES["one number for all"](second)).backward()

    for seed in range(2):
        alike(model, net, use, seed)


def test_a_forward_without_a_backward_leaves_its_buffers() -> None:
    model, mirror = pair(Net)
    net = wrap(mirror, X)
    for seed in range(3):
        alike(model, net, lambda one: one(X), seed)
    assert net.count == 3


def test_an_output_that_is_not_used_has_no_say() -> None:
    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.other = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            y = self.layer(x)
            return y.square(), (y - y.detach()).abs().sqrt() + self.other(x)  # infinite slope: zeros give NaN

    x = torch.randn(3, 4)
    model, mirror = pair(Root)
    net = wrap(mirror, x)
    for seed in range(3):
        alike(model, net, lambda one: one(x)[0].sum().backward(), seed)
    assert mirror.other.weight.grad is None
    assert mirror.layer.weight.grad.isfinite().all()
    alike(model, net, lambda one: (one(x)[0] + one(x)[1].detach()).sum().backward(), 3)


def test_gradients_of_gradients_are_refused() -> None:
    model, mirror = pair(lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh()))
    x = torch.randn(3, 4, requires_grad=True)
    net = wrap(mirror, x)
    found = net(x)
    with pytest.raises(lowtide.LowtideError, match="gradient of a gradient"):  # it had none, in silence
        (found.sum() + torch.autograd.grad(found.sum(), x, create_graph=True)[0].square().sum()).backward()
    alike(model, net, lambda one: one(x.detach()).sum().backward(), 0)


def test_a_forward_that_can_not_run_again_is_refused() -> None:
    _, mirror = pair(Net)
    net = wrap(mirror, X)
    loss = LOSSES["of the first only"](net(X))
    with torch.no_grad():
        mirror.first.bias.add_(1.0)
    with pytest.raises(lowtide.LowtideError, match=r"first\.bias' was changed in place between forward and backward"):
        loss.backward()
    loss = LOSSES["of the second only"](net(X))
    mirror.norm.eps = 0.1
    with pytest.raises(lowtide.LowtideError, match="changed between forward and backward"):
        loss.backward()
    LOSSES["of the first only"](net(X)).backward()
