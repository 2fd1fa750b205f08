"""Our own kernels against torch's on whatever they may be handed: the same bits and writes, or the same error."""

from __future__ import annotations

import math
import random
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lowtide import kernels
from lowtide.kernels import own

BERNOULLI = "aten.bernoulli_.float"
BATCH_NORM = "aten.native_batch_norm.default"
MAX_POOL = "aten.max_pool2d_with_indices.default"
EDGES = (math.nan, math.inf, -math.inf, -0.0, 0.0, 1e-42, -1e-45, 3e38, 2**-126)
CASES = 400  # of each kernel in the ordinary tests
MANY = 5_000  # in the long ones


@pytest.fixture(autouse=True)
def _from_the_first_element(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own, "LEAST", 1)


def numbers(chance: random.Random, shape: tuple[int, ...]) -> Tensor:
    """Ordinary numbers, often with a few at the edge."""
    found = torch.randn(shape, generator=torch.Generator().manual_seed(chance.randrange(2**31)))
    found *= 10.0 ** chance.randint(-3, 3)
    if found.numel() and chance.random() < 0.4:
        flat = found.view(-1)
        for _ in range(chance.randint(1, 5)):
            flat[chance.randrange(flat.numel())] = chance.choice(EDGES)
    return found


def disguised(chance: random.Random, plain: Tensor, *, often: float = 0.4) -> Tensor:
    """The tensor, maybe in another layout, type or place; maybe not all there."""
    if chance.random() > often:
        return plain
    kind = chance.randrange(12)
    if kind == 0 and plain.dim():  # every other one along some axis
        axis = chance.randrange(plain.dim())
        wide = plain.repeat_interleave(2, axis)
        return wide[(slice(None),) * axis + (slice(None, None, 2),)]
    if kind == 1 and plain.dim() == 4:
        return plain.to(memory_format=torch.channels_last)
    if kind == 2 and plain.dim() > 1:
        return plain.transpose(0, -1).contiguous().transpose(0, -1)
    if kind == 3:  # at an odd place in something larger
        offset = chance.randint(1, 9)
        larger = torch.zeros(plain.numel() + 2 * offset)
        larger[offset : offset + plain.numel()] = plain.reshape(-1)
        return larger[offset : offset + plain.numel()].view(plain.shape)
    if kind == 4 and plain.dim():  # one number for many
        axis = chance.randrange(plain.dim())
        return plain.narrow(axis, 0, min(1, plain.shape[axis])).expand(plain.shape)
    if kind == 5:
        return plain.to(chance.choice((torch.float64, torch.bfloat16, torch.float16)))
    if kind == 6:
        return plain.to(chance.choice((torch.int64, torch.bool, torch.complex64)))
    if kind == 7:  # odd strides where they do not matter
        sizes = plain.shape
        stride = [step if size > 1 else chance.randint(1, 99) for size, step in zip(sizes, plain.stride(), strict=True)]
        return torch.empty(plain.numel() + 500).as_strided(sizes, stride).copy_(plain)
    if kind == 8:
        return torch._neg_view(plain)
    if kind == 9:
        return torch.nn.Parameter(plain, requires_grad=chance.random() < 0.5)
    if kind == 10 and plain.dim():  # neighbours share all but one number
        return torch.randn(sum(plain.shape) + 1).as_strided(plain.shape, [1] * plain.dim())
    if kind == 11:
        return plain.to("meta")
    return plain


def batch_norm_case(chance: random.Random) -> tuple[Any, ...]:
    """Arguments of a batch norm, some of them wrong."""
    shape = [chance.choice((0, 1, 2, 3, 4)), chance.choice((0, 1, 2, 3, 8, 9, 17)), *chance.choices(range(9), k=4)]
    shape = shape[: chance.choice((0, 1, 2, 3, 3, 4, 4, 4, 4, 5, 6))]
    x = disguised(chance, numbers(chance, tuple(shape)))
    channels = shape[1] if len(shape) > 1 else 3

    def parameter() -> Tensor | None:
        if chance.random() < 0.15:
            return None
        sizes: tuple[int, ...] = (channels,)
        if chance.random() < 0.06:
            sizes = chance.choice(((max(0, channels - 1),), (channels + 1,), (1,), (), (channels, 1), (1, channels)))
        return disguised(chance, numbers(chance, sizes), often=0.06)

    parameters = [parameter() for _ in range(4)]
    if chance.random() < 0.1:  # one tensor in two places
        parameters[chance.randrange(2, 4)] = chance.choice(parameters)
    if chance.random() < 0.05 and x.dtype is torch.float32 and x.numel() >= channels and x.is_contiguous():
        parameters[2] = x.detach().view(-1)[:channels]
    momentum, eps = chance.choice((0.1, 0.0, 1.0, 0.3, math.nan)), chance.choice((1e-5, 0.0, 1.0))
    return (x, *parameters, chance.random() < 0.9, momentum, eps)


def max_pool_case(chance: random.Random) -> tuple[Any, ...]:
    """Arguments of a max pooling, some of them wrong."""
    shape = [chance.choice((0, 1, 2, 3, 3)), chance.choice((0, 1, 2, 3, 4, 5, 5)), *chance.choices(range(40), k=3)]
    shape = shape[: chance.choice((2, 3, *[4] * 20, 5))]
    if chance.random() < 0.05 and len(shape) == 4:
        shape[2:] = [2, 1200]  # longer than what is kept at a time
    x = numbers(chance, tuple(shape))
    x = disguised(chance, x.round() if chance.random() < 0.5 else x)

    def sizes(low: int, high: int, odd: float = 0.04) -> list[int]:
        number = chance.choice((0, 1, 3)) if chance.random() < odd else 2
        bad = chance.choice((-1, 0, 2**31, 2**40)) if chance.random() < odd else None
        found = [chance.randint(low, high) for _ in range(number)]
        return found if bad is None or not found else [bad, *found[1:]]

    stride = [] if chance.random() < 0.2 else sizes(1, 4)
    padding = sizes(0, 2) if chance.random() < 0.5 else [0, 0]
    return x, sizes(1, 5), stride, padding, sizes(1, 3), chance.random() < 0.5


