"""Training runs: the same bits as eager PyTorch, however often they are killed and taken up again."""

from __future__ import annotations

import io
import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import pytest
import torch
from rich.console import Console
from test_cli import COMMON
from twins import assert_same
from typer.testing import CliRunner

from lowtide import tree
from lowtide.capture import capture
from lowtide.cli import app, checkpoint, loop
from lowtide.cli.target import build
from lowtide.data import source
from lowtide.measure import measure
from lowtide.models import SMALL
from lowtide.plan import as_eager
from lowtide.simulate import simulate

MLP = SMALL["mlp"]
GPT = f"{SMALL['gpt']},optimizer=adamw"  # with dropout
RESNET = SMALL["resnet"]  # with batch norm, and SGD with momentum
QUICK = ("--budget", "70%", "--time-limit", "0.2")

FILE = """
import torch
from torch import nn


class Noisy(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("noise", torch.zeros(8), persistent=False)

    def forward(self, x):
        self.noise += 0.1 * torch.randn(8)
        return self.layer(x + self.noise)


def accumulating():
    def step(model, optimizer, x):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    model = Noisy()
    return step, model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), (torch.ones(4, 8),)


class Finer(torch.optim.Optimizer):
    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.01})

    def step(self):
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            state.setdefault("sum", torch.zeros_like(parameter, dtype=torch.float32))
            state["sum"] += parameter.grad.float().abs() + 1e-6
            parameter.data -= (0.01 * parameter.grad / state["sum"]).to(parameter.dtype)


def finer():
    def step(model, optimizer, x):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    model = nn.Linear(8, 8).bfloat16()
    return step, model, Finer(model.parameters()), (torch.ones(4, 8).bfloat16(),)


def without_optimizer():
    def step(model, optimizer, x):
        loss = nn.functional.dropout(model(x)).square().mean()
        loss.backward()
        return loss

    return step, Noisy(), None, (torch.ones(4, 8),)


def stopping():
    calls = []

    def step(model, optimizer, x):
        calls.append(1)
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        if len(calls) == 6:
            raise KeyboardInterrupt
        optimizer.zero_grad()
        return loss

    model = nn.Linear(8, 8)
    return step, model, torch.optim.Adam(model.parameters()), (torch.ones(4, 8),)
"""


@pytest.fixture(scope="module", autouse=True)
def own_cache(stocked: Path) -> Iterator[None]:
    """Costs are measured here, whatever the user's own cache has."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOWTIDE_CACHE", str(stocked))
        yield


@pytest.fixture
def file(tmp_path: Path) -> str:
    """A user's file."""
    (tmp_path / "noisy.py").write_text(FILE)
    return str(tmp_path / "noisy.py")


def run(*arguments: str, code: int = 0) -> tuple[str, str]:
    """Train; what it prints on stdout and stderr."""
    result = CliRunner().invoke(app, ["train", *arguments], env={"COLUMNS": "100", "NO_COLOR": "1"})
    assert result.exit_code == code, (result.output, result.exception)
    return result.stdout, result.stderr


def run_json(*arguments: str) -> dict[str, Any]:
    """Train with --json; the one object that it prints."""
    found: dict[str, Any] = json.loads(run(*arguments, "--json")[0])
    return found


def by_hand(target: str, steps: int, data: str | None = None, seed: int = 0) -> dict[str, Any]:
    """All that eager PyTorch has after these steps."""
    torch.manual_seed(seed)
    step, model, optimizer, example = build(target)
    batch: Callable[[int], Any] = (lambda number: example) if data is None else source(data, target, example, seed=seed)
    losses = [float(step(model, optimizer, *batch(number)).detach()) for number in range(steps)]
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "losses": losses}
    return leaves({**state, "generator": torch.get_rng_state()})


def leaves(thing: Any) -> dict[str, Any]:
    """Everything in a nested object, by its path."""
    found, shape = tree.flatten(thing)
    return {str(path): leaf for path, leaf in zip(shape.paths(), found, strict=True)}


