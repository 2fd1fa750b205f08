"""What a rank of a test is: its number, its batches, a step, and how what it has is compared with the plain run."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

import lowtide

STEPS = 5
WIDTH, CLASSES, BATCH = 64, 10, 256
RANK, RANKS = int(sys.argv[2]), int(sys.argv[3])
FOLDER = Path(sys.argv[4])

Step = Callable[..., Any]
Make = Callable[..., tuple[Any, Any]]


def batch(number: int, size: int = BATCH) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * number + RANK)
    x = torch.randn(size, WIDTH, generator=generator)
    return x, torch.randint(0, CLASSES, (size,), generator=generator)


def plain(model: nn.Module, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    return loss.detach()


def run(step: Callable[..., torch.Tensor], steps: range = range(STEPS)) -> list[torch.Tensor]:
    return [step(*batch(number)) for number in steps]


def own(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank has of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def state(model: nn.Module, optimizer: Any) -> list[torch.Tensor]:
    """Parameters, buffers, gradients and the optimizer's state."""
    found = [*model.state_dict().values()]
    found += [torch.zeros(0) if one.grad is None else one.grad for one in model.parameters()]
    for one in optimizer.state_dict()["state"].values():
        found += [value for value in one.values() if isinstance(value, torch.Tensor)]
    return found


def assert_same(one: list[torch.Tensor], other: list[torch.Tensor]) -> None:
    assert len(one) == len(other)
    for number, (first, second) in enumerate(zip(one, other, strict=True)):
        assert isinstance(first, DTensor) == isinstance(second, DTensor), (number, type(first), type(second))
        assert torch.equal(own(first), own(second)), f"tensor {number} of {len(one)} differs, {tuple(first.shape)}"


def assert_equal(step: Step, budget: str | int, make: Make, **options: Any) -> lowtide.Fitted:
    """The same steps by the plain model and within the budget: losses, all that a rank has, and the meter."""
    model, optimizer = make(**options)
    losses = run(lambda *given: step(model, optimizer, *given))
    ours, our_optimizer = make(**options)
    fitted = lowtide.fit(step, ours, our_optimizer, example=batch(0), budget=budget, time_limit=0.5)
    assert_same(losses, run(fitted))
    assert_same(state(model, optimizer), state(ours, our_optimizer))
    assert fitted.peak is not None
    assert fitted.plan.budget is not None
    assert fitted.peak <= fitted.plan.budget, (fitted.peak, fitted.plan.budget)
    return fitted


def take_part(scenarios: Mapping[str, Any]) -> None:
    """Meet the other ranks, and do what the first argument names."""
    warnings.simplefilter("error", lowtide.LowtideWarning)
    torch.set_num_threads(1)
    store = distributed.FileStore(str(FOLDER / "store"), RANKS)
    distributed.init_process_group("gloo", store=store, rank=RANK, world_size=RANKS, timeout=timedelta(seconds=60))
    scenarios[sys.argv[1]]()
    distributed.barrier()
    distributed.destroy_process_group()
