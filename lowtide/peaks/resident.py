"""The resident memory of this process, in bytes, as the system counts it."""

from __future__ import annotations

import contextlib
import os
import resource
import sys
from pathlib import Path


def now() -> int | None:
    """What is resident now, where the system says so."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return None


def peak() -> int:
    """The most that was resident since the start, or since the last reset."""
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def reset_peak() -> int:
    """Let the peak start again from what is resident now, where the system can do that; returns it."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return peak()
