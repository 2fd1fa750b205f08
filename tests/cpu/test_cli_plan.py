"""Plans on the command line: what is printed is what was found, what is saved can be loaded, and budgets are kept."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from lowtide.capture import capture
from lowtide.check import check
from lowtide.cli import app
from lowtide.cli.target import build
from lowtide.measure import roofline
from lowtide.models import SMALL
from lowtide.plan import as_eager
from lowtide.program import Program, Run
from lowtide.simulate import simulate

GPT = SMALL["gpt"]
QUICK = ("--costs", "roofline", "--time-limit", "0.5")
COMMON = {  # what the JSON of every command has
    "budget",
    "stays",
    "predicted_peak",
    "metered_peak",
    "least_feasible",
    "overhead",
    "bound",
    "time_ratio",
    "planning_seconds",
}


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Costs are measured here and shared by the tests of this file only."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOWTIDE_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


def run(*arguments: str) -> Result:
    """The command as it is called in a wide terminal."""
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "120", "NO_COLOR": "1"})


def json_of(*arguments: str) -> dict[str, Any]:
    """What the command prints with `--json`."""
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def test_the_numbers_of_a_plan_agree_with_each_other_and_with_the_saved_program(tmp_path: Path) -> None:
    file = tmp_path / "program.json"
    found = json_of("plan", GPT, "--budget", "50%", *QUICK, "--out", str(file))
    assert found.keys() >= COMMON | {"gap", "eager_peak", "recomputed", "kept", "in_place", "runs", "ops"}
    assert found["metered_peak"] is None
    assert found["least_feasible"] is None
    assert found["stays"] < found["predicted_peak"] <= found["budget"] < found["eager_peak"]
    assert found["budget"] == found["stays"] + round((found["eager_peak"] - found["stays"]) / 2)
    assert 0 <= found["bound"] <= found["overhead"] + 1e-9
    assert found["gap"] == pytest.approx(found["overhead"] - found["bound"])

    graph = capture(*build(GPT)).graph
    costs = roofline(graph)
    program = Program.load(file, graph)
    check(graph, costs, program, budget=found["budget"])
    assert found["eager_peak"] == simulate(graph, costs, as_eager(graph)).peak
    assert found["predicted_peak"] == simulate(graph, costs, program).peak
    runs = [item for item in program.instructions if isinstance(item, Run)]
    again = [item for item in runs if item.again]
    assert again
    assert (found["runs"], found["ops"]) == (len(runs), len(graph.ops))
    assert sum(row["count"] for row in found["recomputed"]) == len(again)
    seconds = sum(row["seconds"] for row in found["recomputed"])
    assert seconds == pytest.approx(found["overhead"] * found["seconds_without_recomputation"])
    assert any(row["bytes"] for row in found["recomputed"])
    own = found["budget"] - found["stays"]
    assert 0 < sum(row["bytes"] for row in found["kept"]) <= own
    assert found["in_place"]["count"] > 0
    for rows, order in ((found["recomputed"], "seconds"), (found["kept"], "bytes")):
        amounts = [row[order] for row in rows]
        assert amounts == sorted(amounts, reverse=True)
        places = [(row["module"], row["target"], row.get("phase")) for row in rows]
        assert len(set(places)) == len(places)


def test_a_plan_with_room_recomputes_nothing() -> None:
    found = json_of("plan", GPT, "--budget", "1GiB", *QUICK)
    assert found["recomputed"] == []
    assert found["overhead"] == pytest.approx(0)
    assert found["runs"] == found["ops"]
    result = run("plan", GPT, "--budget", "1GiB", *QUICK)
    assert "Recomputed: nothing" in result.stdout


def test_a_person_reads_the_promise_and_folded_layers() -> None:
    result = run("plan", GPT, "--budget", "50%", *QUICK)
    assert result.exit_code == 0, result.output
    for words in ("budget", "predicted peak", "overhead", "bound", "gap", "Recomputed:", "Kept for the backward:"):
        assert words in result.stdout
    assert "blocks.{0,1}" in result.stdout
    assert all(len(line) <= 120 for line in result.stdout.splitlines())


def test_a_file_is_overwritten_only_by_force(tmp_path: Path) -> None:
    file = tmp_path / "program.json"
    file.write_text("mine")
    call = ("plan", GPT, "--budget", "60%", *QUICK, "--out", str(file))
    refused = run(*call)
    assert refused.exit_code == 1
    assert "--force" in refused.stderr
    assert file.read_text() == "mine"
    assert run(*call, "--force").exit_code == 0
    Program.load(file, capture(*build(GPT)).graph)


def test_a_budget_that_nothing_fits_is_answered_with_the_op() -> None:
    result = run("plan", GPT, "--budget", "1KiB", *QUICK)
    assert result.exit_code == 3
    assert result.stdout == ""
    assert "no plan found within 1,024 bytes" in result.stderr
    names = [op.name for op in capture(*build(GPT)).graph.ops]
    assert any(f": {name} (" in result.stderr for name in names)


@pytest.mark.parametrize("command", ["plan", "train"])
@pytest.mark.parametrize("budget", ["5furlongs", "-3", "0"])
def test_what_is_no_budget_is_refused_before_anything_is_built(command: str, budget: str) -> None:
    result = run(command, "no-such-model", f"--budget={budget}")
    assert result.exit_code == 2
    assert "budget" in result.stderr
    assert "no-such-model" not in result.stderr


def test_a_plan_needs_a_budget() -> None:
    result = run("plan", GPT)
    assert result.exit_code == 2
    assert "--budget" in result.stderr


def test_training_keeps_within_the_budget() -> None:
    found = json_of("train", GPT, "--steps", "3", "--budget", "60%", "--time-limit", "0.5")
    assert found.keys() >= COMMON
    assert found["predicted_peak"] <= found["budget"]
    assert found["metered_peak"] is not None, found["notes"]
    assert found["metered_peak"] <= found["budget"]
    assert 0 <= found["bound"] <= found["overhead"] + 1e-9
    assert found["planning_seconds"] > 0
    result = run("train", GPT, "--steps", "2", "--budget", "60%", "--time-limit", "0")
    assert result.exit_code == 0, result.output
    for words in ("budget", "predicted peak", "metered peak", "overhead"):
        assert words in result.stdout
