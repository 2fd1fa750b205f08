"""The planner's C++, loaded; where it can't be, one warning, and `plain` does what it can."""

from __future__ import annotations

import ctypes
import warnings
from pathlib import Path

from lowtide import native
from lowtide.errors import LowtideError, LowtideWarning

REFUSED, NO_MEMORY = -101, -102  # answers of every inner loop, as the sources number them
_missing: list[Path] = []  # sources that this process could not load


def compiled(source: Path, signatures: native.Signatures) -> ctypes.CDLL | None:
    """The library of one of the planner's sources; None where it can't be compiled or loaded."""
    try:
        return native.library(source, signatures, what="the planner")
    except native.NativeUnavailable as error:
        _missing.append(source)
        if len(_missing) == 1:
            warnings.warn(_instead(error), LowtideWarning, stacklevel=2)
        return None


def answered(answer: int) -> int:
    """What an inner loop answers, if it took what it was given."""
    if answer == REFUSED:
        raise LowtideError(
            "the planner was given numbers that belong to no graph: an index out of range, or a size that is none.",
            hint="a file that was read may be damaged; make it again from the model.",
        )
    if answer == NO_MEMORY:
        raise LowtideError("there is no memory left to plan in.", hint="end what else uses the memory.")
    return answer


def _instead(error: native.NativeUnavailable) -> str:
    return (
        f"{error.message}\nPlans are made in plain Python instead. They keep their budgets, but steps come out slower, "
        "by 1% or so, at tight budgets by up to 6%; large steps take longer to plan; and there is no arena.\n"
        f"hint: {error.hint}"
    )
