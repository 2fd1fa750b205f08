"""A list of layers with dropout, batch norm, layer norm, tied weights and an order that can be changed."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Unit(nn.Module):
    """A linear layer, a norm and dropout."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.norm = norm
        self.drop = nn.Dropout(0.1)
        self.bend = torch.tanh

    def forward(self, hidden: Tensor) -> Tensor:
        out: Tensor = self.drop(self.norm(self.bend(self.linear(hidden))))
        return out


class Stack(nn.Module):
    """Embedding, units in an order, and a head tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(16, 8)
        self.units = nn.ModuleList([Unit(nn.BatchNorm1d(8)), Unit(nn.LayerNorm(8)), Unit(nn.BatchNorm1d(8))])
        self.order = [0, 1, 2]
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.tokens.weight
        self.bias: nn.Parameter | None = nn.Parameter(torch.zeros(16))
        self.extras = {"gain": 1.0, "mask": torch.ones(8)}

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.tokens(tokens) * self.extras["gain"] * self.extras["mask"]
        for number in self.order:
            hidden = hidden + self.units[number](hidden)
        out: Tensor = self.head(hidden)
        return out if self.bias is None else out + self.bias


def step(model: nn.Module, optimizer: torch.optim.Optimizer, tokens: Tensor, labels: Tensor) -> Tensor:
    """One step."""
    loss = F.cross_entropy(model(tokens), labels)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def make() -> tuple[Any, nn.Module, Any, tuple[Any, ...]]:
    """All of it."""
    model = Stack()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)
    return step, model, optimizer, (torch.randint(16, (80,)), torch.randint(16, (80,)))
