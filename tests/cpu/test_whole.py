"""Whole programs, with all that comes between steps: never above the plain program's peak, and equal to the bit."""

from __future__ import annotations

import copy
import gc
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from twins import same

import lowtide
from lowtide.allocator.arena import POOL, Arena, Tape, stepping

QUICK: dict[str, Any] = {"costs": "roofline", "time_limit": 0.2, "tell": lambda _: None}
MARK = 8  # bytes: of each plan of a model in one's own loop
TURNS = 2 * 2**10  # bytes of gradients, below a MiB in all, that leave together where eager adds them one by one


@dataclass(frozen=True)
class Door:
    """How a program takes its steps."""

    name: str = "plain"
    budget: str | None = None

    def net(self, model: nn.Module, optimizer: Any, *example: Tensor) -> nn.Module:
        """What a loop calls in the model's place."""
        if self.name == "attach":
            lowtide.attach(model, self.budget, optimizer, **QUICK)
        elif self.name == "wrap":
            return lowtide.wrap(model, example=example, budget=self.budget, **QUICK)
        return model

    def step(self, step: Callable[..., Any], model: nn.Module, optimizer: Any, *example: Tensor) -> Callable[..., Any]:
        """The step, for a model that is called with the first tensor of its batch."""
        if self.name == "fit":
            return lowtide.fit(step, model, optimizer, example=example, budget=self.budget, **QUICK)
        net = self.net(model, optimizer, example[0])
        return lambda *batch: step(net, optimizer, *batch)


