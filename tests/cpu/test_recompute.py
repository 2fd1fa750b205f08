"""Functions that forget: equal to the same functions without lowtide.recompute, to the bit, with less memory."""

from __future__ import annotations

import copy
import functools
import io
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from twins import assert_exact, assert_same, everything

import lowtide
from lowtide.recompute import second_run

WIDTH = 16


class Norms(nn.Module):
    """Dropout, batch norm, spectral norm, a buffer that is put in the place of another, a counter, an inplace relu."""

    ema: Tensor

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.inner, self.norm = nn.Linear(width, 4 * width), nn.BatchNorm1d(4 * width)
        self.outer = nn.utils.parametrizations.spectral_norm(nn.Linear(4 * width, width))
        self.register_buffer("ema", torch.zeros(()))
        self.register_buffer("count", torch.zeros(()))
        self.calls = 0

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        self.calls += 1
        hidden = F.relu(self.norm(self.inner(x)), inplace=True)
        made: Tensor = self.outer(F.dropout(hidden, 0.2)) * scale
        self.ema = 0.9 * self.ema + 0.1 * made.detach().mean()
        self.count += 1
        return x + made * (1 + self.ema) / self.calls + 0.1 * self.count


class Tower(nn.Module):
    """Blocks, of which one is used twice; how they are called is a choice."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Norms() for _ in range(3))
        self.calls: list[Callable[[Tensor], Tensor]] = list(self.blocks)
        if how == "module":
            self.blocks = nn.ModuleList(lowtide.recompute(block) for block in self.blocks)
        elif how == "function":
            self.calls = [lowtide.recompute(lambda x, block=block: block(x)) for block in self.blocks]
        elif how == "nested":
            inner = [lowtide.recompute(lambda x, block=block: block(x)) for block in self.blocks]
            self.calls = [inner[0], lowtide.recompute(lambda x: inner[2](inner[1](x))), lambda x: x]
        elif how == "partial":
            self.calls = [lowtide.recompute(functools.partial(block.forward, scale=1.0)) for block in self.blocks]

    def forward(self, x: Tensor) -> Tensor:
        first, second, third = self.calls
        return third(second(first(first(x))))


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    loss: Tensor = F.dropout(model(x), 0.1).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def recipe(how: str) -> Any:
    torch.manual_seed(0)
    model = Tower(how)
    return step, model, torch.optim.AdamW(model.parameters(), lr=0.01), (torch.randn(32, WIDTH),)


@pytest.mark.parametrize("how", ["module", "function", "nested", "partial"])
def test_every_bit_is_that_of_the_function_without_it(how: str) -> None:
    (_, model, optimizer, batch), (_, mirror, mirrored, _) = recipe("plain"), recipe(how)
    state = torch.get_rng_state()
    for _ in range(3):
        torch.set_rng_state(state)
        expected, after = step(model, optimizer, *batch), torch.get_rng_state()
        torch.set_rng_state(state)
        assert torch.equal(step(mirror, mirrored, *batch), expected)
        assert torch.equal(torch.get_rng_state(), after)
        assert_same(everything(model, optimizer), everything(mirror, mirrored))
        assert [block.calls for block in mirror.blocks] == [block.calls for block in model.blocks]
        state = after


def test_torch_s_own_checkpoint_is_not_exact_here() -> None:
    """The test above can fail."""
    (_, model, optimizer, batch), (_, mirror, mirrored, _) = recipe("plain"), recipe("plain")
    mirror.calls = [
        functools.partial(torch.utils.checkpoint.checkpoint, block, use_reentrant=False) for block in mirror.blocks
    ]
    step(model, optimizer, *batch)
    step(mirror, mirrored, *batch)
    with pytest.raises(AssertionError, match="running_mean"):
        assert_same(everything(model, None), everything(mirror, None))


def test_memory_falls() -> None:
    def peak(forget: bool) -> int:
        torch.manual_seed(0)
        blocks = [nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Dropout(0.1), nn.Linear(256, 64)) for _ in range(8)]
        model = nn.Sequential(*(lowtide.recompute(block) if forget else block for block in blocks))
        x = torch.randn(512, 64)
        with lowtide.meter() as meter:
            model(x).square().mean().backward()
        return int(meter.peak)

    plain, less = peak(False), peak(True)
    kept = 8 * 512 * 256 * 4  # bytes of one hidden value of every block; three of them are kept otherwise
    assert less < plain - 2 * kept


@dataclass
class Pair:
    one: Tensor
    other: Tensor


def test_arguments_and_results_of_all_kinds() -> None:
    weight = torch.randn(4, 4, requires_grad=True)

    def function(pair: Pair, more: dict[str, list[Tensor]], *, power: int, debug: bool, none: None = None) -> Any:
        product = (pair.one @ weight).tanh()
        return {"made": (product, [product * more["x"][0]]), "power": power}, debug, none, pair.other.sigmoid()

    def gradients(function: Callable[..., Any]) -> list[Any]:
        one = torch.arange(16.0).reshape(4, 4).requires_grad_()
        result = function(Pair(one, torch.ones(2)), {"x": [torch.full((4, 4), 0.5)]}, power=3, debug=True)
        (made, debug, none, other) = result
        assert (made["power"], debug, none, other.requires_grad) == (3, True, None, False)
        weight.grad = None
        (made["made"][0].sum() + made["made"][1][0].square().sum()).backward()
        return [one.grad, weight.grad, made["made"][1][0].detach(), other]

    for expected, found in zip(gradients(function), gradients(lowtide.recompute(function)), strict=True):
        assert torch.equal(expected, found)


def test_methods_and_classes() -> None:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(4)

        @lowtide.recompute
        def part(self, x: Tensor) -> Tensor:
            made: Tensor = self.norm(x).exp()
            return made

        def forward(self, x: Tensor) -> Tensor:
            return self.part(x)

    whole = lowtide.recompute(type("Whole", (Half,), {"part": lambda self, x: self.norm(x).exp()}))
    for kind in (Half, whole):
        module, x = kind(), torch.randn(8, 4, requires_grad=True)
        module(x).sum().backward()
        assert module.norm.num_batches_tracked == 1
        assert isinstance(module, Half)


def test_a_module_keeps_names_type_and_copies() -> None:
    module = lowtide.recompute(nn.Linear(4, 4))
    assert isinstance(module, nn.Linear)
    assert lowtide.recompute(module) is module
    assert list(module.state_dict()) == ["weight", "bias"]
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    for other in (copy.deepcopy(module), torch.load(file, weights_only=False)):
        assert type(other) is type(module)
        other(torch.ones(1, 4)).sum().backward()
        assert other.weight.grad is not None
    assert module.weight.grad is None


def test_autocast_is_as_it_was() -> None:
    seen = []

    @lowtide.recompute
    def function(x: Tensor) -> Tensor:
        made = x @ x
        seen.append((made.dtype, bool(second_run())))
        return made.exp()

    with torch.autocast("cpu", torch.bfloat16):
        made = function(torch.ones(4, 4, requires_grad=True))
    made.sum().backward()
    assert seen == [(torch.bfloat16, False), (torch.bfloat16, True)]


def test_it_stops_where_the_backward_has_what_it_needs() -> None:
    lines = []

    @lowtide.recompute
    def function(x: Tensor) -> Tensor:
        lines.append("begin")
        made = x.exp()
        lines.append("end")
        return made + 1

    function(torch.ones(4, requires_grad=True)).sum().backward()
    assert lines == ["begin", "end", "begin"]


@pytest.mark.parametrize("quiet", [torch.no_grad, torch.inference_mode])
def test_without_gradients_it_runs_as_it_is(quiet: Any) -> None:
    norm = nn.BatchNorm1d(4)
    with quiet():
        made = lowtide.recompute(lambda x: norm(x))(torch.randn(8, 4))
    assert not made.requires_grad
    assert norm.num_batches_tracked == 1


def test_an_error_in_the_function_leaves_nothing_behind() -> None:
    norm = nn.BatchNorm1d(4)

    @lowtide.recompute
    def function(x: Tensor, fails: bool) -> Tensor:
        made: Tensor = norm(x)
        if fails:
            raise ValueError("mine")
        return made

    x = torch.randn(8, 4, requires_grad=True)
    hooks = dict(torch.nn.modules.module._global_forward_pre_hooks)
    with pytest.raises(ValueError, match="mine"):
        function(x, True)
    assert second_run() == ""
    assert dict(torch.nn.modules.module._global_forward_pre_hooks) == hooks
    function(x, False).sum().backward()
    assert norm.num_batches_tracked == 2


def test_an_error_in_the_second_run_leaves_nothing_behind() -> None:
    norm, runs = nn.BatchNorm1d(4), []

    @lowtide.recompute
    def function(x: Tensor) -> Tensor:
        made: Tensor = norm(x)
        runs.append(1)
        if len(runs) == 2:
            raise ValueError("mine")
        return made.exp()

    made = function(torch.randn(8, 4, requires_grad=True))
    statistics = norm.running_mean
    assert statistics is not None
    before = statistics.clone()
    with pytest.raises(ValueError, match="mine"):
        made.sum().backward()
    assert second_run() == ""
    assert norm.running_mean is statistics
    assert torch.equal(statistics, before)
    assert norm.num_batches_tracked == 1


def test_two_backwards_through_one_graph() -> None:
    norm, x = nn.BatchNorm1d(4), torch.randn(8, 4, requires_grad=True)
    loss = lowtide.recompute(lambda x: F.dropout(norm(x), 0.5).exp())(x).sum()
    loss.backward(retain_graph=True)
    once, x.grad = x.grad, None
    loss.backward()
    assert once is not None
    assert x.grad is not None
    assert torch.equal(once, x.grad)
    assert norm.num_batches_tracked == 1


def test_python_s_and_numpy_s_generators_are_put_back() -> None:
    drawn = []

    @lowtide.recompute
    def function(x: Tensor) -> Tensor:
        drawn.append((random.random(), float(numpy.random.rand())))
        return (x * sum(drawn[-1])).exp()

    random.seed(0)
    numpy.random.seed(0)
    made = function(torch.ones(4, requires_grad=True))
    after = random.getstate(), numpy.random.get_state()[1].tolist()  # type: ignore[union-attr]
    made.sum().backward()
    assert drawn[0] == drawn[1]
    assert (random.getstate(), numpy.random.get_state()[1].tolist()) == after  # type: ignore[union-attr]


def test_what_it_can_not_do_is_refused() -> None:
    with pytest.raises(lowtide.UsageError, match="writes to its argument of shape"):
        lowtide.recompute(lambda x: x.relu_().exp())(torch.ones(4, requires_grad=True) * 1)
    weight = torch.ones(4, requires_grad=True)

    def clamped(x: Tensor) -> Tensor:
        weight.data.clamp_(max=0.5)
        return (x * weight).exp()

    with pytest.raises(lowtide.UsageError, match="clamped writes to a tensor of shape"):
        lowtide.recompute(clamped)(torch.ones(4, requires_grad=True)).sum().backward()
    with pytest.raises(lowtide.UsageError, match="a generator or a coroutine"):
        lowtide.recompute(lambda x: (yield x))
    for wrong in (3, int, torch.ones(1)):
        with pytest.raises(lowtide.UsageError, match=r"takes a function or an nn\.Module"):
            lowtide.recompute(wrong)  # type: ignore[type-var]


class Feed(nn.Module):
    """A block that is planned."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm, self.outer = nn.Linear(64, 256), nn.BatchNorm1d(256), nn.Linear(256, 64)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.outer(F.dropout(F.relu(self.norm(self.inner(x)), inplace=True), 0.2))
        return x + made


