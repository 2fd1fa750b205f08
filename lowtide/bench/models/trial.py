"""One model for a few steps in eager and by a plan: whether it is captured, its bits, its peak, the wait before it."""

from __future__ import annotations

import time
import warnings
from dataclasses import dataclass
from typing import Any

import torch

from lowtide.bench.models.families import Family, minimize
from lowtide.budget import LEAST
from lowtide.errors import BudgetError, CaptureError, LowtideError
from lowtide.fit import Fitted, fit
from lowtide.verify.compare import digest
from lowtide.verify.copies import lasting_tensors

RATE = 1e-3  # of learning


@dataclass(frozen=True)
class Trial:
    """What became of one model."""

    library: str
    captured: bool
    reason: str  # why it is not captured, or what went wrong; empty where nothing did
    parameters: int  # how many numbers
    ops: int
    steps: int
    equal: int  # steps after which all losses, parameters, buffers, optimizer state and the generator were eager's
    asked: str  # the budget: "50%", or "least" where that does not fit
    budget: int  # bytes
    peak: int | None  # bytes, metered
    eager_peak: int  # bytes, predicted
    seconds: float  # before the first step

    @property
    def ok(self) -> bool:
        """Whether it is captured, exact and within its budget."""
        within = self.peak is None or self.peak <= self.budget
        return self.captured and self.equal == self.steps and within and not self.reason


def run(family: Family, *, steps: int, budget: str) -> Trial:
    """Train a model in eager, then one like it by a plan."""
    expected = _eager(family, steps)
    torch.manual_seed(0)
    model, batch = family.build()
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    count = sum(one.numel() for one in model.parameters())
    begun = time.perf_counter()
    try:
        train, asked = _fitted(model, optimizer, batch, budget)
    except CaptureError as error:
        return Trial(family.library, False, _said(error), count, 0, steps, 0, budget, 0, None, 0, 0.0)
    seconds = time.perf_counter() - begun
    torch.manual_seed(1)
    equal, reason = 0, ""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a plan that was made anew after its first step; the peak tells
            for number in range(steps):
                equal += _state(model, optimizer, train(batch)) == expected[number]
    except LowtideError as error:
        reason = _said(error)
    return Trial(
        family.library,
        True,
        reason,
        count,
        len(train.captured.graph.ordinary),
        steps,
        equal,
        asked,
        train.plan.budget or 0,
        train.peak,
        train._latest.eager_peak,
        seconds,
    )


def _fitted(model: torch.nn.Module, optimizer: Any, batch: Any, budget: str) -> tuple[Fitted, str]:
    try:
        return fit(minimize, model, optimizer, example=(batch,), budget=budget), budget
    except BudgetError:
        return fit(minimize, model, optimizer, example=(batch,), budget=LEAST), LEAST


def _eager(family: Family, steps: int) -> list[bytes]:
    """What eager's run has made, after each step."""
    torch.manual_seed(0)
    model, batch = family.build()
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    torch.manual_seed(1)
    return [_state(model, optimizer, minimize(model, optimizer, batch)) for _ in range(steps)]


def _state(model: torch.nn.Module, optimizer: Any, loss: torch.Tensor) -> bytes:
    tensors = [*lasting_tensors(model, optimizer, ()), loss, torch.default_generator.get_state()]
    return b"".join(map(digest, tensors))


def _said(error: LowtideError) -> str:
    return error.message.splitlines()[0]
