"""Several processes: DDP and fully_shard as ops of the step, equal to them to the bit, within the budget of each rank.

Two ranks are equal whatever the order in which gradients are added. With four the order matters, and with it DDP's
buckets, their order and the places in them: those are tested by being equal at each of five steps, the first with the
buckets that DDP begins with, the others with those that it has made anew.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 300  # seconds for one scenario


def ranks(scenario: str, count: int, folder: Path, file: str = "ranked.py") -> None:
    """Run a scenario of a file on so many ranks, and fail with what they say where one fails."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    script = str(Path(__file__).with_name(file))
    running = [
        subprocess.Popen(
            [sys.executable, script, scenario, str(rank), str(count), str(folder)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(count)
    ]
    try:
        said = [one.communicate(timeout=PATIENCE)[0] for one in running]
    finally:
        for one in running:
            one.kill()
            one.wait()
    ended = {0, -signal.SIGALRM}  # the rank of which a scenario wants it
    failed = [f"rank {rank}:\n{said[rank]}" for rank, one in enumerate(running) if one.returncode not in ended]
    assert not failed, "\n".join(failed)


def test_two_ranks_with_batch_norm_and_dropout(tmp_path: Path) -> None:
    ranks("cheap", 2, tmp_path)


def test_two_ranks_of_shards(tmp_path: Path) -> None:
    ranks("cheap", 2, tmp_path, "sharded.py")


@pytest.mark.long
@pytest.mark.parametrize("scenario", ["budgets", "kinds", "others", "alone", "refused"])
@pytest.mark.parametrize("count", [2, 3, 4])
def test_shards(tmp_path: Path, scenario: str, count: int) -> None:
    ranks(scenario, count, tmp_path, "sharded.py")


@pytest.mark.long
@pytest.mark.parametrize("scenario", ["budgets", "steps", "settings"])
@pytest.mark.parametrize("count", [2, 3, 4])
def test_budgets_steps_and_settings(tmp_path: Path, scenario: str, count: int) -> None:
    ranks(scenario, count, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("scenario", ["refused", "death", "death_in_a_step", "resume"])
@pytest.mark.parametrize("count", [2, 4])
def test_refusals_deaths_and_checkpoints(tmp_path: Path, scenario: str, count: int) -> None:
    ranks(scenario, count, tmp_path)


@pytest.mark.long
def test_the_example_under_torchrun() -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launch, str(ROOT / "examples" / "several_ranks.py")]
    said = []
    for more in ([], ["--budget", "75%"]):
        found = subprocess.run([*command, *more], env=environment, capture_output=True, text=True, timeout=PATIENCE)
        assert found.returncode == 0, found.stderr
        said.append(sorted(line for line in found.stdout.splitlines() if line.startswith("[")))
    assert len(said[0]) == 2
    assert said[0] == said[1]
