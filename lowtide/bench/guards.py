"""What the guards cost: the time of a step's checks, against the time of the step."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import nn

from lowtide.execute import Batch
from lowtide.execute.binding import Binding
from lowtide.fit import fit
from lowtide.models.steps import classify

LIMITS = {10: 50e-6, 500: 500e-6}  # modules -> seconds
ROUNDS = 300
WIDTH, BATCH = 32, 8


@dataclass(frozen=True)
class GuardCost:
    """The checks of one step."""

    modules: int
    tensors: int  # parameters, buffers and state
    watched: int  # entries of Python objects that are compared
    seconds: float  # of all checks before a step, but for those of the batch
    step_seconds: float


def cost_of_guards(modules: int) -> GuardCost:
    """The cost of the guards of a model with so many modules, half of them linear layers, trained by Adam."""
    layers = [part for _ in range((modules - 1) // 2) for part in (nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1))]
    model = nn.Sequential(*layers, *[nn.Tanh()] * (modules - 1 - len(layers)))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    example = (torch.randn(BATCH, WIDTH), torch.arange(BATCH) % WIDTH)
    train = fit(classify, model, optimizer, example=example, budget="100%", costs="roofline", time_limit=0.5)
    steps = [_timed(train, *example) for _ in range(10)]
    binding = Binding(train.captured)
    given = Batch.of(example)
    inputs, graph = binding.inputs(binding.check(given)), train.captured.graph
    kinds = [graph.values[item.value].kind for item in graph.inputs]
    states = [tensor for kind, tensor in zip(kinds, inputs, strict=True) if kind == "state"]
    whole = [_timed(_check, binding, given, states) for _ in range(ROUNDS)]
    batch = [_timed(binding.check_batch, given) for _ in range(ROUNDS)]
    guards = train.captured.guards
    return GuardCost(
        modules=sum(1 for _ in model.modules()),
        tensors=len(train.captured.slots) + sum(len(state) for state in optimizer.state.values()),
        watched=len(guards.entries) + len(guards.names) + len(guards.contents),
        seconds=median(whole) - median(batch),
        step_seconds=median(steps[3:]),
    )


def limit(modules: int) -> float:
    """The seconds that the guards of a model with so many modules may take."""
    return LIMITS.get(modules, max(50e-6, modules * 1e-6))


def _check(binding: Binding, batch: Batch, states: list[Any]) -> None:
    binding.check(batch)
    binding.check_states(states)


def _timed(run: Any, *args: Any) -> float:
    begun = perf_counter()
    run(*args)
    return perf_counter() - begun
