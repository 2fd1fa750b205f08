"""Optimizers of others, whose state they alone can make: fitted from their first step on, or refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from twins import assert_same, everything

import lowtide


class Adaptive(torch.optim.Optimizer):
    """Averages of gradients and of their squares, a trust ratio, and a copy of where each parameter began."""

    def __init__(self, parameters: Any, lr: float = 0.01) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in (one for one in group["params"] if one.grad is not None):
                self.update(parameter, parameter.grad, self.state[parameter], group["lr"])

    def update(self, parameter: Tensor, gradient: Tensor, state: dict[str, Any], lr: Any) -> None:
        if not state:
            state["step"] = torch.zeros(())
            state.update(average=torch.zeros_like(parameter), square=torch.full_like(parameter, 0.1))
            state.setdefault("origin", parameter.clone())
        state["step"] += 1
        state["average"].lerp_(gradient, 0.1)
        state["square"].mul_(0.99).addcmul_(gradient, gradient, value=0.01)
        change = state["average"] / (state["square"].sqrt() + 1e-8) / state["step"]
        ratio = parameter.norm() / (change.norm() + 1e-6)
        parameter.add_(change * ratio, alpha=-lr).lerp_(state["origin"], 1e-3)


class Plain(Adaptive):
    """Has no state at all."""

    def update(self, parameter: Tensor, gradient: Tensor, state: dict[str, Any], lr: Any) -> None:
        parameter.add_(gradient, alpha=-lr)


class FromGradient(Adaptive):
    """Its first average is the gradient."""

    def update(self, parameter: Tensor, gradient: Tensor, state: dict[str, Any], lr: Any) -> None:
        if "average" not in state:
            state["average"] = gradient.clone()
        else:
            state["average"].mul_(0.9).add_(gradient)
        parameter.add_(state["average"], alpha=-lr)


class Waits(Adaptive):
    """Its first step only looks."""

    def update(self, parameter: Tensor, gradient: Tensor, state: dict[str, Any], lr: Any) -> None:
        if not state:
            state["average"] = torch.zeros_like(parameter)
            return
        parameter.add_(state["average"].lerp_(gradient, 0.1), alpha=-lr)


def step(model: nn.Module, optimizer: Any, x: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


def build(kind: type[Adaptive]) -> tuple[nn.Module, Adaptive, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2))
    optimizer = kind(model.parameters())
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)


@pytest.mark.parametrize("kind", [Adaptive, Plain])
def test_an_optimizer_of_others_is_fitted_from_its_first_step_on(kind: type[Adaptive]) -> None:
    model, optimizer, scheduler = build(kind)
    mirror, other, mirrored_scheduler = build(kind)
    x = torch.randn(4, 6)
    train = lowtide.fit(step, mirror, other, example=(x,), costs="roofline", time_limit=0.3)
    assert not other.state
    for _ in range(5):
        assert torch.equal(step(model, optimizer, x), train(x))
        assert_same(everything(model, optimizer), everything(mirror, other))
        scheduler.step()
        mirrored_scheduler.step()


@pytest.mark.parametrize("kind", [FromGradient, Waits])
def test_a_first_step_that_is_another_one_is_refused(kind: type[Adaptive]) -> None:
    model, optimizer, _ = build(kind)
    before = [one.detach().clone() for one in model.parameters()]
    x = torch.randn(4, 6)
    with pytest.raises(lowtide.LowtideError, match=r"treats its first step in another way[\s\S]*lowtide\.attach"):
        lowtide.fit(step, model, optimizer, example=(x,), costs="roofline", time_limit=0.3)(x)
    assert all(torch.equal(one, now) for one, now in zip(before, model.parameters(), strict=True))
    step(model, optimizer, x)
    train = lowtide.fit(step, model, optimizer, example=(x,), costs="roofline", time_limit=0.3)
    train(x)
