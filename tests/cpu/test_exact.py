"""Every built-in step, run by its program, equals eager PyTorch to the bit."""

from __future__ import annotations

import pytest
import torch
from twins import assert_exact

from lowtide import models

OPTIMIZERS = ("sgd", "adamw")
OTHERS = ("adam", "rmsprop", "adagrad", "nesterov")


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", models.SMALL)
def test_every_model_is_exact(name: str, optimizer: str) -> None:
    assert_exact(lambda: models.build(f"{models.SMALL[name]},optimizer={optimizer}"))


@pytest.mark.parametrize("optimizer", OTHERS)
@pytest.mark.parametrize("name", ["mlp", "unet", "gpt", "lstm"])
def test_other_optimizers_are_exact(name: str, optimizer: str) -> None:
    assert_exact(lambda: models.build(f"{models.SMALL[name]},optimizer={optimizer}"))


def test_other_batches_give_other_results() -> None:
    target = models.SMALL["mlp"]
    _, _, _, (x, y) = models.build(target)
    batches = [(x + number, y.roll(number)) for number in range(5)]
    assert_exact(lambda: models.build(target), batches=batches)


def test_results_are_the_callers_own() -> None:
    train = assert_exact(lambda: models.build(models.SMALL["mlp"]))
    _, _, _, example = models.build(models.SMALL["mlp"])
    first = train(*example)
    kept = first.clone()
    train(*example)
    assert torch.equal(first, kept)
    assert first.grad_fn is None
