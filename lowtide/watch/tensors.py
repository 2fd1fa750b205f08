"""The quick comparison of tensors: whether sizes, memory and all else that can change in place is as it was.

It says nothing of what is different: that is for those to find out who know what the tensors are for.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

from lowtide import native, private
from lowtide.allocator.build import torch_build, torch_flags
from lowtide.packed import kind

SOURCE = Path(__file__).with_name("tensors.cpp")
PLAIN = 6  # numbers of a row beside the words of the object, sizes and strides
_ADDRESS, _INT = ctypes.c_void_p, ctypes.c_int64
SIGNATURES: native.Signatures = {
    "lowtide_tensors_note": ([_ADDRESS, _INT], _INT),
    "lowtide_tensors_same": ([_ADDRESS], _INT),
    "lowtide_state_take": ([_ADDRESS] * 3, _INT),
}


def kind_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """What must not change between steps, wherever a tensor lies."""
    return kind(tensor), tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, tensor.device, tensor.requires_grad


class Rows:
    """Tensors as they are now. It does not keep them alive: somebody must when they are compared."""

    def __init__(self, library: ctypes.PyDLL, tensors: Sequence[torch.Tensor], gradients: Sequence[bool]) -> None:
        """`gradients` says for each tensor whether it counts that it has a gradient, or has none."""
        self._library = library
        words, address = private.object_fields(tensors[0]) if tensors else (0, 0)
        room = sum(words + PLAIN + 2 * tensor.dim() for tensor in tensors)
        self._arrays = array("q", map(id, tensors)), array("b", gradients), array("q", bytes(8 * room))
        objects, asked, numbers = (one.buffer_info()[0] for one in self._arrays)
        self._block = array("q", (objects, asked, len(tensors), words, address, numbers))
        self._address = self._block.buffer_info()[0]
        self._told = library.lowtide_tensors_note(self._address, room) >= 0

    def same(self) -> bool:
        """Whether nothing changed."""
        return self._told and bool(self._library.lowtide_tensors_same(self._address))


class State:
    """Where the tensors of an optimizer's state are, and how: it keeps none of them alive."""

    def __init__(self, library: ctypes.PyDLL, optimizer: Any, wanted: Sequence[tuple[torch.Tensor, str, int]]) -> None:
        """`wanted` are parameters and keys, with the place in a list that each tensor is for."""
        self._library, self._optimizer = library, optimizer
        self._keys: list[str] = []
        places, tensors, starts = [], [], [0]
        keys: dict[int, list[tuple[str, int]]] = {}
        for parameter, key, place in wanted:
            keys.setdefault(id(parameter), []).append((key, place))
        for parameter, entries in optimizer.state.items():
            for key, place in keys.get(id(parameter), ()):
                self._keys.append(key)
                places.append(place)
                tensors.append(entries[key])
            starts.append(len(places))
        self._rows = Rows(library, tensors, [False] * len(tensors))
        items = [list(map(id, part)) for part in (optimizer.state.keys(), optimizer.state.values())]
        numbers = (*items, starts, list(map(id, self._keys)), list(map(id, tensors)), places)
        self._arrays = [array("q", part) for part in numbers]
        self._block = array("q", (len(items[0]), *(one.buffer_info()[0] for one in self._arrays)))
        self._address = self._block.buffer_info()[0]

    def take(self, into: list[Any]) -> bool:
        """Put each tensor into its place of the list; False where one is not as it was, or not where it was."""
        state = self._optimizer.state
        if not isinstance(state, dict):
            return False
        found = self._library.lowtide_state_take(self._address, id(state), id(into))
        return bool(found) and self._rows.same()


@cache
def library() -> ctypes.PyDLL | None:
    """What compares tensors; None where it can't be compiled or loaded."""
    try:
        opened = native.library(SOURCE, SIGNATURES, what="lowtide's watch", flags=torch_flags(), depends=torch_build())
        return native.interpreted(opened, SIGNATURES)
    except native.NativeUnavailable:  # the arena has said so
        return None
