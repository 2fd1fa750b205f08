"""A budget is kept: the metered peak is the planned one, at most the budget, and the results are eager's to the bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from test_capture import IMAGES, convolutional, plain, recipe
from twins import assert_exact

import lowtide
from lowtide import models


def metered_peak(train: lowtide.Fitted, example: tuple[object, ...]) -> int:
    """The whole step's peak in bytes: what persists, the arena, and what the meter saw."""
    for _ in range(2):
        train(*example)
    with lowtide.meter() as meter:
        train(*example)
    graph = train.captured.graph
    persistent = sum(graph.values[item.value].nbytes for item in graph.inputs if item.persistent)
    assert train.peak == persistent + train.arena_bytes + meter.peak
    assert not train.mismatches
    return train.peak


@pytest.mark.parametrize("budget", ["70%", "50%"])
@pytest.mark.parametrize("name", models.SMALL)
def test_every_model_keeps_its_budget_exactly(name: str, budget: str) -> None:
    target = models.SMALL[name]
    try:
        train = assert_exact(lambda: models.build(target), steps=3, budget=budget)
    except lowtide.BudgetError as error:
        train = assert_exact(lambda: models.build(target), steps=3, budget=error.least)
    assert train.plan is not None
    assert train.plan.peak <= train.plan.budget
    found = metered_peak(train, models.build(target)[3])
    assert found <= train.plan.budget
    assert found == pytest.approx(train.plan.peak, rel=0.005)


@pytest.mark.parametrize("name", ["mlp", "unet", "gpt", "bert", "lstm-cell", "hf-gpt2"])
def test_updates_that_need_no_gradient_do_not_spoil_recomputation(name: str) -> None:
    target = f"{models.SMALL[name]},optimizer=adamw"  # whose weight decay writes to parameters before the gradient
    try:
        train = assert_exact(lambda: models.build(target), steps=3, budget="60%")
    except lowtide.BudgetError as error:
        train = assert_exact(lambda: models.build(target), steps=3, budget=error.least)
    assert metered_peak(train, models.build(target)[3]) <= train.plan.budget


@pytest.mark.parametrize(
    ("target", "wanted"),
    [
        ("gpt:layers=4,width=64,context=64,vocabulary=64,batch=4", {"aten.bernoulli_.float", "aten._to_copy.default"}),
        ("resnet:stages=2-2-2-2,width=16,batch=8,size=64,classes=10", {"aten.native_batch_norm.default"}),
    ],
)
def test_a_tight_budget_repeats_draws_or_keeps_their_masks_and_repeats_batch_norm(
    target: str, wanted: set[str]
) -> None:
    train = assert_exact(lambda: models.build(target), steps=3, budget="30%")
    ops = train.captured.graph.ops
    runs = [item for item in train.program.instructions if isinstance(item, lowtide.Run)]
    assert wanted & {ops[run.op].target for run in runs if run.again or ops[run.op].optional}
    assert metered_peak(train, models.build(target)[3]) <= train.plan.budget


def test_a_budget_that_nothing_fits_names_the_values() -> None:
    step, model, optimizer, example = models.build(models.SMALL["gpt"])
    with pytest.raises(
        lowtide.BudgetError, match=r"(?s)no plan found within 5,000 bytes.*needs these together"
    ) as caught:
        lowtide.fit(step, model, optimizer, example=example, budget=5000)
    assert "models/" in str(caught.value)
    assert not optimizer.state


def test_another_batch_size_is_planned_within_the_same_budget() -> None:
    build = recipe(plain, convolutional, example=IMAGES)
    x, y = build()[3]
    train = assert_exact(build, batches=[(x, y), (x[:2], y[:2]), (x, y)], budget="1MB")
    assert len(train._fits) == 2
    assert all(found.plan.peak <= 1_000_000 for found in train._fits)
    assert train.peak <= 1_000_000


def test_a_saved_plan_is_fitted_without_planning(tmp_path: Path) -> None:
    target = models.SMALL["mlp"]
    step, model, optimizer, example = models.build(target)
    first = lowtide.fit(step, model, optimizer, example=example, budget="90%")
    assert first.plan is not None
    first.plan.save(tmp_path / "mlp.plan")
    again = lowtide.fit(*models.build(target)[:3], example=example, plan=tmp_path / "mlp.plan")
    assert again.program == first.program
    assert torch.equal(again(*example), first(*example))


def test_a_plan_of_another_step_or_beside_a_budget_is_refused(tmp_path: Path) -> None:
    step, model, optimizer, example = models.build(models.SMALL["mlp"])
    found = lowtide.fit(step, model, optimizer, example=example, budget="90%").plan
    assert found is not None
    found.save(tmp_path / "mlp.plan")
    step, model, optimizer, example = models.build(models.SMALL["unet"])
    with pytest.raises(lowtide.LowtideError, match="not for this one"):
        lowtide.fit(step, model, optimizer, example=example, plan=tmp_path / "mlp.plan")
    with pytest.raises(lowtide.LowtideError, match="not both"):
        lowtide.fit(step, model, optimizer, example=example, plan=found, budget="50%")
