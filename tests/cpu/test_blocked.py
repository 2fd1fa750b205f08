"""Steps with blocked values train as eager does, to the bit, and each blocked op has the bits of torch's own."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn
from twins import assert_exact

import lowtide
from lowtide import allocator, models
from lowtide.choice import given
from lowtide.costs import Costs
from lowtide.errors import FileError
from lowtide.graph import Graph, Read
from lowtide.kernels import TRIED, kernel, opaque
from lowtide.kernels import blocked as ops
from lowtide.kernels import blocked_norm as norms
from lowtide.kernels.shapes import Shapes
from lowtide.kernels.tried import Own
from lowtide.measure import roofline
from lowtide.measure.trial import has_torch_bits
from lowtide.plan import as_eager
from lowtide.rewrite import EXACT, apply, named
from lowtide.rewrite.blocked import blocked
from lowtide.rewrite.joined_norms import joined

needs_layout = pytest.mark.skipif(not opaque.works(), reason="the library of convolutions has another layout here")
TARGETS = (
    "resnet:stages=1-1-1-1,width=16,batch=4,size=64,classes=10",
    "unet:width=16,depth=2,batch=4,size=32",
    "densenet121:stages=2-2-2-2,growth=16,batch=4,size=64,classes=10",
    "wrn-28-2:blocks=2,batch=4",
)


def exactly_blocked(graph: Graph) -> Graph:
    """The graph with those blocked ops that have torch's bits here, with the sizes that they have; and then joined."""
    changed = _exactly(joined, _exactly(blocked, graph))
    assert changed.fault is None
    assert any(value.form == "blocked" for value in changed.values)
    return changed


def _exactly(run: Callable[..., Graph], graph: Graph) -> Graph:
    without: set[str] = set()
    for _ in range(4):
        changed = run(graph, "+".join(sorted(without)) or None)
        differing = {op.name for op in changed.ops if op.target in TRIED and not _tried(changed, op)}
        if not differing - without:
            break
        without |= differing
    return changed


def _tried(graph: Graph, op: lowtide.Op) -> bool:
    shapes = Shapes(graph.values, graph.views)

    def made(arg: Any) -> Any:
        if isinstance(arg, tuple):
            return [made(item) for item in arg]
        if not isinstance(arg, Read):
            return arg
        seen = shapes.tensor(arg)
        return torch.empty_strided(seen.shape, seen.stride(), dtype=seen.dtype).zero_()

    return bool(has_torch_bits(op.target, [made(arg) for arg in op.args]))


