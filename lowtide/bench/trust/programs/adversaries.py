"""Two models in one, each with an optimizer of its own, trained against each other in one step."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

REAL, FAKE = 0.9, 0.0
ROUNDS = 1


class Adversaries(nn.Module):
    """One makes rows, the other tells them from real ones."""

    def __init__(self) -> None:
        super().__init__()
        self.maker = nn.Sequential(nn.Linear(3, 12), nn.LeakyReLU(0.1), nn.Linear(12, 4))
        self.judge = nn.Sequential(nn.Linear(4, 12), nn.LeakyReLU(0.2), nn.Linear(12, 1))
        self.clip: float | None = None

    def forward(self, noise: Tensor) -> Tensor:
        made = self.maker(noise)
        said: Tensor = self.judge(made)
        return said if self.clip is None else said.clamp(-self.clip, self.clip)


def against(said: Tensor, wanted: float) -> Tensor:
    """How far what was said is from what was wanted."""
    return F.binary_cross_entropy_with_logits(said, torch.full_like(said, wanted))


def step(model: Any, optimizers: Any, rows: Tensor) -> tuple[Tensor, Tensor]:
    """One step of both."""
    maker, judge = optimizers
    noise = torch.randn(rows.size(0), 3)
    for _ in range(ROUNDS):
        told = against(model.judge(rows), REAL) + against(model.judge(model.maker(noise).detach()), FAKE)
        judge.zero_grad()
        told.backward()
        judge.step()
    fooled = against(model(noise), REAL)
    maker.zero_grad()
    fooled.backward()
    maker.step()
    return told, fooled


def make() -> tuple[Any, nn.Module, Any, tuple[Any, ...]]:
    """All of it."""
    model = Adversaries()
    optimizers = (
        torch.optim.Adam(model.maker.parameters(), lr=0.01, betas=(0.5, 0.9)),
        torch.optim.SGD(model.judge.parameters(), lr=0.05),
    )
    return step, model, optimizers, (torch.randn(48, 4),)
