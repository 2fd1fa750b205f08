"""What a step's own code asks while it is traced: what is known at once, what is assumed and checked, and refused."""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from twins import assert_exact, assert_same, everything

import lowtide
from lowtide import CaptureError
from lowtide.kernels.described import described

WIDTH, CLASSES = 8, 4


class Net(nn.Module):
    """Two layers with something between them."""

    def __init__(self, between: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.one, self.two, self.between = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES), between

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.between(torch.tanh(self.one(x))))


def step(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
    loss = functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def recipe(between: Callable[[Tensor], Tensor]) -> Any:
    torch.manual_seed(3)
    model = Net(between)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return step, model, optimizer, (torch.randn(6, WIDTH), torch.randint(0, CLASSES, (6,)))


def raises(x: Tensor) -> Tensor:
    if x.abs().max() > 1:
        raise ValueError("too large")
    if not (x < 2).all():
        raise ValueError(f"too large: {x.max()}")
    return x


def clamps(x: Tensor) -> Tensor:
    if not torch.isfinite(x).all():
        return x.clamp(-1, 1)
    if torch.isnan(x).any() or torch.isinf(x).any():
        return x * 0
    return x


def own_numbers(x: Tensor) -> Tensor:
    span = torch.tensor(min(x.shape[1], 5))
    mask = torch.ones(x.shape[1])
    mask[1:3] = 0
    kept = mask.nonzero()[:, 0]
    assert bool((mask.cumsum(0) <= x.shape[1]).all())
    return functional.pad(x[:, kept], (0, 2))[:, : 3 + span] if span > 3 else x


def by_environment(x: Tensor) -> Tensor:
    if os.environ.get("LOWTIDE_TEST_TWICE", "0") == "1":
        x = x * 2
    return x * 3 if os.getenv("LOWTIDE_TEST_THRICE") else x


@functools.lru_cache(maxsize=1)
def shifted(x: Tensor, by: int) -> Tensor:
    return x.detach() + by


def cached(x: Tensor) -> Tensor:
    return x + shifted(x, 1) * shifted(x.detach(), 2)


@pytest.mark.parametrize("between", [raises, clamps, own_numbers, by_environment, cached])
@pytest.mark.parametrize("budget", [None, "least"])
def test_a_step_that_asks_equals_eager(between: Any, budget: str | None) -> None:
    assert_exact(lambda: recipe(between), budget=budget, steps=3)


@pytest.mark.parametrize(("between", "words"), [(raises, "raises"), (clamps, "not finite")])
def test_a_batch_that_decides_otherwise_is_one_error_before_any_update(between: Any, words: str) -> None:
    step_, model, optimizer, (x, y) = recipe(between)
    train = lowtide.fit(step_, model, optimizer, example=(x, y), costs="roofline")
    train(x, y)
    before = {key: item if item is None else item.clone() for key, item in everything(model, optimizer).items()}
    with pytest.raises(lowtide.StepError, match=r"test_decisions\.py:") as caught:
        train(torch.full_like(x, float("nan")), y)
    assert words in str(caught.value)
    assert not caught.value.parameters
    assert_same(before, everything(model, optimizer))
    train(x, y)


def test_a_check_holds_in_the_caller_s_own_loop() -> None:
    _, model, _, (x, _) = recipe(raises)
    lowtide.attach(model, costs="roofline")
    model(x).sum().backward()
    with pytest.raises(lowtide.StepError, match="raises"):
        model(torch.full_like(x, float("nan")))
    model(x).sum().backward()


def test_a_variable_of_the_environment_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []

    def make(*recipe_: Any) -> Any:
        return lowtide.fit(*recipe_[:3], example=recipe_[3], costs="roofline", tell=told.append)

    count = 0

    def between(*_: Any) -> None:
        nonlocal count
        count += 1
        if count == 2:
            monkeypatch.setenv("LOWTIDE_TEST_TWICE", "1")
        if count == 3:
            monkeypatch.setenv("LOWTIDE_TEST_THRICE", "yes")
        if count == 4:
            monkeypatch.delenv("LOWTIDE_TEST_TWICE")

    assert_exact(lambda: recipe(by_environment), make=make, between=between, steps=6)
    assert any("LOWTIDE_TEST_TWICE" in line for line in told)


def all_variables(x: Tensor) -> Tensor:
    return x * len(list(os.environ))


def sets_a_variable(x: Tensor) -> Tensor:
    os.environ["LOWTIDE_TEST_SET"] = "1"
    return x


def by_data(x: Tensor) -> Tensor:
    return x[:, : 1 + int((x > 0).sum()) % WIDTH]


def chosen_by_data(x: Tensor) -> Tensor:
    return x[x > 0].sum() + x


def weight_cached(model: Net) -> Callable[[Tensor], Tensor]:
    return lambda x: x + shifted(model.one.bias, 1)


@pytest.mark.parametrize(
    ("between", "words"),
    [
        (all_variables, "looks at all of os.environ"),
        (sets_a_variable, "changes os.environ"),
        (by_data, "contents of a tensor"),
        (chosen_by_data, "depends on the data"),
    ],
)
def test_what_stays_refused(between: Any, words: str) -> None:
    before = dict(os.environ)
    step_, model, optimizer, example = recipe(between)
    with pytest.raises(CaptureError, match=words):
        lowtide.capture(step_, model, optimizer, example)
    assert dict(os.environ) == before


def test_a_cache_of_what_is_done_to_a_weight_stays_refused() -> None:
    step_, model, optimizer, example = recipe(torch.tanh)
    model.between = weight_cached(model)
    with pytest.raises(CaptureError, match="tensors that the step is given"):
        lowtide.capture(step_, model, optimizer, example)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("one", "other", "ends"),
    [
        ((8, 16), (2, 16, 24), (3, 8)),
        ((16, 8), (8, 24), (3, 8)),
        ((2, 8, 16), (16, 24), (8, 24)),
        ((2, 8, 16), (2, 16, 24), None),
    ],
)
def test_grouped_products_are_described_as_they_are(one: Any, other: Any, ends: Any, dtype: torch.dtype) -> None:
    product = torch.ops.aten._grouped_mm.default
    offs = None if ends is None else torch.tensor(ends, dtype=torch.int32)
    given = torch.randn(one, dtype=dtype), torch.randn(other, dtype=dtype), offs
    real = product(*given)
    found = described(product)(*(None if one is None else one.to("meta") for one in given))
    assert (found.shape, found.stride(), found.dtype) == (real.shape, real.stride(), real.dtype)
    assert found.untyped_storage().nbytes() == real.untyped_storage().nbytes()


