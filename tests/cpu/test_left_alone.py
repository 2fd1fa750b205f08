"""Gradients that a step leaves alone or clears, hooks on a wrapped net, tensors as options, and other small print."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from twins import assert_same, everything

import lowtide
from lowtide.errors import LowtideError

OPTIONS: dict[str, Any] = {"budget": "1GiB", "costs": "roofline", "time_limit": 0.1}
X, Y = torch.randn(6, 12, generator=torch.Generator().manual_seed(3)), torch.arange(6) % 4


class Scaled(nn.Linear):
    """A linear layer whose class can be changed to and from nn.Linear."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


class Net(nn.Module):
    """Two outputs, of which a loss may use one."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.other = Scaled(12, 12), nn.Linear(12, 4), nn.Linear(12, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = torch.tanh(self.one(x))
        return self.two(x), self.other(x)


Step = Callable[..., Tensor]


def of_optimizer(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
    loss = F.cross_entropy(model(x)[0], y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def of_model(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
    loss = F.cross_entropy(model(x)[0], y)
    loss.backward()
    optimizer.step()
    model.zero_grad()
    return loss


def pair(step: Step, door: str) -> list[tuple[nn.Module, Any, Callable[[], Any], Any]]:
    """The same model twice, in eager and through a door: model, optimizer, what takes a step, and what is called."""
    found: list[tuple[nn.Module, Any, Callable[[], Any], Any]] = []
    for how in ("eager", door):
        torch.manual_seed(0)
        model = Net()
        optimizer = torch.optim.Adam([*model.one.parameters(), *model.two.parameters()], lr=0.01)
        net: Any = lowtide.wrap(model, example=(X,), **OPTIONS) if how == "wrap" else model
        take: Any = lambda net=net, optimizer=optimizer: step(net, optimizer, X, Y)  # noqa: E731
        if how == "fit":
            fitted = lowtide.fit(step, model, optimizer, example=(X, Y), **OPTIONS)
            take = lambda fitted=fitted: fitted(X, Y)  # noqa: E731
        found.append((model, optimizer, take, net))
    return found


def both(twins: list[tuple[nn.Module, Any, Callable[[], Any], Any]], steps: int = 2) -> None:
    """Steps of both; everything must be equal, gradients included."""
    (one, optimizer, take, _), (other, mirrored, taken, _) = twins
    for _ in range(steps):
        assert torch.equal(take(), taken())
        assert_same(everything(one, optimizer), everything(other, mirrored))


@pytest.mark.parametrize("door", ["fit", "wrap"])
@pytest.mark.parametrize("step", [of_optimizer, of_model])
def test_gradients_that_the_loss_does_not_reach(step: Step, door: str) -> None:
    twins = pair(step, door)
    both(twins)
    for model, *_ in twins:
        model.get_parameter("other.weight").grad = torch.ones(3, 12)
    both(twins)
    left = twins[1][0].get_parameter("other.weight").grad
    assert (left is None) == (step is of_model)


@pytest.mark.parametrize("door", ["fit", "wrap"])
@pytest.mark.parametrize("step", [of_optimizer, of_model])
def test_gradients_of_frozen_parameters(step: Step, door: str) -> None:
    twins = pair(step, door)
    both(twins)
    for model, *_ in twins:
        model.get_submodule("one").requires_grad_(False)
        model.get_parameter("one.weight").grad = torch.ones(12, 12)
    both(twins, steps=3)
    assert twins[1][0].get_parameter("one.weight").grad is None


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@pytest.mark.parametrize("kind", ["forward", "forward_pre", "full_backward"])
def test_a_hook_on_the_wrapped_net_itself(kind: str) -> None:
    twins = pair(of_optimizer, "wrap")
    both(twins)
    seen: list[list[Tensor]] = [[], []]
    handles = []
    for (_, _, _, net), notes in zip(twins, seen, strict=True):

        def forward(_: Any, given: Any, result: Any, notes: list[Tensor] = notes) -> Any:
            notes.append(result[0].detach().clone())
            return result[0] * 2, result[1]

        def forward_pre(_: Any, given: Any, notes: list[Tensor] = notes) -> Any:
            notes.append(given[0].clone())
            return (given[0] * 2,)

        def full_backward(_: Any, given: Any, result: Any, notes: list[Tensor] = notes) -> None:
            notes.append(result[0].clone())

        hook = {"forward": forward, "forward_pre": forward_pre, "full_backward": full_backward}[kind]
        handles.append(getattr(net, f"register_{kind}_hook")(hook))
    both(twins)
    assert len(seen[0]) == len(seen[1]) == 2
    assert all(map(torch.equal, *seen))
    for handle in handles:
        handle.remove()
    both(twins)


@pytest.mark.parametrize("door", ["fit", "wrap"])
def test_a_learning_rate_that_becomes_a_tensor(door: str) -> None:
    twins = pair(of_optimizer, door)
    both(twins)
    for _, optimizer, _, _ in twins:
        optimizer.param_groups[0]["lr"] = torch.tensor(0.05)
    if door == "wrap":  # the optimizer is the caller's
        both(twins)
        return
    model, optimizer, take, _ = twins[1]
    kept = {key: item.clone() for key, item in everything(model, optimizer).items() if isinstance(item, Tensor)}
    with pytest.raises(LowtideError, match="a tensor as learning rate"):
        take()
    now = everything(model, optimizer)
    assert_same(kept, {key: now[key] for key in kept})
    for _, owner, _, _ in twins:
        owner.param_groups[0]["lr"] = 0.05
    both(twins)


def test_outputs_of_a_wrapped_model_that_the_loss_does_not_use() -> None:
    twins = pair(of_optimizer, "wrap")
    both(twins)
    assert twins[1][0].get_parameter("other.weight").grad is None
    for model, _, _, net in twins:
        model.zero_grad()
        first, second = net(X)
        second.square().mean().backward()
        del first
    assert_same(everything(*twins[0][:2]), everything(*twins[1][:2]))
    assert twins[1][0].get_parameter("two.weight").grad is None
    for model, *_ in twins:
        model.zero_grad()
    both(twins)


@pytest.mark.parametrize("door", ["fit", "wrap"])
def test_a_module_of_another_class(door: str) -> None:
    twins = pair(of_optimizer, door)
    both(twins)
    for kind in (nn.Linear, Scaled):
        for model, *_ in twins:
            model.get_submodule("one").__class__ = kind
        both(twins)


def test_text_of_a_number_says_what_to_do() -> None:
    def step(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> str:
        loss = F.cross_entropy(model(x)[0], y)
        loss.backward()
        return f"{loss.item():.3f}"

    def rounds(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> Any:
        loss = F.cross_entropy(model(x)[0], y)
        loss.backward()
        return round(loss.item(), 2)

    with pytest.raises(LowtideError, match="return the number from the step, and format it after the step"):
        lowtide.fit(step, Net(), None, example=(X, Y), **OPTIONS)
    with pytest.raises(LowtideError, match="return the number from the step and do it after the step"):
        lowtide.fit(rounds, Net(), None, example=(X, Y), **OPTIONS)
