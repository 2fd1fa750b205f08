"""The command line on real steps: what it prints is what was run, and each mistake gets its answer."""

import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from lowtide.bench import capture as captures
from lowtide.cli import app, talk
from lowtide.errors import BudgetError
from lowtide.models import SMALL, catalog

GPT = SMALL["gpt"]
MLP = SMALL["mlp"]
COMMON = {  # what the JSON of every command has
    "budget",
    "persistent",
    "predicted_peak",
    "metered_peak",
    "least_feasible",
    "overhead",
    "bound",
    "time_ratio",
    "planning_seconds",
}

FILE = """
import torch
import torch.nn.functional as F
from torch import nn
from neighbour import WIDTH

print("printed while the file is imported")


def model():
    return nn.Sequential(nn.Linear(16, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 4))


def make():
    net = model()
    batch = {"x": torch.zeros(8, 16), "y": torch.zeros(8).long()}
    return clear_first, net, torch.optim.AdamW(net.parameters()), (batch,)


def clear_first(model, optimizer, batch):
    print("printed by the step")
    optimizer.zero_grad()
    loss = F.cross_entropy(model(batch["x"]), batch["y"])
    loss.backward()
    optimizer.step()
    return {"note": "a word", "loss": loss}


def accumulating():
    def step(model, optimizer, x):
        model(x).square().mean().backward()

    return step, model(), None, (torch.ones(8, 16),)


def with_gradients():
    def step(model, optimizer, x):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    net = model()
    net(torch.ones(8, 16)).sum().backward()
    return step, net, torch.optim.SGD(net.parameters(), lr=0.1), (torch.ones(8, 16),)


def undecided():
    def step(model, optimizer, x):
        loss = model(x).sum()
        if loss > 0:
            loss = loss.square()
        loss.backward()
        return loss

    return step, model(), None, (torch.zeros(4, 16),)


def idle():
    return (lambda model, optimizer, x: x), model(), None, (torch.zeros(4, 16),)


def broken():
    return 1 / 0
"""


def line_of(words: str) -> int:
    """The line of the user's file that has these words."""
    return FILE[: FILE.index(words)].count("\n") + 1


@pytest.fixture(scope="module", autouse=True)
def own_cache(stocked: Path) -> Iterator[None]:
    """Costs are measured here, whatever the user's own cache has."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOWTIDE_CACHE", str(stocked))
        yield


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A user's file in the current folder."""
    (tmp_path / "users_step.py").write_text(FILE)
    (tmp_path / "neighbour.py").write_text("WIDTH = 256\n")
    monkeypatch.chdir(tmp_path)
    return "users_step.py"


def run(*arguments: str, code: int = 0) -> tuple[str, str]:
    """Run a command; its stdout and stderr."""
    result = CliRunner().invoke(app, list(arguments), env={"COLUMNS": "100", "NO_COLOR": "1"})
    assert result.exit_code == code, (result.output, result.exception)
    return result.stdout, result.stderr


def run_json(*arguments: str) -> dict[str, Any]:
    """Run a command with --json; the one object that it prints."""
    found: dict[str, Any] = json.loads(run(*arguments, "--json")[0])
    return found


@pytest.fixture(scope="module")
def profiled(own_cache: None) -> dict[str, Any]:
    return run_json("profile", GPT)


def test_a_profile_has_the_keys_of_every_command(profiled: dict[str, Any]) -> None:
    assert set(profiled) >= COMMON
    assert profiled["budget"] is None
    assert profiled["overhead"] == 0.0
    assert profiled["ops"] > 200
    assert profiled["optimizer"] == "SGD"


def test_the_prediction_is_what_the_allocator_sees(profiled: dict[str, Any]) -> None:
    assert profiled["predicted_peak"] == pytest.approx(profiled["metered_peak"], rel=0.005)
    assert profiled["eager_predicted_peak"] == pytest.approx(profiled["eager_metered_peak"], rel=0.005)


def test_categories_and_modules_add_up_to_the_peak(profiled: dict[str, Any]) -> None:
    peak = profiled["predicted_peak"]
    assert sum(profiled["categories"].values()) == peak
    assert sum(branch["bytes"] for branch in profiled["modules"]) == peak
    assert profiled["persistent"] + profiled["own"] == peak
    blocks = next(branch for branch in profiled["modules"] if branch["module"].startswith("blocks"))
    assert sum(blocks["categories"].values()) == blocks["bytes"] >= sum(part["bytes"] for part in blocks["parts"])


def test_the_largest_values_have_shape_and_line(profiled: dict[str, Any]) -> None:
    largest = profiled["largest"]
    assert [item["bytes"] for item in largest] == sorted((item["bytes"] for item in largest), reverse=True)
    made = next(item for item in largest if item["category"] == "activations")
    assert ".py:" in made["source"]
    assert made["shape"]
    assert made["dtype"]


