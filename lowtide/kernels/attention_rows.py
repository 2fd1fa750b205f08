"""The compiled rows of attention, and how torch rounds in its softmax and in the gradient of it: found by trying."""

from __future__ import annotations

import ctypes
import math
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from lowtide import native
from lowtide.kernels import vectors

SOURCE = Path(__file__).with_name("attention.cpp")
ROWS = 256  # of an example
SPECIAL = (math.nan, -math.nan, math.inf, -math.inf, 0.0)  # numbers of which bits are kept by the order of sums

_POINTER, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


class Attention(ctypes.Structure):
    _fields_ = (
        *((name, _POINTER) for name in ("scores", "gradient", "added", "hidden", "kept")),
        *((name, _INT) for name in ("heads", "rows", "size", "bytes", "mask_head", "mask_row")),
        *((name, _FLOAT) for name in ("factor", "divisor", "filling", "noise")),
        *((name, _INT) for name in ("safe", "rounding")),
    )


class Draws(ctypes.Structure):
    _fields_ = (
        *((name, _POINTER) for name in ("state", "out")),
        *((name, _INT) for name in ("rows", "size", "bytes", "below")),
    )


SIGNATURES: native.Signatures = {
    "lowtide_attention": ([_POINTER, _POINTER, _INT], None),
    "lowtide_is_state": ([_POINTER], _INT),
}


@cache
def library() -> ctypes.CDLL | None:
    """Our kernels; None where they can't be compiled or loaded."""
    return vectors.library(SOURCE, SIGNATURES, "attention in chunks")


def get_ready() -> None:
    """Find out what the ops ask for when they run, before a step does: it allocates."""
    for shared in {False, torch.get_num_threads() > 1}:
        _rounding(shared)


def rounding(rows: int) -> int | None:
    """How torch rounds in the softmax of so many rows, and in its gradient, as attention.cpp numbers it.

    None: otherwise. What torch shares among threads is compiled apart, and may be rounded otherwise.
    """
    return _rounding(torch.get_num_threads() > 1 and rows > 1)


@cache
def _rounding(shared: bool) -> int | None:
    """What is no number has no value, but bits; which of them are kept depends on the order in which torch adds."""
    if library() is None:
        return None
    found = 0
    stages = ((0, 8, False, False), (5, 32, False, True), (3, 4, True, False), (10, 512, True, True))
    for shift, count, back, special in stages:
        examples = [
            _example(size, shared, back=back, special=special) for size in (77, 64, 16, 7)
        ]  # what tells most apart first
        tried = (found | way << shift for way in range(count) if way & 3 != 3 or shift)
        exact = next((way for way in tried if all(_is_exact(way, *example) for example in examples)), None)
        if exact is None and not special:
            return None
        found = found if exact is None else exact
    return found


def _example(size: int, shared: bool, *, back: bool, special: bool) -> tuple[Tensor, Tensor | None, Tensor]:
    """Scores, a gradient in the backward, and what torch makes of them."""
    generator = torch.Generator().manual_seed(1)
    x, gradient = (torch.randn((ROWS, size), generator=generator, dtype=torch.float32) * 3 for _ in range(2))
    if special:
        numbers = torch.tensor(SPECIAL, dtype=torch.float32)
        for _ in range(6):
            rows, places = torch.arange(0, ROWS, 1 + back), torch.randint(size, (ROWS,), generator=generator)
            drawn = numbers[torch.randint(len(SPECIAL), (ROWS,), generator=generator)]
            x[rows, places[rows]] = drawn[rows]
            gradient[torch.arange(ROWS), places.flip(0)] = drawn.flip(0)
    parts = []
    for one, other in zip(*(tensor.split(ROWS if shared else 1) for tensor in (x, gradient)), strict=True):
        made = torch.ops.aten._softmax.default(one, -1, False)
        if back:
            made = torch.ops.aten._softmax_backward_data.default(other, made, -1, torch.float32)
        parts.append(made)
    return x, gradient if back else None, torch.cat(parts)


def _is_exact(way: int, x: Tensor, gradient: Tensor | None, wanted: Tensor) -> bool:
    compiled = library()
    assert compiled is not None
    scores, back = x.clone(), None if gradient is None else gradient.clone()
    task = Attention(scores=scores.data_ptr(), heads=1, rows=ROWS, size=x.shape[1], factor=1, divisor=1, rounding=way)
    if back is not None:
        task.gradient = back.data_ptr()
    compiled.lowtide_attention(ctypes.byref(task), None, 1)
    return torch.equal((scores if back is None else back).view(torch.int32), wanted.view(torch.int32))
