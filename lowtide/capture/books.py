"""The books of the recorder: which tensor objects are alive on which storage, and which value each storage contains.

Tensors are told apart by their storage; each storage has a present value, and each tensor object a view through which
it sees it. Weak references tell when eager lets go of a storage.
"""

from __future__ import annotations

import dataclasses
import weakref
from typing import Any

import torch

from lowtide.capture.origin import user_line
from lowtide.errors import CaptureError
from lowtide.graph import Kind, Op, Read, Value, View
from lowtide.private import StorageWeakRef, storage_key


class Storage:
    """One storage: its present value, and how many tensors are alive on it."""

    def __init__(self, number: int, weak: StorageWeakRef, value: int, base: torch.Tensor) -> None:
        self.number = number
        self.weak = weak  # keeps the address from being used again
        self.value = value
        self.alive = 0
        self.updated_by = -1  # the op that made the present value by writing here
        self.meta = (tuple(base.shape), tuple(base.stride()), base.dtype)


class Handle:
    """One tensor object: the storage that it is on and the view through which it sees it."""

    def __init__(self, storage: Storage, view: int | None, weak: weakref.ref[Any]) -> None:
        self.storage = storage
        self.view = view
        self.weak = weak


class Books:
    """Values, views and storages of the step that is being recorded."""

    def __init__(self, ops: list[Op]) -> None:
        self.ops = ops  # the recorder's, as far as it has come
        self.values: list[Value] = []
        self.views: list[View] = []
        self.gradient_values: set[int] = set()
        self.drawn_again: set[tuple[int, int]] = set()  # (op, value): the op reads a value that eager draws again
        self._view_numbers: dict[View, int] = {}
        self._storages: dict[int, Storage] = {}
        self._handles: dict[int, Handle] = {}
        self._ends: dict[int, int] = {}  # value -> the op after which eager let go of it

    def knows(self, tensor: torch.Tensor) -> bool:
        """Whether this very tensor object is in the books."""
        return id(tensor) in self._handles

    def has_storage(self, tensor: torch.Tensor) -> bool:
        """Whether the memory of this tensor is in the books."""
        return storage_key(tensor) in self._storages

    def update(self, tensor: torch.Tensor, op: int) -> tuple[int, int] | None:
        """A new value for the storage that an op writes to: (new, old); None if this op made one already."""
        handle = self.handle(tensor)
        storage = handle.storage
        if storage.updated_by == op:
            return None
        old, new = storage.value, len(self.values)
        value = self.values[old]
        if handle.view is None:  # the call may have turned the tensor itself, as transpose_ does
            value = dataclasses.replace(value, shape=tuple(tensor.shape), stride=tuple(tensor.stride()))
            storage.meta = (value.shape, value.stride, tensor.dtype)
        self.values.append(value)
        storage.value, storage.updated_by = new, op
        self._ends[old] = op
        return new, old

    def forget(self) -> None:
        """Let go of every tensor."""
        self._handles.clear()

    def read(self, tensor: torch.Tensor) -> Read:
        """How this tensor is read now."""
        handle = self.handle(tensor)
        return Read(handle.storage.value, handle.view)

    def mark_gradient(self, tensor: torch.Tensor) -> None:
        """Remember that this tensor is the gradient of a parameter."""
        self.gradient_values.add(self.handle(tensor).storage.value)

    def finish(self) -> tuple[tuple[Value, ...], tuple[View, ...]]:
        """The values and views, complete."""
        last_read: dict[int, int] = {}
        for index, op in enumerate(self.ops):
            for number in op.reads:
                if (index, number) not in self.drawn_again:
                    last_read[number] = index
        gradients = {self.values[number].storage for number in self.gradient_values}
        values = []
        for number, value in enumerate(self.values):
            end = self._ends.get(number, -1)
            if end >= 0:
                end = max(end, last_read.get(number, end))
            kind = value.kind
            if value.storage in gradients and kind in ("activation", "activation gradient"):
                kind = "gradient"
            values.append(dataclasses.replace(value, eager_end=end, kind=kind))
        return tuple(values), tuple(self.views)

    def handle(self, tensor: torch.Tensor) -> Handle:
        handle = self._handles.get(id(tensor))
        if handle is not None:
            return handle
        storage = self._storages.get(storage_key(tensor))
        if storage is None:
            raise CaptureError(
                f"{user_line()}: the step uses a tensor of shape {tuple(tensor.shape)} that lowtide did not see made.",
                hint="this is a gap in lowtide; please report the op.",
            )
        return self.register_strided(tensor, storage)

    def register_strided(self, tensor: torch.Tensor, storage: Storage) -> Handle:
        """A tensor on a known storage, however it came about: seen by its sizes and strides."""
        shape, stride, dtype = storage.meta
        size, steps, offset = tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset())
        if tensor.dtype != dtype:
            raise CaptureError(f"{user_line()}: a tensor is seen as {tensor.dtype} where its memory is {dtype}.")
        if (size, steps, offset) == (shape, stride, 0):
            return self.register(tensor, storage, None)
        return self.register(tensor, storage, self.view(View(None, "aten.as_strided.default", (size, steps, offset))))

    def register(self, tensor: torch.Tensor, storage: Storage, view: int | None) -> Handle:
        key = id(tensor)

        def gone(_: Any) -> None:
            if self._handles.get(key) is handle:
                del self._handles[key]
            storage.alive -= 1
            if storage.alive == 0:
                self._ends[storage.value] = len(self.ops) - 1

        handle = Handle(storage, view, weakref.ref(tensor, gone))
        storage.alive += 1
        self._ends.pop(storage.value, None)
        self._handles[key] = handle
        return handle

    def new_storage(self, tensor: torch.Tensor, value: int) -> Storage:
        storage = Storage(self.values[value].storage, StorageWeakRef(tensor.untyped_storage()), value, tensor)
        self._storages[storage_key(tensor)] = storage
        return storage

    def new_value(self, name: str, tensor: torch.Tensor, kind: Kind, *, nbytes: int | None = None) -> int:
        number = len(self.values)
        self.values.append(
            Value(
                name=name,
                nbytes=tensor.untyped_storage().nbytes() if nbytes is None else nbytes,
                kind=kind,
                storage=number,
                dtype=str(tensor.dtype).removeprefix("torch."),
                shape=tuple(tensor.shape),
                stride=tuple(tensor.stride()),
            )
        )
        return number

    def view(self, view: View) -> int:
        number = self._view_numbers.setdefault(view, len(self.views))
        if number == len(self.views):
            self.views.append(view)
        return number
