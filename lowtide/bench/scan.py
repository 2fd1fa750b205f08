"""What a scan within a part of the plain loop's memory costs in time: the part of the forward that runs twice."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

from lowtide.bench.classics.loops import rounds_of, same, setting

LIMITS = {256: 1.40}  # width of the cell, without gradients of inputs, at PART -> the most time, of the plain loop's
PART = 5  # percent of what the plain loop keeps
BATCH, LENGTH = 64, 1000
ROUNDS = 21


@dataclass(frozen=True)
class ScanTime:
    """A scan over an LSTM cell against the plain loop."""

    width: int
    part: float  # percent of what the plain loop keeps
    forwards: int  # runs of the cell
    own: int  # bytes, metered, beyond inputs, outputs and gradients
    plain_own: int  # the same of the plain loop
    equal: bool  # whether all results are the plain loop's, bit for bit
    ratios: tuple[float, ...]  # its seconds over the plain loop's, of all rounds

    @property
    def ratio(self) -> float:
        """The median of all rounds."""
        return median(self.ratios)

    @property
    def ok(self) -> bool:
        """Whether it is exact, and quick enough where there is a limit."""
        return self.equal and self.ratio <= LIMITS.get(self.width, float("inf"))


def time_scan(width: int, *, part: float = PART, rounds: int = ROUNDS, length: int = LENGTH) -> ScanTime:
    """Run both loops by turns, forward and backward, without gradients of the inputs."""
    given = setting(layers=1, width=width, batch=BATCH, length=length, below=False)
    loops = [given.plain, given.scan(f"{part:g}%")]
    (plain, taken), (_, ratios) = rounds_of(given, loops, rounds=rounds)
    equal = same(plain.results, taken.results)
    return ScanTime(width, part, taken.forwards, taken.own, plain.own, equal, tuple(ratios))