class Odd(nn.Module):
    """Channels that are no whole blocks, second readers, dropout, windows, and a batch norm in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 32, 3, padding=1), nn.Conv2d(32, 32, 3, padding=1, bias=False)
        self.norm, self.frozen = nn.BatchNorm2d(32), nn.BatchNorm2d(32).eval()
        self.narrow, self.wide = nn.Conv2d(64, 20, 1), nn.Conv2d(20, 48, 3, stride=2, padding=1)
        self.dropout, self.pool = nn.Dropout(0.3), nn.MaxPool2d(2)
        self.up, self.head = nn.ConvTranspose2d(48, 16, 2, stride=2), nn.Conv2d(16, 5, 1)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        one = self.norm(self.first(images)).relu_()
        two = self.dropout(self.frozen(self.second(one)))
        both = torch.cat([one + two, two * 2], dim=1)
        out = self.up(self.wide(self.narrow(self.pool(both))))
        return self.head(out).mean() + one.square().mean() + torch.nn.functional.avg_pool2d(two, 3, 2).sum() * 1e-3


def odd() -> tuple[Callable[..., Any], nn.Module, Any, tuple[Any, ...]]:
    torch.manual_seed(3)
    model = Odd()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def step(model: nn.Module, optimizer: Any, images: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(images)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step, model, optimizer, (torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(5)),)


@needs_layout
@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.split(":")[0])
def test_models_train_blocked_as_eager_does(target: str) -> None:
    assert_exact(lambda: models.build(target), change=exactly_blocked, program=as_eager)


@needs_layout
def test_odd_channels_second_readers_and_dropout_stay_exact() -> None:
    seen: list[Counter[str]] = []

    def change(graph: Graph) -> Graph:
        changed = exactly_blocked(graph)
        seen.append(Counter(op.target for op in changed.ops))
        return changed

    assert_exact(odd, change=change, program=as_eager)
    assert seen[0][norms.NORM] == 1, "the batch norm in evaluation is torch's"
    assert seen[0][ops.FROM_BLOCKED]
    assert seen[0][ops.CONVOLUTION]


@needs_layout
def test_views_of_blocked_values_are_refused() -> None:
    step, model, optimizer, example = odd()
    graph = blocked(lowtide.capture(step, model, optimizer, example).graph)
    pairs = ((index, arg) for index in graph.ordinary for arg in graph.ops[index].args if isinstance(arg, Read))
    reader, value = next((index, arg.value) for index, arg in pairs if graph.values[arg.value].form == "blocked")
    args = tuple(
        replace(arg, view=0) if getattr(arg, "value", None) == value else arg for arg in graph.ops[reader].args
    )
    broken = tuple(replace(op, args=args) if index == reader else op for index, op in enumerate(graph.ops))
    assert "blocked" in str(replace(graph, ops=broken).fault)


@needs_layout
def test_a_trial_sees_another_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    x = opaque.blocked(torch.zeros(2, 32, 5, 7))
    given = [[x], torch.zeros(32), torch.zeros(32), None, None, 0.1, 1e-5, None, True, 2]
    assert has_torch_bits(norms.NORM, given) is True
    own = TRIED[norms.NORM]

    def off(*args: Any) -> Any:
        made, *rest = own.kernel(*args)
        made.as_strided((made.numel(),), (1,))[5] += 1e-6
        return (made, *rest)

    monkeypatch.setitem(cast(dict[str, Own], TRIED), norms.NORM, replace(own, kernel=off))
    assert has_torch_bits(norms.NORM, given) is False
    assert has_torch_bits("aten.mm.default", []) is None


@needs_layout
def test_what_else_reads_a_value_keeps_it() -> None:
    """A batch norm's result that two read, a gradient that counts for two, and a concatenation that a window reads."""

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Conv2d(3, 32, 3, padding=1), nn.Conv2d(32, 32, 3, padding=1)
            self.one, self.two, self.all = nn.BatchNorm2d(32), nn.BatchNorm2d(32), nn.BatchNorm2d(64)

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            seen = self.one(self.first(images))
            rectified = seen.relu()
            summed = (self.two(self.second(rectified)) + seen).relu()
            both = torch.cat([rectified, summed], 1)
            out = self.all(both).relu() + nn.functional.max_pool2d(both, 3, 1, 1)
            return out.square().mean() + seen.sum() * 1e-3

    def both() -> tuple[Callable[..., Any], nn.Module, Any, tuple[Any, ...]]:
        step, _, _, example = odd()
        torch.manual_seed(8)
        model = Both()
        return step, model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9), example

    seen: list[Counter[str]] = []

    def change(graph: Graph) -> Graph:
        changed = exactly_blocked(graph)
        seen.append(Counter(op.target for op in changed.ops))
        return changed

    assert_exact(both, change=change, program=as_eager)
    assert seen[0][ops.CAT] == 1
    assert seen[0]["aten.relu.default"] == 1


@needs_layout
def test_dense_blocks_make_no_concatenation() -> None:
    graph = lowtide.capture(*models.build(TARGETS[2])).graph
    targets = Counter(op.target for op in joined(blocked(graph)).ops)
    assert not targets[ops.CAT] + targets["aten.cat.default"]
    assert not targets["aten.threshold_backward.default"] + targets["aten.relu_.default"]
    assert targets[ops.SUM]


