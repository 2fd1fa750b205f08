"""Long loops: captured, measured, planned and run without long waits, and all the same as the short way round."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import nn
from twins import assert_exact

import lowtide
from lowtide import files, models
from lowtide.capture.recall import UNKNOWN, Recall
from lowtide.measure.specimen import specimen
from lowtide.models.steps import Recipe
from lowtide.plan.classics import CLASSICS
from lowtide.plan.planning import Planning


@cache
def unrolled(length: int, loss: str = "each") -> lowtide.Graph:
    target = f"lstm-cell:length={length},width=8,batch=4,loss={loss}"
    return lowtide.capture(*models.build(target)).graph


@pytest.mark.parametrize("name", sorted(models.SMALL))
def test_what_is_remembered_of_calls_changes_no_graph(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = lowtide.capture(*models.build(models.SMALL[name])).graph
    monkeypatch.setattr(Recall, "key", lambda self, func, args, kwargs: UNKNOWN)
    assert lowtide.capture(*models.build(models.SMALL[name])).graph == found


def test_views_and_turned_tensors_are_remembered_rightly(monkeypatch: pytest.MonkeyPatch) -> None:
    class Views(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(nn.Linear(6, 6).weight.detach().clone())

        def forward(self, x: Any) -> Any:
            total = 0
            for row in range(3):
                part = x[row : row + 2]  # the same sizes, another place
                strided = x.as_strided((2, 6), (6, 1), 6 * row)
                turned = (part @ self.weight).clone().transpose_(0, 1)
                total = total + turned.t().sum() + (part * strided).select(1, row).sum() + (turned * 2).t().sum()
            return total

    def step(model: Any, optimizer: Any, x: Any) -> Any:
        loss = model(x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    def recipe() -> Recipe:
        torch.manual_seed(0)
        model = Views()
        return step, model, torch.optim.SGD(model.parameters(), lr=0.1), (torch.randn(5, 6),)

    assert_exact(recipe, steps=2)
    found = lowtide.capture(*recipe()).graph
    monkeypatch.setattr(Recall, "key", lambda self, func, args, kwargs: UNKNOWN)
    assert lowtide.capture(*recipe()).graph == found


@pytest.mark.parametrize("loss", ["each", "end"])
def test_a_longer_loop_has_no_more_to_measure(loss: str) -> None:
    def distinct(length: int) -> int:
        graph = unrolled(length, loss)
        # What sees the whole sequence at once is as long as the sequence.
        return len({files.digest(specimen(graph, op)) for op in graph.ordinary})

    assert distinct(40) == distinct(20)


@pytest.mark.parametrize("name", ["gruslys-internal", "revolve", "rockmate"])
@pytest.mark.parametrize("loss", ["each", "end"])
def test_chains_see_the_cells_of_a_loop(name: str, loss: str) -> None:
    graph = unrolled(60, loss)
    costs = lowtide.roofline(graph)
    planning = Planning(graph, costs)
    arrays = planning.arrays
    budget = arrays.persistent + (arrays.peak(planning.order) - arrays.persistent) * 2 // 5
    found = CLASSICS[name](arrays, planning.order, budget)
    assert found is not None
    assert arrays.peak(found) <= budget
    assert arrays.time(found) < 1.6 * planning.base


def test_a_long_program_is_written_as_loops_and_runs_exactly() -> None:
    target = "tanh-chain:length=1500,width=4,batch=4"
    train = assert_exact(lambda: models.build(target), steps=3, budget="10%")
    lines = train.source.splitlines()
    assert any(line.startswith("  for n0, ") for line in lines)
    assert len(lines) < len(train.program.instructions)
    assert train.mismatches == 0
    assert train.peak <= train.plan.budget
