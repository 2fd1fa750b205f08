"""What `allow="lossy"` finds by itself: the mildest setting that fits, whatever the model is made of."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from formed import step
from torch import Tensor, nn

import lowtide
from lowtide.fit import Fitted

WORDS, WIDTH = 256, 64


class Words(nn.Module):
    """A language model whose batch has nothing but numbers of words: none of it can be packed."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.body = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.ReLU(), nn.Linear(4 * WIDTH, WIDTH))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.words(tokens)
        logits: Tensor = self.head(hidden + self.body(hidden)).transpose(1, 2)
        return logits


def found(model: nn.Module, example: tuple[Tensor, Tensor], budget: int) -> tuple[Fitted, list[str], dict[str, Any]]:
    """The model fitted with anything lossy, what was said, and the settings of what was taken."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    said: list[str] = []
    train = lowtide.fit(
        step,
        model,
        optimizer,
        example=example,
        budget=budget,
        allow="lossy",
        costs="roofline",
        time_limit=0.1,
        tell=said.append,
    )
    assert train.plan.peak <= budget
    return train, said, {one.name: one.setting for one in train.plan.rewrites if one.exactness != "bitwise"}


def test_what_has_nothing_to_do_stands_in_no_other_technique_s_way() -> None:
    """Little more than half of what parameters and state of a model of words need: only other forms of both fit."""
    torch.manual_seed(0)
    model = Words()
    example = torch.randint(0, WORDS, (4, 8)), torch.randint(0, WORDS, (4, 8))
    train, said, used = found(model, example, 7 * sum(weight.numel() for weight in model.parameters()))
    assert not any("input8" in line for line in said)
    assert {*used} == {"weights16", "state8"}
    losses = [float(train(*example)) for _ in range(3)]
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("budget", [420_000, 150_000])
def test_a_density_is_as_mild_as_the_budget_bears(budget: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(192, 512), nn.ReLU(), nn.Linear(512, 192), nn.ReLU(), nn.Linear(192, 10)
    )
    example = torch.randn(4, 3, 8, 8), torch.randint(0, 10, (4,))
    _, _, used = found(model, example, budget)
    assert used["sparse"] == {420_000: 0.3, 150_000: 0.05}[budget]
