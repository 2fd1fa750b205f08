"""A recurrent model with a window, a class attribute, defaults of functions and a step of two parts."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WINDOW = (0, 3)
IGNORED = {-100}


def mix(old: Tensor, new: Tensor, share: float = 0.3) -> Tensor:
    """Between two tensors."""
    return torch.lerp(old, new, share)


def keep(old: Tensor, new: Tensor, share: float = 0.3) -> Tensor:
    """Another way between two tensors."""
    return old + share * torch.tanh(new)


class Reader(nn.Module):
    """A cell by hand, over the window."""

    reverse = False

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 6, padding_idx=0)
        self.cell = nn.GRUCell(6, 8)
        self.out = nn.utils.parametrizations.weight_norm(nn.Linear(8, 12))
        self.log_scale = nn.Parameter(torch.zeros(()))

    def forward(self, tokens: Tensor) -> Tensor:
        time_steps = list(self.embed(tokens[:, WINDOW[0] : WINDOW[1]]).unbind(1))
        state = torch.zeros(tokens.size(0), 8)
        for time_step in reversed(time_steps) if self.reverse else time_steps:
            state = mix(state, self.cell(time_step, state))
        out: Tensor = self.out(state) * self.log_scale.exp()
        return out


def step(model: nn.Module, optimizer: torch.optim.Optimizer, tokens: Tensor, labels: Tensor, weight: float) -> Tensor:
    """One step, in two parts of the batch."""
    total = torch.zeros(())
    for part, wanted in zip(tokens.chunk(2), labels.chunk(2), strict=True):
        loss = F.cross_entropy(model(part), wanted, ignore_index=min(IGNORED)) * weight / 2
        loss.backward()
        total = total + loss.detach()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    return total


def make() -> tuple[Any, nn.Module, Any, tuple[Any, ...]]:
    """All of it."""
    model = Reader()
    optimizer = torch.optim.NAdam(model.parameters(), lr=0.01)
    return step, model, optimizer, (torch.randint(12, (32, 6)), torch.randint(12, (32,)), 1.0)
