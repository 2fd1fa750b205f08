"""Lossy techniques and another place under one budget: what is computed is what the lossy step alone computes."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from formed import step
from test_pairs import Block
from torch import nn
from twins import assert_same, everything

import lowtide
from lowtide.choice import Leave
from lowtide.device import CPU
from lowtide.measure import roofline, with_lanes
from lowtide.plan.infeasible import floor
from lowtide.plan.planning import Planning
from lowtide.plan.problem import problem
from lowtide.resized import Resized, resized
from lowtide.rewrite import offload, with_narrow
from lowtide.rewrites import Rewrite, exactness, read_allow

BATCH = 20
STEPS = 3


def recipe() -> Any:
    torch.manual_seed(0)
    head = nn.Sequential(nn.Flatten(), nn.Linear(4 * 1024, 10))
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), Block(), Block(), Block(), head)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    return step, model, optimizer, (torch.randn(BATCH, 3, 32, 32), torch.randint(0, 10, (BATCH,)))


def alone(rewrites: tuple[Rewrite, ...]) -> dict[str, Any]:
    """What steps leave behind on the same lossy graph, with no recomputation and no copy."""
    step, model, optimizer, example = recipe()
    allow = ",".join(one.name if one.setting is None else f"{one.name}:{one.setting}" for one in rewrites)
    captured = lowtide.capture(step, model, optimizer, example)
    at = cache(lambda size: lowtide.capture(step, model, optimizer, resized(example, size)).graph)
    leave = Leave(read_allow(allow), Resized(captured.graph, BATCH, at))
    rewritten = leave.apply(captured.graph, rewrites)
    plan = Planning(rewritten.graph, roofline(rewritten.graph)).within(None)
    assert not plan.program.copies
    plan = replace(plan, rewrites=rewritten.rewrites)
    train = lowtide.fit(step, model, optimizer, example=example, plan=plan, allow=allow, costs="roofline")
    losses = {f"loss {number}": train(*example).detach().clone() for number in range(STEPS)}
    return everything(model, optimizer) | losses


def test_lossy_techniques_and_copies_keep_one_budget_and_the_bits_of_the_lossy_step(tmp_path: Path) -> None:
    """Within half of what the largest op of the exact step needs, which no copy lowers."""
    step, model, optimizer, example = recipe()
    graph = with_narrow(lowtide.capture(step, model, optimizer, example).graph)
    budget = floor(problem(graph, roofline(graph)))[0] // 2
    train = lowtide.fit(
        step,
        model,
        optimizer,
        example=example,
        budget=budget,
        allow="input8,microbatch,batch-statistics",
        offload="disk",
        offload_dir=tmp_path,
        time_limit=0.2,
    )
    changing = tuple(one for one in train.plan.rewrites if one.exactness != "bitwise")
    assert exactness(changing) == "lossy"
    assert "offload" in {one.name for one in train.plan.rewrites}
    losses = {f"loss {number}": train(*example).detach().clone() for number in range(STEPS)}
    assert train.peak is not None
    assert train.peak <= train.plan.peak <= budget
    assert_same(everything(model, optimizer) | losses, alone(changing))


def test_copies_under_a_lossy_step_keep_its_bits() -> None:
    """Copies alone, with no op run twice, in place of recomputation."""
    step, model, optimizer, example = recipe()
    lossy = read_allow("activations16")
    captured = lowtide.capture(step, model, optimizer, example)
    leave = Leave(lossy)
    changing = tuple(leave.all_named(captured.graph))
    rewritten = leave.apply(captured.graph, (*changing, *offload("disk")))
    planning = Planning(rewritten.graph, with_lanes(rewritten.graph, roofline(rewritten.graph)), time_limit=0.2)
    plan = planning.least("offload")
    assert plan.program.copies
    plan = replace(plan, rewrites=rewritten.rewrites)
    train = lowtide.fit(step, model, optimizer, example=example, plan=plan, allow=str(lossy), costs="roofline")
    losses = {f"loss {number}": train(*example).detach().clone() for number in range(STEPS)}
    assert_same(everything(model, optimizer) | losses, alone(changing))


class Heads(nn.Module):
    """Several heads over one body: what persists is more than one of them needs while it is updated."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), Block(), nn.Flatten())
        self.heads = nn.ModuleList(nn.Linear(4 * 1024, 16) for _ in range(6))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        body = self.body(images)
        return torch.stack([head(body) for head in self.heads]).sum(0)


def test_what_is_lossy_goes_together_with_state_and_parameters_elsewhere(tmp_path: Path) -> None:
    """A budget below what persists and below what one batch norm needs of the whole batch: each alone is too much."""
    torch.manual_seed(0)
    model = Heads()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    example = torch.randn(64, 3, 32, 32), torch.randint(0, 10, (64,))
    weights = sum(weight.nbytes for weight in model.parameters())
    budget = weights + CPU.staging
    train = lowtide.fit(
        step,
        model,
        optimizer,
        example=example,
        budget=budget,
        allow="input8,microbatch,batch-statistics",
        offload="disk",
        offload_dir=tmp_path,
        time_limit=0.2,
    )
    names = {one.name for one in train.plan.rewrites}
    assert {"homes", "microbatch", "batch-statistics"} <= names
    losses = [float(train(*example)) for _ in range(STEPS)]
    assert losses[-1] < losses[0]
    assert train.peak == train.plan.peak <= budget
