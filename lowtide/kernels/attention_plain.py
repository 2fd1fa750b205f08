"""What attention is in torch's own calls, all heads at once: what ours is tried against, and runs where it can't."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten
FLAT, APART, JOINED = 0, 1, 2  # (heads, rows, columns), (examples, heads, rows, ..), (examples, rows, heads, ..)


def operand(seen: Tensor, scale: float, copied: bool) -> Tensor:
    """What a product reads: (heads, rows, columns), scaled and copied into plain order where the step does so."""
    seen = seen if scale == 1 else aten.mul.Scalar(seen, scale)
    seen = aten.clone.default(seen, memory_format=torch.contiguous_format) if copied else seen
    return seen.flatten(0, 1) if seen.dim() == 4 else seen


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    heads: int,
    scales: list[float],
    filling: float,
    copied: list[bool],
    safe: bool,
    layout: int,
) -> Tensor:
    """The values, weighted by how well their keys match each query."""
    given = (query, key, value, mask, heads, scales, filling, copied, safe)
    weights = _weights(*given)
    return _laid_out(aten.bmm.default(weights.flatten(0, 1), _value(given)), heads, layout)


def dropped_attention(*given: Any) -> tuple[Tensor, Tensor]:
    """The same with dropout, and the draws."""
    *given_, rate, layout = given
    weights = _weights(*given_)
    drawn = aten.bernoulli_.float(aten.empty_like.default(weights), rate)
    noise = aten.div_.Scalar(drawn.clone(), rate)
    mixed = aten.bmm.default(aten.mul.Tensor(weights, noise).flatten(0, 1), _value(given_))
    return _laid_out(mixed, given_[4], layout), packed(drawn.flatten(0, 1))


def attention_backward(*given: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of query, key and value."""
    gradient, *rest, seen_copied, layouts = given
    return _backward(gradient, rest, seen_copied, None, layouts)


def dropped_attention_backward(*given: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The same with dropout."""
    gradient, kept, *rest, rate, seen_copied, layouts = given
    drawn = unpacked(kept, _sizes(rest)[-1])
    return _backward(gradient, rest, seen_copied, aten.div_.Scalar(drawn, rate), layouts)


def _backward(
    gradient: Tensor, given: Any, seen_copied: bool, noise: Tensor | None, layouts: list[int]
) -> tuple[Tensor, Tensor, Tensor]:
    weights = _weights(*given)
    query, key, _, mask, heads, scales, _, copied, _ = given
    query, key = operand(query, scales[0], copied[0]), operand(key, scales[1], copied[1])
    seen = operand(gradient, 1, seen_copied)
    used = weights if noise is None else aten.mul.Tensor(weights, noise.view_as(weights))
    of_value = aten.bmm.default(used.flatten(0, 1).transpose(1, 2), seen)
    back = aten.bmm.default(seen, _value(given).transpose(1, 2)).view_as(weights)
    back = back if noise is None else aten.mul.Tensor(back, noise.view_as(weights))
    back = aten._softmax_backward_data.default(back, weights, -1, torch.float32)
    if mask is not None and mask.dtype is torch.bool:
        back = back.masked_fill(mask, 0)
    back = back if scales[3] == 1 else aten.div.Scalar(back, scales[3])
    back = (back if scales[2] == 1 else aten.mul.Scalar(back, scales[2])).flatten(0, 1)
    of_key = aten.bmm.default(query.transpose(1, 2), back)
    of_query = aten.bmm.default(back, key.transpose(1, 2))
    made = (_scaled(of_query, scales[0]), _scaled(of_key, scales[1]), of_value)
    first, second, third = (_laid_out(each, heads, layout) for each, layout in zip(made, layouts, strict=True))
    return first, second, third


def _weights(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    heads: int,
    scales: list[float],
    filling: float,
    copied: list[bool],
    safe: bool,
) -> Tensor:
    scores = aten.bmm.default(operand(query, scales[0], copied[0]), operand(key, scales[1], copied[1]))
    scores = scores.unflatten(0, (-1, heads))
    scores = scores if scales[2] == 1 else aten.mul.Scalar(scores, scales[2])
    scores = scores if scales[3] == 1 else aten.div.Scalar(scores, scales[3])
    if mask is not None and mask.dtype is torch.bool:
        scores = scores.masked_fill(mask, filling)
    elif mask is not None:
        scores = aten.add.Tensor(scores, mask)
    made: Tensor = aten._safe_softmax.default(scores, -1) if safe else aten._softmax.default(scores, -1, False)
    return made


def _value(given: Any) -> Tensor:
    return operand(given[2], 1, given[7][2])


def _sizes(given: Any) -> tuple[int, int, int]:
    """Heads of all examples, rows and columns of the scores."""
    query, key, heads = given[0], given[1], given[4]
    count = query.shape[0] * (heads if query.dim() == 4 else 1)
    return count, query.shape[-2], key.shape[-1]


def _scaled(made: Tensor, scale: float) -> Tensor:
    return made if scale == 1 else aten.mul.Scalar(made, scale)


def _laid_out(made: Tensor, heads: int, layout: int) -> Tensor:
    """What a product made, in the layout that is asked for."""
    if layout == FLAT:
        return made
    made = made.unflatten(0, (-1, heads))
    if layout == JOINED:
        made = aten.clone.default(made.transpose(1, 2), memory_format=torch.contiguous_format)
    return made


def bits(size: int) -> int:
    """The bytes of a row of bits: whole words of eight."""
    return -(-size // 64) * 8


def packed(drawn: Tensor) -> Tensor:
    """Draws as bits, eight in a byte, each row from a byte of its own."""
    row = torch.nn.functional.pad(drawn, (0, bits(drawn.shape[-1]) * 8 - drawn.shape[-1])).to(torch.uint8)
    weights = torch.tensor([1 << place for place in range(8)], dtype=torch.uint8, device=drawn.device)
    made: Tensor = (row.unflatten(-1, (-1, 8)) * weights).sum(-1, dtype=torch.uint8)
    return made


def unpacked(kept: Tensor, size: int) -> Tensor:
    """Bits as the draws that they were."""
    weights = torch.tensor([1 << place for place in range(8)], dtype=torch.uint8, device=kept.device)
    return ((kept.unsqueeze(-1) & weights) != 0).flatten(-2)[..., :size].to(torch.float32).contiguous()
