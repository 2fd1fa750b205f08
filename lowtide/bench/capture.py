"""What a capture costs: seconds and heap, and how they grow with the graph."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from lowtide.capture import capture
from lowtide.models import SMALL, build
from lowtide.peaks import resident

LIMIT_SECONDS = 2.5e-3  # an op
LIMIT_BYTES = 100e6  # of heap, for the first target
TARGETS = (  # the first one has a limit, the others show that the cost grows with the ops and with nothing else
    "resnet:depth=50,optimizer=adam",
    "resnet:depth=50",
    "resnet:stages=3-24-36-3,batch=2,size=32",
    "resnet:stages=3-24-36-3,batch=32,size=224",
    "resnet:stages=3-130-197-3,batch=2,size=32",
    "resnet:stages=3-130-197-3,batch=32,size=224",
)


@dataclass(frozen=True)
class CaptureCost:
    """What one capture took."""

    ops: int
    seconds: float
    heap: int  # bytes by which the process grew, at most, while it captured

    @property
    def seconds_an_op(self) -> float:
        """Seconds for each op of the graph."""
        return self.seconds / self.ops


def cost_of_capture(step: Any, model: Any, optimizer: Any, example: tuple[Any, ...]) -> CaptureCost:
    """Capture a step once, after a tiny one that makes torch import all that it needs."""
    capture(*build(SMALL["resnet"]))
    gc.collect()
    before = resident.reset_peak()
    start = perf_counter()
    captured = capture(step, model, optimizer, example)
    seconds = perf_counter() - start
    return CaptureCost(len(captured.graph.ops), seconds, resident.peak() - before)
