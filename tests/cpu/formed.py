"""Small steps whose parameters, state and batch are in other forms, by the rewrites themselves or by the front door."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch

import lowtide
from lowtide.measure import roofline
from lowtide.resized import Resized, resized
from lowtide.rewrite import EXACT, apply
from lowtide.rewrites import Rewrite

Batch = tuple[torch.Tensor, torch.Tensor]
Optimizer = Callable[[Any], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Optimizer] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=5e-4),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-3, weight_decay=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3),
    "amsgrad": lambda p: torch.optim.AdamW(p, lr=1e-3, amsgrad=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.9),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
    "nadam": lambda p: torch.optim.NAdam(p, lr=1e-3),
    "adamax": lambda p: torch.optim.Adamax(p, lr=1e-3),
    "adadelta": lambda p: torch.optim.Adadelta(p, lr=1.0),
}


def step(model: Any, optimizer: Any, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """One step of a classifier."""
    loss = torch.nn.functional.cross_entropy(model(inputs), labels)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def made(optimizer: str = "sgd", *, convolutions: bool = False) -> tuple[torch.nn.Sequential, torch.optim.Optimizer]:
    """A small model and its optimizer, always the same."""
    torch.manual_seed(0)
    n = torch.nn
    first: list[n.Module] = [n.Flatten(), n.Linear(192, 64)]
    if convolutions:
        first = [n.Conv2d(3, 16, 3, padding=1), n.ReLU(), n.Conv2d(16, 48, 3, padding=1), n.ReLU(), n.MaxPool2d(4)]
        first += [n.Flatten(), n.Linear(192, 64)]
    model = n.Sequential(*first, n.ReLU(), n.Dropout(0.1), n.Linear(64, 96), n.ReLU(), n.Linear(96, 10))
    return model, OPTIMIZERS[optimizer](model.parameters())


def batches(count: int, size: int = 8) -> list[Batch]:
    """Batches of images."""
    drawn = torch.Generator().manual_seed(1)
    return [
        (torch.randn(size, 3, 8, 8, generator=drawn), torch.randint(10, (size,), generator=drawn)) for _ in range(count)
    ]


def rewrites(names: Sequence[str]) -> list[Rewrite]:
    """Names with settings, as rewrites."""
    found = []
    for name in names:
        word, _, setting = name.partition(":")
        found.append(Rewrite(word, int(setting) if setting.isdecimal() else setting or None))
    return found


def run(
    names: Sequence[str],
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    example: Batch,
    *,
    program: Callable[[lowtide.Graph, lowtide.Costs], lowtide.Program] | None = None,
    measured: bool = False,
) -> Any:
    """The step after these rewrites, by a program that makes nothing twice or by another one."""
    captured = lowtide.capture(step, model, optimizer, example)
    sizes = cache(lambda size: lowtide.capture(step, model, optimizer, resized(example, size)).graph)
    graph = apply(captured.graph, [*EXACT, *rewrites(names)], Resized(captured.graph, len(example[1]), sizes)).graph
    costs = lowtide.measure(graph) if measured else roofline(graph)
    chosen = (
        program(graph, costs) if program is not None else lowtide.plan(graph, costs, 10**12, time_limit=0.2).program
    )
    return lowtide.execute(replace(captured, graph=graph), chosen, costs.nbytes)


def train(take: Callable[..., Any], given: Sequence[Batch]) -> list[float]:
    """The losses of steps, with the same draws each time."""
    torch.manual_seed(7)
    return [take(*batch).item() for batch in given]


def eager(model: Any, optimizer: Any) -> Callable[..., torch.Tensor]:
    """A step in eager PyTorch."""
    return lambda *batch: step(model, optimizer, *batch)


def distance(one: torch.nn.Module, other: torch.nn.Module) -> float:
    """How far the weights of two models are apart, of the norm of all of them."""
    pairs = [(a.detach(), b.detach()) for a, b in zip(one.parameters(), other.parameters(), strict=True)]
    away = sum(float((a - b).square().sum()) for a, b in pairs)
    return float((away / sum(float(a.square().sum()) for a, _ in pairs)) ** 0.5)
