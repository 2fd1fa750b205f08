"""Whether a call can run in parts: it runs whole and in two parts, on random contents, and the results are compared.

There are no rules for ops here. What a call does along an axis is seen from numbers: a result whose slices are what the
parts make is independent along it; one that the parts add up to is a sum; what is neither is coupled.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import product
from math import prod
from typing import Any, Literal

import torch
from torch import Tensor

from lowtide.aten import GROUPED, OPAQUE, SAME_ANYWAY
from lowtide.graph import Arg, Constant
from lowtide.kernels import constant, overload, returns_one
from lowtide.private import bare_kernel

PARTS = (2, 3)  # examples of the two parts
LARGE = 2**20  # elements of all tensors of a trial, from which it has one example in each part, in single precision
CLOSE = {torch.float64: 1e-9, torch.float32: 2e-4}  # differences from rounding, of the largest number
WORDS = ("normal", "positive")  # two kinds of contents; either alone would let some calls look alike

Role = Literal["axis", "partial", "same", "scalar"]  # sliced for a part; a term of the whole; the same for all
Kept = Literal["none", "numbers", "all"]  # which numbers among the arguments are those of the whole in each part
KEPT: tuple[Kept, ...] = ("none", "numbers", "all")


@dataclass(frozen=True, slots=True)
class Grows:
    """A number that is so many for each example."""

    each: int

    def at(self, examples: int) -> int:
        """The number for so many examples."""
        return self.each * examples


@dataclass(frozen=True, slots=True)
class Counted:
    """A number that depends on the examples otherwise than in proportion, as it is for all of them."""

    number: Any


@dataclass(frozen=True, slots=True)
class Link:
    """One view of a chain of views."""

    target: str
    args: tuple[Any, ...]
    item: int | None


@dataclass(frozen=True, slots=True)
class Operand:
    """An argument: the tensor of this number, seen through these views."""

    place: int
    chain: tuple[Link, ...] = ()


Size = int | Grows


@dataclass(frozen=True, slots=True)
class Source:
    """A tensor that a call reads."""

    role: Role
    dtype: str
    shape: tuple[Size, ...]
    stride: tuple[Size, ...]
    dim: int = -1  # the axis; -1: it has none
    outer: int = 1  # in how many blocks along it the examples repeat
    maker: Trial | None = None  # of contents that nobody can make up
    output: int = 0  # of the maker


@dataclass(frozen=True, slots=True)
class Trial:
    """A call for any number of examples."""

    target: str
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    sources: tuple[Source, ...]
    dims: tuple[int | None, ...]  # of each result the axis; -1: it has none; None: no tensor
    updated: tuple[tuple[int, int], ...] = ()  # sources that the call writes over, results too, and their axes then


@dataclass(frozen=True, slots=True)
class Seen:
    """What the results of parts are to that of the whole: its slices, its terms, or the same."""

    role: Role
    share: bool = False  # each in proportion to its examples: a mean, or what is divided by a count inside
    outer: int = 1  # of slices: in how many blocks along the axis the examples repeat


@dataclass(frozen=True, slots=True)
class Behaviour:
    """What a call does along the axis."""

    kept: Kept
    results: tuple[Seen | None, ...]


@cache
def behaviour(trial: Trial) -> Behaviour | None:
    """What a call does along the axis; None: its parts do not make what the whole makes."""
    results = (*trial.dims, *(dim for _, dim in trial.updated))
    alike = all(source.role in ("same", "scalar") for source in trial.sources)
    if alike and not _grows((trial.args, trial.kwargs)) and all(dim is None or dim < 0 for dim in results):
        return Behaviour("all", tuple(None if dim is None else Seen("same") for dim in results))
    best = None
    for kept in KEPT if _has_sizes(trial.args) or _has_sizes(trial.kwargs) else KEPT[:1]:
        found = _tried(trial, kept)
        if found is not None:
            if not any(seen is not None and seen.share for seen in found):
                return Behaviour(kept, found)
            best = best or Behaviour(kept, found)
    return best


def at(arg: Any, part: int, whole: int, kept: Kept, *, listed: bool = False) -> Any:
    """An argument for a part of so many examples."""
    match arg:
        case Grows():
            return arg.at(whole if kept == "all" or (kept == "numbers" and not listed) else part)
        case Counted():
            return arg.number
        case tuple():
            return tuple(at(item, part, whole, kept, listed=True) for item in arg)
        case _:
            return arg


def _grows(arg: Any) -> bool:
    """Whether how an argument is seen depends on the number of examples."""
    if isinstance(arg, tuple):
        return any(_grows(item) for item in arg)
    return isinstance(arg, Operand) and any(_has_sizes(link.args) for link in arg.chain)


def _has_sizes(arg: Any) -> bool:
    if isinstance(arg, tuple):
        return any(_has_sizes(item) for item in arg)
    return isinstance(arg, Grows)


def _tried(trial: Trial, kept: Kept) -> tuple[Seen | None, ...] | None:
    """What came of two contents; None where anything is coupled, fails, or differs between them."""
    grouped = GROUPED.get(trial.target)
    together = 1 if grouped is None else trial.args[grouped]
    elements = sum(prod(_size(n, together * sum(PARTS)) for n in source.shape) for source in trial.sources)
    precise = elements <= LARGE
    parts = tuple(part * together for part in (PARTS if precise else (1, 1)))
    answers = []
    for words in WORDS:
        for odd, dtype in product((True, False), (torch.float64, torch.float32) if precise else (torch.float32,)):
            try:
                answers.append(_compare(trial, kept, parts, dtype, words, odd))
            except (RuntimeError, IndexError, ValueError, TypeError, NotImplementedError):
                continue  # such contents, or that precision, are not for this call
            break
    return answers[0] if answers and all(answer == answers[0] for answer in answers) else None


def _compare(
    trial: Trial, kept: Kept, parts: tuple[int, ...], dtype: torch.dtype, words: str, odd: bool
) -> tuple[Seen | None, ...] | None:
    state = torch.get_rng_state()
    try:
        torch.default_generator.manual_seed(1)
        return _compared(trial, kept, parts, _Contents(dtype, words, _oddities(trial.args) if odd else ()))
    finally:
        torch.set_rng_state(state)


def _compared(trial: Trial, kept: Kept, parts: tuple[int, ...], contents: _Contents) -> tuple[Seen | None, ...] | None:
    whole = sum(parts)
    tensors = [contents.whole(source, parts) for source in trial.sources]
    expected = _run(trial, kept, whole, whole, [pieces[0] for pieces in tensors], contents)
    made = [
        _run(trial, kept, part, whole, [pieces[1 + number] for pieces in tensors], contents)
        for number, part in enumerate(parts)
    ]
    found: list[Seen | None] = []
    for place, dim in enumerate((*trial.dims, *(dim for _, dim in trial.updated))):
        if dim is None or not isinstance(expected[place], Tensor):
            found.append(None)
            continue
        seen = _seen(trial, expected[place], [one[place] for one in made], parts, dim)
        if seen is None:
            return None
        found.append(seen)
    return tuple(found)


def _seen(trial: Trial, expected: Tensor, made: list[Tensor], parts: tuple[int, ...], dim: int) -> Seen | None:
    """What the results of the parts are to that of the whole."""
    whole = sum(parts)
    if trial.target in SAME_ANYWAY and dim < 0:
        return Seen("same")
    if trial.target in SAME_ANYWAY or (trial.target in OPAQUE and expected.dtype == torch.uint8):
        return Seen("axis")  # no contents, or such as mean something to another call only
    shares = [one * (n / whole) for one, n in zip(made, parts, strict=True)] if expected.is_floating_point() else []
    if dim >= 0:
        for outer in _outers(trial, expected.shape[dim] // whole):
            if _close(expected, joined(made, dim, outer)):
                return Seen("axis", outer=outer)
            if shares and _close(expected, joined(shares, dim, outer)):
                return Seen("axis", share=True, outer=outer)
        return None
    if any(one.shape != expected.shape for one in made) or not expected.count_nonzero():
        return None
    if _close(expected, sum(made[1:], made[0])):
        return Seen("partial")
    return Seen("partial", share=True) if shares and _close(expected, sum(shares[1:], shares[0])) else None


def _outers(trial: Trial, each: int) -> list[int]:
    """In how many blocks the examples may repeat along an axis with so many places for each: sizes that are there."""
    sizes = {size for source in trial.sources for size in source.shape if isinstance(size, int)}
    sizes |= {source.outer for source in trial.sources}
    return [1, *sorted(size for size in sizes if 1 < size <= each and not each % size)]


def joined(parts: list[Tensor], dim: int, outer: int) -> Tensor:
    """Parts along an axis in which the examples repeat in so many blocks, as one."""
    if outer == 1:
        return torch.cat(parts, dim)
    return torch.cat([one.unflatten(dim, (outer, -1)) for one in parts], dim + 1).flatten(dim, dim + 1)


def _close(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if not one.is_floating_point():
        return torch.equal(one, other)
    scale = one.abs().nan_to_num(0, 0, 0).max().item() if one.numel() else 0.0
    return torch.allclose(one, other, rtol=0, atol=CLOSE.get(one.dtype, 2e-2) * max(scale, 1e-30), equal_nan=True)


class _Contents:
    """Random tensors for the whole and its parts."""

    def __init__(self, dtype: torch.dtype, words: str, oddities: tuple[int, ...]) -> None:
        self.dtype, self.words, self.oddities = dtype, words, oddities

    def whole(self, source: Source, parts: tuple[int, ...]) -> list[Any]:
        """The tensor of the whole, and those of the parts."""
        if source.role == "scalar":
            return [0.5] * (1 + len(parts))
        if source.maker is not None:
            return self.made(source, parts)
        if source.role == "partial":
            terms = [self.filled(source, 1) for _ in parts]
            return [sum(terms[1:], terms[0]), *terms]
        full = self.filled(source, sum(parts))
        if source.role == "same":
            return [full] * (1 + len(parts))
        found, start = [full], 0
        for part in parts:
            piece = torch.empty_strided(_sizes(source.shape, part), _sizes(source.stride, part), dtype=full.dtype)
            size = piece.shape[source.dim] // source.outer
            blocks = full.unflatten(source.dim, (source.outer, -1)).narrow(source.dim + 1, start, size)
            found.append(piece.copy_(blocks.flatten(source.dim, source.dim + 1)))
            start += size
        return found

    def made(self, source: Source, parts: tuple[int, ...]) -> list[Any]:
        """What the call that makes this tensor gives for the whole and for the parts."""
        assert source.maker is not None
        whole, trial = sum(parts), source.maker
        tensors = [self.whole(one, parts) for one in trial.sources]
        sizes = (whole, *parts)
        return [
            _run(trial, "none", size, whole, [pieces[number] for pieces in tensors], self)[source.output]
            for number, size in enumerate(sizes)
        ]

    def filled(self, source: Source, examples: int) -> Tensor:
        kind = getattr(torch, source.dtype)
        kind = self.dtype if kind == torch.float32 else kind
        tensor = torch.empty_strided(_sizes(source.shape, examples), _sizes(source.stride, examples), dtype=kind)
        if kind == torch.bool:
            return tensor.bernoulli_()
        if not kind.is_floating_point:
            tensor.random_(0, 2)
            for number in self.oddities:
                tensor[torch.rand(tensor.shape) < 0.3] = number
            return tensor
        return tensor.normal_() if self.words == "normal" else tensor.uniform_(0.1, 1.0)


def _oddities(args: Any) -> tuple[int, ...]:
    """Whole numbers below zero among the arguments, which may mean something as contents: labels to leave out."""
    return tuple(dict.fromkeys(arg for arg in args if type(arg) is int and arg < -1))


def _run(trial: Trial, kept: Kept, part: int, whole: int, tensors: list[Any], contents: _Contents) -> list[Any]:
    """Call it for so many examples; the tensors stay as they are."""
    written = {place for place, _ in trial.updated}
    own = [one.clone() if place in written else one for place, one in enumerate(tensors)]
    args = [_argument(at(arg, part, whole, kept), own, part, contents.dtype) for arg in trial.args]
    kwargs = {key: _argument(at(arg, part, whole, kept), own, part, contents.dtype) for key, arg in trial.kwargs}
    returned = overload(trial.target)(*args, **kwargs)
    results = [returned] if returns_one(trial.target) else list(returned)
    return [*results[: len(trial.dims)], *(own[place] for place, _ in trial.updated)]


def _argument(arg: Any, tensors: list[Any], part: int, dtype: torch.dtype) -> Any:
    match arg:
        case Operand(place, chain):
            seen = tensors[place]
            for link in chain:
                given = [_argument(at(item, part, part, "none"), tensors, part, dtype) for item in link.args]
                seen = bare_kernel(overload(link.target))(seen, *given)
                seen = seen if link.item is None else seen[link.item]
            return seen
        case Constant("dtype", "float32"):
            return dtype
        case Constant(family, name):
            return constant(family, name)
        case tuple():
            return [_argument(item, tensors, part, dtype) for item in arg]
        case _:
            return arg


def _size(size: Size, examples: int) -> int:
    return size.at(examples) if isinstance(size, Grows) else size


def _sizes(sizes: tuple[Size, ...], examples: int) -> tuple[int, ...]:
    return tuple(_size(size, examples) for size in sizes)


def operands(arg: Any) -> Iterator[Operand]:
    """The tensors among arguments."""
    if isinstance(arg, Operand):
        yield arg
    elif isinstance(arg, tuple):
        for item in arg:
            yield from operands(item)


Arguments = tuple[Arg, ...]
