"""Values that are away from the device: in the host's memory, or in files that are gone after the step."""

from __future__ import annotations

import os
import tempfile
from typing import Any

import torch

from lowtide.errors import ProgramError


class Places:
    """What one run of a program has stored elsewhere; close it, and nothing is left."""

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)
        self.stored: dict[tuple[int, str], tuple[torch.Tensor, Any]] = {}
        self.folder: tempfile.TemporaryDirectory[str] | None = None

    def store(self, value: int, place: str, tensor: torch.Tensor) -> None:
        """Copy a tensor from the device to a place."""
        flat = _bytes_of(tensor)
        meta = (tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()))
        if place == "host":
            kept = torch.empty(len(flat), dtype=torch.uint8, pin_memory=self.device.type == "cuda")
        else:
            if self.folder is None:
                self.folder = tempfile.TemporaryDirectory(prefix="lowtide-")
            path = os.path.join(self.folder.name, str(value))
            kept = torch.from_file(path, shared=True, size=max(1, len(flat)), dtype=torch.uint8)[: len(flat)]
        kept.copy_(flat)
        self.stored[value, place] = (kept, meta)

    def load(self, value: int) -> torch.Tensor:
        """Copy a value back to the device."""
        place = "host" if (value, "host") in self.stored else "disk"
        kept, (dtype, shape, stride) = self.stored[value, place]
        tensor = torch.empty_strided(shape, stride, dtype=dtype, device=self.device)
        flat = _bytes_of(tensor)
        if len(flat) != len(kept):
            raise ProgramError("no such", f"%{value} came back with {len(flat)} bytes and left with {len(kept)}")
        flat.copy_(kept)
        return tensor

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
