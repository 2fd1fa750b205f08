"""Whether a cell may run again, found out once for each cell: it writes to nothing that it did not make."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lowtide import tree
from lowtide.errors import UsageError
from lowtide.private import StorageWeakRef, TorchDispatchMode, schema, storage_key

AGAIN = "Within a budget cells run again, which would write again."
BATCH_NORM = torch.ops.aten.native_batch_norm.default  # writes to its statistics without saying so


@dataclass(frozen=True)
class Known:
    """What an earlier scan found out about a cell."""

    needs: tuple[bool, ...]  # which leaves of the state take part in the backward, from the second time step on
    quiet: bool  # whether it computes the same bits without autograd
    foreign: tuple[StorageWeakRef, ...]  # what it reads and does not make
    passes: tuple[int | None, ...]  # for each leaf of the state after it the one before it that it hands on


class Watch(TorchDispatchMode):
    """Stops a cell before it writes to a tensor that it did not make, and notes what it reads of others."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.made: dict[int, torch.UntypedStorage] = {}
        self.foreign: dict[int, StorageWeakRef] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        given = [*zip(schema(func).arguments, args, strict=False)]
        given += [(item, kwargs[item.name]) for item in schema(func).arguments if item.name in kwargs]
        written = [value for item, value in given if item.alias_info is not None and item.alias_info.is_write]
        if func is BATCH_NORM and args[5]:
            written += args[3:5]
        for tensor in tensors(written):
            if storage_key(tensor) not in self.made:
                what = f"a tensor of shape {tuple(tensor.shape)} that it did not make"
                raise UsageError(
                    f"the cell writes to {what} ({func}). {AGAIN}",
                    hint="make it a part of the state; put batch norms into eval(); or scan without a budget.",
                )
        for tensor in tensors([value for _, value in given]):
            key = storage_key(tensor)
            if key not in self.made:
                self.foreign[key] = StorageWeakRef(tensor.untyped_storage())
        result = func(*args, **kwargs)
        for tensor in tensors(result):
            key = storage_key(tensor)
            if key not in self.foreign:
                self.made[key] = tensor.untyped_storage()
        return result


_memories: weakref.WeakKeyDictionary[Any, dict[Any, Known]] = weakref.WeakKeyDictionary()


def memory(function: Any, leaves: Sequence[Tensor], mask: Tensor | None) -> tuple[dict[Any, Known], Any]:
    """Where it is kept what is known about a cell, and under which key."""
    owner = owner_of(function)
    modules = owner.modules() if isinstance(owner, torch.nn.Module) else ()
    key = (
        getattr(function, "__func__", None),
        tuple((leaf.shape, leaf.stride(), leaf.dtype, leaf.device) for leaf in leaves),
        mask is not None,
        tuple(module.training for module in modules),
    )
    try:
        return _memories.setdefault(owner, {}), key
    except TypeError:  # it can't be referred to weakly, or has no hash
        return {}, key


def owner_of(function: Any) -> Any:
    """The object whose method a cell is, or the cell itself."""
    return getattr(function, "__self__", function)


def tensors(*things: Any) -> list[Tensor]:
    """All tensors in nested lists and tuples."""
    return [leaf for leaf in tree.flatten(things)[0] if isinstance(leaf, Tensor)]
