"""A step with rewrites, run plainly: by a program that makes nothing twice and moves nothing, in place of its plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from lowtide.captured import Captured
from lowtide.choice import Leave
from lowtide.execute import Batch, Runner, StaleError, execute
from lowtide.plan import keep_everything
from lowtide.resized import resizable
from lowtide.rewrites import Allowed, Rewrite
from lowtide.verify.copies import Copy
from lowtide.verify.gradient import error_of

Capture = Callable[[Copy, tuple[Any, ...]], Captured]


class Plainly:
    """Takes the steps of a copy with the rewrites of a plan, and with nothing else of it."""

    def __init__(self, capture: Capture, allowed: Allowed) -> None:
        self._capture, self._allowed = capture, allowed
        self._runner: Runner | None = None
        self._made: tuple[Any, ...] = ()  # for which batches, and with which rewrites

    def __call__(self, copied: Copy, batch: tuple[Any, ...], rewrites: tuple[Rewrite, ...]) -> tuple[Any, float | None]:
        """One step; with the error of its gradient, where the step was captured for it and that can be measured."""
        given, error = Batch.of(batch), None
        changing = tuple(one for one in rewrites if one.exactness != "bitwise")
        made = given.key, changing
        if self._runner is not None and made == self._made:
            try:
                return self._runner.run(given), None
            except StaleError:
                pass
        captured = self._capture(copied, batch)
        sizes = resizable(captured.graph, batch, lambda other: self._capture(copied, other).graph)
        leave = Leave(self._allowed, sizes)
        graph = leave.apply(captured.graph, changing).graph
        error = error_of(captured, graph, given)
        self._runner, self._made = execute(replace(captured, graph=graph), keep_everything(graph)), made
        return self._runner.run(given), error
