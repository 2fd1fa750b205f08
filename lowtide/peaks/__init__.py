"""The real peak of a step, from the allocator, to hold against the predicted one.

The meter counts the bytes that are allocated while it runs. What the step finds there when it starts (parameters,
buffers, optimizer state, the batch) was allocated before, so its bytes are added.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from lowtide import allocator
from lowtide.captured import Captured
from lowtide.costs import Costs

Peak = Callable[[], int]


def why_not(captured: Captured) -> str | None:
    """Why the step cannot be metered here, or None where it can."""
    device = captured.graph.device
    if device != "cpu":
        return f"the step runs on {device}; lowtide meters the CPU only."
    if not allocator.available():
        return "memory cannot be metered here: there is no C++ compiler to build the allocator with."
    return None


def metered_peak(captured: Captured, costs: Costs, run: Callable[[], Any]) -> int:
    """The peak of a second run of the step; the first one warms up, and is the reason for the outer meter.

    The outer meter makes the blocks of the first run known, so that the inner one sees them go.
    """
    with allocator.meter():
        _restore_gradients(captured)
        run()
        _restore_gradients(captured)
        with step_meter(captured, costs) as peak:
            run()
        return peak()


@contextmanager
def step_meter(captured: Captured, costs: Costs) -> Iterator[Peak]:
    """Meter steps; what is given says the peak so far, with what was there before the first of them."""
    before = _bytes_before(captured, costs)
    with allocator.meter() as meter:
        yield lambda: before + meter.peak


def storage_bytes(things: Iterable[Any]) -> int:
    """The bytes of the tensors among these things, each storage counted once."""
    storages = [thing.untyped_storage() for thing in things if isinstance(thing, torch.Tensor)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def _bytes_before(captured: Captured, costs: Costs) -> int:
    """Bytes of the inputs of the next step, and of gradients that it will throw away."""
    graph = captured.graph
    inputs = sum(costs.nbytes[item.value] for item in graph.inputs if graph.values[item.value].kind != "gradient")
    return inputs + storage_bytes(parameter.grad for parameter in captured.model.parameters())


def _restore_gradients(captured: Captured) -> None:
    """Give the model gradients where it had some when the step was captured, and none elsewhere."""
    graph = captured.graph
    had = {str(item.path[0]) for item in graph.inputs if graph.values[item.value].kind == "gradient"}
    for name, slot in captured.slots.items():
        tensor = slot.holder[slot.key]
        if name not in had:
            tensor.grad = None
        elif tensor.grad is None:
            tensor.grad = torch.zeros_like(tensor)
