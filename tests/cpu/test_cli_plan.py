"""Plans on the command line: what is printed is what was found, what is saved can be loaded, and budgets are kept."""

import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from test_cli import COMMON
from typer.testing import CliRunner, Result

from lowtide.capture import capture
from lowtide.check import check
from lowtide.cli import app
from lowtide.cli.target import build
from lowtide.graph import Graph
from lowtide.measure import roofline
from lowtide.models import SMALL
from lowtide.plan import CLASSICS, METHODS, as_eager
from lowtide.program import Free, Plan, Program, Run
from lowtide.rewrite import with_narrow
from lowtide.simulate import simulate

GPT = SMALL["gpt"]
QUICK = ("--costs", "roofline", "--time-limit", "0.5")


@pytest.fixture(scope="module", autouse=True)
def own_cache(stocked: Path) -> Iterator[None]:
    """Costs are measured here, whatever the user's own cache has."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOWTIDE_CACHE", str(stocked))
        yield


def run(*arguments: str) -> Result:
    """The command as it is called in a wide terminal."""
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "120", "NO_COLOR": "1"})


def graph_of(target: str) -> Graph:
    """The step that is planned: with the ops that a plan may use to keep values narrow."""
    return with_narrow(capture(*build(target)).graph)


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
    assert found["persistent"] < found["least_bound"] <= found["least_feasible"] <= found["predicted_peak"]
    assert found["persistent"] < found["predicted_peak"] <= found["budget"] < found["eager_peak"]
    assert found["budget"] == found["persistent"] + round((found["eager_peak"] - found["persistent"]) / 2)
    assert 0 <= found["bound"] <= found["overhead"] + 1e-9
    assert found["gap"] == pytest.approx(found["overhead"] - found["bound"])

    graph = graph_of(GPT)
    costs = roofline(graph)
    program = Program.load(file, graph)
    assert (found["arena"], found["arena"] + found["outside"]) == (program.arena, found["predicted_peak"])
    check(graph, costs, program, budget=found["budget"])
    assert found["eager_peak"] == simulate(graph, costs, as_eager(graph)).peak
    assert found["predicted_peak"] == simulate(graph, costs, program).peak
    runs = [item for item in program.instructions if isinstance(item, Run)]
    again = [item for item in runs if item.again and not graph.ops[item.op].optional]
    assert again
    assert (found["runs"], found["ops"]) == (len(runs), len(graph.ordinary))
    assert sum(row["count"] for row in found["recomputed"]) == len(again)
    seconds = sum(row["seconds"] for row in found["recomputed"]) + found["packing_seconds"]
    assert seconds == pytest.approx(found["overhead"] * found["seconds_without_recomputation"])
    assert any(row["bytes"] for row in found["recomputed"])
    own = found["budget"] - found["persistent"]
    assert 0 < sum(row["bytes"] for row in found["kept"]) <= own
    assert found["in_place"]["count"] > 0
    for rows, order in ((found["recomputed"], "seconds"), (found["kept"], "bytes")):
        amounts = [row[order] for row in rows]
        assert amounts == sorted(amounts, reverse=True)
        places = [(row["module"], row["target"], row.get("phase"), row.get("narrow")) for row in rows]
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
    promise = ("budget", "predicted peak", "arena", "least feasible", "overhead", "bound", "gap")
    for words in (*promise, "Recomputed:", "Kept for the backward:"):
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
    Program.load(file, graph_of(GPT))


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


# ------------------------------------------------------------------------------------------------------------- methods


@pytest.mark.parametrize(("method", "budget"), [("chen-budget", "70%"), ("one-shot", "100%")])
def test_a_classic_plans_by_its_name(method: str, budget: str) -> None:
    call = ("plan", GPT, "--budget", budget, "--method", method, *QUICK)
    found = json_of(*call)
    assert found["method"] == method
    assert found["predicted_peak"] <= found["budget"]
    assert (found["overhead"] == pytest.approx(0)) == (method == "one-shot")
    assert f"planned by {method} in" in run(*call).stdout


def test_a_method_that_is_none_is_refused_before_anything_is_built() -> None:
    result = run("plan", "no-such-model", "--budget", "50%", "--method", "magic")
    assert result.exit_code == 2
    assert "'magic'" in result.stderr
    assert all(name in result.stderr for name in METHODS)


# ------------------------------------------------------------------------------------------------------ explanations


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plan that recomputes, in a file."""
    file = tmp_path_factory.mktemp("plan") / "gpt.plan"
    assert run("plan", GPT, "--budget", "50%", *QUICK, "--out", str(file)).exit_code == 0
    return file