def bernoulli_case(chance: random.Random) -> tuple[Any, ...]:
    """Arguments of a draw, some of them wrong."""
    shape = tuple(chance.choices((0, 1, 2, 3, 7, 50), k=chance.randint(0, 4)))
    p = chance.choice((0.0, 1.0, 0.5, 1 / 3, 0.9, 1e-300, 1 - 2**-53, -0.1, 1.1, math.nan, 1, 0))
    return disguised(chance, numbers(chance, shape)), p


MAKERS: dict[str, Callable[[random.Random], tuple[Any, ...]]] = {
    BERNOULLI: bernoulli_case,
    BATCH_NORM: batch_norm_case,
    MAX_POOL: max_pool_case,
}


def written(tensor: Tensor) -> Any:
    """What is in a tensor, to the bit; a number that is none is like any other such number."""
    if tensor.device.type == "meta":
        return None
    plain = tensor.detach().resolve_neg().contiguous()
    if plain.is_floating_point():
        plain = torch.where(plain.isnan(), torch.full_like(plain, math.nan), plain)
    return plain.reshape(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b""


def looks(tensor: Tensor) -> Any:
    return tensor.dtype, tuple(tensor.shape), tensor.stride(), written(tensor)


def outcome(call: Callable[..., Any], target: str, seed: int) -> Any:
    """All that a call on the arguments of this seed leaves: results or the class of an error, arguments, generator."""
    torch.manual_seed(seed)
    args = MAKERS[target](random.Random(seed))
    torch.rand(seed % 700)
    tensors = [arg for arg in args if isinstance(arg, Tensor)]
    try:
        with torch._C._AutoDispatchBelowAutograd(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch gives each only once
            results = call(*args)
    except Exception as error:
        return type(error)
    results = results if isinstance(results, tuple) else (results,)
    if target == BATCH_NORM and not args[0].numel():
        results = results[:1]  # the statistics of nothing are whatever is in memory
    return (
        [looks(tensor) for tensor in results],
        [looks(tensor) for tensor in tensors],
        [tensor._version for tensor in tensors],
        torch.get_rng_state().numpy().tobytes(),
    )


def eagers(target: str) -> Callable[..., Any]:
    """What eager calls: torch's kernel, for batch norm behind the checks that it does not make by itself."""
    kernel: Callable[..., Any] = kernels.overload(target)._op
    if target != BATCH_NORM:
        return kernel

    def batch_norm(x: Tensor, *rest: Any) -> Any:
        fits = all(tensor is None or (x.dim() > 1 and tensor.numel() == x.shape[1]) for tensor in rest[:4])
        fits &= rest[4] or all(tensor is not None for tensor in rest[2:4])
        if fits and not x.numel():  # eager's answer is other ops than these
            return kernel(x, *rest)
        return torch.ops.aten._batch_norm_impl_index.default(x, *rest, False)[:3]

    return batch_norm


def compare(target: str, seeds: range) -> int:
    """How many of these calls are ours from start to end; all leave what torch's leave."""
    mine, theirs = own.quicker(target), eagers(target)
    assert mine is not None
    done = 0
    for seed in seeds:
        found, expected = outcome(mine, target, seed), outcome(theirs, target, seed)
        done += not isinstance(found, type)
        assert found == expected, (target, seed, MAKERS[target](random.Random(seed)))
    return done


@pytest.mark.parametrize("target", MAKERS)
def test_whatever_they_are_handed(target: str) -> None:
    assert compare(target, range(CASES)) > CASES // 4


@pytest.mark.long
@pytest.mark.parametrize("target", MAKERS)
def test_whatever_they_are_handed_at_length(target: str) -> None:
    assert compare(target, range(CASES, MANY)) > MANY // 4


@pytest.mark.parametrize("wrong", range(4))
def test_a_parameter_of_another_size_is_torchs_error(wrong: int) -> None:
    channels = 16
    for size in (channels - 1, 1, channels + 1):
        parameters = [torch.ones(channels) for _ in range(4)]
        parameters[wrong] = torch.ones(size)
        call = own.quicker(BATCH_NORM)
        assert call is not None
        with pytest.raises(RuntimeError, match=f"should contain {channels} elements not {size}"):
            call(torch.randn(4, channels, 8, 8), *parameters, True, 0.1, 1e-5)


def test_a_tensor_whose_memory_is_gone_is_torchs_error() -> None:
    call = own.quicker(BATCH_NORM)
    assert call is not None
    mean = torch.ones(16)
    mean.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError):
        call(torch.randn(4, 16, 8, 8), None, None, mean, torch.ones(16), True, 0.1, 1e-5)


def test_a_state_that_no_generator_has_is_refused() -> None:
    library = own._library()
    assert library is not None
    for left, after in ((0, 0), (625, 0), (-1, 0), (2, 624), (1, 2**40), (624, 2)):
        state, out = torch.get_rng_state(), torch.full((9,), 7.0)
        state[8:12].view(torch.int32)[0] = left
        state[16:24].view(torch.int64)[0] = after
        before = state.clone()
        assert library.lowtide_bernoulli(state.data_ptr(), out.data_ptr(), 9, 2**52) == 1
        assert torch.equal(state, before)
        assert torch.equal(out, torch.full((9,), 7.0))
