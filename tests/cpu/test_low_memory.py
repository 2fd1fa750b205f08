"""The table of low memory on a small net and the images that come with lowtide."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from lowtide import allocator
from lowtide.bench.cli import app  # noqa: F401 - adds the command
from lowtide.bench.low_memory import EAGER, TASKS, Way, missing, runs, ways_of
from lowtide.bench.low_memory.runs import Effort, run
from lowtide.cli import app as commands

TARGET = "wrn-28-2:blocks=1,batch=8"
TASK = replace(TASKS[0], dataset="fashion-small", target=TARGET)
needs_meter = pytest.mark.skipif(not allocator.available(), reason="needs the meter")


def row(way: Way, part: str) -> Any:
    return run(TASK, TARGET, way, part, steps=3, items=16, effort=Effort(0.5))


@needs_meter
def test_memory_is_what_was_planned_and_less_than_eager_s() -> None:
    eager = row(Way(EAGER), "memory")
    packed = row(Way("packed", "activations8:products"), "memory")
    for found in (eager, packed):
        assert abs(found["peak"] - found["planned"]) <= 0.03 * found["planned"]
        assert sum(found["categories"].values()) == pytest.approx(found["planned"], rel=0.03)
        assert found["not_counted"] > 0
    assert packed["peak"] < eager["peak"]
    assert "activations8" in packed["rewrites"][0]


def test_training_is_eager_s_where_nothing_is_allowed_and_near_it_else() -> None:
    eager, exact, packed = (
        row(way, "1") for way in (Way(EAGER), Way("exact"), Way("packed", "activations16:products"))
    )
    assert exact["score"] == eager["score"]
    assert exact["loss"] == eager["loss"]
    assert packed["loss"] == pytest.approx(eager["loss"], rel=1e-3)


@needs_meter
def test_a_way_with_a_budget_is_searched_for_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    way, effort = Way("within", "input8", "100%"), Effort(0.5, tmp_path / "plans" / "within.json")
    run(TASK, TARGET, way, "memory", 0, 16, effort)
    asked: list[dict[str, Any]] = []
    fit = runs.fit
    monkeypatch.setattr(runs, "fit", lambda *given, **told: asked.append(told) or fit(*given, **told))
    assert run(TASK, TARGET, way, "1", 2, 16, effort)["items"] >= 16
    assert [one.get("plan") for one in asked] == [effort.plan]


def test_rows_of_techniques_that_are_not_there_are_left_out_by_name() -> None:
    for task in TASKS:
        names = [way.name for way in ways_of(task.kind)]
        assert len(set(names)) == len(names)
        assert names[0] == EAGER
    assert missing(Way("all", "microbatch:2,activations8")) == []


def test_wrong_calls_are_answered(tmp_path: Path) -> None:
    for arguments, words in (
        (["resnet"], "there is no task 'resnet'"),
        (["--target", "wrn-28-2:batch=4"], "--target is of a single task"),
    ):
        found = CliRunner().invoke(commands, ["bench", "low-memory", *arguments])
        assert found.exit_code == 2
        assert words in found.output
