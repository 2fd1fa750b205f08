"""Values kept narrow: equal to eager to the bit, with a lower peak, which is the one that was predicted."""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from twins import assert_exact, same

import lowtide
from lowtide import models
from lowtide.costs import Costs, declared
from lowtide.graph import Graph
from lowtide.measure.bench_call import Call
from lowtide.measure.specimen import specimen
from lowtide.plan.emit import emit
from lowtide.plan.order import captured_order
from lowtide.plan.problem import problem
from lowtide.program import Program
from lowtide.rewrite import with_narrow
from lowtide.rewrite.sizes import sizes_only


def all_narrow(graph: Graph, costs: Costs) -> Program:
    """The captured order, with all that can be kept narrow kept so from its last use in the forward on."""
    after: defaultdict[int, list[int]] = defaultdict(list)
    before: defaultdict[int, list[int]] = defaultdict(list)
    instead: dict[int, int] = {}
    for keep in graph.alternatives:
        uses = (graph.maker[keep.value], *graph.readers[keep.value])
        backward = next(place for place, op in enumerate(uses) if graph.ops[op].phase == "backward")
        after[uses[backward - 1]].append(keep.store)
        before[uses[backward]].extend(keep.restore)
        instead.update(keep.instead)
    order = [run for op in graph.ordinary for run in (*before[op], instead.get(op, op), *after[op])]
    return emit(problem(graph, costs), np.array(order, np.int64))


def assert_narrow(recipe: Any) -> Counter[str]:
    """Train with everything narrow, compare with eager; the dtypes in which values are kept, counted."""
    kinds: Counter[str] = Counter()

    def program(graph: Graph) -> Program:
        kinds.update(graph.values[keep.keeper].dtype for keep in graph.alternatives)
        found = all_narrow(graph, declared(graph))
        lowtide.check(graph, declared(graph), found)
        return found

    assert_exact(recipe, steps=3, change=with_narrow, program=program)
    return kinds


KINDS = {
    "gpt": {"bool": 7},
    "bert": {"bool": 7},
    "dynamicconv": {"bool": 18},
    "resnet": {"bool": 2, "int16": 1},
    "unet": {"bool": 2, "uint8": 2},
    "hf-bert": {"bool": 7},
}


@pytest.mark.parametrize("name", KINDS)
def test_models_are_exact_with_everything_narrow(name: str) -> None:
    assert assert_narrow(lambda: models.build(models.SMALL[name])) == KINDS[name]


def _train(model: nn.Module, optimizer: Any, x: torch.Tensor) -> torch.Tensor:
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def _recipe(make: Callable[[], nn.Module], *shape: int, dtype: torch.dtype = torch.float32, like: Any = None) -> Any:
    def build() -> Any:
        torch.manual_seed(3)
        model = make().to(dtype)
        x = torch.randn(shape, dtype=dtype)
        if like is not None:
            model, x = model.to(memory_format=like), x.to(memory_format=like)
        return _train, model, torch.optim.SGD(model.parameters(), lr=0.1), (x,)

    return build


def _mlp(*, inplace: bool = False) -> nn.Module:
    """Linear layers whose ReLU and dropout follow each other, so that the backward asks only for the ReLU's zeros."""
    relu, dropout = nn.ReLU(inplace=inplace), nn.Dropout(0.3)
    return nn.Sequential(nn.Linear(16, 32), relu, dropout, nn.Linear(32, 32), relu, dropout, nn.Linear(32, 4))


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("shape", [(8, 16), (4, 5, 16)])
def test_relu_and_dropout(shape: tuple[int, ...], inplace: bool) -> None:
    assert assert_narrow(_recipe(lambda: _mlp(inplace=inplace), *shape)) == {"bool": 4}


