"""Our own kernels against torch's: every bit of results, statistics and generator, and who does what we can't."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import lowtide
from lowtide import device, kernels, models, native
from lowtide.kernels import own

BERNOULLI = "aten.bernoulli_.float"
BATCH_NORM = "aten.native_batch_norm.default"
MAX_POOL = "aten.max_pool2d_with_indices.default"
TARGETS = (BERNOULLI, BATCH_NORM, MAX_POOL)
LEAST = own.LEAST
LARGE_ENOUGH = {
    "gpt:layers=1,width=64,heads=2,context=64,vocabulary=64,batch=4": BERNOULLI,
    "resnet:stages=1-1-1-1,width=16,batch=4,size=64,classes=10": BATCH_NORM,
}


@pytest.fixture(autouse=True)
def _from_the_first_element(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own, "LEAST", 1)


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def mine(target: str) -> Callable[..., Any]:
    found = own.quicker(target)
    assert found is not None, "our kernel gives torch's bits on this machine"
    assert kernels.kernel(target) is found
    return found


def theirs(target: str) -> Callable[..., Any]:
    called: Callable[..., Any] = kernels.overload(target)._op
    return called


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


def same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.stride() == b.stride() and torch.equal(bits(a), bits(b))


# Draws


@pytest.mark.parametrize("count", [1, 2, 311, 312, 313, 624, 5000, 70_001])
@pytest.mark.parametrize("p", [0.0, 1e-300, 0.1, 1 / 3, 0.5, 0.9, 1 - 2**-53, 1.0])
@pytest.mark.parametrize("before", [0, 1, 623, 624, 1000])
def test_draws_and_what_comes_after_them(count: int, p: float, before: int) -> None:
    drawn = []
    for draw in (mine(BERNOULLI), theirs(BERNOULLI)):
        torch.manual_seed(count + before)
        torch.randint(2**24, (before,))
        torch.randn(3)  # torch keeps one of these for the next time
        drawn += [(draw(torch.empty(count), p), torch.get_rng_state(), torch.randn(5), torch.rand(700))]
    assert all(same(a, b) for a, b in zip(*drawn, strict=True))


def test_it_fills_the_tensor_that_it_is_given() -> None:
    tensor = torch.full((50, 40), 7.0)
    assert mine(BERNOULLI)(tensor, 0.25) is tensor
    assert set(tensor.unique().tolist()) == {0.0, 1.0}
    assert 0.15 < tensor.mean().item() < 0.35


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.empty(40, 50).t(),
        lambda: torch.empty(40, 50)[:, ::2],
        lambda: torch.empty(2000, dtype=torch.float64),
        lambda: torch.empty(2000, dtype=torch.bfloat16),
        lambda: torch.empty(0),
    ],
)
def test_other_draws_stay_with_torch(make: Callable[[], Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = []
    for draw in (mine(BERNOULLI), theirs(BERNOULLI)):
        torch.manual_seed(3)
        drawn += [(draw(make(), 0.3), torch.get_rng_state())]
    assert all(same(a, b) for a, b in zip(*drawn, strict=True))


def test_another_generator_and_a_wrong_probability() -> None:
    sources = [torch.Generator().manual_seed(5), torch.Generator().manual_seed(5)]
    draws = zip((mine(BERNOULLI), theirs(BERNOULLI)), sources, strict=True)
    drawn = [draw(torch.empty(999), 0.5, generator=source) for draw, source in draws]
    assert same(*drawn)
    assert same(sources[0].get_state(), sources[1].get_state())
    for p in (1.5, -0.5, math.nan):
        with pytest.raises(RuntimeError, match="expects p to be in"):
            mine(BERNOULLI)(torch.empty(99), p)


# Batch norm


def normalized(
    call: Callable[..., Any], x: Tensor, *, affine: bool, tracked: bool, training: bool, eps: float
) -> list[Tensor]:
    torch.manual_seed(1)
    channels = x.shape[1]
    parameters = [torch.randn(channels), torch.randn(channels)] if affine else [None, None]
    running = [torch.randn(channels), torch.rand(channels)] if tracked or not training else [None, None]
    results = call(x, *parameters, *running, training, 0.3, eps)
    return [*results, *(tensor for tensor in running if tensor is not None)]


@pytest.mark.parametrize(
    "shape", [(2, 3, 8), (4, 16, 7, 7), (16, 64, 16, 16), (3, 37, 5, 9), (1, 8, 33), (2, 9, 4, 5, 6)]
)
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("tracked", [True, False])
def test_batch_norm(shape: tuple[int, ...], affine: bool, tracked: bool, threads: int) -> None:
    torch.manual_seed(sum(shape))
    x = torch.randn(shape) * 5 + 3
    for eps in (1e-5, 0.0):
        found = [
            normalized(call, x, affine=affine, tracked=tracked, training=True, eps=eps)
            for call in (mine(BATCH_NORM), theirs(BATCH_NORM))
        ]
        assert all(same(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e38, 1e-42, -0.0])
def test_batch_norm_of_numbers_at_the_edge(value: float) -> None:
    x = torch.randn(4, 16, 6, 6)
    x[1, 3], x[:, 5], x[2, 7, 1, 1] = value, value, value
    found = [
        normalized(call, x, affine=True, tracked=True, training=True, eps=1e-5)
        for call in (mine(BATCH_NORM), theirs(BATCH_NORM))
    ]
    for a, b in zip(*found, strict=True):
        assert torch.equal(a.isnan(), b.isnan())
        assert torch.equal(bits(a.nan_to_num(5)), bits(b.nan_to_num(5)))


@pytest.mark.parametrize(
    ("x", "training"),
    [
        (torch.randn(4, 16, 8, 8), False),
        (torch.randn(4, 16, 8, 8).to(memory_format=torch.channels_last), True),
        (torch.randn(4, 16, 8, 16)[..., ::2], True),
        (torch.randn(64, 16), True),
        (torch.randn(64, 16, 2), True),
    ],
)
def test_other_batch_norms_stay_with_torch(x: Tensor, training: bool) -> None:
    found = [
        normalized(call, x, affine=True, tracked=True, training=training, eps=1e-5)
        for call in (mine(BATCH_NORM), theirs(BATCH_NORM))
    ]
    assert all(same(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize(
    ("channels", "threads", "busy"), [(3, 1, True), (8, 2, False), (64, 2, True), (64, 64, False), (512, 64, True)]
)
def test_few_channels_are_left_to_many_threads(
    channels: int, threads: int, busy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    assert own._busy(channels) == busy


# Max pooling


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_max_pool(data: st.DataObject) -> None:
    kernel = [data.draw(st.integers(1, 5)) for _ in range(2)]
    stride = data.draw(st.sampled_from([[], [1, 1], [2, 2], [3, 2], [1, 4]]))
    dilation = [data.draw(st.integers(1, 3)) for _ in range(2)]
    padding = [data.draw(st.integers(0, size // 2)) for size in kernel]
    ceil_mode = data.draw(st.booleans())
    sizes = [data.draw(st.integers(d * (k - 1) + 1, d * (k - 1) + 20)) for k, d in zip(kernel, dilation, strict=True)]
    torch.manual_seed(data.draw(st.integers(0, 9)))
    x = torch.randint(-3, 3, (2, 3, *sizes)).float()
    x[torch.rand(x.shape) < 0.1] = data.draw(st.sampled_from([math.nan, -math.inf, math.inf, -0.0, 2.0]))
    x[0, 1] = -math.inf
    found = [call(x, kernel, stride, padding, dilation, ceil_mode) for call in (mine(MAX_POOL), theirs(MAX_POOL))]
    assert same(found[0][0], found[1][0])
    assert same(found[0][1], found[1][1])


@pytest.mark.parametrize(
    "x",
    [
        torch.randn(3, 20, 20),
        torch.randn(2, 1, 20, 20),
        torch.randn(2, 4, 20, 20, dtype=torch.float64),
        torch.randn(2, 4, 20, 20).to(memory_format=torch.channels_last),
    ],
)
def test_other_pools_stay_with_torch(x: Tensor) -> None:
    found = [call(x, [3, 3], [2, 2], [1, 1]) for call in (mine(MAX_POOL), theirs(MAX_POOL))]
    assert same(found[0][0], found[1][0])
    assert same(found[0][1], found[1][1])


def test_a_large_pool_is_shared_by_threads(threads: int) -> None:
    x = torch.randn(8, 32, 40, 40)
    found = [call(x, [3, 3], [2, 2], [1, 1], [1, 1], False) for call in (mine(MAX_POOL), theirs(MAX_POOL))]
    assert same(found[0][0], found[1][0])
    assert same(found[0][1], found[1][1])


# Whether they are used


class Wrong:
    """A library whose kernels do nothing, as ours would look where torch's add up in another order."""

    def __getattr__(self, name: str) -> Callable[..., int]:
        return lambda *_: 1


