"""What paired runs say of a difference: its mean, the interval that it is in, and whether that answers the question."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import sqrt
from statistics import fmean, stdev

from scipy.stats import t as student

CONFIDENCE = 0.95
GOAL = 0.4  # points of accuracy or of BLEU, by which results may differ


@dataclass(frozen=True)
class Difference:
    """A difference over paired seeds; both ends are None for a single pair, which has no spread."""

    mean: float
    low: float | None
    high: float | None
    pairs: int

    @property
    def resolved(self) -> bool:
        """Whether the interval leaves out no difference, or one as large as the goal, whichever way it goes."""
        if self.low is None or self.high is None:
            return False
        return not (self.low <= 0 <= self.high and (self.low <= -GOAL or self.high >= GOAL))

    def __str__(self) -> str:
        if self.low is None or self.high is None:
            return f"{self.mean:+.2f} (one seed)"
        said = "" if self.resolved else ", not resolved"
        return f"{self.mean:+.2f} [{self.low:+.2f}, {self.high:+.2f}]{said}"


def difference(found: Mapping[int, float], base: Mapping[int, float]) -> Difference | None:
    """The mean of the differences over the seeds that both have, with Student's interval; None where there is none."""
    off = [found[seed] - base[seed] for seed in sorted(found.keys() & base.keys())]
    if not off:
        return None
    mean = fmean(off)
    if len(off) == 1:
        return Difference(mean, None, None, 1)
    reach = float(student.ppf(0.5 + CONFIDENCE / 2, len(off) - 1)) * stdev(off) / sqrt(len(off))
    return Difference(mean, mean - reach, mean + reach, len(off))
