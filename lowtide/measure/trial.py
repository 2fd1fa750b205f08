"""Whether a call of ours has torch's bits: tried with these sizes and this number of threads before it is used."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from lowtide.kernels import blocked
from lowtide.kernels import blocked_plain as by_torch

SPECIAL = (math.nan, math.inf, -math.inf, -0.0, 0.0, 1e-40, -1e-40, 3e38)  # numbers that kernels may treat otherwise
APART = 997  # elements from one special number to the next: most sums have none of them


def has_torch_bits(target: str, args: list[Any]) -> bool | None:
    """Whether ours and torch's call make the same bits of ordinary numbers and of special ones; None: it is torch's."""
    if target not in blocked.TARGETS:
        return None
    return all(_same(target, args, special) for special in (False, True))


def _same(target: str, args: list[Any], special: bool) -> bool:
    mine, theirs = blocked.OPS[target.split(".")[1]]
    generator = torch.Generator().manual_seed(17)
    given = [_filled(arg, generator, special) for arg in args]
    if target == blocked.NORM_BACKWARD:  # the statistics are those of what was normalised
        x, weight, bias, eps, images = given[1], given[2], given[3], given[8], given[9]
        _, given[4], given[5] = by_torch.norm(x, weight, bias, None, None, 0.0, eps, None, False, images)
    if target == blocked.POOL_BACKWARD:
        given[1] = torch.randint_like(given[1], given[2][0] * given[2][1])
    again = [_copied(arg) for arg in given]
    made, expected = (_row(call(*each)) for call, each in ((mine, given), (theirs, again)))
    written = ([arg for arg in each if isinstance(arg, Tensor)] for each in (given, again))
    return blocked.same_bits((*made, *next(written)), (*expected, *next(written)))


def _filled(arg: Any, generator: torch.Generator, special: bool) -> Any:
    """An argument of the same sizes with other numbers."""
    if isinstance(arg, list) and arg and isinstance(arg[0], Tensor):
        return [_filled(item, generator, special) for item in arg]
    if not isinstance(arg, Tensor) or not arg.dtype.is_floating_point:
        return _copied(arg)
    made = torch.empty_like(arg)
    made.copy_(torch.randn(arg.shape, generator=generator, dtype=arg.dtype))
    if special and arg.dim() == 4:  # one bad weight, mean or scale would be in every number
        flat = made.as_strided((made.numel(),), (1,))[::APART]
        flat.copy_(torch.tensor(SPECIAL, dtype=arg.dtype).repeat(-(-len(flat) // len(SPECIAL)))[: len(flat)])
    return made


def _copied(arg: Any) -> Any:
    if isinstance(arg, list) and arg and isinstance(arg[0], Tensor):
        return [_copied(item) for item in arg]
    return torch.empty_like(arg).copy_(arg) if isinstance(arg, Tensor) else arg


def _row(made: Any) -> tuple[Any, ...]:
    return tuple(made) if isinstance(made, (tuple, list)) else (made,)