@pytest.mark.parametrize("target", TARGETS)
def test_a_kernel_that_gives_other_bits_is_not_used(target: str) -> None:
    state = torch.get_rng_state()
    with own._undisturbed():
        assert own._MAKERS[target](Wrong()) is None  # type: ignore[arg-type]
    assert torch.equal(state, torch.get_rng_state()), "the trial leaves the generator as it was"


@pytest.mark.parametrize("target", TARGETS)
def test_they_are_tried_as_they_are_used_whatever_the_defaults(target: str) -> None:
    library = own._library()
    assert library is not None
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    try:
        assert own._MAKERS[target](library) is not None
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)


def test_a_generator_that_is_saved_otherwise_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    library = own._library()
    assert library is not None
    monkeypatch.setattr(own, "STATE", own.STATE + 8)
    assert own._MAKERS[BERNOULLI](library) is None


def test_without_a_compiler_torchs_kernels_are_called(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: Any, **__: Any) -> ctypes.CDLL:
        raise native.NativeUnavailable("there is no compiler.")

    monkeypatch.setattr(native, "library", missing)
    for cached in (own.quicker, own._library):
        monkeypatch.setattr(own, cached.__name__, cached.__wrapped__)
    assert [own.quicker(target) for target in TARGETS] == [None] * 3


