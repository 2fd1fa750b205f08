"""Is the predicted peak the real one?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lowtide.capture import capture
from lowtide.captured import Captured
from lowtide.costs import Costs
from lowtide.errors import LowtideError
from lowtide.execute import execute
from lowtide.measure import measure
from lowtide.peaks import metered_peak, why_not
from lowtide.plan import as_eager, keep_everything
from lowtide.simulate import simulate

LIMIT = 0.005  # of the metered peak; what the prediction may be off by


@dataclass(frozen=True)
class Prediction:
    """Predicted and metered peaks of a step, in bytes: of its program, and of eager PyTorch."""

    persistent: int
    predicted_peak: int
    metered_peak: int
    eager_predicted_peak: int
    eager_metered_peak: int

    @property
    def error(self) -> float:
        """How much the program's prediction is off, as a signed fraction of what was metered."""
        return self.predicted_peak / self.metered_peak - 1

    @property
    def eager_error(self) -> float:
        """The same of eager PyTorch."""
        return self.eager_predicted_peak / self.eager_metered_peak - 1

    @property
    def ok(self) -> bool:
        """Whether both are within the limit."""
        return max(abs(self.error), abs(self.eager_error)) <= LIMIT


def predict(step: Any, model: Any, optimizer: Any, example: tuple[Any, ...]) -> Prediction:
    """Predict the peaks of a step, then run it and meter them."""
    captured = capture(step, model, optimizer, example)
    return compare(captured, measure(captured.graph), example)


def compare(captured: Captured, costs: Costs, example: tuple[Any, ...]) -> Prediction:
    """The predicted peaks of a captured step beside those of real runs; the model is trained by them."""
    reason = why_not(captured)
    if reason is not None:
        raise LowtideError(reason)
    graph = captured.graph
    program = keep_everything(graph)
    runner = execute(captured, program)
    return Prediction(
        persistent=costs.persistent(graph),
        predicted_peak=simulate(graph, costs, program).peak,
        metered_peak=metered_peak(captured, costs, lambda: runner(*example)),
        eager_predicted_peak=simulate(graph, costs, as_eager(graph)).peak,
        eager_metered_peak=metered_peak(
            captured, costs, lambda: captured.step(captured.model, captured.optimizer, *example)
        ),
    )
