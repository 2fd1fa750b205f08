"""A budget as people write it: bytes, a number with a unit, or a part of what eager's step adds to what stays."""

from __future__ import annotations

import re

from lowtide.errors import UsageError

UNITS = {
    "": 1, "b": 1,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
    "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40,
}  # fmt: skip
FORM = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([a-zA-Z]*|%)\s*")


def read_budget(budget: int | str, *, stays: int, eager_peak: int) -> int:
    """The bytes of a budget; a percentage is `stays` plus that part of what eager's step adds to it."""
    if isinstance(budget, int) and not isinstance(budget, bool):
        return _positive(budget, budget)
    found = FORM.fullmatch(budget) if isinstance(budget, str) else None
    if found is None or (found[2] != "%" and found[2].lower() not in UNITS):
        raise UsageError(
            f"{budget!r} is no budget.", hint="write bytes (1500000000), a unit (1.5GiB, 800MB) or a part (50%)."
        )
    if found[2] == "%":
        return _positive(stays + round(float(found[1]) / 100 * max(0, eager_peak - stays)), budget)
    return _positive(round(float(found[1]) * UNITS[found[2].lower()]), budget)


def _positive(nbytes: int, budget: int | str) -> int:
    if nbytes <= 0:
        raise UsageError(f"a budget of {budget!r} leaves no bytes.", hint="give the memory that you have: 2GiB.")
    return nbytes
