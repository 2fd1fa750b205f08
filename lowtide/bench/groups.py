"""Control groups of memory: a limit of the system on all pages that a process gets, those of files among them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

NAME = "a control group's memory limit"
FIRST, SECOND = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")  # where groups are, by version of the interface
LIMITS = ("memory.limit_in_bytes", "memory.max")
PEAKS = ("memory.max_usage_in_bytes", "memory.peak")


@contextlib.contextmanager
def group() -> Iterator[Path | None]:
    """A new group without members, gone at the end; None where this system does not let us make one."""
    for root in (FIRST, SECOND):
        for old in root.glob("lowtide-*"):  # of a process that was killed; those with members stay
            with contextlib.suppress(OSError):
                old.rmdir()
        place = root / f"lowtide-{os.getpid()}"
        try:
            place.mkdir()
        except OSError:
            continue
        try:
            if _file(place, LIMITS) is not None:
                yield place
                return
        finally:
            with contextlib.suppress(OSError):
                place.rmdir()
    yield None


def join(place: Path, nbytes: int) -> None:
    """Let this process be a member from now on, with so many bytes for what it gets from now on."""
    limit = _file(place, LIMITS)
    assert limit is not None
    limit.write_text(str(nbytes), encoding="ascii")
    (place / "cgroup.procs").write_text(str(os.getpid()), encoding="ascii")


def charged(place: Path) -> int:
    """The most bytes that the group has had; 0: this system does not say."""
    peak = _file(place, PEAKS)
    return 0 if peak is None else int(peak.read_text(encoding="ascii"))


def _file(place: Path, names: tuple[str, ...]) -> Path | None:
    return next((place / name for name in names if (place / name).exists()), None)