def in_file(path: Path) -> dict[str, Any]:
    """What a checkpoint holds, as torch itself reads it, and nobody's temporary file beside it."""
    assert not list(path.parent.glob(f".{path.name}*"))
    loaded = torch.load(path, weights_only=True)
    return leaves({key: loaded[key] for key in ("model", "optimizer", "losses", "generator")})


def steps_in(path: Path) -> int:
    return int(torch.load(path, weights_only=True)["step"]) if path.exists() else -1


def ended(path: Path, step: int, number: int, *arguments: str) -> tuple[int, str]:
    """Train in another process until the checkpoint has this step, then send a signal; exit code and stderr."""
    command = [sys.executable, "-m", "lowtide.cli", "train", *arguments, "--save", str(path), "--steps", "100000"]
    patience = monotonic() + 300
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        try:
            while steps_in(path) < step:
                assert process.poll() is None, process.communicate()
                assert monotonic() < patience
                sleep(0.05)
            sleep(random.random() / 20)
            process.send_signal(number)
            _, talked = process.communicate(timeout=300)
        finally:
            process.kill()
    return process.returncode, talked


# ------------------------------------------------------------------------------------------------ killed and taken up


@pytest.mark.parametrize(("target", "data"), [(GPT, "austen"), (RESNET, "fashion-small")], ids=["gpt", "resnet"])
def test_a_run_that_is_killed_goes_on_to_the_same_bits(target: str, data: str, tmp_path: Path) -> None:
    path = tmp_path / "run.pt"
    code, _ = ended(path, 3, signal.SIGKILL, target, *QUICK, "--data", data, "--every", "1")
    assert code == -signal.SIGKILL
    taken = steps_in(path)
    found = run_json(target, *QUICK, "--resume", str(path), "--save", str(path), "--steps", str(taken + 2))
    assert found["resumed_from"] == taken
    assert found["data"] == data
    assert len(found["losses"]) == found["steps"] == taken + 2
    assert_same(by_hand(target, taken + 2, data), in_file(path))


def test_ctrl_c_saves_the_last_complete_step(tmp_path: Path) -> None:
    path = tmp_path / "run.pt"
    code, talked = ended(path, 0, signal.SIGINT, GPT, "--eager")
    taken = steps_in(path)
    assert code == 130
    assert talked == f"interrupted: step {taken} of 100000 is saved; go on with --resume {path}\n"
    assert_same(by_hand(GPT, taken), in_file(path))


@pytest.mark.parametrize(("every", "kept"), [(1, 5), (2, 4), (100, 0)])
def test_a_step_that_is_half_done_is_not_saved(file: str, tmp_path: Path, every: int, kept: int) -> None:
    path = tmp_path / "run.pt"
    options = ("--eager", "--every", str(every), "--save", str(path))
    shown, talked = run(f"{file}:stopping", "--steps", "9", *options, code=130)
    assert shown == ""
    assert talked == f"interrupted: step {kept} of 9 is saved; go on with --resume {path}\n"
    assert_same(by_hand(f"{file}:stopping", kept), in_file(path))


def test_an_interruption_without_a_file_says_that_nothing_is_saved(file: str) -> None:
    _, talked = run(f"{file}:stopping", "--eager", "--steps", "9", code=130)
    assert talked == "interrupted: step 5 of 9 was the last, nothing is saved.\n"


@pytest.mark.parametrize("function", ["accumulating", "finer", "without_optimizer"])
def test_what_a_state_dict_leaves_out_or_rounds_is_kept(file: str, tmp_path: Path, function: str) -> None:
    straight, stopped = tmp_path / "straight.pt", tmp_path / "stopped.pt"
    target = f"{file}:{function}"
    run(target, "--eager", "--steps", "7", "--seed", "3", "--save", str(straight))
    run(target, "--eager", "--steps", "4", "--seed", "3", "--save", str(stopped))
    run(target, "--eager", "--steps", "7", "--resume", str(stopped), "--save", str(stopped))
    one, other = (leaves(torch.load(path, weights_only=True)) for path in (straight, stopped))
    assert_same(one, other)
    assert len({loss for name, loss in one.items() if "losses" in name}) == 7


