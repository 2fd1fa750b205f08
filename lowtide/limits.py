"""What a machine can do at most, and the seconds that it needs at least for what an op has to do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

USUAL = "float32"  # stands in for dtypes whose products were not timed
LONG = 1e-3  # seconds of an op from which on its rate is believed


@dataclass(frozen=True)
class Limits:
    """The best that simple calls reach on one machine, with one number of threads."""

    operations: Mapping[str, float]  # floating point operations a second of a large matrix product, by dtype
    bandwidth: float  # bytes a second that are read or written past the caches
    machine: str

    def to_json(self) -> dict[str, object]:
        """All of it as plain data."""
        return {"operations": dict(self.operations), "bandwidth": self.bandwidth, "machine": self.machine}

    def raised(self, work: Sequence[Work], seconds: Mapping[int, float]) -> Limits:
        """These, or more operations a second where ops that took so long did more: others had the cores meanwhile.

        The rate of memory stays: an op that is quicker found its bytes in a cache.
        """
        operations = dict(self.operations)
        for op, taken in seconds.items():
            done, dtype = work[op].operations, work[op].dtype
            if done is not None and taken >= LONG:
                operations[dtype] = max(operations.get(dtype, operations[USUAL]), done / taken)
        return replace(self, operations=operations)


@dataclass(frozen=True)
class Work:
    """What an op has to do, however it does it."""

    operations: float | None  # floating point; None: no rule counts them, and only its bytes are known
    dtype: str  # in which it computes
    nbytes: int  # that it reads and writes at least

    def arithmetic(self, limits: Limits) -> float:
        """The seconds that its operations take at the rate of matrix products."""
        rate = limits.operations.get(self.dtype, limits.operations[USUAL])
        return (self.operations or 0.0) / rate

    def traffic(self, limits: Limits) -> float:
        """The seconds that its bytes take between processor and memory."""
        return self.nbytes / limits.bandwidth

    def needed(self, limits: Limits) -> float:
        """The seconds of the longer of the two: what a machine with these limits needs at least."""
        return max(self.arithmetic(limits), self.traffic(limits))
