"""Products with sparse weights against torch's dense ones in double precision, and whole steps that take them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy
import pytest
import torch
from formed import batches, distance, eager, made, run, train
from torch import Tensor

import lowtide
from lowtide import kernels
from lowtide.kernels import sparse

# images, channels in and out, height and width, kernel, stride, padding, dilation
WINDOWS = (
    (1, 32, 32, (32, 32), (3, 3), (1, 1), (1, 1), (1, 1)),
    (2, 64, 96, (16, 16), (3, 3), (2, 2), (1, 1), (1, 1)),
    (3, 64, 96, (16, 16), (1, 1), (2, 2), (0, 0), (1, 1)),
    (2, 128, 130, (8, 8), (3, 3), (1, 1), (1, 1), (1, 1)),
    (2, 16, 48, (7, 9), (3, 3), (1, 1), (1, 1), (1, 1)),
    (1, 5, 7, (13, 11), (5, 3), (3, 2), (2, 0), (2, 1)),
    (1, 3, 20, (20, 21), (7, 7), (2, 2), (3, 3), (1, 1)),
    (1, 40, 17, (6, 6), (2, 2), (1, 1), (0, 0), (1, 1)),
    (1, 400, 3, (3, 3), (3, 3), (1, 1), (2, 2), (1, 1)),
    (1, 4, 4, (2, 70), (1, 1), (3, 3), (1, 1), (1, 1)),
)
NEAR = 1e-6  # of the norm: sums of a thousand floats


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def weight(size: tuple[int, ...], density: float, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Values, their mask as bytes and as truth values, and the dense weight in double precision."""
    drawn, elements = torch.Generator().manual_seed(len(size)), math.prod(size)
    bits = torch.rand(elements, generator=drawn) < density
    mask = torch.from_numpy(numpy.packbits(bits.numpy(), bitorder="little"))
    values = torch.randn(int(bits.sum()), generator=drawn).to(dtype)
    dense = torch.zeros(elements, dtype=torch.float64)
    dense[bits] = values.double()
    return values, mask, bits, dense.view(size)


def apart(found: Tensor, expected: Tensor) -> float:
    expected = expected.detach()
    return float((found.double() - expected).norm() / expected.norm().clamp_min(1e-30))


