"""What the judge accepts, the executor runs to eager's bits: random programs for captured steps, and changed ones."""

from __future__ import annotations

import dataclasses
import gc
from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import torch
from graphs import lay_out, make_program
from late import LATE, poisoned
from machine import Machine, Step
from mutations import mutate
from torch import nn
from twins import assert_same, everything, same

import lowtide
from lowtide import tree
from lowtide.check import check
from lowtide.device import CPU, Device
from lowtide.device.disk import Disk
from lowtide.errors import ProgramError
from lowtide.program import Copy, Program, Run

FILES = dataclasses.replace(CPU, stores={"host": Disk, "disk": Disk})  # two files
Recipe = tuple[Any, nn.Module, Any, tuple[Any, ...]]


def normed() -> Recipe:
    """Batch norm, dropout, and momentum."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.4), nn.Linear(8, 6))

    def step(model: nn.Module, optimizer: Any, x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = (model(x) - x).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss

    return step, model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), (torch.randn(4, 6),)


class Noisy(nn.Module):
    """A buffer that drifts, and views."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.register_buffer("noise", torch.zeros(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.noise += 0.1 * torch.randn(6)
        hidden = torch.tanh(self.layer(x + self.noise))
        left, right = hidden.chunk(2, dim=1)
        return torch.sigmoid(left) * right.t().contiguous().t()


def accumulated() -> Recipe:
    """Gradients that stay, and no optimizer."""
    torch.manual_seed(1)
    model = Noisy()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)

    def step(model: nn.Module, _: Any, x: torch.Tensor) -> torch.Tensor:
        loss = nn.functional.dropout(model(x), 0.3).square().sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    return step, model, None, (torch.randn(4, 6),)


def adam() -> Recipe:
    """Optimizer state of several kinds."""
    torch.manual_seed(2)
    model = Noisy()

    def step(model: nn.Module, optimizer: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        optimizer.zero_grad()
        out = model(x)
        loss = out.square().sum()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss, out

    return step, model, torch.optim.AdamW(model.parameters()), (torch.randn(4, 6),)


class Twins:
    """A step in eager and by programs, again and again from the same state."""

    STEPS = 2  # the first one learns, the second runs in the arena

    def __init__(self, recipe: Callable[[], Recipe]) -> None:
        step, model, optimizer, batch = recipe()
        _, self.mirror, self.mirrored, self.batch = recipe()
        self.captured = lowtide.capture(step, self.mirror, self.mirrored, batch)
        self.captured.prepare()
        self.start = {key: _copy(item) for key, item in everything(self.mirror, self.mirrored).items()}
        self.expected = []
        torch.manual_seed(7)
        for _ in range(self.STEPS):
            results = [item.detach().clone() for item in tree.flatten(step(model, optimizer, *batch))[0]]
            state = {key: _copy(item) for key, item in everything(model, optimizer).items()}
            self.expected.append((results, state, torch.get_rng_state()))

    def reset(self) -> None:
        """Put everything back where it was, in the same tensors."""
        for name, parameter in self.mirror.named_parameters():
            before = self.start[f"gradient {name}"]
            if before is None:
                parameter.grad = None
        for key, item in everything(self.mirror, self.mirrored).items():
            if isinstance(item, torch.Tensor):
                item.detach().copy_(self.start[key])
        torch.manual_seed(7)

    def run(self, program: Program, nbytes: tuple[int, ...], device: Device) -> None:
        """Take the steps by a program, and compare all that they leave."""
        self.reset()
        with poisoned():
            train = lowtide.execute(self.captured, program, nbytes, device=device)
        for results, state, generator in self.expected:
            found = tree.flatten(train(*self.batch))[0]
            assert all(same(a, b) for a, b in zip(results, found, strict=True))
            assert_same(state, everything(self.mirror, self.mirrored))
            assert torch.equal(generator, torch.get_rng_state())


def _copy(item: Any) -> Any:
    return item.detach().clone() if isinstance(item, torch.Tensor) else item


@pytest.mark.parametrize("recipe", [normed, accumulated, adam])
def test_the_executor_runs_what_the_judge_accepts(recipe: Callable[[], Recipe]) -> None:
    twins = Twins(recipe)
    graph = twins.captured.graph
    costs = lowtide.measure(graph)
    step = Step(graph, costs)
    used: Counter[str] = Counter()
    for seed in range(12):
        random = Random(seed)
        program = make_program(random, graph, costs, wild=random.choice((0.05, 0.1, 0.3)), astray=0.5)
        program = lay_out(random, graph, costs, program)
        changed = [mutate(random, graph, costs, program) for _ in range(10)]
        for one in (program, *[other for other in changed if _accepted(graph, costs, other)][:3]):
            used["again"] += sum(isinstance(row, Run) and row.again for row in one.instructions)
            used["copies"] += sum(isinstance(row, Copy) for row in one.instructions)
            used["programs"] += 1
            assert Machine(step, one).execute() == check(graph, costs, one)
            for device in (LATE, FILES):
                twins.run(one, costs.nbytes, device)
            gc.collect()
    print(used)
    assert used["programs"] > 15
    assert used["copies"] > 50


def _accepted(graph: lowtide.Graph, costs: lowtide.Costs, program: Program) -> bool:
    try:
        check(graph, costs, program)
    except ProgramError:
        return False
    return True
