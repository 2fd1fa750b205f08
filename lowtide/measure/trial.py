"""Whether a call of ours has torch's bits: tried with these sizes and this number of threads before it is used."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from lowtide.kernels import TRIED
from lowtide.kernels.tried import Own, same_bits

SPECIAL = (math.nan, math.inf, -math.inf, -0.0, 0.0, 1e-40, -1e-40, 3e38)  # numbers that kernels may treat otherwise
APART = 997  # elements from one special number to the next: most sums have none of them
KINDS = ("ordinary", "special", "zero")  # of numbers: zeros of one sign show what a sum begins with
ENOUGH, MOST = 2**12, 16  # numbers to compare of each kind, and rounds for it: few of them may be equal by chance


def has_torch_bits(target: str, args: list[Any]) -> bool | None:
    """Whether ours and torch's call make the same bits of all kinds of numbers; None: it is torch's."""
    own = TRIED.get(target)
    return None if own is None else all(_same(own, args, kind) for kind in KINDS)


def _same(own: Own, args: list[Any], kind: str) -> bool:
    """Whether they do with numbers of one kind, with others in each round."""
    compared = 0
    for number in range(MOST):
        if (count := _compared(own, args, kind, number)) is None:
            return False
        compared += count
        if compared >= ENOUGH:
            break
    return True


def _compared(own: Own, args: list[Any], kind: str, number: int) -> int | None:
    """How many numbers are equal in every bit, if all are."""
    generator = torch.Generator().manual_seed(17 + number)
    first = number if kind == "special" else None
    given = _zeros(args, generator) if kind == "zero" else _filled(args, generator, first)
    own.belong(given)
    again = [_copied(arg) for arg in given]
    before = torch.default_generator.get_state()
    made, mine = _row(own.kernel(*given)), torch.default_generator.get_state()
    torch.default_generator.set_state(before)
    expected, theirs = _row(own.reference(*again)), torch.default_generator.get_state()
    results, wanted = (*made, *_tensors(given)), (*expected, *_tensors(again))
    if not same_bits((*results, mine), (*wanted, theirs)):
        return None
    return sum(one.numel() for one in made if isinstance(one, Tensor)) or sum(one.numel() for one in _tensors(given))


def _tensors(args: list[Any]) -> Iterator[Tensor]:
    for arg in args:
        if isinstance(arg, Tensor):
            yield arg
        elif isinstance(arg, list):
            yield from _tensors(arg)


def _filled(args: list[Any], generator: torch.Generator, first: int | None) -> list[Any]:
    """Arguments of the same sizes with other numbers, special ones among them from the `first` of these on."""
    return [_anew(arg, lambda tensor: _numbers(tensor, generator, first)) for arg in args]


def _zeros(args: list[Any], generator: torch.Generator) -> list[Any]:
    """Arguments of the same sizes with -0.0 in all but the last of them with rows, which has numbers above zero."""
    last = [tensor for tensor in _tensors(args) if _is_float(tensor) and tensor.dim() > 1][-1:]

    def numbers(tensor: Tensor) -> Tensor:
        memory = torch.rand(_count(tensor), generator=generator, dtype=tensor.dtype) + 0.5
        return memory if any(tensor is one for one in last) else memory.fill_(-0.0)

    return [_anew(arg, numbers) for arg in args]


def _anew(arg: Any, numbers: Callable[[Tensor], Tensor]) -> Any:
    """An argument with other numbers in its memory, if it has any."""
    if isinstance(arg, list):
        return [_anew(item, numbers) for item in arg]
    return _seen(numbers(arg), arg) if _is_float(arg) else _copied(arg)


def _is_float(arg: Any) -> bool:
    return isinstance(arg, Tensor) and arg.dtype.is_floating_point


def _numbers(tensor: Tensor, generator: torch.Generator, first: int | None) -> Tensor:
    memory = torch.randn(_count(tensor), generator=generator, dtype=tensor.dtype)
    if first is not None and tensor.dim() > 1:  # one bad weight, mean or scale would be in every number
        flat = memory[first % len(memory) :: APART] if len(memory) else memory
        row = torch.tensor(SPECIAL, dtype=tensor.dtype).roll(-first)
        flat.copy_(row.repeat(-(-len(flat) // len(SPECIAL)))[: len(flat)])
    return memory


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
