"""What the guards cost: the time of a step with its checks, less that of one without, against the time of the step."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import nn

from lowtide import tree
from lowtide.execute import Batch
from lowtide.execute.binding import Binding
from lowtide.fit import fit
from lowtide.models.steps import classify

LIMITS = {10: 50e-6, 500: 500e-6}  # modules -> seconds
COUNTED = (
    "Guards are all that a step does before its first op, less putting the batch and the learning rate into its "
    "inputs:\nthe checks of settings, Python objects, parameters, gradients, options, optimizer state and the batch."
)
ROUNDS = 500
WIDTH, BATCH = 32, 8


@dataclass(frozen=True)
class GuardCost:
    """The checks of one step."""

    modules: int
    tensors: int  # parameters, buffers and state
    watched: int  # entries of Python objects that are compared
    seconds: float  # of all that is done before the first op of a step, less what a step without checks must do
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
    known = binding.inputs(binding.check(Batch.of(example)))
    rounds = [
        (_timed(_with_guards, binding, example), _timed(_without, binding, example, known)) for _ in range(ROUNDS)
    ]
    with_guards, without = map(median, zip(*rounds, strict=True))
    guards = train.captured.guards
    return GuardCost(
        modules=sum(1 for _ in model.modules()),
        tensors=len(train.captured.slots) + sum(len(state) for state in optimizer.state.values()),
        watched=len(guards.entries) + len(guards.names) + len(guards.contents),
        seconds=with_guards - without,
        step_seconds=median(steps[3:]),
    )


def limit(modules: int) -> float:
    """The seconds that the guards of a model with so many modules may take."""
    return LIMITS.get(modules, max(50e-6, modules * 1e-6))


def _with_guards(binding: Binding, batch: tuple[Any, ...]) -> None:
    binding.inputs(binding.check(Batch.of(batch)))


def _without(binding: Binding, batch: tuple[Any, ...], known: list[Any]) -> None:
    leaves, _ = tree.flatten(batch)
    binding.fill(known.copy(), leaves)


def _timed(run: Any, *args: Any) -> float:
    begun = perf_counter()
    run(*args)
    return perf_counter() - begun
