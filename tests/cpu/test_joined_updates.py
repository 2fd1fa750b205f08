"""Updates that are one call for each parameter train as eager does, to the bit, whatever the optimizer."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import torch
from torch import nn
from trying import assert_torchs_bits
from twins import assert_exact

import lowtide
from lowtide import models
from lowtide.graph import Graph
from lowtide.kernels import chains
from lowtide.plan import as_eager
from lowtide.rewrite.joined_updates import joined_updates

needs_kernels = pytest.mark.skipif(chains.library() is None, reason="no compiler, or no headers of torch, here")
OPTIMIZERS = ("sgd", "nesterov", "adam", "adamw", "rmsprop", "adagrad")


def _joined(graph: Graph) -> Graph:
    changed = joined_updates(graph)
    assert changed.fault is None
    assert any(op.target == chains.CHAIN for op in changed.ops)
    assert_torchs_bits(changed)
    return changed


@needs_kernels
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_optimizer_trains_as_in_eager(optimizer: str) -> None:
    target = f"{models.SMALL['mlp']},optimizer={optimizer}"
    assert_exact(lambda: models.build(target), change=_joined, program=as_eager)


@needs_kernels
def test_each_parameter_has_one_call() -> None:
    step, model, optimizer, example = models.build(models.SMALL["mlp"])
    graph = lowtide.capture(step, model, optimizer, example).graph
    changed = joined_updates(graph)
    counts = Counter(op.target for op in changed.ops if op.phase == "update")
    parameters = len(list(model.parameters()))
    assert counts[chains.CHAIN] == parameters
    assert counts["aten.add_.Tensor"] == 0
    name = next(op.name for op in changed.ops if op.target == chains.CHAIN)
    left = Counter(op.target for op in joined_updates(graph, name).ops)
    assert left[chains.CHAIN] == parameters - 1


def _average() -> tuple[Callable[..., Any], nn.Module, Any, tuple[Any, ...]]:
    torch.manual_seed(3)
    model = nn.Linear(16, 8)
    model.register_buffer("mean", torch.zeros(8, 16))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1, amsgrad=False)

    def step(model: Any, optimizer: Any, x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        with torch.no_grad():
            model.mean.lerp_(model.weight, 0.1)
            return loss.detach() + model.weight.sum()

    return step, model, optimizer, (torch.randn(4, 16, generator=torch.Generator().manual_seed(5)),)


@needs_kernels
def test_weights_that_are_read_after_their_update_are_those_after_it() -> None:
    assert_exact(_average, change=_joined, program=as_eager)


@needs_kernels
def test_lines_that_name_what_is_not_there_are_refused() -> None:
    tensor = torch.zeros(8)
    add = chains.LINES.index("add")
    for code in ([0, 0, 5, 0, 0, 0], [add, 0, 0, 1, 0, 0], [0, 99, 0, 0, 0, 0], [1, 0, 0, 0, 0, 0], [0, 0, 0]):
        with pytest.raises(ValueError, match="do not belong"):
            chains.update([tensor], [tensor.clone()], code, [1.0])
    with pytest.raises(ValueError, match="do not belong"):
        chains.update([torch.zeros(7)], [tensor], [0, 0, 0, 0, 0, 0], [])


def _penalised() -> tuple[Callable[..., Any], nn.Module, Any, tuple[Any, ...]]:
    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(8, 3), nn.Tanh(), nn.Linear(3, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(model: Any, optimizer: Any, x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        gradients = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        (loss + sum(one.square().sum() for one in gradients)).backward()
        optimizer.step()
        return loss.detach()  # type: ignore[no-any-return]

    return step, model, optimizer, (torch.randn(4, 8, generator=torch.Generator().manual_seed(6)),)


@needs_kernels
def test_a_gradient_whose_memory_has_another_order_than_its_dimensions() -> None:
    """It is seen turned, in the order of memory, and all of its updates are joined."""
    joined: list[Graph] = []
    assert_exact(_penalised, change=lambda graph: (joined.append(_joined(graph)), joined[-1])[1], program=as_eager)
    ops = [op for op in joined[0].ops if op.target == chains.CHAIN]
    assert len(ops) == 4
    assert any(read.view is not None for op in ops for read in op.arguments())


class Zeros(torch.optim.SGD):
    """Updates that add zeros of both signs, and multiply by them."""

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            with torch.no_grad():
                kept = (parameter.grad * 0.0 + -0.0) * 0.0
                parameter.mul_(-0.0).add_(kept)


@needs_kernels
def test_zeros_of_either_sign_are_two_numbers() -> None:
    def recipe() -> tuple[Callable[..., Any], nn.Module, Any, tuple[Any, ...]]:
        step, model, _, example = _penalised()
        return step, model, Zeros(model.parameters(), lr=0.1), example

    assert_exact(recipe, steps=2, change=_joined, program=as_eager)


READS = {"add": 2, "multiply": 2, "divide": 2, "lerp": 2, "add product": 3, "add quotient": 3}
NUMBERS = (0.1, -0.3, 0.5, 0.4999999, 1.5, 1e-8, 0.0, -1.0, 3e38)
COUNTS = (1, 2, 7, 15, 16, 17, 63, 511, 512, 513, 4097, 16384, 16385, 32768, 50_003)


@needs_kernels
@pytest.mark.parametrize("threads", [1, 2])
def test_every_line_has_torchs_bits_with_any_number(threads: int) -> None:
    """Ordinary numbers, and NaN, infinities, zeros of both signs and denormals among them, whatever the size."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        random = Random(threads)
        for name in chains.LINES[2:]:
            for count in COUNTS:
                _assert_line(name, count, random.choice(NUMBERS), random.random() < 0.5)
        for count in (*COUNTS, 65_537, 100_003):
            _assert_line("lerp", count, 1.0, special=True)  # zero times the way: its sign is of zeros alone
    finally:
        torch.set_num_threads(before)


def _assert_line(name: str, count: int, number: float, special: bool) -> None:
    generator = torch.Generator().manual_seed(count)
    given = [torch.randn(count, generator=generator, dtype=torch.float32) for _ in range(3)]
    if special:
        values = torch.tensor([math.nan, math.inf, -math.inf, -0.0, 0.0, 1e-40, -1e-40, 3e38])
        for tensor in given:
            places = torch.randint(count, (count // 3 + 1,), generator=generator)
            tensor[places] = values[torch.randint(len(values), places.shape, generator=generator)]
    loads = [word for place in range(3) for word in (0, place, place, 0, 0, 0)]
    reads = [0, 1, 2][: READS.get(name, 1)]
    line = [chains.LINES.index(name), 3, *reads, *([0] * (3 - len(reads))), 0]
    mine, theirs = given[2].clone(), given[2].clone()
    for run, target in ((chains.update, mine), (chains.by_torch, theirs)):
        run(given[:2], [target], [*loads, *line, 1, 0, 3, 0, 0, 0], [number])
    assert torch.equal(mine.view(torch.int32), theirs.view(torch.int32)), (name, count, number, special)
