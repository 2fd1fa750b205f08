"""Which file systems are memory under another name."""

from __future__ import annotations

import os
import re
from pathlib import Path

MOUNTS = Path("/proc/self/mounts")
IN_MEMORY = frozenset({"tmpfs", "ramfs", "devtmpfs", "hugetlbfs", "rootfs"})


def file_system(folder: Path, mounts: str | None = None) -> str | None:
    """The kind of file system that a folder is on, as the kernel names it; None where that can't be told."""
    if mounts is None:
        try:
            mounts = MOUNTS.read_text(encoding="utf-8", errors="surrogateescape")
        except OSError:
            return None
    path = os.path.realpath(folder)
    found, length = None, -1
    for line in mounts.splitlines():
        fields = line.split(" ")
        if len(fields) < 3:
            continue
        point = re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), fields[1])
        within = path == point or path.startswith(point.rstrip("/") + "/")
        if within and len(point) >= length:  # of several at one point, the last covers the others
            found, length = fields[2], len(point)
    return found


def is_memory(folder: Path) -> bool:
    """Whether files of this folder are kept in memory."""
    return file_system(folder) in IN_MEMORY
