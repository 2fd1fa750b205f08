"""What the command line prints, in full."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lowtide.cli import app

Golden = Callable[[str, str], None]
FOLDER = Path(__file__).parent
PLAIN = {"COLUMNS": "100", "NO_COLOR": "1", "TERM": "dumb", "_TYPER_FORCE_DISABLE_TERMINAL": "1"}


def run(*arguments: str) -> str:
    """The command as a person sees it, and how it ended."""
    result = CliRunner().invoke(app, list(arguments), env=PLAIN, prog_name="lowtide")
    ending = f"[exit code {result.exit_code}]\n" if result.exit_code else ""
    return f"$ lowtide {' '.join(arguments)}\n{result.output}{ending}"


@pytest.mark.parametrize(
    "command",
    [
        *("", "profile", "plan", "curve", "batch", "train", "verify", "models"),
        *("report", "diff", "timeline", "pebble", "doctor"),
        *("bench", "bench predict", "bench execute", "bench capture", "bench plan", "bench batch", "bench offload"),
        *("bench fit", "bench limited", "bench steady", "bench soak", "bench classics", "bench trust", "bench guards"),
        *("bench low-memory", "bench lengths", "bench pace", "bench models", "bench ranks", "bench scan"),
        *("data", "data install"),
    ],
)
def test_help(golden: Golden, command: str) -> None:
    golden("-".join(["help", *command.split()]), run(*command.split(), "--help"))


def test_models(golden: Golden) -> None:
    pytest.importorskip("transformers")
    golden("models", run("models", "--quick"))


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("pebble-chain", ["pebble", "chain:length=4", "--pebbles", "3"]),
        ("pebble-tree", ["pebble", "tree:height=2", "--one-shot"]),
    ],
)
def test_pebbles(golden: Golden, name: str, call: list[str]) -> None:
    golden(name, run(*call))


def test_pebbles_by_hand(golden: Golden) -> None:
    moves = "1\n2\n5\n3\n-3\n3\n-2\n4\n-1\n4\n7\n5\n"
    call = ["pebble", "caterpillar:length=2", "--play"]
    result = CliRunner().invoke(app, call, input=moves, env=PLAIN, prog_name="lowtide")
    golden("pebble-by-hand", result.output)


def test_wrong_calls(golden: Golden, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(FOLDER)
    calls = [
        ["profile", "gpt:widht=3"],
        ["profile", "gpt:width=wide"],
        ["profile", "nowhere.py:make"],
        ["profile", "step.py"],
        ["profile", "step.py:nothing"],
        ["profile", "step.py:incomplete"],
        ["profile", "step.py:hungry"],
        ["profile", "step.py:broken"],
        ["profile", "step.py:list_example"],
        ["plan", "mlp", "--budget", "50%", "--offload", "tape"],
        ["plan", "mlp", "--budget", "50%", "--offload", "disk", "--offload-budget", "50%"],
        ["plan", "mlp", "--budget", "50%", "--offload", "disk", "--offload-dir", "nowhere"],
        ["plan", "mlp", "--budget", "50%", "--offload", "host"],
        ["plan", "mlp", "--budget", "50%", "--offload", "disk", "--method", "rotor"],
        ["plan", "mlp", "--budget", "50%", "--method", "offload"],
        ["plan", "mlp", "--load", "step.plan", "--offload", "disk"],
        ["train", "mlp", "--eager", "--offload", "disk"],
        ["train", "mlp", "--budget", "50%", "--offload-dir", "."],
        ["curve", "mlp", "--offload-budget", "1GiB"],
        ["report", "mlp"],
        ["report", "mlp", "--out", "nowhere/report.html"],
        ["report", "mlp", "--out", "step.py"],
        ["timeline", "mlp"],
        ["pebble", "chain:width=3"],
        ["pebble", "chain:length=40"],
        ["pebble", "tree", "--pebbles", "few"],
        ["pebble", "tree", "--pebbles", "4"],
        ["diff", "models.txt", "step.py"],
        ["diff", "mlp@much", "mlp"],
    ]
    golden("wrong-calls", "\n".join(run(*call) for call in calls))


@pytest.mark.parametrize(
    ("name", "target", "columns"),
    [
        ("profile-gpt-100", "gpt:layers=4,width=128,context=64,vocabulary=512,batch=4", 100),
        ("profile-step-120", "step.py:make", 120),
    ],
)
def test_profile(golden: Golden, name: str, target: str, columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(FOLDER)
    environment = {**PLAIN, "COLUMNS": str(columns)}
    done = CliRunner().invoke(app, ["profile", target, "--costs", "roofline"], env=environment)
    assert done.exit_code == 0, done.output
    compare_profile(golden, name, columns, done.stdout, done.stderr)


def test_profile_in_a_process_of_its_own(golden: Golden) -> None:
    command = [sys.executable, "-m", "lowtide.cli", "profile", "step.py:make", "--costs", "roofline"]
    environment = {**os.environ, **PLAIN, "COLUMNS": "80"}
    done = subprocess.run(command, cwd=FOLDER, env=environment, capture_output=True, text=True, check=True)
    compare_profile(golden, "profile-step-80", 80, done.stdout, done.stderr)


def compare_profile(golden: Golden, name: str, columns: int, shown: str, talked: str) -> None:
    """What was shown is as wide as the terminal at most, and in the golden file; and nothing was said beside it."""
    assert "\x1b" not in shown
    assert all(re.search(r"\.\.\.$|: [\d.]+ s$", line) for line in talked.splitlines())  # of what took long
    assert all(len(line) <= columns and line == line.rstrip() for line in shown.splitlines())
    golden(name, shown)
