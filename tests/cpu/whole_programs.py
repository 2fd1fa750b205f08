"""Small programs of the kinds that people write, whole: training, updates, evaluation, a smaller last batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Door = Callable[[nn.Module, tuple[Any, ...]], Any]  # from a model and its example to what the loop calls


class Digits(nn.Module):
    """Two convolutions, a pool, two linear layers, dropout: the first program of many."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 8, 3), nn.Conv2d(8, 16, 3)
        self.hidden, self.last = nn.Linear(16 * 12 * 12, 64), nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        found = F.max_pool2d(F.relu(self.second(F.relu(self.first(x)))), 2)
        found = F.dropout(F.relu(self.hidden(found.flatten(1))), 0.25, self.training)
        return F.log_softmax(self.last(found), 1)


class Names(nn.Module):
    """A recurrent classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.recurrent, self.last = (
            nn.Embedding(40, 32),
            nn.RNN(32, 64, batch_first=True),
            nn.Linear(64, 5),
        )

    def forward(self, x: Tensor) -> Tensor:
        found, _ = self.recurrent(self.embedding(x))
        return F.log_softmax(self.last(found[:, -1]), 1)


class Policy(nn.Module):
    """An actor and a critic on one body."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.actor, self.critic = nn.Linear(4, 128), nn.Linear(128, 2), nn.Linear(128, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        found = F.relu(self.body(x))
        return F.softmax(self.actor(found), -1), self.critic(found)


def images(count: int, seed: int) -> tuple[Tensor, Tensor]:
    dice = torch.Generator().manual_seed(seed)
    return torch.randn(count, 1, 28, 28, generator=dice), torch.randint(0, 10, (count,), generator=dice)


def words(count: int, seed: int) -> tuple[Tensor, Tensor]:
    dice = torch.Generator().manual_seed(seed)
    return torch.randint(0, 40, (count, 12), generator=dice), torch.randint(0, 5, (count,), generator=dice)


def nll_step(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = F.nll_loss(model(x), y)
    loss.backward()
    optimizer.step()
    return loss.detach()


def batches(make: Callable[[int, int], tuple[Tensor, Tensor]], size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """An epoch with a smaller last batch."""
    for number, count in enumerate((size, size, size, size // 3)):
        yield make(count, number)


def evaluate(model: nn.Module, make: Callable[[int, int], tuple[Tensor, Tensor]], size: int) -> list[Tensor]:
    model.eval()
    with torch.no_grad():
        found = [F.nll_loss(model(x), y) for x, y in (make(size, 100 + number) for number in range(2))]
    model.train()
    return found


def supervised(
    model: nn.Module, net: Any, step: Callable[..., Any], make: Callable[[int, int], tuple[Tensor, Tensor]], size: int
) -> list[Tensor]:
    """Two epochs, each with an evaluation on batches of another size; `net` is what is evaluated."""
    found = []
    for _ in range(2):
        found += [step(*batch) for batch in batches(make, size)]
        found += evaluate(net, make, 2 * size)
    return found


def actor_critic(net: Any, optimizer: Any) -> list[Tensor]:
    """Episodes of other lengths; an action for one state at a time, under no_grad, then one update."""
    found = []
    for episode, length in enumerate((40, 25, 40, 12)):
        dice = torch.Generator().manual_seed(episode)
        states, rewards = torch.randn(length, 4, generator=dice), torch.rand(length, 1, generator=dice)
        with torch.no_grad():
            actions = torch.stack([net(state[None])[0].argmax(-1) for state in states])
        chances, worth = net(states)
        advantage = rewards - worth
        loss = -(chances.gather(1, actions).log() * advantage.detach()).sum() + advantage.pow(2).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.detach())
    return found
