"""Steps that put the random generator back and draw again, as torch.utils.checkpoint does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from twins import assert_exact, everything

import lowtide
from lowtide.peaks.predict import predict

Step = Callable[..., Any]
OUTSIDE = torch.get_rng_state()


class Noise(nn.Module):
    """Draws in all ways that need no tensor's contents."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, 4 * width)
        self.outer = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.dropout(F.gelu(self.inner(x)), 0.2) + 0.1 * torch.randn(4 * x.shape[1])
        hidden = hidden * torch.rand_like(hidden) * torch.empty(x.shape[0], 1).bernoulli_(0.9)
        out: Tensor = self.outer(hidden)
        return out


class Checkpointed(nn.Module):
    """Blocks, each of which runs again in the backward."""

    def __init__(self, block: Callable[[], nn.Module], **options: Any) -> None:
        super().__init__()
        self.first = nn.Linear(64, 64)
        self.blocks = nn.ModuleList(block() for _ in range(4))
        self.options = options

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + checkpoint(block, x, **self.options)
        return x


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    loss: Tensor = F.dropout(model(x), 0.1).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def recipe(make: Callable[[], nn.Module], step: Step = step) -> Callable[[], Any]:
    def built() -> Any:
        torch.manual_seed(0)
        model = make()
        return step, model, torch.optim.AdamW(model.parameters(), lr=0.01), (torch.randn(256, 64),)

    return built


@pytest.mark.parametrize("options", [{"use_reentrant": False}, {"use_reentrant": True}], ids=["hooks", "reentrant"])
@pytest.mark.parametrize("budget", [None, "60%"])
@pytest.mark.parametrize("preserve", [True, False])
def test_checkpoints_draw_what_they_drew(options: dict[str, Any], budget: str | None, preserve: bool) -> None:
    made = recipe(lambda: Checkpointed(lambda: Noise(64), **options, preserve_rng_state=preserve))
    train = assert_exact(made, budget=budget)
    assert train.peak <= train.plan.budget
    assert train.mismatches == 0


def test_peaks_are_predicted_where_numbers_are_drawn_again() -> None:
    found = predict(*recipe(lambda: Checkpointed(lambda: Noise(64), use_reentrant=False))())
    assert found.ok, found
    assert found.eager_predicted_peak < found.predicted_peak  # the program keeps them


def again(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Any:
    before = torch.get_rng_state()
    first = torch.rand(64)
    second = F.dropout(model(x), 0.3)
    with torch.random.fork_rng(devices=[]):
        torch.random.set_rng_state(before)
        third = torch.rand(64)
    loss = (second * first * third).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach(), first, third


def test_a_state_that_was_asked_for_can_be_put_back() -> None:
    train = assert_exact(recipe(lambda: nn.Linear(64, 64), again))
    _, first, third = train(torch.randn(256, 64))
    assert torch.equal(first, third)


class LayerDrop(nn.Module):
    """Leaves out layers at random, or never."""

    def __init__(self, dropped: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))
        self.dropped = dropped

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if not self.dropped(torch.rand([])):
                x = layer(x)
        return x


@pytest.mark.parametrize(
    "dropped", [lambda p: p < 0.0, lambda p: p > 1.0, lambda p: p >= 1, lambda p: p >= 0.0, lambda p: p < -1]
)
def test_layers_that_are_never_or_always_left_out(dropped: Callable[[Tensor], Tensor]) -> None:
    def both(model: Any, optimizer: Any, x: Tensor) -> Any:
        return step(lambda x: model[0](x) + model[1](x), optimizer, x)  # type: ignore[arg-type]

    assert_exact(recipe(lambda: nn.ModuleList([LayerDrop(dropped), nn.Linear(64, 64)]), both), steps=2)


@pytest.mark.parametrize("dropped", [lambda p: p < 0.5, lambda p: p <= 0.0, lambda p: p > 0])
def test_layers_that_are_left_out_at_random(dropped: Callable[[Tensor], Tensor]) -> None:
    model = LayerDrop(dropped)
    with pytest.raises(lowtide.CaptureError, match="looks at the contents of a tensor"):
        lowtide.fit(step, model, torch.optim.SGD(model.parameters(), lr=0.1), example=(torch.ones(4, 64),))


class Weighted(nn.Module):
    """Draws by the contents of a tensor."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.bernoulli(x.sigmoid())


def seeds(model: nn.Module, *_: Any) -> Tensor:
    torch.manual_seed(7)
    return F.dropout(next(model.parameters()), 0.5).sum().detach()


def draws_less(*_: Any) -> Tensor:
    before = torch.get_rng_state()
    torch.rand(8)
    torch.set_rng_state(before)
    return torch.rand(4)


def goes_on_from_elsewhere(*_: Any) -> Tensor:
    torch.set_rng_state(OUTSIDE)
    return torch.rand(4)


def stays_back(*_: Any) -> Tensor:
    before = torch.get_rng_state()
    drawn = torch.rand(8)
    torch.set_rng_state(before)
    return drawn


@pytest.mark.parametrize(
    ("step", "model", "why"),
    [
        (seeds, nn.Linear(2, 2), r"test_draws\.py:\d+: the step seeds the random generator"),
        (
            draws_less,
            nn.Linear(2, 2),
            r"test_draws\.py:\d+: the step puts the random generator back and draws something",
        ),
        (goes_on_from_elsewhere, nn.Linear(2, 2), "gives it a state from elsewhere"),
        (stays_back, nn.Linear(2, 2), "the step puts the random generator back and leaves it there"),
        (step, Checkpointed(Weighted, use_reentrant=False), "draws something else than before"),
    ],
)
def test_what_can_not_be_followed_is_refused(step: Step, model: nn.Module, why: str) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state, functions, before = (
        torch.get_rng_state(),
        (torch.get_rng_state, torch.set_rng_state),
        everything(model, None),
    )
    with pytest.raises(lowtide.CaptureError, match=why):
        lowtide.fit(step, model, optimizer, example=(torch.ones(4, 64),))
    assert torch.equal(torch.get_rng_state(), state)
    assert (torch.get_rng_state, torch.set_rng_state) == functions
    assert everything(model, None).keys() == before.keys()
