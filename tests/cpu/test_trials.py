"""Kernels of ours stand for torch's without leave where a trial shows its bits in less time, and nowhere else."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from twins import assert_same, everything

import lowtide
from lowtide import models, trials
from lowtide.choice import Choice, Leave, choose
from lowtide.costs import Costs
from lowtide.errors import UsageError
from lowtide.graph import Graph
from lowtide.kernels import TRIED as OURS
from lowtide.kernels import attention_products, opaque, products
from lowtide.kernels import blocked as ops
from lowtide.kernels.tried import same_bits
from lowtide.measure import roofline
from lowtide.measure.trial import has_torch_bits
from lowtide.rewrite import TRIED
from lowtide.rewrites import NOTHING, Allowed, read_allow
from lowtide.trials import with_tried

pytestmark = pytest.mark.skipif(not opaque.works(), reason="the library of convolutions has another layout here")
measure = importlib.import_module("lowtide.measure")
NAMES = tuple(one.name for one in TRIED)


@pytest.fixture(scope="module")
def graph() -> Graph:
    return lowtide.capture(*models.build("wrn-28-2:blocks=1,batch=2")).graph


def _priced(
    graph: Graph, *, lacking: Callable[[Graph, int], bool] = lambda graph, op: False, ours: float = 0.5
) -> Costs:
    """Estimates as if they were measured: our calls take a part of the seconds, and some lack torch's bits."""
    costs, mine = roofline(graph), [op.target in OURS for op in graph.ops]
    seconds = tuple(taken * (ours if own else 1.0) for taken, own in zip(costs.seconds, mine, strict=True))
    differing = tuple(op for op, own in enumerate(mine) if own and lacking(graph, op))
    return replace(costs, seconds=seconds, differing=differing)


def test_what_is_exact_and_quicker_is_taken_without_leave(graph: Graph) -> None:
    leave, seconds = with_tried(Leave(), graph, _priced)
    assert {one.name for one in leave.always} <= set(NAMES)
    assert "blocked" in {one.name for one in leave.always}
    assert all(one.setting is None and one.tried for one in leave.always)
    assert seconds > 0
    assert with_tried(Leave(), graph, partial(_priced, ours=50.0))[0].always == (), "slower"
    assert with_tried(Leave(), graph, roofline)[0].always == (), "an estimate knows nothing of bits"


def test_calls_with_other_bits_stay_torchs(graph: Graph) -> None:
    convolutions = [op.name for op in graph.ops if op.target == "aten.convolution.default"]

    def lacking(seen: Graph, op: int) -> bool:
        return seen.ops[op].name == convolutions[2]

    leave, _ = with_tried(Leave(), graph, partial(_priced, lacking=lacking))
    assert "blocked" in {one.name for one in leave.always}
    for one in leave.always:
        if one.name == "blocked":
            assert one.setting == convolutions[2]
    changed = leave.apply(graph, ()).graph
    kept = {op.name: op.target for op in changed.ops}
    assert kept[convolutions[2]] == "aten.convolution.default"
    assert ops.CONVOLUTION in kept.values()


def test_a_pass_that_pays_with_the_next_one_only_is_taken_with_it(graph: Graph) -> None:
    """Blocked values alone cost more here, and batch norms that take in their neighbours are what makes up for that."""

    def price(seen: Graph) -> Costs:
        masks = sum(op.target == "aten.threshold_backward.default" for op in seen.ops)
        costs = _priced(seen, ours=1.1)
        return replace(costs, seconds=tuple(taken * (1 if masks else 0.5) for taken in costs.seconds))

    assert {"blocked", "joined-norms"} <= {one.name for one in with_tried(Leave(), graph, price)[0].always}
    refusing = Leave(read_allow("-joined-norms"))
    assert "blocked" not in {one.name for one in with_tried(refusing, graph, price)[0].always}


def test_a_conversion_with_other_bits_ends_the_pass(graph: Graph) -> None:
    def lacking(seen: Graph, op: int) -> bool:
        return seen.ops[op].target == ops.FROM_BLOCKED

    leave, _ = with_tried(Leave(), graph, partial(_priced, lacking=lacking))
    assert "blocked" not in {one.name for one in leave.always}


def test_it_is_refused_with_a_minus(graph: Graph) -> None:
    refusing = read_allow(",".join(f"-{name}" for name in NAMES))
    assert not refusing
    assert read_allow(str(refusing)) == refusing
    assert with_tried(Leave(refusing), graph, _priced)[0].always == ()
    assert "split" not in read_allow("rounding,-split")
    assert "chunks" in read_allow("rounding,-split")
    assert "blocked" not in NOTHING
    with pytest.raises(UsageError, match="no blocks that could be refused"):
        Leave(read_allow("-blocks"))
    with pytest.raises(UsageError, match="both allowed and refused"):
        read_allow("split:0.5,-split")
    with pytest.raises(UsageError, match="no 'blocked' that could be allowed"):
        read_allow("blocked")


