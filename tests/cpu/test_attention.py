"""Attention in chunks of heads trains as eager does, to the bit, and each of its calls has the bits of torch's own."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from trying import assert_torchs_bits
from twins import assert_exact

from lowtide import models
from lowtide.costs import declared
from lowtide.graph import Graph
from lowtide.kernels import attention as ops
from lowtide.kernels import attention_plain as by_torch
from lowtide.plan import as_eager
from lowtide.plan.emit import emit
from lowtide.plan.problem import problem
from lowtide.program import Program
from lowtide.rewrite.attention import attention

needs_kernels = pytest.mark.skipif(ops.library() is None, reason="no compiler, or no headers of torch, here")
TARGETS = ("gpt", "bert", "hf-gpt2", "dynamicconv")
PLAIN = f"{models.SMALL['gpt']},attention=plain"


def _targets(graph: Graph) -> set[str]:
    return {op.target for op in graph.ops} & {one.target for one in ops.OWN}


def _in_chunks(graph: Graph, dropped: bool = True) -> Graph:
    """The graph with attention in chunks: all of it, and with torch's bits."""
    changed = attention(graph)
    assert changed.fault is None
    wanted = (ops.DROPPED, ops.DROPPED_BACKWARD) if dropped else (ops.PLAIN, ops.BACKWARD)
    assert set(wanted) <= _targets(changed)
    assert_torchs_bits(changed)
    return changed


@needs_kernels
@pytest.mark.parametrize("name", TARGETS)
def test_models_train_in_chunks_as_eager_does(name: str) -> None:
    assert_exact(lambda: models.build(models.SMALL[name]), change=_in_chunks, program=as_eager)


@needs_kernels
@pytest.mark.parametrize("dropout", [0.0, 0.25, 0.5])  # 0.5 is what torch draws with unless it is told
def test_attention_that_is_written_out_trains_as_eager_does(dropout: float) -> None:
    target = f"{PLAIN},dropout={dropout}"
    assert_exact(lambda: models.build(target), change=partial(_in_chunks, dropped=dropout > 0), program=as_eager)


@needs_kernels
def test_what_is_drawn_is_drawn_again_where_it_runs_again() -> None:
    def program(graph: Graph) -> Program:
        order: list[int] = []
        for index in graph.ordinary:
            if graph.ops[index].target == ops.DROPPED_BACKWARD:
                order += [graph.maker[value] for value in graph.reads[index] if graph.values[value].dtype == "uint8"]
            order.append(index)
        assert len(order) > len(graph.ordinary)
        return emit(problem(graph, declared(graph)), np.array(order, np.int64))

    assert_exact(lambda: models.build(models.SMALL["gpt"]), change=_in_chunks, program=program)


class Two(nn.Module):
    """Attention whose weights somebody else reads, and another one that is named to stay."""

    def forward(self, x: Tensor) -> Tensor:
        weights = torch.softmax(x @ x.transpose(1, 2), -1)
        other = torch.softmax(x @ x.transpose(1, 2) * 0.5, -1) @ x
        return (weights @ x).mean() + weights.square().mean() + other.square().mean()


def _two() -> tuple[Callable[..., Any], nn.Module, Any, tuple[Any, ...]]:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(8, 8), Two())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(model: nn.Module, optimizer: Any, x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(x)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step, model, optimizer, (torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(5)),)


@needs_kernels
def test_weights_with_other_readers_and_named_softmaxes_stay() -> None:
    seen: list[Graph] = []

    def change(graph: Graph) -> Graph:
        changed = attention(graph)
        seen.extend((graph, changed))
        return changed

    assert_exact(_two, change=change, program=as_eager)
    before, after = seen
    softmaxes = [op.name for op in before.ops if op.target == "aten._softmax.default"]
    assert len(softmaxes) == 2
    assert [op.name for op in after.ops if op.target == "aten._softmax.default"] == softmaxes[:1]
    assert attention(before, softmaxes[1]) == before


def _given(sizes: tuple[int, ...], mask: str, special: bool) -> tuple[Tensor, tuple[Any, ...]]:
    examples, heads, rows, size, width, wide = sizes
    generator = torch.Generator().manual_seed(3)
    made = partial(torch.randn, generator=generator, dtype=torch.float32)
    query, gradient = (made(examples, rows, heads, columns).transpose(1, 2) for columns in (width, wide))
    key = made(examples, size, heads, width).permute(0, 2, 3, 1)
    value = made(examples, size, heads, wide).transpose(1, 2)
    if special:
        for tensor in (query, key, value, gradient):
            tensor[0, 0, :2, :2] = torch.tensor([[math.nan, math.inf], [-0.0, 1e-40]])
    hidden = {
        "none": None,
        "added": torch.where(torch.rand(rows, size, generator=generator) < 0.3, -math.inf, 0.0),
        "hidden": torch.rand(examples, 1, 1, size, generator=generator) < 0.3,
    }[mask]
    scales = [1.0, 1.0, 1.0, 2.8284] if mask == "hidden" else [0.35, 0.35, 1.0, 1.0]
    return gradient, (query, key, value, hidden, heads, scales, -math.inf, [True] * 3, mask != "hidden")


def _assert_same(mine: Any, theirs: Any) -> None:
    """The same bits; of rows that are no whole vectors, which of several NaN is kept is for the trial to say."""
    for one, other in zip(mine, theirs, strict=True):
        assert (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)
        nan = torch.isnan(one)
        assert torch.equal(nan, torch.isnan(other))
        bits = [torch.where(nan, 0, part).view(torch.uint8) for part in (one, other)]
        assert torch.equal(*bits)


@needs_kernels
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("mask", ["none", "added", "hidden"])
@pytest.mark.parametrize("sizes", [(2, 3, 37, 41, 24, 20), (1, 1, 5, 3, 8, 8), (3, 5, 16, 128, 16, 16)], ids=str)
def test_each_call_has_torchs_bits(sizes: tuple[int, ...], mask: str, threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for special in (False, True):
            gradient, given = _given(sizes, mask, special)
            for layout in (by_torch.FLAT, by_torch.JOINED):
                _assert_same([ops.attention(*given, layout)], [by_torch.attention(*given, layout)])
                torch.manual_seed(5)
                mine, after = ops.dropped_attention(*given, 0.9, layout), torch.get_rng_state()
                torch.manual_seed(5)
                _assert_same(mine, by_torch.dropped_attention(*given, 0.9, layout))
                assert torch.equal(after, torch.get_rng_state())
            kept, layouts = mine[1], [by_torch.JOINED, by_torch.APART, by_torch.FLAT]
            backs = (ops.attention_backward, by_torch.attention_backward)
            _assert_same(*(back(gradient, *given, True, layouts) for back in backs))
            backs = (ops.dropped_attention_backward, by_torch.dropped_attention_backward)
            _assert_same(*(back(gradient, kept, *given, 0.9, True, layouts) for back in backs))
    finally:
        torch.set_num_threads(before)


@needs_kernels
def test_sizes_that_do_not_fit_raise_what_torch_raises() -> None:
    _, given = _given((2, 3, 4, 5, 8, 8), "none", special=False)
    with pytest.raises(RuntimeError):
        ops.attention(given[0], given[1][:, :, :4], *given[2:], by_torch.FLAT)