def test_eager_and_planned_steps_take_turns(tmp_path: Path) -> None:
    path = tmp_path / "run.pt"
    run(GPT, "--eager", "--steps", "2", "--save", str(path))
    run(GPT, *QUICK, "--steps", "4", "--resume", str(path), "--save", str(path))
    run(GPT, "--eager", "--steps", "5", "--resume", str(path), "--save", str(path))
    assert_same(by_hand(GPT, 5), in_file(path))


# ---------------------------------------------------------------------------------------------------------- the file


@pytest.mark.parametrize("stage", ["torch.save", "torch.load", "os.fsync", "os.replace"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError(28, "No space left on device")])
def test_a_checkpoint_that_fails_leaves_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str, error: Any
) -> None:
    path = tmp_path / "run.pt"
    _, model, optimizer, _ = build(MLP)
    checkpoint.take(MLP, None, 0, [1.0], model, optimizer).write(path)
    before = path.read_bytes()

    def fail(*arguments: Any, **options: Any) -> None:
        if stage == "torch.save":
            arguments[1].write(b"half of it")
        raise error

    monkeypatch.setattr(stage, fail)
    with pytest.raises((KeyboardInterrupt, checkpoint.FileError)):
        checkpoint.take(MLP, None, 0, [1.0, 2.0], model, optimizer).write(path)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["run.pt"]


def test_what_a_killed_run_left_half_written_is_removed(tmp_path: Path) -> None:
    path, other = tmp_path / "run.pt", tmp_path / ".run.pt.bak"
    (tmp_path / ".run.pt.partial").write_bytes(b"half")
    other.write_bytes(b"not ours")
    run(MLP, "--eager", "--steps", "2", "--save", str(path))
    assert sorted(os.listdir(tmp_path)) == [".run.pt.bak", "run.pt"]


def test_two_runs_do_not_write_the_same_file_at_once(tmp_path: Path) -> None:
    _, model, optimizer, _ = build(MLP)
    (tmp_path / ".run.pt.partial").write_bytes(b"of a run that is still there")
    with pytest.raises(checkpoint.FileError, match="another run"):
        checkpoint.take(MLP, None, 0, [], model, optimizer).write(tmp_path / "run.pt")
    assert (tmp_path / ".run.pt.partial").read_bytes() == b"of a run that is still there"


def test_what_torch_could_not_read_again_is_not_written(tmp_path: Path) -> None:
    _, model, optimizer, _ = build(MLP)
    optimizer.param_groups[0]["odd"] = Path("no plain data")
    with pytest.raises(checkpoint.FileError, match="cannot save"):
        checkpoint.take(MLP, None, 0, [], model, optimizer).write(tmp_path / "run.pt")
    assert os.listdir(tmp_path) == []


def test_it_is_saved_as_often_as_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[int] = []
    write = checkpoint.Checkpoint.write

    def noted(self: checkpoint.Checkpoint, path: Path) -> None:
        written.append(self.step)
        write(self, path)

    monkeypatch.setattr(checkpoint.Checkpoint, "write", noted)
    run(MLP, "--eager", "--steps", "7", "--save", str(tmp_path / "a.pt"), "--every", "3")
    assert written == [0, 3, 6, 7]
    written.clear()
    run(MLP, "--eager", "--steps", "7", "--save", str(tmp_path / "b.pt"))
    assert written == [0, 7]
    written.clear()
    monkeypatch.setattr(loop, "BETWEEN", 0.0)
    run(MLP, "--eager", "--steps", "3", "--save", str(tmp_path / "c.pt"))
    assert written == [0, 1, 2, 3]


# ------------------------------------------------------------------------------------------------------ wrong calls


