"""Whether a call of ours has torch's bits: tried with these sizes and this number of threads before it is used."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from lowtide.kernels import TRIED
from lowtide.kernels.tried import Own, same_bits

SPECIAL = (math.nan, math.inf, -math.inf, -0.0, 0.0, 1e-40, -1e-40, 3e38)  # numbers that kernels may treat otherwise
APART = 997  # elements from one special number to the next: most sums have none of them


def has_torch_bits(target: str, args: list[Any]) -> bool | None:
    """Whether ours and torch's call make the same bits of ordinary numbers and of special ones; None: it is torch's."""
    own = TRIED.get(target)
    return None if own is None else all(_same(own, args, special) for special in (False, True))


def _same(own: Own, args: list[Any], special: bool) -> bool:
    generator = torch.Generator().manual_seed(17)
    given = [_filled(arg, generator, special) for arg in args]
    own.belong(given)
    again = [_copied(arg) for arg in given]
    before = torch.default_generator.get_state()
    made, mine = _row(own.kernel(*given)), torch.default_generator.get_state()
    torch.default_generator.set_state(before)
    expected, theirs = _row(own.reference(*again)), torch.default_generator.get_state()
    written = (list(_tensors(each)) for each in (given, again))
    return same_bits((*made, *next(written), mine), (*expected, *next(written), theirs))


def _tensors(args: list[Any]) -> Iterator[Tensor]:
    for arg in args:
        if isinstance(arg, Tensor):
            yield arg
        elif isinstance(arg, list):
            yield from _tensors(arg)


def _filled(arg: Any, generator: torch.Generator, special: bool) -> Any:
    """An argument of the same sizes with other numbers."""
    if isinstance(arg, list) and arg and isinstance(arg[0], Tensor):
        return [_filled(item, generator, special) for item in arg]
    if not isinstance(arg, Tensor) or not arg.dtype.is_floating_point:
        return _copied(arg)
    memory = torch.randn(_count(arg), generator=generator, dtype=arg.dtype)
    if special and arg.dim() > 1:  # one bad weight, mean or scale would be in every number
        flat = memory[::APART]
        flat.copy_(torch.tensor(SPECIAL, dtype=arg.dtype).repeat(-(-len(flat) // len(SPECIAL)))[: len(flat)])
    return _seen(memory, arg)


def _copied(arg: Any) -> Any:
    if isinstance(arg, list) and arg and isinstance(arg[0], Tensor):
        return [_copied(item) for item in arg]
    if not isinstance(arg, Tensor):
        return arg
    return _seen(arg.as_strided((_count(arg),), (1,), 0).clone(), arg)


def _count(tensor: Tensor) -> int:
    """The elements of the memory that a tensor is in."""
    return tensor.untyped_storage().nbytes() // tensor.element_size()


def _seen(memory: Tensor, arg: Tensor) -> Tensor:
    return memory.as_strided(arg.shape, arg.stride(), arg.storage_offset())


def _row(made: Any) -> tuple[Any, ...]:
    return tuple(made) if isinstance(made, (tuple, list)) else (made,)