def test_sizes_that_are_no_blocks_are_refused() -> None:
    with pytest.raises(ValueError, match="no blocks of"):
        ops.to_blocked(torch.zeros(2, 20, 3, 3))
    with pytest.raises(ValueError, match="no 2 blocked images"):
        norms.norm([torch.zeros(2, 32, 3, 3)], None, None, None, None, 0.1, 1e-5, None, False, 2)
    x = opaque.blocked(torch.zeros(2, 32, 3, 3))
    with pytest.raises(ValueError, match="not one number for each of 32 channels"):
        norms.norm([x], torch.zeros(16), None, None, None, 0.1, 1e-5, None, False, 2)
    with pytest.raises(ValueError, match="no blocks from"):
        ops.cut(x, 8, 24, 2)


def test_without_the_layout_the_pass_changes_nothing_and_ops_still_run(monkeypatch: pytest.MonkeyPatch) -> None:
    step, model, optimizer, example = odd()
    graph = lowtide.capture(step, model, optimizer, example).graph
    monkeypatch.setattr(sys.modules["lowtide.rewrite.blocked"], "works", lambda: False)
    assert blocked(graph) is graph
    monkeypatch.setattr(ops, "works", lambda: False)
    monkeypatch.setattr(norms, "_rounding", lambda: None)
    x, weight = torch.randn(2, 32, 6, 6), torch.randn(16, 32, 3, 3)
    sizes = ([1, 1], [1, 1], [1, 1], False, [0, 0])
    made = kernel(ops.CONVOLUTION)(opaque.blocked(x), weight, None, *sizes, 2, [True, True])
    assert torch.equal(opaque.plain(made, 2), torch.ops.aten.convolution(x, weight, None, *sizes, 1))
    out, mean, _ = norms.norm([opaque.blocked(x)], None, None, None, None, 0.1, 1e-5, None, True, 2)
    expected = torch.ops.aten.native_batch_norm(x, None, None, None, None, True, 0.1, 1e-5)
    assert torch.equal(opaque.plain(out, 2), expected[0].relu())
    assert torch.equal(mean, expected[1])


@needs_layout
def test_a_result_may_outlive_the_step_that_made_it() -> None:
    if not allocator.available():
        pytest.skip("no meter here")
    code = """
import torch
from lowtide import allocator
from lowtide.kernels import TRIED, kernel, opaque, blocked as ops
call, x, weight = kernel(ops.CONVOLUTION), torch.ones(2, 32, 64, 64), torch.ones(32, 32, 1, 1)
with allocator.meter() as meter:
    made = call(opaque.blocked(x), weight, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 2, [True, True])
assert allocator.installed()
assert torch.equal(opaque.plain(made, 2), torch.full_like(x, 32.0))
del made
assert not allocator.installed()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-600:]


@needs_layout
def test_a_plan_with_our_calls_needs_a_trial_where_it_is_loaded(tmp_path: Path) -> None:
    """Where a call has other bits, or nobody has tried, the plan is refused."""
    graph = lowtide.capture(*models.build("wrn-28-2:blocks=1,batch=2")).graph
    one = named("blocked")
    assert one is not None
    changed = apply(graph, (*EXACT, one.by(None)))
    found = lowtide.plan(changed.graph, roofline(changed.graph), 2**30, time_limit=0.1)
    path = tmp_path / "step.plan"
    replace(found, rewrites=changed.rewrites).save(path)
    for differing, words in ((None, "not tried here"), ((0,), "other bits than torch's here")):
        with pytest.raises(FileError, match=words):
            given(path, graph, partial(_priced, differing))
    assert given(path, graph, partial(_priced, ())).plan.rewrites == changed.rewrites


def _priced(differing: tuple[int, ...] | None, graph: Graph) -> Costs:
    return replace(roofline(graph), differing=differing)
