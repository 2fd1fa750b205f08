"""What a device is stands in one record, and all who run, plan and judge read it there."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from twins import assert_exact

import lowtide
from lowtide import device, models
from lowtide.check import check
from lowtide.costs import declared
from lowtide.errors import ProgramError, UsageError
from lowtide.execute import Runner
from lowtide.plan.layout import layout
from lowtide.program import Run


@pytest.mark.parametrize("name", ["cuda", "cuda:1", "mps", "xpu"])
def test_a_device_that_does_not_exist_yet_is_refused_in_words(name: str) -> None:
    assert not device.known(name)
    with pytest.raises(UsageError, match=f"does not know the device '{name}'") as caught:
        device.of(name)
    assert "cpu" in str(caught.value.hint)


def test_the_cpu_answers() -> None:
    cpu = device.of("cpu")
    assert cpu.generator() is torch.default_generator
    assert 0 < cpu.free_bytes() < 2**50
    assert torch.__version__ in cpu.model()
    before = cpu.clock()
    cpu.synchronise()
    assert cpu.clock() >= before
    with cpu.meter() as meter:
        kept = torch.empty(1000, dtype=torch.uint8)
    assert meter.peak == len(kept)


@pytest.mark.parametrize("alignment", [64, 256, 4096])
def test_layout_and_judge_read_the_alignment_of_the_costs(alignment: int) -> None:
    built = models.build(models.SMALL["mlp"])
    graph = lowtide.capture(*built[:3], built[3]).graph
    costs = dataclasses.replace(declared(graph), alignment=alignment)
    program = layout(graph, costs, lowtide.keep_everything(graph))
    offsets = [at for row in program.instructions if isinstance(row, Run) for at in row.at if at >= 0]
    assert len(set(offsets)) > 3
    assert all(at % alignment == 0 for at in offsets)
    assert check(graph, costs, program) > 0
    coarser = dataclasses.replace(costs, alignment=alignment * 2**20)
    with pytest.raises(ProgramError, match=f"in steps of {alignment * 2**20}"):
        check(graph, coarser, program)


def test_a_runner_asks_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def own_kernel(target: str) -> Any:
        asked.append(target)
        return device.CPU.own_kernel(target)

    monkeypatch.setitem(device.DEVICES, "cpu", dataclasses.replace(device.CPU, own_kernel=own_kernel))
    train = assert_exact(
        lambda: models.build(models.SMALL["mlp"]), steps=2, program=lambda graph: lowtide.keep_everything(graph)
    )
    assert isinstance(train, Runner)
    assert {op.target for op in train.captured.graph.ops if not op.target.startswith("operator.")} <= set(asked)