def test_the_curve_is_short_and_reaches_the_peak(profiled: dict[str, Any]) -> None:
    curve = profiled["curve"]
    assert max(curve["bytes"]) == profiled["predicted_peak"]
    assert len(curve["bytes"]) == len(curve["at"]) == len(curve["at_seconds"]) <= 512
    assert {item["phase"] for item in curve["phases"]} == {"forward", "backward", "update"}
    assert curve["phases"][-1]["end"] == curve["instructions"]


def test_the_terminal_report_shows_what_the_json_says(profiled: dict[str, Any]) -> None:
    shown, _ = run("profile", GPT)
    assert "\x1b" not in shown
    for title in ("Peak of one step", "by category", "by module", "largest values", "Over the step"):
        assert title in shown
    for row in ("metered", "eager, metered", "not counted"):
        assert row in shown
    assert f"{profiled['parameters']:,} parameters" in shown


def test_roofline_runs_nothing_and_says_so() -> None:
    found = run_json("profile", GPT, "--costs", "roofline")
    assert found["metered_peak"] is None
    assert found["eager_metered_peak"] is None
    assert any("nothing was run" in note for note in found["notes"])


@pytest.mark.parametrize("function", ["make", "accumulating", "with_gradients"])
def test_a_function_of_a_file_is_a_target(file: str, function: str) -> None:
    found = run_json("profile", f"{file}:{function}")
    assert found["predicted_peak"] == pytest.approx(found["metered_peak"], rel=0.005)
    assert found["eager_predicted_peak"] == pytest.approx(found["eager_metered_peak"], rel=0.005)


def test_what_a_users_file_prints_is_talk(file: str) -> None:
    shown, talk = run("train", f"{file}:make", "--steps", "2", "--json")
    json.loads(shown)
    assert "printed while the file is imported" in talk
    assert "printed by the step" in talk


def test_train_lowers_the_loss_within_the_predicted_peak() -> None:
    found = run_json("train", MLP, "--steps", "6")
    assert set(found) >= COMMON
    assert found["last_loss"] < found["first_loss"]
    assert len(found["losses"]) == found["steps"] == 6
    assert found["predicted_peak"] == pytest.approx(found["metered_peak"], rel=0.005)
    shown, _ = run("train", MLP, "--steps", "2")
    assert "metered peak" in shown
    assert "prediction is off by" in shown


def test_one_step_is_metered_but_has_no_speed() -> None:
    found = run_json("train", MLP, "--steps", "1")
    assert found["predicted_peak"] == pytest.approx(found["metered_peak"], rel=0.005)
    assert found["steps_per_second"] is None


def test_train_finds_the_loss_in_a_dictionary(file: str) -> None:
    found = run_json("train", f"{file}:make", "--steps", "3")
    assert found["last_loss"] < found["first_loss"]


def test_models_are_listed_with_parameters() -> None:
    listed = {item["name"]: item for item in run_json("models", "--quick")["models"]}
    assert listed["resnet"]["parameters"] == 25_557_032
    assert listed["resnet"]["options"]["batch"]["default"] == 16
    assert listed["resnet"]["predicted_peak"] is None


def test_models_are_listed_with_peaks(monkeypatch: pytest.MonkeyPatch) -> None:
    only = [entry for entry in catalog() if entry.name == "mlp"]
    monkeypatch.setattr(importlib.import_module("lowtide.models"), "catalog", lambda: only)
    (listed,) = run_json("models")["models"]
    assert listed["predicted_peak"] > 4 * listed["parameters"]
    assert "MiB" in run("models")[0]


def test_bench_predict_of_one_target_runs_here() -> None:
    (row,) = run_json("bench", "predict", MLP, "--rounds", "0")["rows"]
    assert row["ok"]
    assert abs(row["error"]) <= 0.005
    assert row["target"] == MLP


def test_bench_predict_tells_seconds_for_each_budget() -> None:
    chain = "tanh-chain:length=30,width=64,batch=32"
    call = ["bench", "predict", chain, "--rounds", "2", "--time-limit", "0.1"]
    result = CliRunner().invoke(app, [*call, "--json"])
    (row,) = json.loads(result.stdout)["rows"]
    assert [item["percent"] for item in row["seconds"]] == [100, 50, 30]
    for item in row["seconds"]:
        assert len(item["rounds"]) == 2
        assert item["measured"] == sum(item["rounds"]) / 2
        assert item["error"] == item["predicted"] / item["measured"] - 1
        assert 0.02 < item["predicted"] / item["measured"] < 50  # seconds, not milliseconds; no bar on time
    assert row["seconds"][0]["budget"] > row["seconds"][1]["budget"] > row["seconds"][2]["budget"]
    assert result.exit_code == (0 if row["ok"] else 1)


def test_bench_runs_several_targets_elsewhere_and_survives_one() -> None:
    shown, _ = run("bench", "predict", MLP, "nonsense", "--rounds", "0", "--json", code=1)
    good, bad = json.loads(shown)["rows"]
    assert good["ok"]
    assert "there is no built-in model 'nonsense'" in bad["failure"]
    assert not bad["ok"]


