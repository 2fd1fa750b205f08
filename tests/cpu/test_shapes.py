"""Batches of other lengths: a shorter one runs by the plan of the next longer one, and nothing is measured for it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from twins import assert_same, everything, same

import lowtide
from lowtide.fit.ladder import Ladder


class Reader(nn.Module):
    """A small transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(40, 16), nn.Embedding(64, 16)
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True) for _ in range(3))
        self.head = nn.Linear(16, 40)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.tokens(x) + self.places(torch.arange(x.shape[1]))
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)  # type: ignore[no-any-return]


def step(model: nn.Module, optimizer: Any, x: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x).flatten(0, 1), x.flatten())
    loss.backward()
    optimizer.step()
    return loss.detach()


@pytest.mark.parametrize("budget", ["60%", "100%"])
def test_shorter_batches_take_the_plan_of_the_next_longer_one(budget: str) -> None:
    found = []
    for planned in (False, True):
        torch.manual_seed(0)
        model = Reader()
        optimizer = torch.optim.Adam(model.parameters())
        said: list[str] = []
        batches = [torch.randint(0, 40, (4, length)) for length in (48, 40, 31, 44, 48, 12)]
        run: Any = lambda x, model=model, optimizer=optimizer: step(model, optimizer, x)  # noqa: E731
        if planned:
            run = lowtide.fit(
                step, model, optimizer, example=(batches[0],), budget=budget, time_limit=0.3,
                tell=said.append,
            )  # fmt: skip
            said.clear()
        losses = [run(x) for x in batches]
        found.append((losses, everything(model, optimizer)))
        if planned:
            assert run.peak <= run.plan.budget
            assert sum(line.startswith("captured") for line in said) == 4
            assert not any(line.startswith("measured") for line in said)
    (expected, state), (losses, other) = found
    assert all(same(one, two) for one, two in zip(expected, losses, strict=True))
    assert_same(state, other)


def test_ever_longer_batches_take_few_searches_and_stay_within_the_budget() -> None:
    sizes = [20, 26, 31, 17, 37, 33, 44, 29, 50, 41, 23, 38, 47, 62, 55, 30, 60]

    def run(budget: str | None) -> tuple[list[Tensor], nn.Module, Any, Any]:
        torch.manual_seed(0)
        model = Reader()
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        batches = [torch.randint(0, 40, (2, size)) for size in sizes]
        train: Any = None
        if budget is not None:
            train = lowtide.fit(
                step, model, optimizer, example=(batches[0],), budget=budget, costs="roofline", time_limit=0.2
            )
        torch.manual_seed(1)
        losses = [step(model, optimizer, x) if train is None else train(x) for x in batches]
        return losses, model, optimizer, train

    plain, found = run(None), run("900kB")
    assert all(map(same, plain[0], found[0]))
    assert_same(everything(plain[1], plain[2]), everything(found[1], found[2]))
    train = found[3]
    assert len(train.makings) == len(sizes)
    assert sum(one.searches for one in train.makings) <= 6
    assert sum(one.searches == 0 for one in train.makings) >= len(sizes) - 5
    assert train.peak <= 900_000


def test_sizes_of_notches() -> None:
    ladder = Ladder()
    ladder.see((torch.zeros(4, 20), 3))
    assert ladder.above((torch.zeros(4, 20), 3)) is None  # nothing is known to change
    ladder.see((torch.zeros(4, 30), 3))
    above = ladder.above((torch.zeros(4, 30), 3))
    assert above is not None
    assert above[0].shape == (4, 40)
    assert above[1] == 3
    ladder.see((torch.zeros(3, 10), 3))  # the last, smaller batch of an epoch
    above = ladder.above((torch.zeros(3, 10), 3))
    assert above is not None
    assert above[0].shape == (4, 16)
    ladder.refuse(above)
    assert ladder.above((torch.zeros(3, 10), 3)) is None