def planned(forget: bool) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(*(lowtide.recompute(Feed()) if forget else Feed() for _ in range(4)))
    return step, model, torch.optim.AdamW(model.parameters(), lr=0.01), (torch.randn(256, 64),)


@pytest.mark.parametrize("budget", [None, "95%"])
def test_a_plan_takes_it_as_a_constraint(budget: str | None) -> None:
    train = assert_exact(lambda: planned(True), budget=budget)
    assert train.mismatches == 0
    graph = train.captured.graph
    again = [op for op in graph.ops if op.forgotten]
    assert {op.forgotten for op in again} == {"Feed"}
    assert sum(op.target == "aten.addmm.default" for op in again) == 4  # the backward does without the second one
    forward = {value for index, op in enumerate(graph.ops) if op.phase == "forward" for value in graph.makes[index]}
    for index in graph.ordinary:
        if graph.ops[index].phase == "backward" and not graph.ops[index].forgotten:
            read = {graph.values[value].shape for value in graph.reads[index] if value in forward}
            assert (256, 256) not in read, graph.show_op(index)
    assert "lowtide.recompute of Feed: 32 values" in train.report()


def test_results_equal_those_of_a_plan_without_it() -> None:
    def make(step: Any, model: nn.Sequential, optimizer: Any, example: Any) -> Any:
        for block in model:
            lowtide.recompute(block)
        return lowtide.fit(step, model, optimizer, example=example, costs="roofline")

    train = assert_exact(lambda: planned(False), make=make)
    assert any(op.forgotten for op in train.captured.graph.ops)


def test_a_wrapped_model_takes_it_too() -> None:
    (_, model, optimizer, batch), (_, mirror, mirrored, _) = planned(False), planned(True)
    net = lowtide.wrap(mirror, example=batch, costs="roofline")
    for _ in range(3):
        torch.manual_seed(1)
        expected = step(model, optimizer, *batch)
        torch.manual_seed(1)
        assert torch.equal(step(net, mirrored, *batch), expected)
        assert_same(everything(model, optimizer), everything(mirror, mirrored))
    assert any(op.forgotten for op in net.fitted.captured.graph.ops)


def test_a_graph_with_it_survives_its_file(tmp_path: Any) -> None:
    graph = lowtide.capture(*planned(True)).graph
    graph.save(tmp_path / "graph")
    assert lowtide.Graph.load(tmp_path / "graph") == graph
