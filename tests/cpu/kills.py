"""Train, kill -9 at random times, go on, and compare: `python kills.py FOLDER KILLS SEED` prints what it saw as JSON.

Each run is a fork of this process, which has imported everything and computed nothing, so that the times fall into
the training and not into the imports.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from twins import assert_same

from lowtide import tree
from lowtide.cli import app

STEPS = 40
TARGET = """
import torch
from torch import nn


def build():
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.3), nn.Linear(64, 16))

    def step(model, optimizer, x):
        optimizer.zero_grad()
        loss = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return step, model, torch.optim.AdamW(model.parameters()), (torch.randn(32, 16),)
"""


def start(folder: Path, *options: str) -> int:
    """Train in another process, whose id is returned."""
    process = os.fork()
    if process:
        return process
    code = 1
    try:
        log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        quick = ("--budget", "80%", "--time-limit", "0.1", "--every", "1", "--steps", str(STEPS))
        app(["train", f"{folder / 'target.py'}:build", *quick, *options], standalone_mode=False)
        code = 0
    finally:
        os._exit(code)


def end(process: int) -> int:
    """Wait for a process; how it ended."""
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def on(path: Path) -> tuple[str, ...]:
    """Save there, and go on with what is there."""
    return ("--save", str(path), *(("--resume", str(path)) if path.exists() else ()))


def content(path: Path) -> dict[str, Any]:
    """Everything in a checkpoint."""
    found, shape = tree.flatten(torch.load(path, weights_only=True))
    return {".".join(map(str, place)): leaf for place, leaf in zip(shape.paths(), found, strict=True)}


def kill_once(folder: Path, path: Path, chance: random.Random, seconds: float) -> str | None:
    """Start or go on, and kill that at some time; what is there then, or None if the run was quicker."""
    process, before = start(folder, *on(path)), _when(path)
    if chance.random() < 0.8:  # while it trains, else at any time
        while _when(path) == before and os.waitpid(process, os.WNOHANG) == (0, 0):
            time.sleep(0.001)
    time.sleep(chance.uniform(0, seconds))
    try:
        os.kill(process, signal.SIGKILL)
        if end(process) != -signal.SIGKILL:
            return None
    except (ProcessLookupError, ChildProcessError):
        return None
    if path.with_name(f".{path.name}.partial").exists():
        return "half a checkpoint"
    if not path.exists():
        return "nothing"
    return f"a checkpoint in the {'first' if content(path)['step'] < STEPS / 2 else 'second'} half"


def _when(path: Path) -> int:
    return path.stat().st_mtime_ns if path.exists() else 0


def main(folder: Path, kills: int, seed: int) -> dict[str, int]:
    """Kill so often; how often what was there after it."""
    chance = random.Random(seed)
    saves, temporary = folder / "saves", folder / "temporary"
    saves.mkdir()
    temporary.mkdir()
    (folder / "target.py").write_text(TARGET)
    os.environ |= {"TMPDIR": str(temporary), "NO_COLOR": "1"}
    assert end(start(folder, "--save", str(folder / "whole.pt"))) == 0, (folder / "log").read_text()
    whole, seconds = content(folder / "whole.pt"), 1.0
    seen: Counter[str] = Counter()
    path = saves / "run.pt"
    while seen.total() < kills:
        for _ in range(min(chance.choice((1, 1, 2, 3)), kills - seen.total())):
            if path.exists() and content(path)["step"] == STEPS:
                break
            found = kill_once(folder, path, chance, seconds)
            seconds *= 0.7 if found is None else 1.1
            seen.update([] if found is None else [found])
        if not path.exists() or content(path)["step"] < STEPS:
            assert end(start(folder, *on(path))) == 0, (folder / "log").read_text()
        assert_same(whole, content(path))
        left = {file.name for place in (saves, temporary) for file in place.iterdir()} - {path.name}
        assert not [name for name in left if not name.startswith("torchinductor")], left  # which torch makes for itself
        path.unlink()
    return dict(sorted(seen.items()))


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))))