def explained(saved: Path, name: str) -> dict[str, Any]:
    """The first value that a name stands for."""
    found = json_of("plan", GPT, "--load", str(saved), "--costs", "roofline", "--explain", name)
    assert found.keys() >= COMMON
    first: dict[str, Any] = found["explained"][0]
    assert first["value"] == found["values"][0]
    return first


def test_what_is_said_of_a_value_is_what_the_program_does(saved: Path) -> None:
    graph = graph_of(GPT)
    costs, plan = roofline(graph), Plan.load(saved, graph)
    runs = [item for item in plan.program.instructions if isinstance(item, Run)]
    again = next(run for run in runs if run.again and not graph.ops[run.op].optional)
    value = graph.makes_of(again.op, again=True)[0]
    found = explained(saved, f"%{value}")
    assert found["verdict"] in ("made again", "kept narrow")
    assert found["bytes"] == costs.nbytes[value]
    assert [runs[place].op for place in found["made"]].count(again.op) >= 1
    assert all(value in graph.reads[runs[place].op] for place in found["read"])
    if found["verdict"] == "made again":
        assert graph.ops[again.op].name in found["again"]
        seconds = sum(costs.seconds[op] for op, item in enumerate(graph.ops) if item.name in found["again"])
        assert found["again_seconds"] == pytest.approx(seconds)
        assert found["wait_runs"] > 0


def test_a_kept_value_says_what_it_would_cost_to_let_it_go(saved: Path) -> None:
    graph = graph_of(GPT)
    plan = Plan.load(saved, graph)
    freed = [item.value for item in plan.program.instructions if isinstance(item, Free)]
    taken = [read for item in plan.program.instructions if isinstance(item, Run) for _, read in item.over]
    once = {value for value in range(len(graph.values)) if [*freed, *taken].count(value) == 1}
    phases = {value: [graph.ops[op].phase for op in graph.readers[value]] for value in once if graph.maker[value] >= 0}
    waiting = [value for value, found in phases.items() if "backward" in found and "forward" in found]
    kept = [item for item in (explained(saved, str(value)) for value in waiting[:4]) if item["verdict"] == "kept"]
    assert kept
    for item in kept:
        assert len(item["made"]) == 1
        assert item["again_seconds"] is None or item["again"]
        assert any("To hold it" in sentence for sentence in item["sentences"])


def test_inputs_results_and_modules_are_explained(saved: Path) -> None:
    weight = explained(saved, "tokens.weight")
    assert weight["verdict"] == "an input"
    assert any("persistent" in sentence for sentence in weight["sentences"])
    result = run("plan", GPT, "--load", str(saved), "--costs", "roofline", "--explain", "blocks.1.attention")
    assert result.exit_code == 0, result.output
    assert "When the most bytes are in use" in result.stdout
    assert "ask for the others by number" in result.stdout
    assert all(len(line) <= 120 for line in result.stdout.splitlines()[:-1])


@pytest.mark.parametrize("name", ["%999999", "no_such_thing", "blocks.1.atention"])
def test_a_value_that_is_none_is_refused_before_anything_is_planned(name: str) -> None:
    result = run("plan", GPT, "--budget", "50%", "--time-limit", "600", "--explain", name)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert "hint:" in result.stderr
    assert ("blocks.1.attention" in result.stderr) == (name == "blocks.1.atention")


# --------------------------------------------------------------------------------------------------------------- files


def test_a_saved_plan_is_shown_as_it_was_found(saved: Path, tmp_path: Path) -> None:
    found = json_of("plan", GPT, "--budget", "50%", *QUICK, "--out", str(tmp_path / "one.plan"))
    loaded = json_of("plan", GPT, "--load", str(tmp_path / "one.plan"), "--costs", "roofline")
    differing = {key for key in found if found[key] != loaded[key]}
    assert differing == {"least_feasible", "method", "out"}
    plan = Plan.load(tmp_path / "one.plan", graph_of(GPT))
    plan.save(tmp_path / "two.plan")
    assert (tmp_path / "one.plan").read_text() == (tmp_path / "two.plan").read_text()


