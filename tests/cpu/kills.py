"""Train, kill -9 at random moments, go on, and compare: `python kills.py FOLDER KILLS SEED` prints what it saw as JSON.

Each run is a fork of this process, which has imported everything and computed nothing, so that the moments fall into
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

STEPS = 25
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
    return {str(place): leaf for place, leaf in zip(shape.paths(), found, strict=True)}


def kill_once(folder: Path, path: Path, after: float) -> str:
    """Start or go on, and kill that after so many seconds; what is there then."""
    if path.exists() and content(path)["('step',)"] == STEPS:
        return "complete"
    process = start(folder, *on(path))
    time.sleep(after)
    os.kill(process, signal.SIGKILL)
    if end(process) == 0:
        return "complete"
    if path.with_name(f".{path.name}.partial").exists():
        return "half a checkpoint"
    return "a checkpoint" if path.exists() else "nothing"


def main(folder: Path, kills: int, seed: int) -> dict[str, int]:
    """Kill so often; how often what was there after it."""
    chance = random.Random(seed)
    saves, temporary = folder / "saves", folder / "temporary"
    saves.mkdir()
    temporary.mkdir()
    (folder / "target.py").write_text(TARGET)
    os.environ |= {"TMPDIR": str(temporary), "NO_COLOR": "1"}
    assert end(start(folder, "--save", str(folder / "first.pt"))) == 0, (folder / "log").read_text()  # fills the cache
    began = time.monotonic()
    assert end(start(folder, "--save", str(folder / "whole.pt"))) == 0, (folder / "log").read_text()
    seconds, whole = time.monotonic() - began, content(folder / "whole.pt")
    assert_same(content(folder / "first.pt"), whole)
    seen: Counter[str] = Counter()
    path = saves / "run.pt"
    while seen.total() < kills:
        for _ in range(min(chance.choice((1, 1, 2, 3)), kills - seen.total())):
            seen[kill_once(folder, path, chance.uniform(0.05, 1.0) * seconds)] += 1
        if not path.exists() or content(path)["('step',)"] < STEPS:
            assert end(start(folder, *on(path))) == 0, (folder / "log").read_text()
        assert_same(whole, content(path))
        left = {file.name for place in (saves, temporary) for file in place.iterdir()} - {path.name}
        assert not [name for name in left if not name.startswith("torchinductor")], left  # which torch makes for itself
        path.unlink()
    return dict(seen)


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))))
