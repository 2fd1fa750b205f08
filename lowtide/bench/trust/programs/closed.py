"""A trainer object: its step closes over the optimizer and a scheduler, and lowtide is handed neither."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

MARGIN = 0.1


class Trainer:
    """What many people write around a model."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
        self.scale = 1.0
        self.tracked = {"best": 10.0}

    def step(self, model: nn.Module, _: Any, rows: Tensor, targets: Tensor) -> Tensor:
        loss = self.scale * F.relu(F.l1_loss(model(rows), targets) - MARGIN)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss


def make() -> tuple[Any, nn.Module, Any, tuple[Any, ...]]:
    """All of it."""
    model = nn.Sequential(nn.Linear(4, 12), nn.ELU(), nn.Linear(12, 12), nn.Sigmoid(), nn.Linear(12, 2))
    return Trainer(model).step, model, None, (torch.randn(64, 4), torch.randn(64, 2))
