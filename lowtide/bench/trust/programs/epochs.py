"""A step made by a function: it closes over the epoch, a list of weights and a schedule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SCALES = [1.0, 0.5, 0.25]
ACTIVE = [0, 2]


class Heads(nn.Module):
    """One body, and a head for each task."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Dropout(0.2), nn.Linear(12, 12))
        self.heads = nn.ModuleList(nn.Linear(12, 2) for _ in range(3))
        self.scales = SCALES
        self.names = ("left", "middle", "right")

    def forward(self, rows: Tensor) -> dict[str, Tensor]:
        hidden = self.body(rows)
        return {self.names[n]: self.heads[n](hidden) * self.scales[n] for n in range(len(self.heads))}


def make_step(weights: list[float], schedule: Callable[[int], float], limit: float = 1.0) -> Callable[..., Any]:
    """A step with what it needs in its closure."""
    epoch = 1
    options = {"square": True}

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, rows: Tensor, targets: Tensor) -> Tensor:
        outputs = list(model(rows).values())
        loss = torch.zeros(())
        for number in ACTIVE:
            error = F.mse_loss(outputs[number], targets) if options["square"] else F.l1_loss(outputs[number], targets)
            loss = loss + weights[number] * error
        loss = loss * schedule(epoch)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), limit)
        optimizer.step()
        return loss

    return step


def falling(epoch: int) -> float:
    """Less with each epoch."""
    return 1.0 / (1 + epoch)


def rising(epoch: int) -> float:
    """More with each epoch."""
    return 0.5 + 0.1 * epoch


def make() -> tuple[Any, nn.Module, Any, tuple[Any, ...]]:
    """All of it."""
    model = Heads()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
    return make_step([1.0, 2.0, 3.0], falling), model, optimizer, (torch.randn(48, 6), torch.randn(48, 2))