def flip(path: Path) -> None:
    """Change one bit of a parameter."""
    raw = bytearray(path.read_bytes())
    weight = next(iter(torch.load(path, weights_only=True)["model"].values()))
    raw[raw.index(weight.numpy().tobytes())] ^= 1
    path.write_bytes(raw)


@pytest.mark.parametrize(
    ("options", "damage", "words"),
    [
        (["--steps", "3"], None, "has taken 3 steps already"),
        (["--steps", "5", "--data", "fashion-small"], None, "is a run on the example batch, not on fashion-small"),
        (["--steps", "5", "--seed", "1"], None, "is a run with seed 0, not 1"),
        (["--steps", "5"], Path.unlink, "No such file"),
        (["--steps", "5"], flip, "does not match its checksum"),
        (["--steps", "5"], lambda path: path.write_bytes(path.read_bytes()[:-100]), "is damaged, or no checkpoint"),
        (["--steps", "5"], lambda path: path.write_bytes(b""), "is damaged, or no checkpoint"),
        (["--steps", "5"], lambda path: torch.save({"step": 3}, path), "is no checkpoint of this lowtide"),
    ],
)
def test_a_checkpoint_that_cannot_be_taken_up_is_refused(
    tmp_path: Path, options: list[str], damage: Callable[[Path], None] | None, words: str
) -> None:
    path = tmp_path / "run.pt"
    run(MLP, "--eager", "--steps", "3", "--save", str(path))
    if damage is not None:
        damage(path)
    before = {name: (tmp_path / name).read_bytes() for name in os.listdir(tmp_path)}
    shown, talked = run(MLP, "--eager", *options, "--resume", str(path), "--save", str(path), code=2)
    assert shown == ""
    assert words in talked
    assert talked.count("error:") == talked.count("hint:") == 1
    assert {name: (tmp_path / name).read_bytes() for name in os.listdir(tmp_path)} == before


def test_a_checkpoint_of_another_model_is_refused(file: str, tmp_path: Path) -> None:
    path = tmp_path / "run.pt"
    run(f"{file}:finer", "--eager", "--steps", "2", "--save", str(path))
    _, talked = run(f"{file}:accumulating", "--eager", "--resume", str(path), code=2)
    assert "finer, not of" in talked
    Path(file).write_text(FILE.replace("nn.Linear(8, 8).bfloat16()", "nn.Linear(8, 9).bfloat16()"))
    _, talked = run(f"{file}:finer", "--eager", "--resume", str(path), code=2)
    assert "size mismatch for weight" in talked
    assert "was the model changed since?" in talked


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--eager", "--budget", "50%"], "eager PyTorch keeps to no budget"),
        (["--eager", "--plan", "x"], "eager PyTorch keeps to no budget"),
        (["--every", "3"], "nothing is saved"),
        (["--force"], "nothing is saved"),
        (["--save", "here.pt"], "here.pt exists already"),
        (["--save", "here.pt", "--resume", "other.pt"], "here.pt exists already"),
        (["--budget", "much"], "'much' is no budget"),
        (["--data", "fashion"], "there is no dataset 'fashion'"),
    ],
)
def test_options_that_do_not_go_together_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str], words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("here.pt").write_text("mine")
    _, talked = run(MLP, *options, code=2)
    assert words in talked
    assert "hint:" in talked
    assert Path("here.pt").read_text() == "mine"


def test_a_file_is_overwritten_only_by_force(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "run.pt"
    run(MLP, "--eager", "--steps", "2", "--save", str(path))
    run(MLP, "--eager", "--steps", "3", "--save", str(path), code=2)
    run(MLP, "--eager", "--steps", "3", "--save", str(path), "--force")
    assert steps_in(path) == 3


def test_other_versions_get_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run.pt"
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "made_with", lambda: "torch 1.0")
        run(MLP, "--eager", "--steps", "2", "--save", str(path))
    shown, talked = run(MLP, "--eager", "--steps", "3", "--resume", str(path))
    assert f"note: {path} was made with torch 1.0" in talked
    assert "3 steps, 2 of them before" in shown


