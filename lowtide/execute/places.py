"""Values that are away from the device: in the host's memory, or in files that are gone after the step."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class _Form:
    """How a tensor sees the bytes of its storage."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int  # elements before its first one

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """A tensor of this form on these bytes."""
        empty = torch.empty(0, dtype=self.dtype, device=flat.device)
        return empty.set_(flat.untyped_storage(), self.offset, self.shape, self.stride)


class Places:
    """What one run of a program has stored elsewhere; close it, and nothing is left."""

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)
        self.stored: dict[tuple[int, str], tuple[torch.Tensor, _Form]] = {}
        self.folder: tempfile.TemporaryDirectory[str] | None = None

    def store(self, value: int, place: str, tensor: torch.Tensor, *, part: bool) -> None:
        """Copy a tensor from the device to a place: with all of its storage, or only the part that it spans."""
        flat, offset = _bytes_of(tensor), int(tensor.storage_offset())
        if part:  # the rest is not ours
            start = offset * tensor.element_size()
            flat, offset = flat[start : start + _span(tensor) * tensor.element_size()], 0
        form = _Form(tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()), offset)
        if place == "host":
            kept = torch.empty(len(flat), dtype=torch.uint8, pin_memory=self.device.type == "cuda")
        else:
            if self.folder is None:
                self.folder = tempfile.TemporaryDirectory(prefix="lowtide-")
            path = os.path.join(self.folder.name, str(value))
            kept = torch.from_file(path, shared=True, size=max(1, len(flat)), dtype=torch.uint8)[: len(flat)]
        kept.copy_(flat)
        self.stored[value, place] = (kept, form)

    def load(self, value: int) -> torch.Tensor:
        """Copy a value back to the device, to new memory."""
        kept, form = self._find(value)
        made = torch.empty(len(kept), dtype=torch.uint8, device=self.device)
        made.copy_(kept)
        return form.of(made)

    def load_home(self, value: int, home: torch.Tensor) -> None:
        """Copy a value to the caller's own tensor; only its elements, for what lies between them is not ours."""
        kept, form = self._find(value)
        home.copy_(form.of(kept))

    def _find(self, value: int) -> tuple[torch.Tensor, _Form]:
        return self.stored[value, "host" if (value, "host") in self.stored else "disk"]

    def wait(self, value: int, place: str) -> None:
        """Copies here are finished when they return; a device with queues waits for its event."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def free(self, value: int, place: str) -> None:
        """Forget a stored value."""
        del self.stored[value, place]
        if place == "disk" and self.folder is not None:
            os.unlink(os.path.join(self.folder.name, str(value)))

    def close(self) -> None:
        """Let go of everything, files included."""
        self.stored.clear()
        if self.folder is not None:
            self.folder.cleanup()
            self.folder = None


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """All bytes of the tensor's storage."""
    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return flat.set_(tensor.untyped_storage())


def _span(tensor: torch.Tensor) -> int:
    """The elements from the tensor's first one to its last one."""
    if tensor.numel() == 0:
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
