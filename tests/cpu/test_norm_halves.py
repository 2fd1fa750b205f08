"""Batch norm in halves: torch's numbers up to rounding, and second halves that may lie on what they are made of."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import lowtide
from lowtide import models
from lowtide.kernels.norm_halves import APPLY, SPREAD
from lowtide.plan.problem import problem
from lowtide.resized import resizable
from lowtide.rewrite import EXACT, apply, named

OURS: Any = torch.ops.lowtide
NORM, BACKWARD = torch.ops.aten.native_batch_norm, torch.ops.aten.native_batch_norm_backward
CLOSE = 2e-6  # of numbers about 1


@pytest.mark.parametrize("shape", [(8, 6, 5, 5), (3, 17), (2, 1, 1, 40)], ids=str)
@pytest.mark.parametrize("weighted", [True, False])
def test_halves_are_torch_s_batch_norm(shape: tuple[int, ...], weighted: bool) -> None:
    torch.manual_seed(0)
    x, gradient = torch.randn(shape), torch.randn(shape)
    weight, bias = (torch.rand(shape[1]) + 0.5, torch.randn(shape[1])) if weighted else (None, None)
    expected, mean, inverse = NORM(x, weight, bias, None, None, True, 0.1, 1e-5)
    saved, sums = OURS.norm_statistics(x, 1e-5)
    made = OURS.norm_apply(x, weight, bias, saved)
    assert torch.allclose(made, expected, rtol=0, atol=CLOSE)
    assert torch.allclose(sums[0] / sums[2], mean.double(), atol=CLOSE)
    of_input, of_weight, of_bias = BACKWARD(gradient, x, weight, None, None, mean, inverse, True, 1e-5, [True] * 3)
    mine_weight, mine_bias, terms = OURS.norm_terms(gradient, x, weight, saved)
    mine = OURS.norm_spread(gradient, x, weight, saved, terms)
    scale = max(1.0, float(of_input.abs().max()))
    assert torch.allclose(mine, of_input, rtol=0, atol=5 * CLOSE * scale)
    if weighted:
        assert torch.allclose(mine_weight, of_weight, rtol=1e-5, atol=1e-5)
        assert torch.allclose(mine_bias, of_bias, rtol=1e-5, atol=1e-5)
    for onto in (gradient.clone(), x.clone()):
        over = (onto, x) if torch.equal(onto, gradient) else (gradient, onto)
        OURS.norm_spread.out(*over, weight, saved, terms, out=onto)
        assert torch.equal(onto, mine)
    onto = x.clone()
    OURS.norm_apply.out(onto, weight, bias, saved, out=onto)
    assert torch.equal(onto, made)


def test_other_layouts_and_precisions_are_refused() -> None:
    for x in (torch.randn(4, 3, 2, 2).double(), torch.randn(4, 3, 2, 2).transpose(2, 3), torch.randn(2, 3)[:, ::2]):
        with pytest.raises(ValueError, match="in halves"):
            OURS.norm_statistics(x, 1e-5)


def test_a_split_step_writes_over_the_gradients_of_its_batch_norms() -> None:
    step, model, optimizer, example = models.build("wrn-28-2:blocks=1,batch=8")
    captured = lowtide.capture(step, model, optimizer, example)
    sizes = resizable(captured.graph, example, lambda batch: lowtide.capture(step, model, optimizer, batch).graph)
    one = named("split")
    assert one is not None
    graph = apply(captured.graph, (*EXACT, one.by(0.25)), sizes).graph
    arrays = problem(graph, lowtide.measure(graph))
    halves = [index for index in graph.ordinary if graph.ops[index].target in (APPLY, SPREAD)]
    assert halves
    spreads = [index for index in halves if graph.ops[index].target == SPREAD]
    assert all(arrays.over_rows[index] for index in spreads)