# ------------------------------------------------------------------------------------------------------ what is shown


def test_planned_and_eager_runs_have_the_same_losses_and_their_own_peaks() -> None:
    planned = run_json(GPT, *QUICK, "--steps", "20", "--data", "austen")
    eager = run_json(GPT, "--eager", "--steps", "20", "--data", "austen")
    for found in (planned, eager):
        assert set(found) >= COMMON | {"losses", "steps_per_second", "arena_bytes", "mismatches", "data", "saved"}
        assert found["data"] == "austen"
        assert found["resumed_from"] is None
        assert found["saved"] is None
    assert planned["losses"] == eager["losses"]
    assert planned["losses"][-1] < planned["losses"][0]
    assert planned["metered_peak"] <= planned["budget"] < eager["metered_peak"]
    assert planned["metered_peak"] == pytest.approx(planned["predicted_peak"], rel=0.005)
    assert planned["persistent"] == eager["persistent"]
    assert planned["mismatches"] == 0
    captured = capture(*build(GPT))
    costs = measure(captured.graph)
    predicted = simulate(captured.graph, costs, as_eager(captured.graph)).peak
    assert eager["metered_peak"] == pytest.approx(predicted, rel=0.005)


def test_the_seed_makes_the_run() -> None:
    first, again, other = (run_json(GPT, "--eager", "--steps", "3", "--seed", seed)["losses"] for seed in "110")
    assert first == again != other


def test_the_table_says_what_came_of_the_run(tmp_path: Path) -> None:
    path = tmp_path / "run.pt"
    shown, talked = run(GPT, *QUICK, "--steps", "20", "--data", "austen", "--save", str(path))
    assert talked == ""
    losses = torch.load(path, weights_only=True)["losses"]
    rows = {line[:14].strip(): line[14:].strip() for line in shown.splitlines()}
    assert rows["loss"].startswith(f"{losses[0]:.4g} -> {losses[-1]:.4g}"[:5])
    assert rows["mean loss"].endswith("of the first and the last 2 steps")
    assert rows["data"].startswith("austen")
    assert rows["checkpoint"].startswith("step 20")
    assert "planned in" in rows["budget"]
    assert "the prediction is off by" in rows["metered peak"]
    assert rows.keys() >= {"steps a second", "overhead", "predicted peak", "arena"}
    assert "mismatches" not in rows
    assert all(len(line) <= 100 for line in shown.splitlines())


def test_a_terminal_shows_loss_speed_and_peak_against_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    monkeypatch.setattr(loop, "talk", lambda: Console(file=screen, force_terminal=True, width=80, color_system=None))

    class Step:
        peak = 900 * 2**20

        def __call__(self, number: int) -> torch.Tensor:
            time.sleep(1e-3)  # a speed of six digits would need more room than a real one does
            return torch.tensor(7.0 / (number + 1))

    log = loop.Log([])
    assert loop.run(Step(), lambda number: (number,), 200, log, limit=2**30, keeper=None) == 0
    last = screen.getvalue().replace("\r", "\n").split("\n")[-3]
    assert "200/200 loss 0.03500" in last
    assert "steps/s" in last
    assert "peak 900.00 MiB of 1.00 GiB" in last
    assert "…" not in last


def test_losses_that_are_no_numbers_are_shown_and_kept_as_such(file: str, tmp_path: Path) -> None:
    path = tmp_path / "run.pt"
    text = FILE.replace("loss = model(x).square().mean()", "loss = model(x).square().mean() * float('nan')")
    Path(file).write_text(text.replace("        return loss\n\n    model = nn.Linear", "\n    model = nn.Linear"))
    found = run_json(f"{file}:accumulating", "--eager", "--steps", "2", "--save", str(path))
    assert found["losses"] == [None, None]
    assert math.isnan(torch.load(path, weights_only=True)["losses"][0])
    shown, _ = run(f"{file}:finer", "--eager", "--steps", "2")
    assert "- -> -" in shown
