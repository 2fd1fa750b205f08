"""Optimizers and frozen parts that came after: captured, planned, and equal to eager to the bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from twins import assert_exact

from lowtide import models
from lowtide.bench.optimizers import AdamMini, GaLore, adapted

TARGET = "gpt:layers=2,width=32,heads=2,context=16,vocabulary=64,batch=2"
MAKERS: dict[str, Callable[[Any], Any]] = {
    "adafactor": lambda model: torch.optim.Adafactor(model.parameters(), lr=1e-2),
    "galore": lambda model: GaLore(model.parameters(), lr=1e-2, rank=4, every=3),
    "adam-mini": lambda model: AdamMini(model.parameters(), lr=1e-2),
    "lora": lambda model: torch.optim.Adam([item for item in adapted(model, 4).parameters() if item.requires_grad]),
}


@pytest.mark.parametrize("name", MAKERS)
def test_what_came_after_trains_as_in_eager(name: str) -> None:
    def recipe() -> Any:
        torch.manual_seed(0)
        step, model, _, example = models.build(TARGET)
        return step, model, MAKERS[name](model), example

    assert_exact(recipe, steps=7, budget="70%")


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_lora_of_peft_trains_as_in_eager() -> None:
    peft = pytest.importorskip("peft")

    def recipe() -> Any:
        torch.manual_seed(0)
        step, model, _, example = models.build("hf-gpt2:layers=2,width=32,heads=2,context=16,vocabulary=64,batch=2")
        settings = peft.LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True)
        wrapped = peft.get_peft_model(model, settings)
        trained = [item for item in wrapped.parameters() if item.requires_grad]
        return step, wrapped, torch.optim.AdamW(trained, lr=1e-2), example

    assert_exact(recipe, steps=3, budget="70%")


def test_a_maximum_of_data_is_a_number_of_the_step() -> None:
    """Clipping by Python's max and min, of numbers that are known only when the step runs, one after the other."""

    def recipe() -> Any:
        torch.manual_seed(0)
        _, model, optimizer, (inputs, labels) = models.build("mlp:width=16,depth=2,features=8,batch=8")

        def clipped(model: Any, optimizer: Any, inputs: Any, labels: Any) -> Any:
            loss = torch.nn.functional.cross_entropy(model(inputs), labels)
            loss.backward()
            for parameter in model.parameters():
                norm = parameter.grad.norm().item()
                parameter.grad.mul_(min(1.0, 0.05 / max(norm, 1e-6, norm / 2)))
            optimizer.step()
            optimizer.zero_grad()
            return loss

        return clipped, model, optimizer, (inputs, labels)

    assert_exact(recipe, steps=4)