def test_a_step_in_which_nothing_is_found_is_priced_no_more_often() -> None:
    """A tiny language model has nothing for kernels of convolutions; what others find is theirs."""
    seen: list[str] = []

    def price(graph: Graph) -> Costs:
        seen.append(graph.fingerprint)
        return _priced(graph)

    plain = lowtide.capture(*models.build("mlp:depth=2,width=16,batch=2")).graph
    with_tried(Leave(Allowed(refused=tuple(name for name in NAMES if name != "blocked"))), plain, price)
    assert seen == []


def test_the_better_of_two_plans_is_taken_where_ours_has_to_repeat_much(graph: Graph) -> None:
    """Seconds of the plan count, not only those of the ops."""
    searched: list[bool] = []

    def search(seen: Graph, costs: Costs, eager_peak: int, effort: Any) -> lowtide.Plan:
        ours = any(op.target in OURS for op in seen.ops)
        searched.append(ours)
        found = lowtide.plan(seen, costs, None, time_limit=0.01)
        return replace(found, seconds=found.seconds * (4 if ours else 1))

    found: Choice = choose(graph, _priced, search)
    assert searched == [True, False]
    assert not any(one.tried for one in found.plan.rewrites)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 32, 3, padding=1), nn.Conv2d(32, 32, 3, padding=1, bias=False)
        self.one, self.two, self.head = nn.BatchNorm2d(32), nn.BatchNorm2d(32), nn.Conv2d(32, 5, 1)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        seen = self.one(self.first(images)).relu()
        return self.head((self.two(self.second(seen)) + seen).relu()).square().mean()


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, images: torch.Tensor) -> torch.Tensor:
    optimizer.zero_grad()
    loss = model(images)
    loss.backward()
    optimizer.step()
    return loss.detach()


def _built() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(4)
    model = Net()
    return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def _batches() -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(9)
    for count in (6, 6, 3, 6):
        yield torch.randn(count, 3, 16, 16, generator=generator)