def test_all_else_is_torchs() -> None:
    assert own.quicker("aten.mm.default") is None
    assert kernels.kernel("aten.mm.default") is torch.ops.aten.mm.default._op


@pytest.mark.parametrize("name", LARGE_ENOUGH)
def test_a_step_uses_them_and_is_eagers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own, "LEAST", LEAST)
    target, used = LARGE_ENOUGH[name], []
    found = mine(target)

    def counted(*args: Any) -> Any:
        used.append(args[0].numel())
        return found(*args)

    cpu = replace(device.CPU, own_kernel=lambda asked: counted if asked == target else own.quicker(asked))
    monkeypatch.setitem(device.DEVICES, "cpu", cpu)
    (step, model, optimizer, example), (_, model_2, optimizer_2, _) = models.build(name), models.build(name)
    train = lowtide.fit(step, model, optimizer, example=example, budget="70%", time_limit=0.5)
    for seed in range(3):
        torch.manual_seed(seed)
        loss, state = train(*example), torch.get_rng_state()
        torch.manual_seed(seed)
        assert torch.equal(loss, step(model_2, optimizer_2, *example).detach())
        assert torch.equal(state, torch.get_rng_state())
    for ours, eagers in zip(model.state_dict().values(), model_2.state_dict().values(), strict=True):
        assert torch.equal(ours, eagers)
    assert max(used) >= LEAST
    assert train.mismatches == 0
    assert train.peak is not None
    assert train.plan.budget is not None
    assert train.peak <= train.plan.budget
