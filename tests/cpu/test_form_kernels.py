"""The kernels of forms against torch's own casts, closed forms and numpy; and what they refuse."""

from __future__ import annotations

from collections.abc import Iterator

import numpy
import pytest
import torch
from torch import Tensor

from lowtide.kernels import forms
from lowtide.kernels.forms_plain import INSTRUCTIONS

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.uint8)
COUNTS = (1, 255, 256, 257, 5000)


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def numbers(count: int, dtype: torch.dtype) -> Tensor:
    """Numbers of many sizes, zeros among them."""
    drawn = torch.randn(count, generator=torch.Generator().manual_seed(count)) * torch.logspace(-9, 3, count)
    drawn[::7] = 0
    return drawn.abs() if dtype == torch.uint8 else drawn


def parts(dtype: torch.dtype, count: int) -> tuple[Tensor, Tensor | None]:
    scaled = dtype in (torch.int8, torch.uint8)
    return torch.zeros(count, dtype=dtype), torch.zeros(-(-count // 256)) if scaled else None


def mask_of(bits: Tensor) -> Tensor:
    return torch.from_numpy(numpy.packbits(bits.numpy(), bitorder="little"))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("masked", [False, True])
def test_with_and_without_a_compiler_the_bits_are_the_same(
    dtype: torch.dtype, count: int, masked: bool, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = numbers(count, dtype)
    bits = torch.rand(count, generator=torch.Generator().manual_seed(3)) < 0.3
    bits[0] = True
    mask = mask_of(bits) if masked else None
    found = []
    for plain in (False, True):
        if plain:
            monkeypatch.setattr(forms, "library", lambda: None)
        else:
            assert forms.library() is not None
        values, scales = parts(dtype, int(bits.sum()) if masked else count)
        counter = torch.tensor([41])
        forms.pack(values, scales, mask, counter, given, [0])
        found.append((values, counter, forms.unpack(values, scales, mask, [count], [1])))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))
    assert found[0][1].item() == 42
    if masked:
        assert not found[0][2][~bits].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_to_the_nearest_is_torch_s_cast_but_for_ties(dtype: torch.dtype) -> None:
    given = numbers(5000, dtype)
    values, _ = parts(dtype, 5000)
    forms.pack(values, None, None, None, given, [0])
    assert torch.equal(values, given.to(dtype)), "random numbers have no ties"
    special = torch.tensor([float("inf"), -float("inf"), float("nan"), -0.0, 1.0])
    values, _ = parts(dtype, 5)
    forms.pack(values, None, None, None, special, [0])
    assert torch.equal(values.nan_to_num(), special.to(dtype).nan_to_num())
    assert torch.equal(forms.unpack(values, None, None, [5], [1])[:2], special[:2])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int8, torch.uint8])
def test_chance_is_right_on_average_and_never_a_step_off(dtype: torch.dtype) -> None:
    given = numbers(2048, dtype)
    values, scales = parts(dtype, 2048)
    counter, total, count = torch.tensor([7]), torch.zeros(2048, dtype=torch.float64), 400
    forms.pack(values, scales, None, None, given, [0])
    nearest = forms.unpack(values, scales, None, [2048], [1])
    for _ in range(count):
        forms.pack(values, scales, None, counter, given, [0])
        total += forms.unpack(values, scales, None, [2048], [1])
    size = given.abs()
    if scales is not None:
        size = scales.repeat_interleave(256) / {torch.int8: 127, torch.uint8: 255}[dtype] + size
    step = size * {torch.bfloat16: 2**-7, torch.float16: 2**-10}.get(dtype, 0.06) + 2**-24
    assert ((nearest - given).abs() <= step).all()
    assert ((total / count - given).abs() <= step * 5 / count**0.5 + 1e-3 * step).float().mean() > 0.995


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_was_unpacked_is_packed_to_the_same_bytes(dtype: torch.dtype) -> None:
    values, scales = parts(dtype, 4096)
    forms.pack(values, scales, None, None, numbers(4096, dtype), [0])
    again = values.clone().zero_()
    forms.pack(again, scales, None, torch.tensor([5]), forms.unpack(values, scales, None, [4096], [1]), [0])
    assert torch.equal(values.view(torch.uint8), again.view(torch.uint8))


def test_orders_of_memory_and_views_of_what_is_read() -> None:
    given = torch.randn(4, 6, 3, 5)
    last = given.contiguous(memory_format=torch.channels_last)
    values, _ = parts(torch.float32, given.numel())
    for seen in (given, last, given.transpose(0, 1).contiguous().transpose(0, 1)):
        forms.pack(values, None, None, None, seen, [0, 2, 3, 1])
        assert torch.equal(forms.unpack(values, None, None, list(last.shape), list(last.stride())), given)


def test_programs_that_reach_too_far_are_refused() -> None:
    values, given = torch.zeros(8), torch.ones(8)
    see, store, add = (INSTRUCTIONS.index(name) for name in ("see", "store", "add"))
    good = [see, 0, 0, 0, 0, store, 0, 0, 0, 0]
    call = ([values], [], [0], None, [given], [8], [0], [], good)
    forms.update(*call)
    assert torch.equal(values, given)
    wrong: list[tuple[int, object]] = [
        (8, [see, 16, 0, 0, 0]),
        (8, [see, 0, 1, 0, 0]),
        (8, [store, 1, 0, 0, 0]),
        (8, [add, 0, 0, 0, 0]),
        (8, [99, 0, 0, 0, 0]),
        (8, good[:7]),
        (5, [9]),
        (6, [1]),
        (4, [given[:4]]),
        (4, [given.double()]),
        (2, [1]),
        (1, [torch.zeros(1)]),
        (3, torch.zeros(0, dtype=torch.uint8)),
        (0, [torch.zeros(8, dtype=torch.int8)]),
    ]
    for place, item in wrong:
        with pytest.raises(ValueError, match="do not fit together"):
            forms.update(*call[:place], item, *call[place + 1 :])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="do not fit together"):
        forms.unpack(values, None, torch.zeros(1, dtype=torch.uint8), [100], [1])
    with pytest.raises(ValueError, match="do not fit together"):
        forms.from_bytes(torch.zeros(8, dtype=torch.uint8), given[:1], given[:1], [8], [1], 1, -1)
