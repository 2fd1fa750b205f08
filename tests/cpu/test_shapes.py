"""Batches of other lengths: a shorter one runs by the plan of the next longer one, and nothing is measured for it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from twins import assert_same, everything, same

import lowtide


class Reader(nn.Module):
    """A small transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(40, 16), nn.Embedding(64, 16)
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True) for _ in range(3))
        self.head = nn.Linear(16, 40)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.tokens(x) + self.places(torch.arange(x.shape[1]))
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)  # type: ignore[no-any-return]


def step(model: nn.Module, optimizer: Any, x: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x).flatten(0, 1), x.flatten())
    loss.backward()
    optimizer.step()
    return loss.detach()


@pytest.mark.parametrize("budget", ["60%", "100%"])
def test_shorter_batches_take_the_plan_of_the_next_longer_one(budget: str) -> None:
    found = []
    for planned in (False, True):
        torch.manual_seed(0)
        model = Reader()
        optimizer = torch.optim.Adam(model.parameters())
        said: list[str] = []
        batches = [torch.randint(0, 40, (4, length)) for length in (48, 40, 31, 44, 48, 12)]
        run: Any = lambda x, model=model, optimizer=optimizer: step(model, optimizer, x)  # noqa: E731
        if planned:
            run = lowtide.fit(
                step, model, optimizer, example=(batches[0],), budget=budget, time_limit=0.3,
                tell=said.append,
            )  # fmt: skip
            said.clear()
        losses = [run(x) for x in batches]
        found.append((losses, everything(model, optimizer)))
        if planned:
            assert run.peak <= run.plan.budget
            assert sum(line.startswith("captured") for line in said) == 4
            assert not any(line.startswith("measured") for line in said)
    (expected, state), (losses, other) = found
    assert all(same(one, two) for one, two in zip(expected, losses, strict=True))
    assert_same(state, other)
