"""Techniques go together: every two that are there, on one small step, with all and with least memory, to the bit."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import combinations
from typing import Any

import pytest
import torch
from formed import step
from torch import Tensor, nn
from twins import assert_same, everything

import lowtide
from lowtide.choice import Leave
from lowtide.fit import Fitted
from lowtide.measure import roofline
from lowtide.plan.planning import Planning
from lowtide.resized import Resized, resized
from lowtide.rewrite import named
from lowtide.rewrites import BY_NAME, LOSSY_ORDER, ROUNDING, read_allow

SETTINGS = {"batch-statistics": "batch-statistics:2", "microbatch": "microbatch:2", "sparse": "sparse:0.5"}
NAMES = [name for name in (*ROUNDING, *LOSSY_ORDER, *BY_NAME) if named(name) is not None]
BATCH = 8


class Block(nn.Module):
    """A residual block, so that there are batch norms, a sum of large values and a ReLU."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 1))

    def forward(self, images: Tensor) -> Tensor:
        output: Tensor = images + self.body(images)
        return output


def recipe() -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), Block(), Block(), nn.Flatten(), nn.Linear(4 * 64, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    return step, model, optimizer, (torch.randn(BATCH, 3, 8, 8), torch.randint(0, 10, (BATCH,)))


def fitted(built: Any, allow: str, *, least: bool) -> Fitted:
    """The step with these techniques, all applied, under a plan that keeps all, or under that with the least peak."""
    step, model, optimizer, example = built
    captured = lowtide.capture(step, model, optimizer, example)
    at = cache(lambda size: lowtide.capture(step, model, optimizer, resized(example, size)).graph)
    leave = Leave(read_allow(allow), Resized(captured.graph, BATCH, at))
    rewritten = leave.apply(captured.graph, leave.all_named(captured.graph))
    planning = Planning(rewritten.graph, roofline(rewritten.graph))
    plan = planning.least() if least else planning.within(2**40)
    return lowtide.fit(
        step,
        model,
        optimizer,
        example=example,
        plan=replace(plan, rewrites=rewritten.rewrites),
        allow=allow,
        costs="roofline",
    )


def pairs() -> list[Any]:
    """All of them; those without any of the three that change most take part in the long run only."""
    always = {"microbatch", "activations8", "sparse"}
    found = combinations(NAMES, 2)
    return [pytest.param(pair, marks=[] if always & {*pair} else pytest.mark.long, id="+".join(pair)) for pair in found]


@pytest.mark.parametrize("pair", pairs())
def test_two_techniques_together_compute_the_same_under_every_plan(pair: tuple[str, str]) -> None:
    allow = ",".join(SETTINGS.get(name, name) for name in pair)
    runs = []
    for least in (False, True):
        built = recipe()
        train = fitted(built, allow, least=least)
        losses = [train(*built[3]) for _ in range(2)]
        assert all(bool(loss.isfinite()) for loss in losses)
        runs.append(everything(built[1], built[2]) | {f"loss {place}": loss for place, loss in enumerate(losses)})
    assert_same(*runs)


@pytest.mark.parametrize("which", ["all", "products", "sums"])
def test_packed_values_are_written_over_by_parts_of_large_ops(which: str) -> None:
    """A split backward writes its slices over what it reads: over what was unpacked."""
    runs = []
    for least in (False, True):
        built = recipe()
        train = fitted(built, f"split:0.125,activations8:{which}", least=least)
        ops = train.captured.graph.ops
        assert all(old in op.reads for op in ops for _, old in op.updates)
        assert any("unpack_" in op.name for op in ops)
        assert any("_part1" in op.name for op in ops)
        losses = [train(*built[3]) for _ in range(2)]
        runs.append(everything(built[1], built[2]) | {f"loss {place}": loss for place, loss in enumerate(losses)})
    assert_same(*runs)


def test_all_names_are_known_here() -> None:
    assert {"microbatch", "batch-statistics", "activations16", "activations8", "activations4"} <= set(NAMES)