def test_bench_execute_takes_turns() -> None:
    result = CliRunner().invoke(app, ["bench", "execute", MLP, "--rounds", "3", "--json"])
    (row,) = json.loads(result.stdout)["rows"]
    assert len(row["eager"]) == len(row["program"]) == 3
    assert row["time_ratio"] > 0
    assert result.exit_code == (0 if row["ok"] else 1)


@pytest.fixture
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow the machine is just now, captures are quick enough."""
    monkeypatch.setattr(captures, "LIMIT_SECONDS", float("inf"))


@pytest.mark.usefixtures("_patient")
def test_bench_capture_counts_ops_and_heap() -> None:
    (row,) = run_json("bench", "capture", MLP)["rows"]
    assert row["ops"] > 30
    assert row["seconds_an_op"] == row["seconds"] / row["ops"]
    assert row["heap"] < 100e6


@pytest.mark.usefixtures("_patient")
def test_a_table_can_be_markdown() -> None:
    shown, _ = run("bench", "capture", MLP, "--markdown")
    assert shown.startswith("| target | ops |")


@pytest.mark.parametrize(
    "arguments",
    [
        ["profile"],
        ["profile", MLP, "--costs", "guessed"],
        ["profile", MLP, "--unknown"],
        ["train", MLP, "--steps", "0"],
        ["bench", "nothing"],
        ["nothing"],
    ],
)
def test_a_wrong_call_exits_with_2(arguments: list[str]) -> None:
    shown, talk = run(*arguments, code=2)
    assert shown == ""
    assert talk.startswith("Usage: ")


@pytest.mark.parametrize(
    ("target", "code", "words"),
    [
        ("gtp", 2, ["error: there is no built-in model 'gtp'", "hint: did you mean gpt?"]),
        ("gpt:widht=3", 2, ["hint: did you mean width?"]),
        ("nowhere.py:make", 2, ["error: there is no file nowhere.py."]),
        ("users_step.py", 2, ["hint: write users_step.py:make"]),
        ("users_step.py:nothing", 2, ["error: users_step.py has no function 'nothing'."]),
        ("users_step.py:broken", 2, [f"error: users_step.py:{line_of('1 / 0')}: ZeroDivisionError: division by zero"]),
        ("users_step.py:idle", 2, ["error: the step of users_step.py:idle calls no op of torch."]),
        ("users_step.py:undecided", 4, [f"error: users_step.py:{line_of('if loss > 0')}: "]),
    ],
)
def test_a_mistake_gets_an_answer_without_a_traceback(file: str, target: str, code: int, words: list[str]) -> None:
    for command in (["profile", target], ["train", target, "--steps", "2"]):
        shown, talk = run(*command, code=code)
        assert shown == ""
        assert all(word in talk for word in words), talk
        assert "Traceback" not in talk


def test_a_syntax_error_names_its_line(tmp_path: Path) -> None:
    path = tmp_path / "syntax.py"
    path.write_text("import torch\ndef make(:\n")
    _, talk = run("profile", f"{path}:make", code=2)
    assert f"error: {path}:2: " in talk


def test_a_file_may_be_named_like_a_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "json.py").write_text("def make():\n    return 1, 2\n")
    monkeypatch.chdir(tmp_path)
    _, talk = run("profile", "json.py:make", code=2)
    assert "make in json.py returned 2 things" in talk
    assert json.loads("1") == 1


def test_other_errors_keep_their_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(target: str) -> None:
        raise BudgetError("3 GiB is too little.", hint="4 GiB would do.")

    monkeypatch.setattr(importlib.import_module("lowtide.cli.profile"), "captured_target", refuse)
    _, talk = run("profile", MLP, code=3)
    assert talk == "error: 3 GiB is too little.\nhint: 4 GiB would do.\n"


def test_an_interrupt_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(target: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(importlib.import_module("lowtide.cli.profile"), "captured_target", interrupt)
    _, talk = run("profile", MLP, code=130)
    assert len(talk.splitlines()) == 1


def test_the_version_is_printed() -> None:
    assert run("--version")[0].split()[0] == "lowtide"


# Without memory


def test_no_memory_is_an_answer(capsys: pytest.CaptureFixture[str]) -> None:
    @talk.answering
    def starve() -> None:
        raise MemoryError

    with pytest.raises(typer.Exit) as ended:
        starve()
    assert ended.value.exit_code == 1
    said = capsys.readouterr().err
    assert "error: there is no memory left" in said
    assert "hint: end what else uses the memory" in said


def test_without_memory_to_prove_a_bound_the_plan_is_still_made(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ("plan", SMALL["gpt"], "--budget", "40%", "--costs", "roofline", "--time-limit", "0.5")
    proven = run_json(*arguments)

    def starve(*_: Any, **__: Any) -> Any:
        asked.append(1)
        raise MemoryError

    asked: list[int] = []
    monkeypatch.setattr(importlib.import_module("lowtide.plan.bound"), "milp", starve)
    found = run_json(*arguments)
    assert asked
    assert found["predicted_peak"] <= found["budget"]
    assert found["bound"] <= proven["bound"]
