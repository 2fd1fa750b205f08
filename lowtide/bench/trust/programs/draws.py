"""Numbers from Python's and numpy's generators, used in arithmetic."""

from __future__ import annotations

import random
from typing import Any

import numpy
import torch
import torch.nn.functional as F
from torch import Tensor, nn

SPREAD = 0.1
NOISY = True


class Noisy(nn.Module):
    """Layers whose strength is drawn at each call."""

    def __init__(self) -> None:
        super().__init__()
        self.low, self.high = 0.5, 1.5
        self.layers = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 10), nn.Tanh(), nn.Linear(10, 2))

    def forward(self, rows: Tensor) -> Tensor:
        strength = random.uniform(self.low, self.high)
        shift = float(numpy.random.normal(0.0, SPREAD)) if NOISY else 0.0
        out: Tensor = self.layers(rows * strength + shift)
        return out


def step(model: nn.Module, optimizer: torch.optim.Optimizer, rows: Tensor, targets: Tensor) -> Tensor:
    """One step."""
    loss = F.mse_loss(model(rows), targets) * (1 + random.random())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def make() -> tuple[Any, nn.Module, Any, tuple[Any, ...]]:
    """All of it."""
    model = Noisy()
    return step, model, torch.optim.Adagrad(model.parameters(), lr=0.05), (torch.randn(48, 6), torch.randn(48, 2))
