"""A small training step whose profile is kept as a golden file."""

import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.widen = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.narrow(F.gelu(self.widen(x)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*[Block(64) for _ in range(6)])
        self.norm = nn.BatchNorm1d(64)
        self.head = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.blocks(x)))


def train(model, optimizer, x, y):
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    return loss


def make():
    model = Net()
    return train, model, torch.optim.AdamW(model.parameters()), (torch.zeros(512, 64), torch.zeros(512).long())


def incomplete():
    return train, Net()


def hungry(width):
    return width


def broken():
    return train, Net(), torch.optim.SGD([], lr=0.1), ()


def list_example():
    return train, Net(), None, [torch.zeros(2, 64)]
