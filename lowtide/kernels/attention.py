"""Attention in chunks of heads, forward and backward: the weights of all heads are never there at once.

The products are torch's own, over a few heads at a time; what stands between them is done in place while it is in the
processor's cache. Draws are torch's too, in torch's order, and are kept as bits.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lowtide.kernels import attention_plain as by_torch
from lowtide.kernels.attention_plain import FLAT, JOINED, bits
from lowtide.kernels.attention_rows import Attention, Draws, get_ready, library, rounding
from lowtide.kernels.own import STATE
from lowtide.kernels.tried import Family, Own

CACHED = 2**21  # bytes of scores that are worked on at a time: what fits a processor's own cache, with what is beside


@dataclass(frozen=True)
class _Call:
    """What all four ops are given: see `attention_plain.attention`."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    heads: int
    scales: list[float]  # of query, key and scores, and what scores are divided by
    filling: float  # of scores that a mask of bools hides
    copied: list[bool]  # whether the products read copies of query, key and value
    safe: bool

    @property
    def examples(self) -> int:
        return self.query.shape[0] if self.query.dim() == 4 else self.query.shape[0] // self.heads

    @property
    def rows(self) -> int:
        return self.query.shape[-2]

    @property
    def size(self) -> int:
        return self.key.shape[-1]

    @property
    def rounding(self) -> int | None:
        """How torch rounds in the softmax of all rows."""
        return rounding(self.examples * self.heads * self.rows)

    def chunks(self) -> Iterator[tuple[int, int, int]]:
        """An example, and some of its heads."""
        most = max(torch.get_num_threads(), CACHED // (4 * self.rows * self.size))
        count = -(-self.heads // -(-self.heads // min(most, self.heads)))
        for example in range(self.examples):
            for first in range(0, self.heads, count):
                yield example, first, min(first + count, self.heads)


class _Operand:
    """What a product reads of a tensor, some heads at a time; copied into a buffer where it is not read as it is."""

    def __init__(self, tensor: Tensor, heads: int, scale: float = 1, *, copied: bool = False) -> None:
        self.seen = tensor.unflatten(0, (-1, heads)) if tensor.dim() == 3 else tensor
        self.scale = scale
        self.buffer: Tensor | None = None
        self.copied = copied or scale != 1

    def of(self, example: int, first: int, last: int) -> Tensor:
        part = self.seen[example, first:last]
        if not self.copied or (self.scale == 1 and part.is_contiguous()):
            return part
        if self.buffer is None:
            self.buffer = part.new_empty(part.shape)
        buffer = self.buffer[: last - first]
        return torch.mul(part, self.scale, out=buffer) if self.scale != 1 else buffer.copy_(part)


class _Result:
    """What products make, some heads at a time: where it goes in the whole."""

    def __init__(self, call: _Call, rows: int, columns: int, layout: int, scale: float = 1) -> None:
        count, heads = call.examples, call.heads
        sizes = (count, rows, heads, columns) if layout == JOINED else (count, heads, rows, columns)
        made = call.query.new_empty(sizes)
        self.seen = made.transpose(1, 2) if layout == JOINED else made
        self.whole = made.flatten(0, 1) if layout == FLAT else made
        self.scale = scale
        self.buffer: Tensor | None = None

    def put(self, one: Tensor, other: Tensor, example: int, first: int, last: int) -> None:
        """The product of two."""
        part = self.seen[example, first:last]
        if self.scale == 1 and part.is_contiguous():
            torch.bmm(one, other, out=part)
            return
        if self.buffer is None:
            self.buffer = part.new_empty(part.shape)
        made = torch.bmm(one, other, out=self.buffer[: last - first])
        if self.scale != 1:
            torch.mul(made, self.scale, out=part)
        else:
            part.copy_(made)


class _Rows:
    """What is done to the rows of scores, by the compiled kernel."""

    def __init__(self, call: _Call, noise: float, rounding: int) -> None:
        compiled = library()
        assert compiled is not None
        self.library, self.call, self.noise, self.rounding = compiled, call, noise, rounding
        self.mask = None if call.mask is None else _spread(call.mask, call)
        self.factor, self.divisor = (float(scale) for scale in call.scales[2:])

    def run(
        self,
        where: tuple[int, int, int] | None,
        scores: Tensor | None,
        gradient: Tensor | None,
        kept: Tensor | None,
        draws: Draws | None = None,
    ) -> None:
        """Work on the scores of some heads, and draw for others meanwhile."""
        task = None if where is None or scores is None else ctypes.byref(self._task(where, scores, gradient, kept))
        drawn = None if draws is None else ctypes.byref(draws)
        self.library.lowtide_attention(task, drawn, torch.get_num_threads())

    def _task(
        self, where: tuple[int, int, int], scores: Tensor, gradient: Tensor | None, kept: Tensor | None
    ) -> Attention:
        added = hidden = None
        steps = (0, 0)
        if self.mask is not None:
            example, first, _ = where
            place = self.mask[example, first].data_ptr()
            added, hidden = (None, place) if self.mask.dtype is torch.bool else (place, None)
            steps = self.mask.stride(1), self.mask.stride(2)
        call = self.call
        return Attention(
            scores.data_ptr(),
            None if gradient is None else gradient.data_ptr(),
            added,
            hidden,
            None if kept is None else kept.data_ptr(),
            scores.shape[0],
            call.rows,
            call.size,
            bits(call.size),
            *steps,
            self.factor,
            self.divisor,
            call.filling,
            self.noise,
            call.safe,
            self.rounding,
        )


def _spread(mask: Tensor, call: _Call) -> Tensor:
    """The mask for every score; along a row its elements lie side by side."""
    seen = mask.expand(call.examples, call.heads, call.rows, call.size)
    return seen if seen.stride(3) == 1 or call.size == 1 else seen.contiguous()


def _forward(call: _Call, rate: float | None, layout: int) -> tuple[Tensor, Tensor | None]:
    way = call.rounding
    drawing = None if rate is None else _Drawing(call, rate)
    assert way is not None
    rows = _Rows(call, 1.0 if rate is None else _noise(rate), way)
    query, key, value = _operands(call)
    made = _Result(call, call.rows, call.value.shape[-1], layout)
    chunks = list(call.chunks())
    scores = call.query.new_empty((chunks[0][2], call.rows, call.size))
    if drawing is not None:
        rows.run(None, None, None, None, drawing.of(chunks[0]))
    for number, where in enumerate(chunks):
        some = torch.bmm(query.of(*where), key.of(*where), out=scores[: where[2] - where[1]])
        after = chunks[number + 1] if number + 1 < len(chunks) else None
        draws = None if drawing is None or after is None else drawing.of(after)
        rows.run(where, some, None, None if drawing is None else drawing.kept[where[0], where[1]], draws)
        made.put(some, value.of(*where), *where)
    return made.whole, None if drawing is None else drawing.done()


def _backward(
    call: _Call, gradient: Tensor, kept: Tensor | None, rate: float | None, seen_copied: bool, layouts: list[int]
) -> tuple[Tensor, Tensor, Tensor]:
    way = call.rounding
    assert way is not None
    rows = _Rows(call, 1.0 if rate is None else _noise(rate), way)
    query, key, value = _operands(call)
    seen = _Operand(gradient, call.heads, copied=seen_copied)
    width = call.query.shape[-1]
    of_query = _Result(call, call.rows, width, layouts[0], call.scales[0])
    of_key = _Result(call, width, call.size, layouts[1], call.scales[1])
    of_value = _Result(call, call.size, call.value.shape[-1], layouts[2])
    chunks = list(call.chunks())
    scores, back = (call.query.new_empty((chunks[0][2], call.rows, call.size)) for _ in range(2))
    kept = None if kept is None else kept.unflatten(0, (-1, call.heads))
    for where in chunks:
        count = where[2] - where[1]
        one, other, third, fourth = (operand.of(*where) for operand in (query, key, value, seen))
        some = torch.bmm(one, other, out=scores[:count])
        weighted = torch.bmm(fourth, third.transpose(1, 2), out=back[:count])
        rows.run(where, some, weighted, None if kept is None else kept[where[0], where[1]])
        of_value.put(some.transpose(1, 2), fourth, *where)
        of_key.put(one.transpose(1, 2), weighted, *where)
        of_query.put(weighted, other.transpose(1, 2), *where)
    return of_query.whole, of_key.whole, of_value.whole


class _Drawing:
    """The bits of an op, drawn in order from torch's generator, which goes on when all are drawn."""

    def __init__(self, call: _Call, rate: float) -> None:
        self.call = call
        self.bytes = bits(call.size)
        self.kept = torch.empty((call.examples, call.heads, call.rows, self.bytes), dtype=torch.uint8)
        self.state = torch.default_generator.get_state()
        self.below = math.ceil(rate * 2**53)

    def of(self, where: tuple[int, int, int]) -> Draws:
        example, first, last = where
        place = self.kept[example, first].data_ptr()
        rows = (last - first) * self.call.rows
        return Draws(self.state.data_ptr(), place, rows, self.call.size, self.bytes, self.below)

    def done(self) -> Tensor:
        torch.default_generator.set_state(self.state)
        return self.kept.flatten(0, 1)


def _noise(rate: float) -> float:
    """What torch's division makes of a draw that is kept; nothing is allocated, for a first step learns what is."""
    return ctypes.c_float(1 / ctypes.c_float(rate).value).value


def _operands(call: _Call) -> list[_Operand]:
    tensors, scales = (call.query, call.key, call.value), (*call.scales[:2], 1)
    return [
        _Operand(tensor, call.heads, scale, copied=copied)
        for tensor, scale, copied in zip(tensors, scales, call.copied, strict=True)
    ]


# -------------------------------------------------------------------------------------------------------------- the ops


def attention(*given: Any) -> Tensor:
    """The values, weighted by how well their keys match each query."""
    *rest, layout = given
    call = _Call(*rest)
    if not _can(call):
        return by_torch.attention(*given)
    return _forward(call, None, layout)[0]


def dropped_attention(*given: Any) -> tuple[Tensor, Tensor]:
    """The same with dropout, and which weights are kept, as bits."""
    *rest, rate, layout = given
    call = _Call(*rest)
    if not (_can(call) and _can_draw(rate)):
        return by_torch.dropped_attention(*given)
    made, kept = _forward(call, rate, layout)
    assert kept is not None
    return made, kept


def attention_backward(*given: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of query, key and value."""
    gradient, *rest, seen_copied, layouts = given
    call = _Call(*rest)
    if not _can(call, gradient):
        return by_torch.attention_backward(*given)
    return _backward(call, gradient, None, None, seen_copied, layouts)


def dropped_attention_backward(*given: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The same with dropout."""
    gradient, kept, *rest, rate, seen_copied, layouts = given
    call = _Call(*rest)
    sizes = (call.examples * call.heads, call.rows, bits(call.size))
    fits = kept.dtype is torch.uint8 and tuple(kept.shape) == sizes and kept.is_contiguous()
    if not (_can(call, gradient) and fits):
        return by_torch.dropped_attention_backward(*given)
    return _backward(call, gradient, kept, rate, seen_copied, layouts)


def _can(call: _Call, gradient: Tensor | None = None) -> bool:
    """Whether sizes belong together, all are floats in this memory, and our kernels have torch's bits."""
    query, key, value, heads = call.query, call.key, call.value, call.heads
    floats = [query, key, value, *(() if gradient is None else (gradient,))]
    if any(
        tensor.dtype is not torch.float32 or tensor.device.type != "cpu" or tensor.dim() not in (3, 4)
        for tensor in floats
    ):
        return False
    leading = [_leading(tensor, heads) for tensor in floats]
    rows, size, columns = query.shape[-2], key.shape[-1], value.shape[-1]
    shapes = [tuple(tensor.shape[-2:]) for tensor in floats]
    wanted = [(rows, query.shape[-1]), (query.shape[-1], size), (size, columns), (rows, columns)][: len(shapes)]
    fits = None not in leading and len(set(leading)) == 1 and shapes == wanted and 0 not in query.shape and size > 0
    return fits and columns > 0 and _mask_fits(call) and call.rounding is not None


def _is_float(tensor: Tensor) -> bool:
    return tensor.dtype is torch.float32 and tensor.device.type == "cpu" and tensor.dim() in (3, 4)


def _leading(tensor: Tensor, heads: int) -> tuple[int, int] | None:
    if tensor.dim() == 4:
        return (tensor.shape[0], heads) if tensor.shape[1] == heads else None
    return (tensor.shape[0] // heads, heads) if heads > 0 and tensor.shape[0] % heads == 0 else None


def _mask_fits(call: _Call) -> bool:
    mask = call.mask
    if mask is None:
        return True
    sizes = (call.examples, call.heads, call.rows, call.size)
    known = mask.dtype in (torch.bool, torch.float32) and mask.device.type == "cpu" and mask.dim() <= 4
    return known and all(mine in (1, theirs) for mine, theirs in zip(mask.shape[::-1], sizes[::-1], strict=False))


def _can_draw(rate: float) -> bool:
    compiled, state = library(), torch.default_generator.get_state()
    return (
        0 < rate <= 1
        and compiled is not None
        and state.numel() == STATE
        and compiled.lowtide_is_state(state.data_ptr())
    )


# ------------------------------------------------------------------------------------------------------------ the trial


def _like_masks(given: list[Any], first: int) -> None:
    """A mask of numbers hides some scores, and adds to others."""
    mask = given[first + 3]
    if mask is not None and mask.dtype is torch.float32:
        mask.copy_(torch.where(mask > 0.5, -math.inf, torch.where(mask < 0, 0.0, 1.0)))


def _belong(given: list[Any]) -> None:
    _like_masks(given, 0)


def _belong_back(given: list[Any]) -> None:
    _like_masks(given, 1)


def _belong_dropped(given: list[Any]) -> None:
    _like_masks(given, 2)
    size, kept = given[3].shape[-1], given[1]  # what is behind a row's last bit is zero
    drawn = torch.rand((*kept.shape[:2], size), generator=torch.Generator().manual_seed(3), dtype=torch.float32)
    kept.copy_(by_torch.packed((drawn < 0.9).to(torch.float32)))


def _operations(args: Sequence[Any], *, first: int, products: int) -> float:
    """Two for each pair of numbers that a product multiplies."""
    query, key, value = args[first : first + 3]
    count = math.prod(query.shape[:-2])
    return float(products * count * query.shape[-2] * key.shape[-1] * (query.shape[-1] + value.shape[-1]))


_GIVEN = (
    "Tensor query, Tensor key, Tensor value, Tensor? mask, int heads, float[] scales, float filling, bool[] copied, "
    "bool safe"
)
_MADE = "(Tensor, Tensor, Tensor)"
OWN = (
    Own(
        f"attention({_GIVEN}, int layout) -> Tensor",
        attention,
        by_torch.attention,
        belong=_belong,
        operations=partial(_operations, first=0, products=2),
        ready=get_ready,
    ),
    Own(
        f"attention_backward(Tensor gradient, {_GIVEN}, bool seen_copied, int[] layouts) -> {_MADE}",
        attention_backward,
        by_torch.attention_backward,
        belong=_belong_back,
        operations=partial(_operations, first=1, products=5),
        ready=get_ready,
    ),
    Own(
        f"dropped_attention({_GIVEN}, float rate, int layout) -> (Tensor, Tensor)",
        dropped_attention,
        by_torch.dropped_attention,
        belong=_belong,
        operations=partial(_operations, first=0, products=2),
        ready=get_ready,
    ),
    Own(
        f"dropped_attention_backward(Tensor gradient, Tensor kept, {_GIVEN}, float rate, bool seen_copied, "
        f"int[] layouts) -> {_MADE}",
        dropped_attention_backward,
        by_torch.dropped_attention_backward,
        belong=_belong_dropped,
        operations=partial(_operations, first=2, products=5),
        ready=get_ready,
    ),
)
PLAIN, BACKWARD, DROPPED, DROPPED_BACKWARD = (one.target for one in OWN)
FAMILY = Family(
    OWN,
    tuple(
        Path(__file__).with_name(name)
        for name in (
            "attention.cpp",
            "draws.hpp",
            "vectors.hpp",
            "threads.hpp",
            "attention.py",
            "attention_rows.py",
            "attention_plain.py",
            "vectors.py",
        )
    ),
)
