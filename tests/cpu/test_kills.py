"""Training runs that are killed at random times, with kill -9, go on to the bits of one that was not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def _kill(folder: Path, kills: int, seed: int) -> dict[str, int]:
    """What was there after each kill; all else is compared by the script itself."""
    paths = os.pathsep.join(filter(None, (str(HERE), os.environ.get("PYTHONPATH"))))
    result = subprocess.run(
        [sys.executable, str(HERE / "kills.py"), str(folder), str(kills), str(seed)],
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    found: dict[str, int] = json.loads(result.stdout)
    assert sum(found.values()) == kills
    return found


def test_three_kills(tmp_path: Path) -> None:
    _kill(tmp_path, 3, 0)


@pytest.mark.long
def test_a_hundred_kills(tmp_path: Path) -> None:
    found = _kill(tmp_path, 100, 1)
    print(f"\nafter 100 kills there was: {found}")
    assert 100 - found.get("nothing", 0) > 30
