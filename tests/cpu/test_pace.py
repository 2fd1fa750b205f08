"""`lowtide profile --time` on real steps: operations by a closed form, and seconds that add up."""

from __future__ import annotations

import importlib
import json
import os
from itertools import pairwise

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from lowtide.capture import capture
from lowtide.cli import app
from lowtide.device import CPU
from lowtide.measure import limits, work
from lowtide.models import SMALL, build

around = importlib.import_module("lowtide.measure.limits")
MLP = {"width": 24, "depth": 3, "features": 16, "classes": 10, "batch": 8}


@pytest.fixture
def small_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Probes that take no second; what they say of the machine matters to nobody here."""
    monkeypatch.setattr(around, "SIDE", 64)
    monkeypatch.setattr(around, "PART", 2**13)


def test_the_time_of_a_step_adds_up_and_products_have_the_operations_of_the_book(small_probes: None) -> None:
    target = "mlp:" + ",".join(f"{name}={value}" for name, value in MLP.items())
    call = ["profile", target, "--time", "--budget", "60%", "--rounds", "2", "--json"]
    done = CliRunner().invoke(app, call, env={**os.environ, "NO_COLOR": "1"})
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    sizes = [MLP["features"], *[MLP["width"]] * MLP["depth"], MLP["classes"]]
    each = [2 * MLP["batch"] * one * other for one, other in pairwise(sizes)]
    ops = {row["target"]: row for row in found["ops"]}
    assert ops["aten.addmm.default"]["operations"] == sum(each)
    assert ops["aten.mm.default"]["operations"] == 2 * sum(each) - each[0]  # nobody wants the batch's gradient
    seconds = sum(row["seconds"] for row in found["ops"])
    again = sum(row["again"] for row in found["ops"])
    assert again == pytest.approx(found["again_seconds"])
    assert sum(row["seconds"] for row in found["modules"]) == pytest.approx(seconds, abs=1e-6)
    assert sum(part["seconds"] for part in found["held_by"].values()) + again == pytest.approx(seconds)
    assert 0 < found["needed_seconds"] <= seconds
    assert 0 < found["uncounted_seconds"] <= seconds
    assert len(found["ratios"]) == 2
    assert found["ratios"] == [one / other for one, other in zip(found["rounds"], found["eager_rounds"], strict=True)]
    assert found["limits"]["operations"].keys() == {"float32"}


def test_the_quickest_of_several_budgets_is_the_one_that_is_shown(small_probes: None) -> None:
    call = ["bench", "pace", SMALL["mlp"], "--rounds", "1", "--time-limit", "0", "--budgets", "100%,1B,70%", "--json"]
    done = CliRunner().invoke(app, call)
    assert done.exit_code == 0, done.output
    (row,) = json.loads(done.stdout)["rows"]
    assert row["budget"] in ("100%", "70%")
    assert row["distance"] == pytest.approx(row["seconds"] / row["needed"])
    assert row["distance"] / row["eager_distance"] == pytest.approx(row["ratios"][0])
    assert 0 < row["arithmetic"] < 1
    nothing = CliRunner().invoke(app, [*call[:-2], "1B"])
    assert nothing.exit_code == 3
    assert "no plan" in nothing.stderr


@pytest.mark.parametrize("name", ["gpt", "resnet", "lstm"])
def test_every_op_of_a_step_has_its_work(name: str) -> None:
    graph = capture(*build(SMALL[name])).graph
    for op, needs in zip(graph.ops, work(graph), strict=True):
        touched = sum(graph.values[value].nbytes for value in (*op.reads, *op.makes))
        assert 0 <= needs.nbytes <= touched
        assert needs.operations is None or needs.operations > 0
    assert {op.target for op, needs in zip(graph.ops, work(graph), strict=True) if needs.operations}


class Rows(nn.Module):
    """What reads few of many rows, one row for all, and what writes over everything."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(1000, 8)
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, places: torch.Tensor) -> torch.Tensor:
        return (self.table(places) * self.scale).sum()


def test_bytes_are_those_that_an_op_must_touch() -> None:
    model = Rows()

    def step(model: nn.Module, optimizer: object, places: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(places)
        loss.backward()
        return loss

    graph = capture(step, model, None, (torch.zeros(4, dtype=torch.long),)).graph
    nbytes = {op.target: needs.nbytes for op, needs in zip(graph.ops, work(graph), strict=True)}
    rows = 4 * 8 * 4
    assert nbytes["aten.embedding.default"] == rows  # of the table no more than is made
    assert nbytes["aten.sum.default"] == rows + 4
    forward = next(op for op in graph.ops if op.target == "aten.mul.Tensor" and op.phase == "forward")
    assert work(graph)[graph.ops.index(forward)].nbytes == 2 * rows + 8 * 4  # the scale is there once


def test_limits_are_rates_of_what_was_measured(small_probes: None) -> None:
    graph = capture(*build(SMALL["mlp"])).graph
    found = limits(graph)
    assert found.operations["float32"] > 0
    assert found.bandwidth > 0
    assert found.machine == CPU.model()
