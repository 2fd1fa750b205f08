"""Stochastic depth: layers are left out by draws of Python's generator, and a span is hidden by numpy's."""

from __future__ import annotations

import random
from typing import Any

import numpy
import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Skipping(nn.Module):
    """Residual layers that are skipped now and then."""

    def __init__(self) -> None:
        super().__init__()
        self.chance = 0.2
        self.hide = True
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, rows: Tensor) -> Tensor:
        if self.hide and self.training:
            start = int(numpy.random.randint(0, 6))
            rows = rows.clone()
            rows[:, start : start + 2] = 0
        for layer in self.layers:
            if not self.training or random.random() >= self.chance:
                rows = rows + torch.relu(layer(rows))
        return rows


def step(model: nn.Module, optimizer: torch.optim.Optimizer, rows: Tensor) -> Tensor:
    """One step."""
    loss = F.mse_loss(model(rows), rows.flip(0)) + sum(p.square().sum() for p in model.parameters()) * 1e-3
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def make() -> tuple[Any, nn.Module, Any, tuple[Any, ...]]:
    """All of it."""
    model = Skipping()
    return step, model, torch.optim.SGD(model.parameters(), lr=0.05), (torch.randn(64, 8),)