def convolved(
    window: tuple[Any, ...], x: Tensor, g: Tensor, values: Tensor, mask: Tensor | None, bias: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    _, channels, made, _, kernel, *sides = window
    size, more = [made, channels, *kernel], [list(side) for side in sides]
    return (
        sparse.convolution(x, values, mask, bias, size, *more),
        sparse.convolution_input(g, values, mask, list(x.shape), size, *more),
        sparse.convolution_weight(g, x, mask, values.numel(), size, *more),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("compiled", [True, False])
def test_convolutions_are_those_of_the_dense_weight(
    window: tuple[Any, ...], dtype: torch.dtype, threads: int, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if compiled:
        assert sparse.library() is not None
    else:
        monkeypatch.setattr(sparse, "library", lambda: None)
    images, channels, made, sides, kernel, stride, padding, dilation = window
    values, mask, bits, dense = weight((made, channels, *kernel), 0.3, dtype)
    x = torch.randn(images, channels, *sides)
    bias = torch.randn(made)
    given, dense = x.double().requires_grad_(), dense.requires_grad_()
    expected = torch.conv2d(given, dense, bias.double(), stride, padding, dilation)
    g = torch.randn(expected.shape)
    expected.backward(g.double())
    assert given.grad is not None
    assert dense.grad is not None
    found = convolved(window, x, g, values, mask, bias)
    assert found[0].is_contiguous()
    for one, other in zip(found, (expected, given.grad, dense.grad.view(-1)[bits]), strict=True):
        assert one.shape == other.shape
        assert apart(one, other) < NEAR
    again = convolved(window, x, g, dense.detach().float(), None, bias)  # without a mask
    assert not compiled or torch.equal(again[2].view(-1)[bits], found[2])
    assert all(apart(one, other) < NEAR for one, other in zip(again, (expected, given.grad, dense.grad), strict=True))
    lying = convolved(window, x.to(memory_format=torch.channels_last), g.mT.contiguous().mT, values, mask, bias)
    assert not compiled or all(torch.equal(one, other) for one, other in zip(found, lying, strict=True))


@pytest.mark.parametrize("examples", [1, 63, 64, 200])
@pytest.mark.parametrize("density", [0.0, 0.1, 1.0])
def test_linear_layers_are_those_of_the_dense_weight(examples: int, density: float, threads: int) -> None:
    values, mask, bits, dense = weight((70, 131), density, torch.float16)
    x, bias, g = torch.randn(examples, 131), torch.randn(70), torch.randn(70, examples).t()
    found = (
        sparse.linear(x, values, mask, bias, [70, 131]),
        sparse.linear(x, values, mask, None, [70, 131]),
        sparse.linear_input(g, values, mask, [70, 131]),
        sparse.linear_weight(g, x, mask, values.numel(), [70, 131]),
    )
    plain = x.double() @ dense.t()
    expected = (plain + bias, plain, g.double() @ dense, (g.double().t() @ x.double()).view(-1)[bits])
    assert all(apart(one, other) < NEAR for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("kernel", [1, 3, 5])
def test_results_may_be_written_over_what_they_are_made_of(kernel: int, threads: int) -> None:
    """With bands of rows that need rows of the band before."""
    size, sides = [48, 48, kernel, kernel], ([1, 1], [kernel // 2] * 2, [1, 1])
    values, mask, _, _ = weight((48, 48, kernel, kernel), 0.3, torch.float16)
    x = torch.randn(2, 48, 40, 40)
    expected = sparse.convolution(x, values, mask, None, size, *sides)
    over = x.clone()
    assert sparse.convolution(over, values, mask, None, size, *sides, out=over) is over
    assert torch.equal(over, expected)
    expected = sparse.convolution_input(x, values, mask, list(x.shape), size, *sides)
    over = x.clone()
    sparse.convolution_input(over, values, mask, list(x.shape), size, *sides, out=over)
    assert torch.equal(over, expected)
    assert kernels.overwriter(sparse.CONVOLUTION, itself=False) is not None
    with pytest.raises(ValueError, match="written over"):
        sparse.convolution(x, values, mask, None, size, *sides, out=x[:1])


def test_threads_do_not_change_a_bit() -> None:
    window = WINDOWS[1]
    values, mask, _, _ = weight((96, 64, 3, 3), 0.3, torch.float32)
    x, g, bias = torch.randn(2, 64, 16, 16), torch.randn(2, 96, 8, 8), torch.randn(96)
    before, found = torch.get_num_threads(), []
    for count in (1, 2, 3, 7):
        torch.set_num_threads(count)
        found.append(convolved(window, x, g, values, mask, bias))
    torch.set_num_threads(before)
    assert all(torch.equal(one, other) for some in found[1:] for one, other in zip(found[0], some, strict=True))


def test_sizes_that_do_not_belong_together_are_refused() -> None:
    values, mask, _, _ = weight((8, 4, 3, 3), 0.3, torch.float32)
    x, sides = torch.randn(1, 4, 8, 8), ([1, 1], [1, 1], [1, 1])
    for wrong in (
        lambda: sparse.convolution(x[:, :3], values, mask, None, [8, 4, 3, 3], *sides),
        lambda: sparse.convolution(x.double(), values, mask, None, [8, 4, 3, 3], *sides),
        lambda: sparse.convolution(x, values, mask[:-1], None, [8, 4, 3, 3], *sides),
        lambda: sparse.convolution(x, values.double(), mask, None, [8, 4, 3, 3], *sides),
        lambda: sparse.convolution(x, values, mask, torch.ones(7), [8, 4, 3, 3], *sides),
        lambda: sparse.convolution(x[..., :1, :1], values, mask, None, [8, 4, 3, 3], [1, 1], [0, 0], [1, 1]),
        lambda: sparse.convolution_input(torch.ones(1, 8, 7, 8), values, mask, [1, 4, 8, 8], [8, 4, 3, 3], *sides),
        lambda: sparse.convolution_weight(torch.ones(2, 8, 8, 8), x, mask, 9, [8, 4, 3, 3], *sides),
        lambda: sparse.linear(torch.ones(3, 35), values, mask, None, [8, 36]),
        lambda: sparse.linear_input(torch.ones(3, 9), values, mask, [8, 36]),
        lambda: sparse.linear_weight(torch.ones(3, 8), torch.ones(4, 36), mask, 9, [8, 36]),
        lambda: sparse.linear_weight(torch.ones(3, 8), torch.ones(3, 36), mask, 999, [8, 36]),
    ):
        with pytest.raises(ValueError, match=r"no |not|are|gives"):
            wrong()


def test_a_mask_with_other_bits_than_values_reaches_for_nothing_else() -> None:
    x, sides, size = torch.randn(1, 4, 8, 8), ([1, 1], [1, 1], [1, 1]), [8, 4, 3, 3]
    mask = torch.full((36,), 255, dtype=torch.uint8)
    for values in (torch.ones(3), torch.ones(288)):
        made = sparse.convolution(x, values, mask, None, size, *sides)
        assert torch.isfinite(made).all()
        assert torch.isfinite(sparse.convolution_input(made, values, mask, [1, 4, 8, 8], size, *sides)).all()
        assert sparse.convolution_weight(made, x, mask, values.numel(), size, *sides).shape == values.shape


TARGETS = {sparse.CONVOLUTION, sparse.CONVOLUTION_INPUT, sparse.CONVOLUTION_WEIGHT}
TARGETS |= {sparse.LINEAR, sparse.LINEAR_INPUT, sparse.LINEAR_WEIGHT}


@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "adam"])
@pytest.mark.parametrize("more", [(), ("microbatch:4",), ("microbatch:4", "weights16", "state8")], ids="+".join)
@pytest.mark.filterwarnings("ignore:.*weights that were not zero are zero now")
def test_steps_with_kernels_are_those_with_dense_weights(optimizer: str, more: tuple[str, ...]) -> None:
    given, runs = batches(5), []
    for setting in ("0.3", "0.3/dense"):
        model, one = made(optimizer, convolutions=True)
        model[-5] = torch.nn.Identity()  # parts draw other numbers for dropout
        step = run((*more, f"sparse:{setting}"), model, one, given[0])
        runs.append((train(step, given), model, step.captured.graph))
    graph = runs[0][2]
    assert {op.target for op in graph.ops} >= TARGETS
    assert not TARGETS.intersection(op.target for op in runs[1][2].ops)
    whole = {one.shape for one in graph.values if one.form == "plain"}
    assert not whole.intersection({(48, 16, 3, 3), (64, 192), (96, 64)}), "no dense weight, gradient or state is made"
    assert max(abs(a - b) for a, b in zip(runs[0][0], runs[1][0], strict=True)) < (1e-4 if not more else 5e-3)
    assert distance(runs[0][1], runs[1][1]) < (1e-5 if len(more) < 2 else 2e-2)


@pytest.mark.filterwarnings("ignore:.*weights that were not zero are zero now")
def test_a_gradient_that_is_clipped_stays_dense() -> None:
    from lowtide.rewrite import EXACT, apply
    from lowtide.rewrites import Rewrite

    def clipped(model: Any, optimizer: Any, inputs: Tensor, labels: Tensor) -> Tensor:
        loss = torch.nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    model, one = made("sgd", convolutions=True)
    captured = lowtide.capture(clipped, model, one, batches(1)[0])
    graph = apply(captured.graph, [*EXACT, Rewrite("sparse", 0.3)]).graph
    targets = {op.target for op in graph.ops}
    assert sparse.CONVOLUTION in targets
    assert "aten.convolution_backward.default" in targets
    of_weights = [op for op in graph.ops if op.target in (sparse.CONVOLUTION_WEIGHT, sparse.LINEAR_WEIGHT)]
    assert all(op.args[2] is None for op in of_weights), "only what has no mask"


def test_with_all_weights_there_a_step_is_eager_s() -> None:
    given = batches(3)
    model, one = made("sgd", convolutions=True)
    expected = train(eager(model, one), given)
    mirror, other = made("sgd", convolutions=True)
    step = run(("sparse:0.9999",), mirror, other, given[0])
    found = train(step, given)
    assert {op.target for op in step.captured.graph.ops} >= TARGETS
    assert max(abs(a - b) for a, b in zip(expected, found, strict=True)) < 1e-5
    assert distance(model, mirror) < 1e-6


@pytest.mark.filterwarnings("ignore:.*weights that were not zero are zero now")
def test_the_gradient_of_the_input_is_made_last() -> None:
    """By then nobody else reads the incoming gradient, on which it may lie."""
    model, optimizer = made("sgd", convolutions=True)
    names = [op.name for op in run(("sparse:0.3",), model, optimizer, batches(1)[0]).captured.graph.ops]
    inputs = [name for name in names if name.startswith("convolution_backward") and name.endswith("_input")]
    assert inputs
    for name in inputs:
        assert names.index(name.replace("_input", "_weight")) < names.index(name)


@pytest.mark.filterwarnings("ignore:.*weights that were not zero are zero now")
def test_plans_write_results_over_what_they_are_made_of() -> None:
    """The least plan of a net of equal layers does, and changes no bit."""
    given, runs = batches(3), []

    def least(graph: lowtide.Graph, costs: lowtide.Costs) -> lowtide.Program:
        places = [place for place, op in enumerate(graph.ops) if op.target in TARGETS and costs.in_place[place]]
        assert places, "some results may lie on what they are made of"
        with pytest.raises(lowtide.BudgetError) as refused:
            lowtide.plan(graph, costs, 1, time_limit=0.2)
        return lowtide.plan(graph, costs, int(refused.value.least or 0), time_limit=0.2).program

    for program in (None, least):
        torch.manual_seed(0)
        layers = [layer for _ in range(4) for layer in (torch.nn.Conv2d(24, 24, 3, padding=1), torch.nn.ReLU())]
        model = torch.nn.Sequential(torch.nn.Conv2d(3, 24, 1), *layers, torch.nn.Flatten(), torch.nn.Linear(1536, 10))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        step = run(("sparse:0.3",), model, optimizer, given[0], program=program, measured=program is not None)
        runs.append((train(step, given), [one.detach().clone() for one in model.parameters()]))
    assert runs[0][0] == runs[1][0]
    assert all(torch.equal(a, b) for a, b in zip(runs[0][1], runs[1][1], strict=True))
