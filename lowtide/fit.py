"""The front door: a training step in, the same step as a program out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lowtide.capture import capture
from lowtide.captured import Captured
from lowtide.errors import BudgetError, LowtideError
from lowtide.execute import Runner, StaleError, execute
from lowtide.measure import measure
from lowtide.plan import keep_everything
from lowtide.program import Program
from lowtide.simulate import simulate


class Fitted:
    """A training step that runs by its program; call it with a batch as you would call the step."""

    def __init__(
        self, step: Callable[..., Any], model: Any, optimizer: Any, example: tuple[Any, ...], budget: int | None
    ) -> None:
        self._step, self._model, self._optimizer, self._budget = step, model, optimizer, budget
        self._runners = [self._make(example)]

    def __call__(self, *batch: Any) -> Any:
        """One training step; returns what the step returns, detached."""
        stale: LowtideError | None = None
        for runner in self._runners:
            try:
                result = runner(*batch)
            except StaleError as error:
                stale = error
                continue
            if runner is not self._runners[0]:
                self._runners.remove(runner)
                self._runners.insert(0, runner)
            return result
        assert stale is not None
        self._runners.insert(0, self._make(batch))
        return self._runners[0](*batch)

    @property
    def captured(self) -> Captured:
        """The step as data, as it last ran."""
        return self._runners[0].captured

    @property
    def plan(self) -> Program:
        """The program, as it last ran."""
        return self._runners[0].program

    @property
    def source(self) -> str:
        """The Python source of the program, as it last ran."""
        return self._runners[0].source

    def _make(self, batch: tuple[Any, ...]) -> Runner:
        captured = capture(self._step, self._model, self._optimizer, batch)
        program = keep_everything(captured.graph)
        if self._budget is not None:
            costs = measure(captured.graph)
            peak = simulate(captured.graph, costs, program).peak
            if peak > self._budget:
                raise BudgetError(
                    f"the step needs {peak} bytes as it is, the budget is {self._budget}: "
                    f"{peak - self._budget} too few.",
                    hint="raise the budget, or lower the batch size.",
                )
        return execute(captured, program)


def fit(
    step: Callable[..., Any],
    model: Any,
    optimizer: Any = None,
    *,
    example: tuple[Any, ...],
    budget: int | None = None,
) -> Fitted:
    """Capture `step(model, optimizer, *example)` and return it as a step that runs by its program."""
    return Fitted(step, model, optimizer, example, budget)
