"""The idea in one file: it runs without the package, stays short, and shows what it says."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

FILE = Path(__file__).resolve().parents[2] / "docs" / "from_scratch.py"
MOST = 300  # lines
ROW = re.compile(r" *(\d+)% +([\d.]+) MB +([\d.]+) MB +(\d+) +([\d.]+)% +yes  [ ▁▂▃▄▅▆▇█]+")


def test_it_is_short_and_needs_only_torch() -> None:
    text = FILE.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= MOST
    modules = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            modules |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            modules.add((node.module or "").partition(".")[0])
    assert "lowtide" not in modules
    assert modules <= {"torch", *sys.stdlib_module_names}


def test_it_runs_and_keeps_every_budget() -> None:
    environment = {**os.environ, "PYTHONIOENCODING": "utf-8"}
    ended = subprocess.run(
        [sys.executable, FILE], capture_output=True, encoding="utf-8", env=environment, timeout=300, check=False
    )
    assert ended.returncode == 0, ended.stderr
    persistent, own = _numbers(r"adds ([\d.]+) MB to ([\d.]+) MB", ended.stdout)[::-1]
    rows = [tuple(map(float, match.groups())) for match in ROW.finditer(ended.stdout)]
    assert [row[0] for row in rows] == [100, 75, 50, 35, 25]
    for percent, predicted, metered, again, more in rows:
        assert predicted == metered
        assert metered <= persistent + own * percent / 100 + 0.01
        assert (again == 0) == (more == 0) == (percent == 100)
    assert [row[1] for row in rows] == sorted((row[1] for row in rows), reverse=True)
    assert "no plan: " in ended.stdout
    assert "torch.set_rng_state(" in ended.stdout


def _numbers(pattern: str, text: str) -> list[float]:
    match = re.search(pattern, text)
    assert match, text
    return [float(group) for group in match.groups()]
