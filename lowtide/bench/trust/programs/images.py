"""A small convolutional net with a batch that is a dict, and weights for classes in a global tensor."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CLASS_WEIGHTS = torch.tensor([1.0, 2.0, 0.5])
options = SimpleNamespace(limit=0.5, decay=0.9, mixing=None, pool="mean")


class Small(nn.Module):
    """Two convolutions with batch norm."""

    average: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(2, 4, 3, padding=1),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.Conv2d(4, 4, 3, stride=2),
            nn.BatchNorm2d(4, momentum=0.2),
            nn.ReLU(inplace=True),
        )
        self.head = nn.Linear(4, 3)
        self.register_buffer("average", torch.zeros(3, 4))

    def forward(self, images: Tensor, scale: float) -> Tensor:
        maps = self.features(images * scale)
        pooled = maps.mean((2, 3)) if options.pool == "mean" else maps.amax((2, 3))
        out: Tensor = self.head(pooled)
        return out


def step(model: Any, optimizer: torch.optim.Optimizer, batch: dict[str, Any]) -> dict[str, Tensor]:
    """One step."""
    logits = model(batch["images"], batch["scale"])
    if options.mixing is not None:
        logits = logits * options.mixing
    loss = F.cross_entropy(logits, batch["labels"], weight=CLASS_WEIGHTS)
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), options.limit)
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        model.average.mul_(options.decay).add_(model.head.weight, alpha=1 - options.decay)
    return {"loss": loss, "norm": norm}


def make() -> tuple[Any, nn.Module, Any, tuple[Any, ...]]:
    """All of it."""
    model = Small()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, amsgrad=True)
    batch = {"images": torch.randn(4, 2, 12, 12), "labels": torch.randint(3, (4,)), "scale": 1.0}
    return step, model, optimizer, (batch,)
