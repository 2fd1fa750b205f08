"""Program -> tensors: the same kernels as eager, called in the program's order."""

from __future__ import annotations

from typing import Any

import torch

from lowtide.captured import Captured
from lowtide.execute.binding import Binding, StaleError
from lowtide.execute.places import Places
from lowtide.execute.source import generate
from lowtide.program import Program

__all__ = ["Runner", "StaleError", "execute"]


class Runner:
    """A captured step that runs by its program: call it with a batch."""

    def __init__(self, captured: Captured, program: Program) -> None:
        self.captured = captured
        self.program = program
        self._binding = Binding(captured)
        self._function, self.source = generate(captured.graph, program)

    def __call__(self, *batch: Any) -> Any:
        """One training step on this batch; returns what the step returns, detached."""
        leaves = self._binding.check(batch)
        self.captured.prepare()
        inputs = self._binding.inputs(leaves)
        self._binding.take_gradients()
        places = Places(self.captured.graph.device)
        generator = torch.default_generator
        try:
            with torch._C._AutoDispatchBelowAutograd():
                outputs = self._function(inputs, generator, places)
        finally:
            places.close()
        return self._binding.leave(outputs)


def execute(captured: Captured, program: Program) -> Runner:
    """Make a callable of a captured step and a program for its graph."""
    return Runner(captured, program)
