"""Calls become one where no other op must run between them, and read copies that two of them share as they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from trying import exactly
from twins import assert_exact

from lowtide.graph import Graph
from lowtide.kernels import attention as heads
from lowtide.kernels import opaque
from lowtide.plan import as_eager
from lowtide.rewrite.attention import attention
from lowtide.rewrite.blocked import blocked
from lowtide.rewrite.joined_norms import joined
from lowtide.rewrite.joined_updates import joined_updates

needs_layout = pytest.mark.skipif(not opaque.works(), reason="the library of convolutions has another layout here")
needs_kernels = pytest.mark.skipif(heads.library() is None, reason="no compiler, or no headers of torch, here")
Recipe = Callable[[], tuple[Callable[..., Any], nn.Module, Any, tuple[Any, ...]]]


def _step(model: Any, optimizer: Any, x: Tensor) -> Tensor:
    optimizer.zero_grad()
    made = model(x)
    loss = (made * torch.linspace(-1, 1, made.numel()).view(made.shape)).sum() * 0.1 + made.square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()  # type: ignore[no-any-return]


def _recipe(made: Callable[[], nn.Module], *sizes: int, step: Callable[..., Any] = _step) -> Recipe:
    def recipe() -> tuple[Callable[..., Any], nn.Module, Any, tuple[Any, ...]]:
        torch.manual_seed(3)
        model = made()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        return step, model, optimizer, (torch.randn(*sizes, generator=torch.Generator().manual_seed(4)),)

    return recipe


class Shared(nn.Module):
    """A batch norm whose result is added to what is only known once it has run."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.norm = kind, nn.BatchNorm2d(32)
        self.first, self.second = nn.Conv2d(3, 32, 3, padding=1), nn.Conv2d(32, 32, 3, padding=1)
        self.head = nn.Conv2d(32, 16, 1)

    def forward(self, x: Tensor) -> Tensor:
        x, norm = self.first(x), self.norm
        made = norm(x)
        if self.kind == "the same norm":
            other = norm(self.second(x))
        elif self.kind == "the same norm of the same":
            other = norm(x)
        elif self.kind == "its statistics":
            other = self.second(x + norm.running_mean.view(1, -1, 1, 1))
        else:
            seen = self.second(x)
            other = nn.functional.batch_norm(seen, norm.running_mean, norm.running_var, norm.weight, norm.bias, False)
        return self.head((made + other).relu())  # type: ignore[no-any-return]


NORMS = ("the same norm", "the same norm of the same", "its statistics", "its statistics, to normalise")


@needs_layout
@pytest.mark.parametrize("kind", NORMS)
def test_a_batch_norm_takes_in_no_sum_with_what_waits_for_it(kind: str) -> None:
    def changed(graph: Graph) -> Graph:
        return exactly(joined, exactly(blocked, graph))

    assert_exact(_recipe(lambda: Shared(kind), 3, 3, 9, 8), steps=2, change=changed, program=as_eager)


class Shrinking(nn.Module):
    """A batch norm whose bias is another one by the time of its backward, which does not read it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.norm = nn.Conv2d(3, 32, 3), nn.Conv2d(32, 32, 3), nn.BatchNorm2d(32)

    def forward(self, x: Tensor) -> Tensor:
        made = self.norm(self.first(x)).relu()
        self.norm.bias.data.mul_(0.9)
        return self.norm(self.second(made)).relu() * made.mean()  # type: ignore[no-any-return]


@needs_layout
def test_a_batch_norm_is_made_again_only_while_its_bias_is_there() -> None:
    def changed(graph: Graph) -> Graph:
        return exactly(joined, exactly(blocked, graph))

    assert_exact(_recipe(Shrinking, 3, 3, 9, 8), steps=2, change=changed, program=as_eager)


class Heads(nn.Module):
    """Attention that draws, or writes, between its products, or whose products share what they read."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.query, self.key, self.value, self.last = (nn.Linear(24, 24) for _ in range(4))
        self.drop = nn.Dropout(0.2)
        self.register_buffer("kept", torch.randn(2, 3, 11, 8, generator=torch.Generator().manual_seed(8)))

    def forward(self, x: Tensor) -> Tensor:
        kind = self.kind
        if kind in ("values drawn later", "keys written between"):
            query, key, value = (one(x).unflatten(-1, (3, 8)).transpose(1, 2) for one in self.first)
            if kind == "values drawn later":
                weights = self.drop((query @ key.transpose(2, 3) / 3).softmax(-1))
                made = weights @ self.drop(value)
            else:
                with torch.no_grad():
                    scores = query @ self.kept.transpose(2, 3)
                    self.kept.add_(0.01)
                    made = (scores / 3).softmax(-1) @ self.kept + 0 * value
            return self.last(made.transpose(1, 2).reshape(x.shape)) + self.value(x)  # type: ignore[no-any-return]
        one, other = (0.3 * self.query(x).transpose(0, 1)).contiguous(), self.key(x).transpose(0, 1)
        query, key, value = {"q": (one, other, one), "k": (other, one, one), "a": (one, one, one)}.get(
            kind[0], (one, one, other)
        )
        with torch.set_grad_enabled(not kind.endswith("without gradients")):
            weights = torch.bmm(query, key.transpose(1, 2)).softmax(-1)
            made = torch.bmm(weights, weights.transpose(1, 2)) if kind.startswith("twice") else weights
            made = torch.bmm(made, value)
        return self.last(made.transpose(0, 1)) + self.value(x)  # type: ignore[no-any-return]

    @property
    def first(self) -> tuple[nn.Module, nn.Module, nn.Module]:
        return self.query, self.key, self.value


READ = ("queries as values", "keys as values", "both as keys", "all as values", "twice the weights")
ATTENTION = ("values drawn later", "keys written between", *READ, *(f"{kind}, without gradients" for kind in READ))


@needs_kernels
@pytest.mark.parametrize("kind", ATTENTION)
def test_attention_is_one_call_only_where_nothing_comes_between(kind: str) -> None:
    """Copies that two of its products read are read as they are."""
    assert_exact(
        _recipe(lambda: Heads(kind), 2, 11, 24),
        steps=2,
        change=lambda graph: exactly(attention, graph),
        program=as_eager,
    )


class Twice(torch.optim.SGD):
    """Updates, and updates again with what is left of the gradients."""

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        super().step()
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                parameter.grad.clamp_(-0.01, 0.01)
        super().step()


@needs_kernels
def test_an_update_is_one_call_only_where_its_gradient_stays() -> None:
    def recipe() -> tuple[Callable[..., Any], nn.Module, Any, tuple[Any, ...]]:
        step, model, _, example = _recipe(lambda: nn.Sequential(nn.Linear(12, 7), nn.Tanh(), nn.Linear(7, 5)), 4, 12)()
        return step, model, Twice(model.parameters(), lr=0.1), example

    assert_exact(recipe, steps=2, change=lambda graph: exactly(joined_updates, graph), program=as_eager)
