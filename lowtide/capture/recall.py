"""What a call makes of fake tensors, remembered: a step calls the same ops on the same sizes again and again.

A fake tensor takes torch half a millisecond. The second time that an op meets arguments of these sizes, strides and
types its results are made from what is known of the first. What is not plain is not remembered, and takes the long way.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch

from lowtide.capture.stand_in import fake_like
from lowtide.kernels.described import described
from lowtide.private import FakeTensor, FakeTensorMode, storage_key, without_dispatch

PLAIN = (int, float, str, torch.dtype, torch.layout, torch.device, torch.memory_format)  # bool is an int
UNKNOWN = object()  # not a key, and not a result


@dataclass(frozen=True, slots=True)
class _Made:
    """A result: a tensor on memory of its own, or on that of the first argument."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int  # elements from where the first argument begins
    dtype: torch.dtype
    device: torch.device
    fresh: bool


@dataclass(frozen=True, slots=True)
class _Recipe:
    """The results of a call; `itself` is the first argument."""

    made: tuple[_Made | None, ...] = ()
    kind: type | None = None  # of the list; None: a single result
    itself: bool = False


class Recall:
    """Remembers the calls of one trace."""

    def __init__(self, fake_mode: FakeTensorMode) -> None:
        self.fake_mode = fake_mode
        self._recipes: dict[Hashable, _Recipe] = {}

    def key(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What a call is known by, or UNKNOWN."""
        found = _key(args)
        if found is UNKNOWN or not kwargs:
            return UNKNOWN if found is UNKNOWN else (func, found)
        named = _key(tuple(kwargs.values()))
        return UNKNOWN if named is UNKNOWN else (func, found, tuple(kwargs), named)

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the call returns."""
        key = self.key(func, args, kwargs)
        recipe = None if key is UNKNOWN else self._recipes.get(key)
        if recipe is not None:
            return self._make(recipe, args)
        result = _apart(described(func)(*args, **kwargs), self.fake_mode)
        if key is not UNKNOWN and self.key(func, args, kwargs) == key:  # it has turned none of its arguments
            recipe = _recipe(func, args, kwargs, result)
            if recipe is not None:
                self._recipes[key] = recipe
        return result

    def _make(self, recipe: _Recipe, args: tuple[Any, ...]) -> Any:
        if recipe.itself:
            return args[0]
        made = [None if one is None else self._fake(one, args) for one in recipe.made]
        return made[0] if recipe.kind is None else recipe.kind(made)

    def _fake(self, made: _Made, args: tuple[Any, ...]) -> FakeTensor:
        with without_dispatch():
            if made.fresh:
                meta = torch.empty_strided(made.shape, made.stride, dtype=made.dtype, device="meta")
            else:
                storage, offset = args[0].untyped_storage(), args[0].storage_offset() + made.offset
                meta = torch.empty(0, dtype=made.dtype, device="meta").set_(storage, offset, made.shape, made.stride)
        return FakeTensor(self.fake_mode, meta, made.device)


def _apart(result: Any, fake_mode: FakeTensorMode) -> Any:
    """The results of a call, no tensor twice: for the biases of a recurrent layer's backward torch's formula of sizes
    returns one tensor, its kernel two.
    """
    if not isinstance(result, (list, tuple)) or len({id(item) for item in result}) == len(result):
        return result
    seen: set[int] = set()
    items = []
    for item in result:
        again = isinstance(item, FakeTensor) and id(item) in seen
        items.append(fake_like(item, fake_mode) if again else item)
        seen.add(id(item))
    return type(result)(items)


def _key(args: Any) -> Any:
    """The sizes, strides and types of arguments, or UNKNOWN."""
    found: list[Any] = []
    for arg in args:
        if isinstance(arg, FakeTensor):
            if arg.constant is not None or arg.layout is not torch.strided:
                return UNKNOWN
            found.append((arg.shape, arg.stride(), arg.dtype, arg.fake_device))
        elif arg is None:
            found.append(None)
        elif isinstance(arg, PLAIN):
            found.append((type(arg), arg))
        elif isinstance(arg, (list, tuple)):
            inner = _key(arg)
            if inner is UNKNOWN:
                return UNKNOWN
            found.append(inner)
        else:
            return UNKNOWN
    return tuple(found)


def _recipe(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> _Recipe | None:
    """How to make such a result again; None where it is not plain."""
    first = args[0] if args and isinstance(args[0], FakeTensor) else None
    if first is not None and result is first:
        return _Recipe(itself=True)
    kind = type(result) if isinstance(result, (list, tuple)) else None
    results = [result] if kind is None else list(result)
    tensors = [item for item in results if item is not None]
    if not tensors or kind not in (None, list, tuple) or any(type(item) is not FakeTensor for item in tensors):
        return None
    known = {_home(item) for item in _tensors((args, tuple(kwargs.values())))}
    new = [home for home in map(_home, tensors) if home not in known]
    if len(set(new)) < len(new) or not all(_plain(func, item, first, known) for item in tensors):
        return None
    start = 0 if first is None else int(first.storage_offset())
    return _Recipe(tuple(None if item is None else _made(item, known, start) for item in results), kind)


def _plain(func: Any, item: FakeTensor, first: FakeTensor | None, known: set[int]) -> bool:
    """Whether a result can be made again from its sizes."""
    if item.constant is not None or item.layout is not torch.strided or item.is_conj() or item.is_neg():
        return False
    if _home(item) not in known:
        span = _nbytes(tuple(item.shape), item.stride(), item.dtype.itemsize)
        return item.storage_offset() == 0 and item.untyped_storage().nbytes() == span
    # A view begins at a fixed distance from what it is a view of, but for those that say where, or count otherwise.
    if first is None or _home(item) != _home(first) or item.dtype != first.dtype:
        return False
    return func is not torch.ops.aten.as_strided.default


def _made(item: FakeTensor, known: set[int], start: int) -> _Made:
    fresh = _home(item) not in known
    offset = 0 if fresh else int(item.storage_offset()) - start
    return _Made(tuple(item.shape), tuple(item.stride()), offset, item.dtype, item.fake_device, fresh)


def _tensors(args: Any) -> list[FakeTensor]:
    found: list[FakeTensor] = []
    for arg in args:
        if isinstance(arg, FakeTensor):
            found.append(arg)
        elif isinstance(arg, (list, tuple)):
            found += _tensors(arg)
    return found


def _home(tensor: FakeTensor) -> int:
    return storage_key(tensor)


def _nbytes(shape: tuple[int, ...], stride: tuple[int, ...], itemsize: int) -> int:
    """The bytes that a tensor of these sizes and strides spans."""
    if 0 in shape:
        return 0
    return itemsize * (1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True)))
