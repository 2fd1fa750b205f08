"""Two equal training runs, one in eager PyTorch and one by a lowtide program, compared to the bit."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import torch

import lowtide
from lowtide import tree
from lowtide.device import Device

Recipe = Callable[[], tuple[Any, torch.nn.Module, Any, tuple[Any, ...]]]


def everything(model: torch.nn.Module, optimizer: Any) -> dict[str, Any]:
    """All that a training step may change: parameters, buffers, gradients, optimizer state."""
    found: dict[str, Any] = {f"model {name}": tensor for name, tensor in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        found[f"gradient {name}"] = parameter.grad
    if optimizer is not None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        for number, parameter in enumerate(parameters):
            for key, item in optimizer.state.get(parameter, {}).items():
                found[f"state {number} {key}"] = item
    return found


def same(one: Any, other: Any) -> bool:
    """Whether two leaves are equal, bit for bit where they are tensors."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        if one.dtype != other.dtype or one.shape != other.shape:
            return False
        if one.dtype.is_floating_point:
            kind = {2: torch.int16, 4: torch.int32, 8: torch.int64}[one.element_size()]
            return torch.equal(one.detach().contiguous().view(kind), other.detach().contiguous().view(kind))
        return torch.equal(one, other)
    return type(one) is type(other) and one == other


def assert_same(expected: dict[str, Any], found: dict[str, Any]) -> None:
    """Fail with the names of all that differs."""
    differing = [key for key in {**expected, **found} if not same(expected.get(key), found.get(key))]
    assert not differing, differing[:10]


def assert_exact(
    recipe: Recipe,
    *,
    steps: int = 5,
    batches: Iterable[tuple[Any, ...]] | None = None,
    between: Callable[[Any, Any], None] | None = None,
    change: Callable[[lowtide.Graph], lowtide.Graph] | None = None,
    program: Callable[[lowtide.Graph], lowtide.Program] | None = None,
    budget: int | str | None = None,
    make: Callable[..., Any] | None = None,
    device: Device | None = None,
) -> Any:
    """Train twice, with and without lowtide, and compare everything after every step; return the fitted step.

    `make` makes of what the recipe returns what takes the steps; otherwise `fit` does, or a program for the graph.
    """
    step, model, optimizer, example = recipe()
    mirrored_step, mirror, mirrored_optimizer, _ = recipe()
    if make is not None:
        train: Any = make(mirrored_step, mirror, mirrored_optimizer, example)
    elif program is None:
        train = lowtide.fit(
            mirrored_step,
            mirror,
            mirrored_optimizer,
            example=example,
            budget=budget,
            time_limit=0.3,
            costs="measured" if budget is not None else "roofline",
        )
    else:
        captured = lowtide.capture(mirrored_step, mirror, mirrored_optimizer, example)
        if change is not None:
            captured = dataclasses.replace(captured, graph=change(captured.graph))
        train = lowtide.execute(captured, program(captured.graph), device=device)
    assert_same(everything(model, optimizer), everything(mirror, mirrored_optimizer))
    given = list(batches) if batches is not None else [example] * steps
    state = torch.Generator().manual_seed(1234).get_state()
    for number, batch in enumerate(given):
        torch.set_rng_state(state)
        expected, _ = tree.flatten(step(model, optimizer, *batch))
        after = torch.get_rng_state()
        torch.set_rng_state(state)
        found, _ = tree.flatten(train(*batch))
        assert torch.equal(after, torch.get_rng_state()), f"the generator differs after step {number}"
        state = after
        assert [same(a, b) for a, b in zip(expected, found, strict=True)] == [True] * len(expected), (expected, found)
        assert_same(everything(model, optimizer), everything(mirror, mirrored_optimizer))
        if between is not None:
            between(model, optimizer)
            between(mirror, mirrored_optimizer)
    return train
