"""A model with a nested configuration, an enum, a dict of settings and functions that are found in globals."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Activation(enum.Enum):
    """What stands between the layers."""

    RELU = "relu"
    TANH = "tanh"
    GELU = "gelu"


@dataclass
class Inner:
    """Of the block."""

    scale: float = 0.5
    power: int = 2
    residual: bool = True
    shift: float | None = None


@dataclass
class Config:
    """Of the model."""

    activation: Activation = Activation.TANH
    dropout: float = 0.1
    inner: Inner = field(default_factory=Inner)
    sizes: tuple[int, ...] = (12, 12)


SETTINGS: dict[str, Any] = {"gain": 1.5, "smooth": 0.1, "reduction": "mean", "penalty": {"weight": 0.01, "kind": "l2"}}
TEMPERATURE = 2.0
USE_PENALTY = True
OFFSET: float | None = None


def relu(value: Tensor) -> Tensor:
    """The plain one."""
    return F.relu(value)


def bent(value: Tensor) -> Tensor:
    """Another one of the same signature."""
    return F.softplus(value)


def penalty(model: nn.Module) -> Tensor:
    """What large weights cost."""
    parts = [p.abs().sum() if SETTINGS["penalty"]["kind"] == "l1" else p.pow(2).sum() for p in model.parameters()]
    weighted: Tensor = torch.stack(parts).sum() * SETTINGS["penalty"]["weight"]
    return weighted


def doubled_penalty(model: nn.Module) -> Tensor:
    """Another cost of large weights."""
    return 2 * torch.stack([p.pow(2).sum() for p in model.parameters()]).sum()


CHOICES: dict[Activation, Callable[[Tensor], Tensor]] = {
    Activation.RELU: relu,
    Activation.TANH: torch.tanh,
    Activation.GELU: F.gelu,
}


class Block(nn.Module):
    """One layer and its way around."""

    floor = 0.0

    def __init__(self, width: int, inner: Inner) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.inner = inner

    def forward(self, hidden: Tensor) -> Tensor:
        out: Tensor = self.linear(hidden) * self.inner.scale
        if self.inner.shift is not None:
            out = out + self.inner.shift
        out = out.abs().pow(self.inner.power) + self.floor
        return hidden + out if self.inner.residual else out


class Net(nn.Module):
    """Blocks, and a head."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.first = nn.Linear(6, config.sizes[0])
        self.blocks = nn.ModuleList(Block(size, config.inner) for size in config.sizes)
        self.head = nn.Linear(config.sizes[-1], 4)

    def forward(self, rows: Tensor) -> Tensor:
        hidden = self.first(rows) * SETTINGS["gain"]
        for block in self.blocks:
            hidden = CHOICES[self.config.activation](block(hidden))
            hidden = F.dropout(hidden, self.config.dropout, self.training)
        out: Tensor = self.head(hidden) / TEMPERATURE
        return out if OFFSET is None else out + OFFSET


def step(model: nn.Module, optimizer: torch.optim.Optimizer, rows: Tensor, labels: Tensor) -> Tensor:
    """One step."""
    optimizer.zero_grad()
    logits = model(rows)
    loss = F.cross_entropy(logits, labels, label_smoothing=SETTINGS["smooth"], reduction=SETTINGS["reduction"])
    if USE_PENALTY:
        loss = loss + penalty(model)
    loss.backward()
    optimizer.step()
    return loss


def make() -> tuple[Any, nn.Module, Any, tuple[Any, ...]]:
    """All of it."""
    model = Net(Config())
    groups: list[dict[str, Any]] = [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.01},
        {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.01)
    return step, model, optimizer, (torch.randn(64, 6), torch.randint(4, (64,)))
