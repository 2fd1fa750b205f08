"""Files that are there as a whole or not at all, also after a crash."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from pathlib import Path

FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})  # what a disk without room answers
ROOM = "free some room on that disk, or name a folder on another one."


def write_atomically(path: Path, data: str | bytes, *, mode: int = 0o666) -> None:
    """Write to `path` so that a reader sees the old file or the new one, never half of it.

    The mode is less what the user's mask takes away.
    """
    content = memoryview(data.encode("utf-8") if isinstance(data, str) else data)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = beside(path, secrets.token_hex(8))
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        file = os.open(temporary, flags, mode)
        try:
            while content:
                content = content[os.write(file, content) :]
            os.fsync(file)
        finally:
            os.close(file)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    settle(path.parent)


def beside(path: Path, ending: str) -> Path:
    """A hidden file in the same folder; a long name is cut, for a system takes 255 bytes."""
    start = os.fsdecode(os.fsencode(path.name)[:100]) if len(os.fsencode(path.name)) > 200 else path.name
    return path.with_name(f".{start}.{ending}")


def settle(folder: Path) -> None:
    """Bring the names in a folder to the disk, where the system can do that."""
    with contextlib.suppress(OSError):
        file = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(file)
        finally:
            os.close(file)


def is_full(error: BaseException) -> bool:
    """Whether a disk had no room."""
    return isinstance(error, OSError) and error.errno in FULL


def advice(error: OSError) -> str:
    """What to do about a file that could not be written."""
    if error.errno in (errno.EISDIR, errno.ENAMETOOLONG, errno.EILSEQ, errno.EBUSY):
        return "choose another name."
    return ROOM if is_full(error) else "choose a folder that can be written."