def classify(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()


def mlp(*widths: int) -> nn.Sequential:
    layers = [part for pair in pairwise(widths) for part in (nn.Linear(*pair), nn.GELU())]
    return nn.Sequential(*layers[:-1], nn.Dropout(0.1))


def evaluated(door: Door) -> list[Tensor]:
    """Adam, a smaller last batch, and an evaluation of larger ones after each epoch."""
    model = mlp(16, 256, 256, 10)
    optimizer = torch.optim.Adam(model.parameters())
    train = door.step(classify, model, optimizer, torch.zeros(64, 16), torch.zeros(64, dtype=torch.long))
    found = []
    for epoch in range(3):
        model.train()
        for rows in (64, 64, 24):
            found.append(train(torch.randn(rows, 16), torch.randint(10, (rows,))))
        model.eval()
        with torch.no_grad():
            found.append(model(torch.randn(100 + 50 * epoch, 16)).sum())
    return found


def averaged(door: Door) -> list[Tensor]:
    """A running average of the weights, made anew at each step, and batches of two sizes by turns."""
    model = mlp(16, 256, 256, 10)
    average = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    train = door.step(classify, model, optimizer, torch.zeros(160, 16), torch.zeros(160, dtype=torch.long))
    found = []
    for number in range(6):
        rows = (160, 96)[number % 2]
        found.append(train(torch.randn(rows, 16), torch.randint(10, (rows,))))
        with torch.no_grad():
            for one, other in zip(average.parameters(), model.parameters(), strict=True):
                one.copy_(0.9 * one + 0.1 * other)
    return [*found, *average.parameters()]


class Speaker(nn.Module):
    """Its outputs are the largest that there is."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.memory, self.head = nn.Embedding(600, 16), nn.GRU(16, 32, batch_first=True), nn.Linear(32, 600)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.memory(self.words(x))[0])  # type: ignore[no-any-return]


def spoken(door: Door) -> list[Tensor]:
    """A loss that is outside of the model and larger than it, over two batches, clipped."""
    model = Speaker()
    optimizer = torch.optim.AdamW(model.parameters())

    def step(model: Any, optimizer: Any, *batches: Tensor) -> Tensor:
        total = torch.zeros(())
        for batch in batches:
            loss = F.cross_entropy(model(batch).flatten(0, 1), batch.roll(-1, 1).flatten())
            loss.backward()
            total = total + loss.detach()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return total

    example = torch.zeros(8, 20, dtype=torch.long)
    if door.name == "fit":
        train = lowtide.fit(step, model, optimizer, example=(example, example), budget=door.budget, **QUICK)
    else:
        net = door.net(model, optimizer, example)
        train = lambda *batch: step(net, optimizer, *batch)  # type: ignore[assignment] # noqa: E731
    return [train(torch.randint(600, (8, 20)), torch.randint(600, (8, 20))) for _ in range(5)]


def played(door: Door) -> list[Tensor]:
    """Ten forwards before their one backward."""
    model = nn.Sequential(nn.Linear(4, 512), nn.ReLU(), nn.Linear(512, 3))
    optimizer = torch.optim.Adam(model.parameters(), 3e-2)

    def episode(model: Any, optimizer: Any, states: Tensor) -> Tensor:
        outputs = [model(state) for state in states]
        loss = torch.stack([out.softmax(-1).log().square().mean() for out in outputs]).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    if door.name == "fit":
        train = door.step(episode, model, optimizer, torch.zeros(10, 8, 4))
    else:
        net = door.net(model, optimizer, torch.zeros(8, 4))
        train = lambda states: episode(net, optimizer, states)  # type: ignore[assignment] # noqa: E731
    return [train(torch.randn(10, 8, 4)) for _ in range(5)]


def forged(door: Door) -> list[Tensor]:
    """Two models with an optimizer each, of which one is called twice before its backward."""
    forger, judge = mlp(8, 128, 300), mlp(300, 128, 1)
    optimizers = [torch.optim.Adam(one.parameters(), 1e-3) for one in (forger, judge)]
    both = nn.ModuleList([forger, judge])

    def learn_to_judge(models: Any, optimizer: Any, x: Tensor, z: Tensor) -> Tensor:
        optimizer.zero_grad()
        with torch.no_grad():
            fake = models[0](z)
        loss = F.softplus(-models[1](x)).mean() + F.softplus(models[1](fake)).mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    def learn_to_forge(models: Any, optimizer: Any, z: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.softplus(-models[1](models[0](z))).mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    x, z = torch.zeros(32, 300), torch.zeros(32, 8)
    if door.name == "fit":
        first = door.step(learn_to_judge, both, optimizers[1], x, z)
        second = door.step(learn_to_forge, both, optimizers[0], z)
    else:
        nets = [door.net(forger, optimizers[0], z), door.net(judge, optimizers[1], x)]
        first = lambda *batch: learn_to_judge(nets, optimizers[1], *batch)  # noqa: E731
        second = lambda *batch: learn_to_forge(nets, optimizers[0], *batch)  # noqa: E731
    found = []
    for _ in range(4):
        found += [first(torch.randn(32, 300), torch.randn(32, 8)), second(torch.randn(32, 8))]
    return [*found, *both.parameters()]


def run(program: Callable[[Door], list[Tensor]], door: Door) -> tuple[int, list[Tensor]]:
    """The peak of a whole program, and what it finds."""
    gc.collect()
    POOL.empty()  # of arenas that other programs left in this process
    torch.manual_seed(0)
    with lowtide.meter() as meter:
        found = [one.detach().clone() for one in program(door)]
    return meter.peak, found


@pytest.mark.filterwarnings("ignore::lowtide.LowtideWarning")  # an estimate knows no temporaries; ten forwards wait
@pytest.mark.parametrize("door", ["attach", "wrap", "fit"])
@pytest.mark.parametrize("program", [evaluated, averaged, spoken, played, forged], ids=lambda one: one.__name__)
def test_the_peak_of_a_program_is_not_above_the_plain_one(program: Callable[[Door], list[Tensor]], door: str) -> None:
    run(program, Door())  # what is made once in a process
    plain, expected = run(program, Door())
    whole = None if program is forged else "100%"  # gradients of a batch are more than its example shows
    for budget in (whole, "least") if door == "attach" else (whole,):
        peak, found = run(program, Door(door, budget))
        assert all(same(one, other) for one, other in zip(expected, found, strict=True))
        assert peak <= plain + 4 * MARK + TURNS, budget


def test_pages_go_back_only_where_more_is_held_than_the_program_would_hold() -> None:
    arena, (cursor, tape) = Arena(2**20), _cursor_and_tape()
    with lowtide.meter() as meter:
        with (running := stepping(cursor, tape, arena)):
            running.expect(2**20)
            inside = torch.empty(2**19, dtype=torch.uint8)
            other = torch.empty(2**18, dtype=torch.uint8)
        assert meter.current == arena.held == 2**19 + 2**18
        del other
        assert meter.current == arena.held == 2**19 + 2**18, "the next step would find its pages there"
        within = torch.empty(2**18, dtype=torch.uint8)
        assert arena.held == 2**19 + 2**18, "eager's step held as much"
        beyond = torch.empty(2**17, dtype=torch.uint8)
        assert arena.held == 2**19 + 2**17
        assert meter.peak == 2**20
        much = torch.empty(2**21, dtype=torch.uint8)
        assert arena.held == 2**19, "what is in it stays"
        assert meter.peak == inside.nbytes + within.nbytes + beyond.nbytes + much.nbytes
        del within, beyond, much, inside
        arena.close()


def _cursor_and_tape() -> tuple[array[int], Tape]:
    return array("q", [0]), Tape([0, 2], [2**19, 2**18], [0, 2**19])


def test_what_a_tensor_had_is_there_after_pages_went_back() -> None:
    arena, (cursor, tape) = Arena(2**20), _cursor_and_tape()
    with stepping(cursor, tape, arena):
        kept = torch.full((2**19,), 7, dtype=torch.uint8)
        torch.empty(2**18, dtype=torch.uint8)
    much = torch.empty(2**22, dtype=torch.uint8)
    assert arena.held == 2**19
    assert int(kept.sum()) == 7 * 2**19
    del kept, much
    with stepping(cursor, tape, arena) as step:
        again = [torch.full((2**19,), 3, dtype=torch.uint8), torch.full((2**18,), 4, dtype=torch.uint8)]
    assert (step.placed, step.mismatches) == (2, 0)
    assert [int(one.sum()) for one in again] == [3 * 2**19, 4 * 2**18]
    arena.close()


def test_a_forward_that_waits_leaves_the_arena_to_none() -> None:
    """Each of the others has what it makes, and no arena of its own."""
    torch.manual_seed(0)
    model, x = mlp(16, 256, 256, 10), torch.randn(64, 16)
    attached = lowtide.attach(model, **QUICK)
    for _ in range(2):
        model(x).sum().backward()
    assert attached.fitted is not None
    one = attached.fitted.program.arena
    with lowtide.meter() as meter:
        outputs = [model(x) for _ in range(6)]
        assert meter.current < 6 * one
        count, nbytes = attached.outstanding
        assert count == 6
        assert one < nbytes < 6 * one
    del outputs
    assert attached.fitted.mismatches == 0
