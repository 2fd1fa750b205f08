"""Budgets that nothing exact fits, through the front door: what is found is named, metered and within them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from formed import step
from test_pairs import Block
from torch import nn

import lowtide
from lowtide.errors import BudgetError
from lowtide.rewrites import LOSSY_ORDER, ROUNDING

BATCH = 20


def recipe() -> Any:
    torch.manual_seed(0)
    head = nn.Sequential(nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(64, 10))
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), Block(), Block(), head)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    return step, model, optimizer, (torch.randn(BATCH, 3, 32, 32), torch.randint(0, 10, (BATCH,)))


@pytest.mark.long
def test_lossy_techniques_bring_a_step_under_what_no_exact_plan_fits() -> None:
    """Within half of what the least exact plan needs; the losses are near eager's, the meter agrees with the plan."""
    step, model, optimizer, example = recipe()
    with pytest.raises(BudgetError) as raised:
        lowtide.fit(step, model, optimizer, example=example, budget="100kB")
    least = raised.value.least
    assert least is not None
    said: list[str] = []
    budget = least // 2
    train = lowtide.fit(step, model, optimizer, example=example, budget=budget, allow="lossy", tell=said.append)
    used = [one.name for one in train.plan.rewrites if one.exactness != "bitwise"]
    assert used
    assert set(used) <= {*ROUNDING, *LOSSY_ORDER}
    assert any(line.startswith("trying ") and all(name in line for name in used) for line in said)
    twin_step, twin, twin_optimizer, _ = recipe()
    for _ in range(3):
        loss, expected = train(*example), twin_step(twin, twin_optimizer, *example)
        assert torch.isfinite(loss)
        assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=0.2)
    assert train.peak is not None
    assert train.peak <= train.plan.peak <= budget
    assert all(name in str(train.report()) for name in used)
