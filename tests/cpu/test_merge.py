"""Models that are checkpointed already: planned like the plain ones, and equal to eager with its second runs."""

from __future__ import annotations

import gc
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from twins import assert_exact, assert_same, everything

import lowtide
from lowtide.allocator import meter
from lowtide.allocator.arena import POOL
from lowtide.choice import choose
from lowtide.graph import Graph
from lowtide.models import build
from lowtide.models.small import SMALL
from lowtide.rewrite.merge import merged

Recipe = Callable[[], Any]


class Block(nn.Module):
    """Dropout, and batch norm if wanted; what is in place is so in both runs."""

    def __init__(self, norm: bool) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(64, 256), nn.Linear(256, 64)
        self.norm = nn.BatchNorm1d(256) if norm else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.relu(self.norm(self.inner(x)) * 1.0, inplace=True)
        made: Tensor = self.outer(F.dropout(hidden, 0.2) + 0.1 * torch.rand_like(hidden))
        return x + made


class Tower(nn.Module):
    """Blocks, one of them used twice, each of which runs again in the backward, or not (None)."""

    def __init__(self, reentrant: bool | None, norm: bool, nested: bool = False, apart: bool = False) -> None:
        super().__init__()
        self.apart = apart
        self.first = nn.Linear(64, 64)
        self.blocks = nn.ModuleList(Block(norm) for _ in range(3))
        self.reentrant, self.nested = reentrant, nested

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.nested:
            return self._again(lambda x: self._again(self.blocks[1], self._again(self.blocks[0], x)), x)
        # Reentrant backwards add to the gradients of a shared block one by one, which are other ops.
        for block in (*self.blocks, *(() if self.apart else self.blocks[:1])):
            x = self._again(block, x)
        return x

    def _again(self, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        if self.reentrant is None:
            return function(x)
        made: Tensor = checkpoint(function, x, use_reentrant=self.reentrant)
        return made


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    loss: Tensor = F.dropout(model(x), 0.1).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def recipe(reentrant: bool | None, norm: bool, nested: bool = False, apart: bool = False) -> Recipe:
    def built() -> Any:
        torch.manual_seed(0)
        model = Tower(reentrant, norm, nested, apart)
        return step, model, torch.optim.AdamW(model.parameters(), lr=0.01), (torch.randn(256, 64),)

    return built


def calls(graph: Graph) -> Counter[str]:
    return Counter(op.target for op in graph.ops)


KINDS = pytest.mark.parametrize(
    ("reentrant", "nested"), [(False, False), (False, True), (True, False)], ids=["hooks", "nested", "reentrant"]
)


@pytest.mark.parametrize("norm", [False, True], ids=["", "norm"])
@KINDS
def test_a_checkpointed_model_has_the_ops_of_the_plain_one(reentrant: bool, norm: bool, nested: bool) -> None:
    plain = lowtide.capture(*recipe(None, norm, nested, apart=reentrant)()).graph
    graph = lowtide.capture(*recipe(reentrant, norm, nested, apart=reentrant)()).graph
    found = merged(graph)
    assert found.fault is None
    assert merged(found) == found
    assert merged(plain) is plain
    assert len(graph.ops) > len(plain.ops) + 10
    updates = calls(graph)["aten.native_batch_norm.default"] - calls(plain)["aten.native_batch_norm.default"]
    expected = Counter({"aten.native_batch_norm.default": updates, "aten.add_.Tensor": updates})
    assert calls(found) - calls(plain) == +expected
    assert not calls(plain) - calls(found)
    assert (updates > 0) == norm


@pytest.mark.parametrize("budget", [None, "90%"])
@KINDS
def test_every_bit_is_eager_s(reentrant: bool, nested: bool, budget: str | None) -> None:
    train = assert_exact(recipe(reentrant, True, nested), budget=budget)
    assert train.mismatches == 0
    assert len(train.captured.graph.ordinary) < len(lowtide.capture(*recipe(reentrant, True, nested)()).graph.ops)


def test_a_wrapped_model_updates_its_statistics_when_eager_does() -> None:
    (_, model, optimizer, batch), (_, mirror, mirrored, _) = recipe(False, True)(), recipe(False, True)()
    net = lowtide.wrap(mirror, example=batch, costs="roofline")
    for one in (model, net):
        torch.manual_seed(2)
        one(*batch)  # no backward: no second run
    assert_same(everything(model, None), everything(mirror, None))
    for _ in range(2):
        torch.manual_seed(1)
        expected = step(model, optimizer, *batch)
        torch.manual_seed(1)
        assert torch.equal(step(net, mirrored, *batch), expected)
        assert_same(everything(model, optimizer), everything(mirror, mirrored))


def test_eager_s_peak_is_that_of_the_checkpointed_program() -> None:
    step, model, optimizer, example = recipe(False, True)()
    step(model, optimizer, *example)  # the optimizer's state is there
    gc.collect()
    POOL.empty()  # arenas that other tests left would give pages back meanwhile
    with meter() as metered:
        step(model, optimizer, *example)
    fitted = lowtide.fit(step, model, optimizer, example=example)
    graph = lowtide.capture(step, model, optimizer, example).graph
    costs = lowtide.measure(graph)
    captured = lowtide.simulate(graph, costs, lowtide.as_eager(graph)).peak
    assert fitted._fits[0].eager_peak == captured
    assert abs(captured - costs.persistent(graph) - metered.peak) <= 0.01 * captured


def test_with_the_bytes_of_the_plain_model_nothing_runs_twice() -> None:
    def planned(reentrant: bool | None) -> lowtide.Plan:
        graph = lowtide.capture(*recipe(reentrant, False)()).graph
        return choose(graph, lowtide.roofline, lambda graph, costs, *_: lowtide.plan(graph, costs)).plan

    plain, found = planned(None), planned(False)
    assert found.seconds == pytest.approx(plain.seconds, rel=1e-9)
    assert found.peak <= plain.peak * 1.01


@pytest.mark.parametrize("name", ["hf-gpt2", "hf-bert"])
@pytest.mark.parametrize("reentrant", [False, True], ids=["hooks", "reentrant"])
def test_hugging_face_s_own_checkpoints(name: str, reentrant: bool) -> None:
    def built() -> Any:
        step, model, optimizer, example = build(SMALL[name])
        with warnings.catch_warnings(action="ignore", category=FutureWarning):  # it is getting another name
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        return step, model, optimizer, example

    plain = lowtide.capture(*build(SMALL[name])).graph
    graph = lowtide.capture(*built()).graph
    found = merged(graph)
    assert len(graph.ops) > len(plain.ops)
    assert len(found.ops) == len(plain.ops)
    assert_exact(built, steps=2)


def test_what_does_not_repeat_stays() -> None:
    """Other numbers, another view, a changed argument: nothing of it is merged."""

    class Different(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x.exp() + (x * 1.0) + x.t().contiguous()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
            (x,) = ctx.saved_tensors
            return gradient * (x.exp() + (x * 1.5) + x.contiguous().clone())

    def once(model: nn.Linear, optimizer: Any, x: Tensor) -> Tensor:
        loss: Tensor = Different.apply(model(x)).sum()  # type: ignore[no-untyped-call]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    def built() -> Any:
        torch.manual_seed(0)
        model = nn.Linear(8, 8)
        return once, model, torch.optim.SGD(model.parameters(), lr=0.1), (torch.randn(8, 8),)

    graph = lowtide.capture(*built()).graph
    gone = calls(graph) - calls(merged(graph))
    assert gone == Counter({"aten.exp.default": 1})
    assert_exact(built)
