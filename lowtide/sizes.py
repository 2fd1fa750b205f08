"""What each batch size of a step costs and yields within a budget."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

KNEE = 0.95  # of the best throughput: the smallest batch that has it is the one to use


@dataclass(frozen=True)
class Way:
    """A step of one size, done in one way."""

    peak: int  # bytes, predicted
    seconds: float  # of one step, predicted
    fits: bool  # the budget
    rewrites: tuple[str, ...] = ()  # what was done to the step before it was planned, besides what is always done


@dataclass(frozen=True)
class Size:
    """One batch size."""

    batch: int  # examples
    measured: bool  # its ops were; else they follow from other sizes
    eager: Way
    plan: Way | None  # None: nothing fits

    def throughput(self, way: Way | None) -> float | None:
        """Examples a second."""
        return None if way is None else self.batch / way.seconds


@dataclass(frozen=True)
class Sizes:
    """What was found within a budget."""

    budget: int  # bytes
    points: tuple[Size, ...]  # by batch; at least one has a plan
    largest: Mapping[str, int | None]  # for each way the largest batch that fits; None: none does
    corrections: Mapping[str, tuple[float, ...]]  # real steps over the sums of their ops, at each measured size

    @property
    def knee(self) -> int:
        """The smallest batch with nearly the best throughput: the one to use."""
        fast = [(size.batch / size.plan.seconds, size.batch) for size in self.points if size.plan is not None]
        best = max(fast)[0]
        return min(batch for throughput, batch in fast if throughput >= KNEE * best)

    def throughput(self, batch: int, way: str) -> float | None:
        """Examples a second of a size of the curve, in eager or by a plan."""
        size = next(size for size in self.points if size.batch == batch)
        return size.throughput(size.eager if way == "eager" else size.plan)

    def to_json(self) -> dict[str, Any]:
        """All of it as plain data."""
        return {
            "budget": self.budget,
            "largest_batch": dict(self.largest),
            "throughput": {way: batch and self.throughput(batch, way) for way, batch in self.largest.items()},
            "knee": self.knee,
            "points": [_point(size) for size in self.points],
            "corrections": {way: list(pair) for way, pair in self.corrections.items()},
        }


def _point(size: Size) -> dict[str, Any]:
    ways = {"eager": size.eager, "plan": size.plan}
    rows = {name: way and {**asdict(way), "throughput": size.throughput(way)} for name, way in ways.items()}
    return {"batch": size.batch, "measured": size.measured, **rows}