LAYOUT_CALLS: dict[str, tuple[Any, ...]] = {
    "mse_loss_backward": (1,),
    "smooth_l1_loss_backward": (1, 1.0),
    "huber_loss_backward": (1, 1.0),
    "binary_cross_entropy_backward": (None, 1),
    "_log_softmax_backward_data": (-1, torch.float32),
    "gelu_backward": (),
    "hardswish_backward": (),
    "hardtanh_backward": (-1.0, 1.0),
    "softplus_backward": (1.0, 20.0),
}


def layouts(*shape: int) -> list[Tensor]:
    """A tensor with its dimensions in every order, and one that is spread from a single number."""
    orders = itertools.permutations(range(len(shape)))
    found = [
        torch.rand([shape[place] for place in order]).permute(torch.tensor(order).argsort().tolist())
        for order in orders
    ]
    return [*found, torch.rand(()).expand(shape)]


def empty(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def assert_described(call: Any, *args: Any) -> None:
    real = call(*args)
    found = described(call)(*(empty(one) if isinstance(one, Tensor) else one for one in args))
    pairs = zip(real, found, strict=True) if isinstance(real, tuple) else [(real, found)]
    for one, other in pairs:
        assert one is None or not one.numel() or (one.stride(), one.dtype) == (other.stride(), other.dtype)


@pytest.mark.parametrize("name", LAYOUT_CALLS)
def test_results_are_laid_out_as_they_are_described(name: str) -> None:
    call = getattr(torch.ops.aten, name).default
    for gradient, given in itertools.product(layouts(2, 4, 3), layouts(2, 4, 3)[:-1]):
        others = (given.contiguous(),) if "loss" in name or "binary" in name else ()
        assert_described(call, gradient, given, *others, *LAYOUT_CALLS[name])


@pytest.mark.parametrize("shape", [(3, 5, 4), (2, 3, 4, 5)])
def test_norms_are_laid_out_as_they_are_described(shape: tuple[int, ...]) -> None:
    aten, channels = torch.ops.aten, torch.ones(shape[1])
    for given in layouts(*shape)[:-1]:
        assert_described(aten.native_batch_norm.default, given, channels, channels, channels, channels, True, 0.1, 1e-5)
        for gradient in layouts(*shape)[:-1]:
            more = (channels, channels, channels, channels, channels, True, 1e-5, [True, True, True])
            assert_described(aten.native_batch_norm_backward.default, gradient, given, *more)
            _, mean, spread = aten.native_layer_norm.default(given, shape[-1:], None, None, 1e-5)
            more = (shape[-1:], mean, spread, None, None, [True, False, False])
            assert_described(aten.native_layer_norm_backward.default, gradient, given, *more)
            assert_described(aten.elu_backward.default, gradient, 1.0, 1.0, 1.0, False, given)


@pytest.mark.long
@pytest.mark.parametrize(
    "name", ["llama", "mixtral", "deberta", "t5", "swin", "detr", "mamba", "vilt", "diffusion-unet"]
)
def test_models_of_others_are_exact_and_within_their_budget(name: str) -> None:
    from lowtide.bench.models import trial
    from lowtide.bench.models.others import FAMILIES

    pytest.importorskip(FAMILIES[name].library)
    found = trial.run(FAMILIES[name], steps=3, budget="50%")
    assert found.ok, found
