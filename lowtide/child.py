"""Processes that lowtide starts. Where memory is short, the system ends them, and never the user's process for them."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

FIRST_TO_GO = "1000"  # the most that Linux takes


def start(command: Sequence[str], **options: Any) -> subprocess.Popen[str]:
    """Start a process, which reads and writes text, as `subprocess.Popen` does."""
    process = subprocess.Popen(command, text=True, **options)
    with contextlib.suppress(OSError):  # a system without it, or a process that is gone by now
        Path(f"/proc/{process.pid}/oom_score_adj").write_text(FIRST_TO_GO, encoding="ascii")
    return process
