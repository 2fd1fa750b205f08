"""torch -> Graph: the user's own training step, traced once on fake tensors and written down as data."""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from lowtide.capture import optimizer as optimizers
from lowtide.capture.door import refuse_at_the_door
from lowtide.capture.trace import Trace
from lowtide.captured import Captured
from lowtide.errors import CaptureError
from lowtide.guards import Place

__all__ = ["ONE_AT_A_TIME", "capture"]

ONE_AT_A_TIME = threading.RLock()  # a trace puts guards around functions that all threads call

TRIES = 4  # traces at most: numbers that turn out to change with every step become inputs of the next


def capture(
    step: Callable[..., Any],
    model: torch.nn.Module,
    optimizer: Any,
    example: tuple[Any, ...],
    *,
    numbers: Sequence[Place] = (),
    ranks: bool = False,
    hooked: bool = False,
) -> Captured:
    """Trace `step(model, optimizer, *example)` without running it, and leave everything as it was.

    The optimizer may be None, or a tuple of them. `numbers` are Python numbers of the caller that are to be inputs of
    the step, not constants of it. With `ranks` the model may be a DistributedDataParallel: who runs the step sees to it
    that all ranks do. With `hooked` parameters may have hooks, which are not a part of the step.
    """
    if not isinstance(example, tuple):
        raise CaptureError(
            f"example is a {type(example).__name__}, not a tuple.",
            hint="pass the arguments of one call of the step: example=(x, y), or example=(batch,).",
        )
    if not isinstance(model, torch.nn.Module):
        raise CaptureError(f"the model is a {type(model).__name__}, not a torch.nn.Module.")
    with ONE_AT_A_TIME:
        refuse_at_the_door(step, model, example, ranks=ranks)
        optimizers.refuse_unknown(optimizer)
        return _captured(functools.partial(Trace, step, model, optimizer, example, hooked=hooked), tuple(numbers))


def _captured(trace: Callable[..., Trace], numbers: tuple[Place, ...]) -> Captured:
    """What so many traces find as it takes."""
    found = trace(numbers=numbers).run()
    arrivals = found.again
    if arrivals:
        found = trace(numbers=numbers, arrivals=arrivals).run()
    for _ in range(TRIES):
        if not found.counted:
            break
        try:
            found = trace(numbers=(*numbers, *found.counted), arrivals=arrivals).run()
        except CaptureError:
            break  # they are more than terms of arithmetic
        numbers = found.captured.guards.numbers
    captured = found.captured
    unsure = {name for name, present in captured.gradients.items() if not present and found.left[name]}
    if unsure:
        # The step leaves gradients behind: does it read them at the next call, or clear them first?
        again = trace(numbers=numbers, phantoms=unsure, arrivals=arrivals).run()
        read = {name for name, present in again.captured.gradients.items() if present}
        matter = {name: had for name, had in captured.gradients.items() if name not in unsure or name in read}
        captured = dataclasses.replace(captured, gradients=matter)
    return captured