def test_batches_of_other_sizes_and_evaluation_stay_eagers(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a tried pass on, whatever was measured of its seconds."""
    monkeypatch.setattr(trials, "_seconds", lambda graph, costs: 1e3 - sum(op.target in OURS for op in graph.ops))
    model, optimizer = _built()
    mirror, mirrored = _built()
    train = lowtide.fit(_step, mirror, mirrored, example=(next(_batches()),), budget="70%", time_limit=0.2)
    assert any(one.tried for one in train.plan.rewrites)
    for images in _batches():
        expected, found = _step(model, optimizer, images), train(images)
        assert torch.equal(expected, found)
        assert_same(everything(model, optimizer), everything(mirror, mirrored))
        model.eval(), mirror.eval()
        with torch.no_grad():
            assert torch.equal(model(images), mirror(images))
        model.train(), mirror.train()


def test_an_attached_model_stays_eagers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials, "_seconds", lambda graph, costs: 1e3 - sum(op.target in OURS for op in graph.ops))
    model, optimizer = _built()
    mirror, mirrored = _built()
    attached = lowtide.attach(mirror, budget="90%", optimizer=mirrored, time_limit=0.2)
    for images in _batches():
        assert torch.equal(_step(model, optimizer, images), _step(mirror, mirrored, images))
        assert_same(everything(model, optimizer), everything(mirror, mirrored))
        with torch.no_grad():
            assert torch.equal(model(images), mirror(images))
    assert attached.fitted is not None
    assert any(one.tried for one in attached.fitted.plan.rewrites)
    latest = attached.fitted._latest
    own = latest.eager_peak - latest.costs.persistent(attached.fitted.captured.graph)
    assert max(latest.runner.arrangement.eager) <= own, "what pages may stay is what eager holds, not calls of ours"
    lowtide.detach(mirror)


def test_what_was_tried_with_other_settings_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process that tries calls is told nothing of mkldnn or of precisions."""
    monkeypatch.setattr(trials, "_seconds", lambda graph, costs: 1e3 - sum(op.target in OURS for op in graph.ops))
    model, optimizer = _built()
    mirror, mirrored = _built()
    images = next(_batches())
    train = lowtide.fit(_step, mirror, mirrored, example=(images,), time_limit=0.2)
    assert any(one.tried for one in train.plan.rewrites)
    for enabled in (True, False, True):
        torch.backends.mkldnn.enabled = enabled  # type: ignore[assignment]
        try:
            assert torch.equal(_step(model, optimizer, images), train(images))
            assert_same(everything(model, optimizer), everything(mirror, mirrored))
        finally:
            torch.backends.mkldnn.enabled = True  # type: ignore[assignment]


def test_libraries_may_be_told_one_by_one_how_many_bits_count() -> None:
    """Torch itself then raises when it is asked how many do in all products."""
    step, model, optimizer, example = models.build(models.SMALL["mlp"])
    _, mirror, mirrored, _ = models.build(models.SMALL["mlp"])
    libraries: list[Any] = [torch.backends.cuda.matmul, torch.backends.mkldnn.matmul]
    try:
        libraries[0].fp32_precision = "tf32"
        train = lowtide.fit(step, mirror, mirrored, example=example, costs="roofline", time_limit=0.2)
        for told in ("none", "bf16", "none", "tf32"):
            libraries[1].fp32_precision = told
            assert torch.equal(step(model, optimizer, *example), train(*example))
            assert_same(everything(model, optimizer), everything(mirror, mirrored))
    finally:
        for library in libraries:
            library.fp32_precision = "none"


def _tiny() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Module()
    model.register_parameter("weight", nn.Parameter(torch.zeros(200_003)))
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def _small_step(model: Any, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
    optimizer.zero_grad()
    loss = ((model.weight * x.mean()) * 1e-20).sum()
    loss.backward()
    optimizer.step()
    return loss.detach()


def test_where_a_thread_makes_zeros_of_denormals_nothing_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's other threads do not, so it matters which of them works on which elements."""
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor can't")
    torch.set_flush_denormal(False)
    monkeypatch.setattr(trials, "_seconds", lambda graph, costs: 1e3 - sum(op.target in OURS for op in graph.ops))
    (model, optimizer), (mirror, mirrored) = _tiny(), _tiny()
    x, threads = torch.full((4,), 1e-20), torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        train = lowtide.fit(_small_step, mirror, mirrored, example=(x,), time_limit=0.2)
        for flushes in (False, True, True, False):
            torch.set_flush_denormal(flushes)
            assert torch.equal(_small_step(model, optimizer, x), train(x))
            assert_same(everything(model, optimizer), everything(mirror, mirrored))
            assert not (flushes and any(one.tried for one in train.plan.rewrites))
    finally:
        torch.set_flush_denormal(False)
        torch.set_num_threads(threads)


def test_what_was_tried_for_other_instructions_is_tried_again(monkeypatch: pytest.MonkeyPatch, graph: Graph) -> None:
    before = measure._book(graph).path
    monkeypatch.setenv("OMP_PROC_BIND", "false")
    assert measure._book(graph).path == before
    for name in ("ONEDNN_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY", "MKL_CBWR"):
        with monkeypatch.context() as told:
            told.setenv(name, "AVX2")
            assert measure._book(graph).path != before


@pytest.mark.parametrize("sizes", [(1024, 1, 1024), (48, 1, 48), (128, 192, 64)], ids=str)
def test_a_trial_sees_what_a_sum_begins_with(sizes: tuple[int, int, int]) -> None:
    """A sum of -0.0 alone is -0.0 only where it does not begin with zero: gradients of one example are such sums."""
    rows, depth, columns = sizes
    one, other = torch.full((rows, depth), -0.0), torch.ones(depth, columns)
    equal = same_bits([products.product(one, other)], [products.by_torch(one, other)])
    assert equal or not has_torch_bits(products.PRODUCT, [one, other])


def test_a_trial_of_a_small_call_is_one_of_many_numbers() -> None:
    """Of two scores, of which a mask hides one, the other has all the weight, and no product is rounded."""
    (own,) = (one for one in attention_products.OWN if one.name == "quick_dropped_attention")
    strides = ((8, 16, 1), (8, 1, 16), (8, 16, 1))
    sizes = ((2, 2, 8), (2, 8, 2), (2, 2, 8))
    given = [torch.zeros(32).as_strided(size, stride) for size, stride in zip(sizes, strides, strict=True)]
    rest = (torch.zeros(2, 2), 2, [1.0, 1.0, 1.0, 1.0], 0.0, [False, False, False], False, 0.7, 2)
    if has_torch_bits(own.target, [*given, *rest]):
        for _ in range(20):
            given = [torch.randn(32).as_strided(one.shape, one.stride()) for one in given]
            state = torch.get_rng_state()
            mine = own.kernel(*given, *rest)
            torch.set_rng_state(state)
            assert same_bits(mine, own.reference(*given, *rest))
