"""Is the throughput that `lowtide batch` predicts the real one? Fitted steps at four sizes of its curve, timed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from time import monotonic, perf_counter

from lowtide.batch import Parts, batch_sizes
from lowtide.fit import fit
from lowtide.measure import measure
from lowtide.sizes import Size, Sizes

TARGETS = {
    "resnet:depth=50,size=64": "1GiB",
    "gpt:layers=6,context=128": "512MiB",
    "lstm": "512MiB",
}  # with the budget of each
BUDGET = "1GiB"  # of other targets
LIMIT = 0.10  # of the measured throughput; what the prediction may be off by
GAINS = {"resnet:depth=50,size=64": 5.0}  # the largest batch with a plan over eager's, at least
COUNT = 4  # sizes that are timed
LONGEST = 4.0  # seconds of a step that is timed, as predicted
ROUNDS = 5
WARM_UPS = 6  # steps of each size before the clock starts: the first ones are timed op by op
TIME_LIMIT = 1.0  # seconds of search for each size


@dataclass(frozen=True)
class Throughput:
    """One batch size, with a plan."""

    batch: int  # examples
    predicted: float  # examples a second
    measured: float  # examples a second, by the median of all rounds

    @property
    def error(self) -> float:
        """How much the prediction is off, as a signed fraction of what was measured."""
        return self.predicted / self.measured - 1

    @property
    def ok(self) -> bool:
        """Whether the prediction is within the limit."""
        return abs(self.error) <= LIMIT


@dataclass(frozen=True)
class Batches:
    """What was predicted for a target, and what came true."""

    sizes: Sizes
    seconds: float  # that the prediction took
    timed: tuple[Throughput, ...]

    @property
    def gain(self) -> float | None:
        """The largest batch with a plan over eager's; None: eager's step fits at no size."""
        eager, planned = self.sizes.largest["eager"], self.sizes.largest["plan"]
        return None if eager is None or planned is None else planned / eager


def compare(
    make: Callable[[int], Parts],
    budget: int,
    *,
    rounds: int = ROUNDS,
    time_limit: float = TIME_LIMIT,
    tell: Callable[[str], None] = lambda _: None,
) -> Batches:
    """Predict the throughput of each size, then run fitted steps of a few of them."""
    begun = monotonic()
    price = lambda graph: measure(graph, corrected=False)  # noqa: E731
    sizes = batch_sizes(make, budget, price=price, time_limit=time_limit, tell=tell)
    seconds = monotonic() - begun
    timed = []
    for size in chosen(sizes.points):
        predicted = size.throughput(size.plan)
        assert predicted is not None
        tell(f"running steps of a batch of {size.batch}")
        step = _seconds(make(size.batch), budget, rounds=rounds, time_limit=time_limit)
        timed.append(Throughput(size.batch, predicted, size.batch / step))
    return Batches(sizes, seconds, tuple(timed))


def chosen(points: Sequence[Size]) -> list[Size]:
    """Sizes from all over the curve whose steps are not too long to be timed."""
    able = [size for size in points if size.plan is not None and size.plan.seconds <= LONGEST]
    count = min(COUNT, len(able))
    return [able[round(place * (len(able) - 1) / max(1, count - 1))] for place in range(count)]


def _seconds(parts: Parts, budget: int, *, rounds: int, time_limit: float) -> float:
    """The seconds of a fitted step."""
    train = fit(*parts[:3], example=parts.example, budget=budget, time_limit=time_limit)
    for _ in range(WARM_UPS):
        train(*parts.example)
    seconds = []
    for _ in range(rounds):
        begun = perf_counter()
        train(*parts.example)
        seconds.append(perf_counter() - begun)
    return median(seconds)
