"""A model that counts its calls, and a step with a weight that grows by a counter of its own."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WARM_UP = 10
state = {"steps": 0}


class Coder(nn.Module):
    """An autoencoder that draws its code."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.beta = 0.5
        self.deterministic = False
        self.seen: list[int] = []
        self.encode = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 6))
        self.decode = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 8))

    def forward(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        self.calls += 1
        mean, spread = self.encode(rows).chunk(2, dim=-1)
        code = mean if self.deterministic else mean + torch.randn_like(mean) * torch.exp(0.5 * spread)
        distance = -0.5 * (1 + spread - mean.pow(2) - spread.exp()).mean()
        return self.decode(code), self.beta * distance


def step(model: nn.Module, optimizer: torch.optim.Optimizer, rows: Tensor) -> tuple[Tensor, Tensor]:
    """One step."""
    state["steps"] += 1
    weight = min(1.0, state["steps"] / WARM_UP)
    made, distance = model(rows)
    loss = F.mse_loss(made, rows) + weight * distance
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss, distance


def make() -> tuple[Any, nn.Module, Any, tuple[Any, ...]]:
    """All of it."""
    model = Coder()
    return step, model, torch.optim.Adam(model.parameters(), lr=0.01), (torch.randn(64, 8),)
