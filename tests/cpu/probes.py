"""A model whose own op does, in the middle of a step, whatever a test wants: raise, keep tensors, fork, step again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

Action = Callable[[Tensor], object]

_actions: dict[str, Action] = {}


@torch.library.custom_op("lowtide_tests::probe", mutates_args=())
def probe(x: Tensor, name: str) -> Tensor:
    """A copy of x; before it is made, the action of this name happens."""
    if name in _actions:
        _actions[name](x)
    return x.clone()


@probe.register_fake
def _(x: Tensor, name: str) -> Tensor:
    return torch.empty_like(x)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.name = inputs[1]


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
    return probe(gradient, f"{ctx.name} backward"), None


probe.register_autograd(_backward, setup_context=_setup)


@contextmanager
def acting(**actions: Action) -> Iterator[None]:
    """Let these actions happen inside the `with`: `middle` in the forward, `middle_backward` in the backward."""
    named = {name.replace("_", " "): action for name, action in actions.items()}
    _actions.update(named)
    try:
        yield
    finally:
        for name in named:
            del _actions[name]


class Probe(nn.Module):
    """Calls the probe."""

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = probe(x, "middle")
        return made


def classify(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
    loss = functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def probed(width: int = 48, batch: int = 32, **options: Any) -> tuple[Any, nn.Sequential, Any, tuple[Tensor, Tensor]]:
    """A step whose model has a probe between its layers, and dropout; the same at every call."""
    with torch.random.fork_rng():
        torch.manual_seed(11)
        model = nn.Sequential(
            nn.Linear(16, width),
            nn.Tanh(),
            nn.Dropout(0.2),
            nn.Linear(width, width),
            nn.Tanh(),
            Probe(),
            nn.Linear(width, width),
            nn.Tanh(),
            nn.Linear(width, 5),
        )
        example = (torch.randn(batch, 16), torch.randint(5, (batch,)))
    optimizer = torch.optim.SGD(model.parameters(), **{"lr": 0.1, "momentum": 0.9, **options})
    return classify, model, optimizer, example
