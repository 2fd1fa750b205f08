"""Packed activations: kernels against plain torch, gradients against eager's with hooks that pack what it saves."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from twins import assert_same, everything

import lowtide
from lowtide import allocator, kernels, models
from lowtide.errors import FileError, UsageError
from lowtide.execute import Batch
from lowtide.kernels import blocks
from lowtide.measure import measure
from lowtide.models.small import SMALL
from lowtide.plan import keep_everything, least
from lowtide.rewrite import EXACT, apply, named
from lowtide.rewrite.activations import SMALLEST, WHICH
from lowtide.verify.gradient import with_errors

BITS = (16, 8, 4)
BOUND = {16: 1e-4, 8: 2e-2, 4: 0.25}  # of the gradient's norm, on all models here
STEPS = ("wrn-28-2:blocks=1,batch=4", "mlp:width=64,depth=3,features=32,batch=64", SMALL["unet"], SMALL["gpt"])
pack, unpack, signs, gate = (kernels.kernel(name) for name in (blocks.PACK, blocks.UNPACK, blocks.SIGNS, blocks.GATE))


def packed_and_back(numbers: Tensor, bits: int) -> Tensor:
    """The format in plain torch, from its description: 256 numbers, the least of them, and whole steps from it."""
    flat = numbers.as_strided((numbers.numel(),), (1,))
    found, levels = torch.empty_like(flat), float(2**bits - 1)
    for first in range(0, len(flat), 256):
        block = flat[first : first + 256]
        low, step = block.min(), block.max() / levels - block.min() / levels
        codes = ((block - low) * (1 / step) + 0.5).clamp(max=levels).floor() if step > 0 else torch.zeros_like(block)
        if low == 0:
            codes = torch.where(block > 0, codes.clamp(min=1), codes)
        found[first : first + 256] = low + codes * step
    return torch.empty_strided(numbers.shape, numbers.stride()).copy_(found.as_strided(numbers.shape, numbers.stride()))


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("count", [1, 2, 255, 256, 257, 70_001])
def test_numbers_come_back_as_the_format_says(bits: int, count: int) -> None:
    numbers = torch.randn(count, generator=torch.Generator().manual_seed(count)) * 3 + 1
    back = unpack(pack(numbers, bits), bits, numbers.shape, numbers.stride())
    assert torch.equal(back, packed_and_back(numbers, bits))
    spans = torch.stack([block.max() - block.min() for block in numbers.split(256)])
    steps = (spans / (2**bits - 1)).repeat_interleave(256)[:count]
    assert bool(((back - numbers).abs() <= 0.51 * steps + 4e-7 * numbers.abs().max()).all())


@pytest.mark.parametrize("bits", BITS)
def test_zeros_of_a_relu_stay_the_only_zeros(bits: int) -> None:
    numbers = torch.randn(4, 33, 65).relu()
    numbers[0, 0, :8] = 1e-6  # far less than a step
    back = unpack(pack(numbers, bits), bits, numbers.shape, numbers.stride())
    assert torch.equal(back > 0, numbers > 0)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf")])
def test_what_is_no_number_is_seen_in_its_block(bits: int, wrong: float) -> None:
    numbers = torch.randn(700)
    numbers[300] = wrong
    back = unpack(pack(numbers, bits), bits, numbers.shape, numbers.stride())
    assert bool(back[256:512].isnan().all())
    assert bool(back[:256].isfinite().all())
    assert bool(back[512:].isfinite().all())


@pytest.mark.parametrize("numbers", [torch.zeros(300), torch.full((300,), -2.5), torch.full((300,), 1e-42)])
def test_equal_numbers_come_back_as_they_were(numbers: Tensor) -> None:
    for bits in BITS:
        assert torch.equal(unpack(pack(numbers, bits), bits, numbers.shape, numbers.stride()), numbers)


def test_any_dense_order_of_dimensions_is_taken_and_others_are_refused() -> None:
    numbers = torch.randn(2, 5, 7, 3).permute(0, 3, 1, 2)
    back = unpack(pack(numbers, 16), 16, numbers.shape, numbers.stride())
    assert back.stride() == numbers.stride()
    assert torch.allclose(back, numbers, atol=1e-3)
    for odd in (torch.randn(4, 6)[:, ::2], torch.randn(6).double(), torch.randn(1, 6).expand(3, 6)):
        with pytest.raises(ValueError, match="can't be packed"):
            pack(odd, 8)
    with pytest.raises(ValueError, match="are not"):
        unpack(pack(numbers, 8), 8, [7], [1])


def test_a_gate_has_the_signs_of_another() -> None:
    numbers, other = torch.randn(3, 100), torch.randn(3, 100)
    numbers[0, :3] = 0
    gated = gate(other, signs(numbers))
    assert torch.equal(gated > 0, numbers > 0)
    both = (numbers > 0) & (other > 0)
    assert torch.equal(gated[both], other[both])


@pytest.mark.skipif(not allocator.available(), reason="needs the meter")
@pytest.mark.parametrize("bits", BITS)
def test_packing_allocates_its_result_and_nothing_else(bits: int) -> None:
    numbers = torch.randn(40_000)
    packed = pack(numbers, bits)
    for call, nbytes in ((lambda: pack(numbers, bits), packed.nbytes), (lambda: signs(numbers), 5_000)):
        with allocator.meter() as meter:
            before = meter.current
            made = call()
            assert meter.peak - before <= nbytes + 64
            del made


class Packing:
    """Hooks that pack what eager saves of activations, in plain torch."""

    def __init__(self, model: torch.nn.Module, batch: tuple[Any, ...], bits: int) -> None:
        given = [*model.parameters(), *model.buffers(), *(leaf for leaf in batch if isinstance(leaf, Tensor))]
        self.given = {tensor.untyped_storage().data_ptr() for tensor in given}
        self.bits, self.count = bits, 0

    def pack(self, tensor: Tensor) -> Tensor:
        small = tensor.untyped_storage().nbytes() < SMALLEST or tensor.dtype is not torch.float32
        if small or tensor.untyped_storage().data_ptr() in self.given:
            return tensor
        self.count += 1
        return packed_and_back(tensor.detach(), self.bits)


def planned(target: str, rewrites: list[Any], program: Any, seed: int = 0) -> tuple[Any, Any, Any, Any]:
    """A step of a target after these rewrites, by a program that is made of its graph."""
    torch.manual_seed(seed)
    step, model, optimizer, example = models.build(target)
    captured = lowtide.capture(step, model, optimizer, example)
    rewritten = apply(captured.graph, (*EXACT, *rewrites))
    captured = replace(captured, graph=rewritten.graph)
    return lowtide.execute(captured, program(rewritten.graph)), model, optimizer, example


@pytest.mark.parametrize("target", ["wrn-28-2:blocks=1,batch=4", "mlp:width=64,depth=3,features=32,batch=64"])
@pytest.mark.parametrize("bits", BITS)
def test_all_packed_is_eager_with_packed_saves_to_the_bit(target: str, bits: int) -> None:
    rewrite = named(f"activations{bits}")
    assert rewrite is not None
    train, mirror, mirrored, example = planned(target, [rewrite.by("all")], keep_everything)
    torch.manual_seed(0)
    step, model, optimizer, _ = models.build(target)
    for _ in range(2):
        hooks = Packing(model, example, bits)
        with torch.autograd.graph.saved_tensors_hooks(hooks.pack, lambda tensor: tensor):
            expected = step(model, optimizer, *example)
        assert torch.equal(expected, train(*example))
        assert hooks.count > 2
        assert_same(everything(model, optimizer), everything(mirror, mirrored))


@pytest.mark.parametrize("target", STEPS)
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("which", WHICH)
def test_the_loss_is_eager_s_and_the_gradient_is_near(target: str, bits: int, which: str) -> None:
    rewrite = named(f"activations{bits}")
    assert rewrite is not None
    train, mirror, _, example = planned(target, [rewrite.by(which)], keep_everything)
    torch.manual_seed(0)
    step, model, optimizer, _ = models.build(target)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    torch.manual_seed(1)
    expected = step(model, optimizer, *example)
    torch.manual_seed(1)
    assert torch.equal(expected, train(*example))
    moved = [parameter.detach() - old for parameter, old in zip(model.parameters(), before, strict=True)]
    wrong = [one.detach() - other.detach() for one, other in zip(mirror.parameters(), model.parameters(), strict=True)]
    error = torch.cat([item.flatten() for item in wrong]).norm() / torch.cat([item.flatten() for item in moved]).norm()
    assert error <= BOUND[bits]
    assert bits == 16 or error > 0 or (which == "sums" and target.startswith("mlp"))  # which adds no large values


@pytest.mark.parametrize("target", ["wrn-28-2:blocks=2,batch=4", SMALL["gpt"]])
@pytest.mark.parametrize("which", WHICH)
def test_recomputation_under_packed_activations_keeps_every_bit_of_them(target: str, which: str) -> None:
    rewrite = named("activations8")
    assert rewrite is not None

    def smallest(graph: lowtide.Graph) -> lowtide.Program:
        return least(graph, measure(graph)).program

    whole, model, optimizer, example = planned(target, [rewrite.by(which)], keep_everything)
    tight, mirror, mirrored, _ = planned(target, [rewrite.by(which)], smallest)
    for number in range(2):
        torch.manual_seed(number)
        expected = whole(*example)
        torch.manual_seed(number)
        assert torch.equal(expected, tight(*example))
        assert_same(everything(model, optimizer), everything(mirror, mirrored))


@pytest.mark.parametrize("target", ["wrn-28-2:blocks=1,batch=4", SMALL["gpt"]])
def test_the_error_that_is_reported_is_the_gradient_s(target: str) -> None:
    """Plain SGD without momentum moves each parameter by its gradient, so that the error shows in the parameters."""
    torch.manual_seed(0)
    step, model, _, example = models.build(target)
    rewrite = named("activations8")
    assert rewrite is not None
    captured = lowtide.capture(step, model, torch.optim.SGD(model.parameters(), lr=1.0), example)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    torch.manual_seed(1)
    (said,) = with_errors(captured, Batch.of(example), [rewrite.by("all")])
    assert_same(before, dict(model.state_dict()))
    moved = []
    for rewrites in ([], [rewrite.by("all")]):
        model.load_state_dict(before)
        graph = apply(captured.graph, rewrites).graph
        torch.manual_seed(1)
        lowtide.execute(replace(captured, graph=graph), keep_everything(graph))(*example)
        names = dict(model.named_parameters())
        moved.append(torch.cat([(item.detach().double() - before[name]).flatten() for name, item in names.items()]))
    found = float((moved[1] - moved[0]).norm() / moved[0].norm())
    assert said.error == pytest.approx(found, rel=1e-2)


def test_fit_reports_what_was_packed_and_what_that_cost() -> None:
    step, model, optimizer, example = models.build("wrn-28-2:blocks=2,batch=4")
    graph = lowtide.capture(step, model, optimizer, example).graph
    rewrite = named("activations8")
    assert rewrite is not None
    rewritten = apply(graph, (*EXACT, rewrite.by("products")))
    found = replace(least(rewritten.graph, measure(rewritten.graph)), rewrites=rewritten.rewrites)
    with pytest.raises(FileError, match="activations8"):
        lowtide.fit(step, model, optimizer, example=example, plan=found)
    train = lowtide.fit(step, model, optimizer, example=example, plan=found, allow="activations8")
    (used,) = [one for one in train.plan.rewrites if one.exactness == "lossy"]
    assert used.error is not None
    assert 0 < used.error <= BOUND[8]
    for _ in range(3):
        train(*example)
    assert train.peak is None or abs(train.peak - found.peak) <= 0.03 * found.peak
    assert f"error {used.error:.1e}" in train.report()


def test_an_unknown_choice_of_activations_is_refused() -> None:
    step, model, optimizer, example = models.build(SMALL["mlp"])
    with pytest.raises(UsageError, match="no activations 'some'"):
        lowtide.fit(step, model, optimizer, example=example, budget=1, allow="activations8:some")
