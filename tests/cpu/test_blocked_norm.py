"""Our batch norm of tensors in blocks has the bits of torch's ops one by one, whatever it takes in."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from lowtide.kernels import blocked as ops
from lowtide.kernels import blocked_norm as norms
from lowtide.kernels import opaque
from lowtide.measure.trial import has_torch_bits

needs_layout = pytest.mark.skipif(not opaque.works(), reason="the library of convolutions has another layout here")
PARTS = (  # images, channels of each part, height and width: fewer places than lanes, odd ones, and whole lanes
    (2, (32,), 5, 7),
    (3, (16, 32, 16), 8, 9),
    (4, (16,), 2, 3),
    (2, (48, 16), 16, 16),
)


def _blocks(images: int, channels: int, height: int, width: int) -> torch.Tensor:
    return opaque.blocked(torch.zeros(images, channels, height, width))


@needs_layout
@pytest.mark.parametrize(("images", "channels", "height", "width"), PARTS)
def test_batch_norms_have_torchs_bits_whatever_they_take_in(
    images: int, channels: tuple[int, ...], height: int, width: int
) -> None:
    """On ordinary numbers, and on NaN, infinities, -0.0 and denormals among them."""
    count, parts = sum(channels), [_blocks(images, each, height, width) for each in channels]
    other, each = _blocks(images, count, height, width), [torch.zeros(count) for _ in range(4)]
    for added, rectified in product((None, other), (False, True)):
        assert has_torch_bits(norms.NORM, [parts, *each, 0.1, 1e-5, added, rectified, images])
    for more, (again, result), keeps in product(
        (None, other), ((False, None), (True, None), (False, other)), (False, True)
    ):
        given = [other, more, parts, *each, result, again, keeps, 1e-5, images]
        assert has_torch_bits(norms.NORM_BACKWARD, given)


@needs_layout
def test_sums_of_channels_have_torchs_bits_and_stay_inside() -> None:
    one, other = _blocks(2, 64, 5, 3), _blocks(2, 48, 5, 3)
    assert has_torch_bits(ops.SUM, [one, other, [32, 16], 32, 2])
    for starts, channels in (([32, 32], 32), ([8, 0], 16), ([0, 0], 0)):
        with pytest.raises(ValueError, match=f"no {channels} channels in blocks"):
            ops.add_up(one, other, starts, channels, 2)


def test_parts_that_do_not_belong_together_are_refused() -> None:
    parts = [_blocks(2, 32, 5, 7), _blocks(2, 16, 5, 6)]
    with pytest.raises(ValueError, match="do not belong together"):
        norms.norm(parts, None, None, None, None, 0.1, 1e-5, None, False, 2)
    with pytest.raises(ValueError, match="do not belong to"):
        norms.norm(parts[:1], None, None, None, None, 0.1, 1e-5, parts[1], False, 2)
    each = [torch.zeros(32) for _ in range(3)]
    with pytest.raises(ValueError, match="not one number for each of 32 channels"):
        norms.norm_backward(parts[0], None, parts[:1], *each, torch.zeros(16), None, False, False, 1e-5, 2)
