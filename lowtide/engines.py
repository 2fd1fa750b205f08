"""Time on several engines: compute, and for each other place one that copies there and one that copies back.

Ops run one after the other on compute. A copy begins when it is asked for and its engine is free, and runs beside them;
while engines copy, each takes its part of compute's speed. So the end of a step is no sum over its instructions. Since
the copies of an engine follow each other without a gap, its end of work is all that has to be known about it: the state
is a handful of numbers, which an inner loop in another language can keep just so.
"""

from __future__ import annotations

from collections.abc import Iterable

from lowtide.costs import Direction, Lane
from lowtide.graph import Place

FLOOR = 0.05  # of compute's speed: what copies leave of it at least


class Engines:
    """How far compute and the copies are, in seconds from the beginning of the step."""

    def __init__(self, lanes: Iterable[Lane]) -> None:
        self.lanes = {(lane.place, lane.direction): lane for lane in lanes}
        self.free = dict.fromkeys(self.lanes, 0.0)  # when each has done all that it was asked for
        self.now = 0.0  # of compute

    def run(self, seconds: float) -> None:
        """Compute for so many seconds, or longer where copies take from it meanwhile."""
        while True:
            busy = [key for key, end in self.free.items() if end > self.now]
            if not busy:
                self.now += seconds
                return
            speed = max(FLOOR, 1.0 - sum(self.lanes[key].takes for key in busy))
            until = min(self.free[key] for key in busy)
            done = (until - self.now) * speed
            if done >= seconds:
                self.now += seconds / speed
                return
            seconds -= done
            self.now = until

    def copy(self, place: Place, direction: Direction, nbytes: int) -> float:
        """Ask for a copy, and say when it will have arrived; one whose engine was not measured takes no time."""
        lane = self.lanes.get((place, direction))
        if lane is None:
            return self.now
        start = max(self.now, self.free[place, direction])
        self.free[place, direction] = start + lane.latency + nbytes / lane.rate
        return self.free[place, direction]

    def wait(self, arrival: float) -> None:
        """Do nothing until then."""
        self.now = max(self.now, arrival)
