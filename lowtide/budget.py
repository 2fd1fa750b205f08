"""A budget as people write it: bytes, a number with a unit, or a part of what eager's step adds to what persists."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

from lowtide.errors import UsageError

UNITS = {
    "": 1, "b": 1,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
    "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40,
}  # fmt: skip
LEAST = "least"  # the budget of whoever wants as few bytes as can be planned
MOST = 2**60  # bytes; sums of a few budgets still are numbers of 64 bits
LONGEST = 40  # letters
MACHINE, PROCESS, GROUPS = Path("/proc/meminfo"), Path("/proc/self"), Path("/sys/fs/cgroup")
LIMITS = (  # of the control group, of both kinds: the most, what is used now, and what that consists of
    ("memory.max", "memory.current", "memory.stat"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat"),
)
OWN_LIMITS = (  # of the process, as `ulimit` sets them: the most, and what is used now; in address space, not in pages
    (re.compile(r"^Max data size\s+(\d+)", re.MULTILINE), re.compile(r"^VmData:\s+(\d+) kB", re.MULTILINE)),
    (re.compile(r"^Max address space\s+(\d+)", re.MULTILINE), re.compile(r"^VmSize:\s+(\d+) kB", re.MULTILINE)),
)
CACHED = re.compile(r"^(?:total_)?inactive_file (\d+)$", re.MULTILINE)  # files in memory, which make room when asked
FORM = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([a-zA-Z]*|%)\s*")


def read_budget(budget: int | str, *, persistent: int, eager_peak: int, least: Callable[[], int] | None = None) -> int:
    """The bytes of a budget; a percentage is `persistent` plus that part of what eager's step adds to it.

    `least` is asked for the fewest bytes that can be planned, where the budget is that word; None: it is not, here.
    """
    if budget == LEAST and least is not None:
        return _positive(least(), budget)
    if isinstance(budget, int) and not isinstance(budget, bool):
        return _positive(budget, budget)
    found = FORM.fullmatch(budget) if isinstance(budget, str) and len(budget) <= LONGEST else None
    if found is None or (found[2] != "%" and found[2].lower() not in UNITS):
        raise UsageError(
            f"{_shown(budget)} is no budget.",
            hint="write bytes (1500000000), a unit (1.5GiB, 800MB) or a part (50%). A step also takes least.",
        )
    if found[2] == "%":
        return _positive(persistent + round(float(found[1]) / 100 * max(0, eager_peak - persistent)), budget)
    return _positive(round(Fraction(found[1]) * UNITS[found[2].lower()]), budget)


def free_memory() -> int:
    """The bytes that this process can still get: what is free on the machine, or left of its limits."""
    own = allowance()
    left = [_available()] if own is None else [_available(), own]
    for limit, used, parts in LIMITS:
        most, now = _number(GROUPS / limit), _number(GROUPS / used)
        if most is not None and now is not None:
            left.append(most - now + max(map(int, CACHED.findall(_text(GROUPS / parts))), default=0))
    return max(0, min(left))


def allowance() -> int | None:
    """The bytes that the limits of this process alone still leave it (`ulimit -d`, `ulimit -v`); None: it has none."""
    limits, status = _text(PROCESS / "limits"), _text(PROCESS / "status")
    found = [(limit.search(limits), used.search(status)) for limit, used in OWN_LIMITS]
    left = [int(limit[1]) - int(used[1]) * 1024 for limit, used in found if limit and used]
    return max(0, min(left)) if left else None


def _available() -> int:
    for line in _text(MACHINE).splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _number(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.isdigit() else None  # "max" is no limit


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii")
    except (OSError, ValueError):
        return ""


def _positive(nbytes: int, budget: int | str) -> int:
    if nbytes <= 0:
        raise UsageError(f"a budget of {_shown(budget)} leaves no bytes.", hint="give the memory that you have: 2GiB.")
    if nbytes > MOST:
        raise UsageError(
            f"{_shown(budget)} is no budget: it is more than 2**60 bytes.", hint="give the memory that you have: 2GiB."
        )
    return nbytes


def _shown(budget: object) -> str:
    """A budget as it was given, unless that is endless."""
    if isinstance(budget, int) and abs(budget) > MOST:
        return f"a number of {budget.bit_length()} bits"
    shown = repr(budget)
    return shown if len(shown) <= 2 * LONGEST else f"{shown[: 2 * LONGEST]}..."