def test_a_plan_of_another_step_is_refused(saved: Path) -> None:
    for call in (("plan", SMALL["mlp"], "--load"), ("train", SMALL["mlp"], "--plan")):
        result = run(*call, str(saved))
        assert result.exit_code == 1
        assert result.stdout == ""
        assert "not for this one" in result.stderr
        assert result.stderr.count("error:") == 1


def test_a_program_without_its_promise_is_no_plan(saved: Path, tmp_path: Path) -> None:
    Program.load(saved, graph_of(GPT)).save(tmp_path / "program")
    result = run("plan", GPT, "--load", str(tmp_path / "program"), "--costs", "roofline")
    assert result.exit_code == 1
    assert "without what it promises" in result.stderr


@pytest.mark.parametrize(
    "call",
    [
        ("plan", GPT, "--load", "x", "--budget", "50%"),
        ("plan", GPT, "--load", "x", "--out", "y"),
        ("train", GPT, "--plan", "x", "--budget", "50%"),
    ],
)
def test_a_saved_plan_and_a_budget_do_not_go_together(call: tuple[str, ...]) -> None:
    assert run(*call).exit_code == 2


def test_training_by_a_saved_plan_keeps_its_peak(tmp_path: Path) -> None:
    file = tmp_path / "measured.plan"
    planned = json_of("plan", GPT, "--budget", "60%", "--time-limit", "0.5", "--out", str(file))
    found = json_of("train", GPT, "--steps", "3", "--plan", str(file))
    for key in ("budget", "predicted_peak", "overhead", "bound"):
        assert found[key] == planned[key]
    assert found["metered_peak"] is not None, found["notes"]
    assert found["metered_peak"] <= found["budget"]


# ------------------------------------------------------------------------------------------------------------ frontier


def test_the_frontier_falls_from_the_least_feasible_budget_to_no_recomputation() -> None:
    call = ("curve", GPT, "--points", "5", "--costs", "roofline", "--time-limit", "0.2")
    found = json_of(*call)
    assert found.keys() >= COMMON | {"rows", "classics", "least_bound", "eager_peak"}
    rows = found["rows"]
    assert len(rows) == 5
    for small, large in pairwise(rows):
        assert small["budget"] < large["budget"]
        assert small["predicted_peak"] <= large["predicted_peak"]
        assert small["overhead"] >= large["overhead"]
    for row in rows:
        assert row["predicted_peak"] <= row["budget"]
        assert row["bound"] <= row["overhead"] + 1e-9
    assert found["least_feasible"] == rows[0]["predicted_peak"] == rows[0]["budget"]
    assert rows[-1]["overhead"] == pytest.approx(0)
    assert found["classics"].keys() == CLASSICS.keys()
    for points in found["classics"].values():
        assert len(points) == 5
        assert all(point["predicted_peak"] <= row["budget"] for point, row in zip(points, rows, strict=True) if point)
    assert found["classics"]["keep"][0] is None
    assert found["classics"]["keep"][-1]["overhead"] == pytest.approx(0)

    result = run(*call, "--no-classics")
    assert result.exit_code == 0, result.output
    for words in ("Least time against peak", "Overhead against budget", "of eager", "gap"):
        assert words in result.stdout
    assert "rotor" not in result.stdout
    assert all(len(line) <= 120 for line in result.stdout.splitlines())


# --------------------------------------------------------------------------------------------------------------- bench


def test_a_bench_of_plans_says_which_bar_is_missed() -> None:
    target = SMALL["unet"]
    call = ("bench", "plan", target, "--budgets", "80,1", "--time-limit", "0.3")
    result = run(*call, "--json")
    (row,) = json.loads(result.stdout)["rows"]
    assert row["target"] == target
    loose, tight = row["budgets"]
    assert loose["bound"] <= loose["overhead"] + 1e-9
    assert loose["peak"] <= loose["budget"]
    assert loose["ratio"] >= 1 - 1e-9
    assert tight["overhead"] is None
    assert row["least_bound"] <= row["least"] < 1
    assert row["ok"] == (not row["missed"] and not loose["missed"])
    assert result.exit_code == (0 if row["ok"] else 1)
    shown = run(*call, "--markdown").stdout
    assert "| 80% |" in shown
    assert "nothing fits" in shown
    assert run("bench", "plan", target, "--budgets", "half").exit_code == 2