class Gate(nn.Module):
    """A ReLU and a dropout without a matrix product, which not every processor has for every dtype."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.weight, self.p = nn.Parameter(torch.randn(16)), p

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(nn.functional.relu(x * self.weight), self.p)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("p", [0.1, 0.3, 0.7, 0.999])
def test_every_rate_and_dtype_of_dropout(p: float, dtype: torch.dtype) -> None:
    assert assert_narrow(_recipe(lambda: Gate(p), 8, 16, dtype=dtype)) == {"bool": 2}


def test_dropout_of_whole_channels_and_dropout_that_is_a_draw() -> None:
    class Drawn(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * torch.bernoulli(torch.full_like(x, 0.7))

    def make() -> nn.Module:
        return nn.Sequential(nn.Conv2d(2, 4, 3), nn.Dropout2d(0.3), nn.Conv2d(4, 2, 3), Drawn())

    assert assert_narrow(_recipe(make, 2, 2, 12, 12)) == {"bool": 2}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_a_mask_says_of_a_relu_what_its_result_says(dtype: torch.dtype) -> None:
    tiny = torch.finfo(dtype).smallest_normal / 4  # denormal
    row = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0, -0.0, tiny, -tiny, 2.0], dtype=dtype)
    gradient, result = torch.meshgrid(row, row.relu(), indexing="ij")
    backward = torch.ops.aten.threshold_backward.default
    expected, found = backward(gradient, result, 0), backward(gradient, result.to(torch.bool), 0)
    assert same(expected, found)
    assert expected.isnan().sum() == 4  # where the result is NaN, infinite, tiny and 2


POOLS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], dict[str, int]]] = {
    "max": (lambda: nn.MaxPool2d(3, 2, 1), (2, 2, 12, 12), {"bool": 1, "uint8": 1}),
    "max, dilated": (lambda: nn.MaxPool2d(2, 1, 0, 2, ceil_mode=True), (2, 2, 40, 12), {"bool": 1, "int16": 1}),
    "max, no batch": (lambda: nn.MaxPool2d(2), (2, 12, 12), {"bool": 1, "uint8": 1}),
    "max, volume": (lambda: nn.MaxPool3d(2), (1, 2, 6, 6, 6), {"bool": 1, "uint8": 1}),
    "max, adaptive": (lambda: nn.AdaptiveMaxPool2d((3, 5)), (2, 2, 12, 12), {"bool": 1, "uint8": 1}),
    "average": (lambda: nn.AvgPool2d(3, 2, 1), (2, 2, 12, 12), {"bool": 1}),
    "average, volume": (lambda: nn.AvgPool3d(2), (1, 2, 6, 6, 6), {"bool": 1}),
    "average, adaptive": (lambda: nn.AdaptiveAvgPool2d((3, 5)), (2, 2, 12, 12), {"bool": 1}),
    "average, adaptive, volume": (lambda: nn.AdaptiveAvgPool3d((2, 3, 2)), (1, 2, 6, 6, 6), {"bool": 1}),
}


@pytest.mark.parametrize("name", POOLS)
def test_pools_keep_only_a_mask_and_narrow_indices(name: str) -> None:
    make, shape, kinds = POOLS[name]

    def net() -> nn.Module:
        conv = nn.Conv3d if "volume" in name else nn.Conv2d
        return nn.Sequential(conv(2, 4, 3, padding=1), nn.ReLU(), make(), nn.Tanh())

    assert assert_narrow(_recipe(net, *shape)) == kinds


def test_pools_of_another_layout_still_ask_for_sizes() -> None:
    def net() -> nn.Module:
        return nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 4, 3))

    recipe = _recipe(net, 2, 2, 12, 12, like=torch.channels_last)
    assert assert_narrow(recipe) == {"uint8": 1}


LARGER = {
    "gpt": "gpt:layers=2,width=32,heads=2,context=64,vocabulary=64,batch=8",
    "resnet": "resnet:stages=1-1-1-1,width=8,batch=8,size=64,classes=10",
    "unet": "unet:width=4,depth=2,batch=8,size=32",
}


@pytest.mark.parametrize("name", [*LARGER, "mlp"])
def test_the_peak_is_lower_and_predicted(name: str) -> None:
    step, model, optimizer, example = models.build(LARGER[name]) if name in LARGER else _recipe(_mlp, 512, 16)()
    captured = lowtide.capture(step, model, optimizer, example)
    captured = dataclasses.replace(captured, graph=with_narrow(captured.graph))
    graph = captured.graph
    costs = lowtide.measure(graph)
    assert not costs.notes
    program = all_narrow(graph, costs)
    predicted = lowtide.simulate(graph, costs, program).peak
    assert predicted == lowtide.check(graph, costs, program)
    assert predicted < 0.95 * lowtide.simulate(graph, costs, emit(problem(graph, costs), captured_order(graph))).peak
    run = lowtide.execute(captured, program)
    for _ in range(2):
        run(*example)
    with lowtide.meter() as meter:
        run(*example)
    assert sum(costs.nbytes[item.value] for item in graph.inputs) + meter.peak == predicted


@pytest.mark.parametrize("name", KINDS)
def test_ops_make_what_the_graph_says(name: str) -> None:
    """The dtype, sizes and strides of what each optional op makes, and each op that was changed."""
    captured = lowtide.capture(*models.build(models.SMALL[name])).graph
    graph = with_narrow(captured)
    for op, item in enumerate(graph.ops):
        if item in captured.ops:
            continue
        (made,) = graph.makes[op]
        value, tensor = graph.values[made], Call(specimen(graph, op)).run()
        assert (tensor.dtype, tensor.shape, tensor.stride()) == (getattr(torch, value.dtype), value.shape, value.stride)


def test_reads_for_sizes_are_gone() -> None:
    graph = lowtide.capture(*models.build(models.SMALL["unet"])).graph
    pools = [op for op in graph.ordinary if graph.ops[op].target == "aten.max_pool2d_with_indices_backward.default"]
    assert [len(graph.reads[op]) for op in pools] == [3, 3]
    assert [len(sizes_only(graph).reads[op]) for op in pools] == [2, 2]
    assert_exact(
        lambda: models.build(models.SMALL["unet"]), steps=2, change=sizes_only, program=lowtide.keep_everything
    )


def test_optional_ops_are_priced() -> None:
    graph = with_narrow(lowtide.capture(*models.build(LARGER["resnet"])).graph)
    for costs in (lowtide.measure(graph), lowtide.roofline(graph)):
        for keep in graph.alternatives:
            narrow = (keep.store, *keep.restore, *(op for _, op in keep.instead))
            assert all(costs.seconds[op] > 0 for op in narrow)
            assert costs.nbytes[keep.keeper] == graph.values[keep.keeper].nbytes < costs.nbytes[keep.value]
            for ordinary, instead in keep.instead:
                (made,), gradient = graph.makes[ordinary], graph.reads[ordinary][0]
                assert (made, gradient) in costs.in_place[instead]
