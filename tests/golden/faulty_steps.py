"""Steps and models that lowtide refuses, each for one reason; their line numbers are in the golden file of errors."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional


def model() -> nn.Module:
    """A small model, the same each time."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    """A batch for it."""
    return torch.ones(32, 8), torch.zeros(32).long()


def plain(net: Any, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """A step that nothing is wrong with."""
    loss = functional.cross_entropy(net(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def decides_by_a_tensor(net: Any, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    if x.sum() > 0:
        x = x * 2
    return plain(net, optimizer, x, y)


def decides_by_the_loss(net: Any, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    loss = plain(net, optimizer, x, y)
    if loss.item() < 3.0:
        loss = loss * 2
    return loss


def has_sizes_of_the_data(net: Any, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return plain(net, optimizer, x, y) + x[x > 0].sum()


def leaves_torch(net: Any, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return plain(net, optimizer, torch.from_numpy(x.numpy() * 2), y)


def keeps_a_tensor(net: Any, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    loss = plain(net, optimizer, x + net.last, y)
    net.last = x.mean()
    return loss


def schedules(net: Any, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    loss = plain(net, optimizer, x, y)
    optimizer.param_groups[0]["lr"] = 0.5 * optimizer.param_groups[0]["lr"]
    return loss
