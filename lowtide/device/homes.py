"""Tensors that live in a file between steps: ordinary tensors to their owner, a place to copy from and to for a step.

Their storage is a mapping of the file, shared with it: what the owner writes is in the file, and what a step copies
there is what the owner reads. The tensor objects stay the same, so that modules and optimizers do not notice. Pages
that were read or written in between are given back when the next step begins. A forked child shares the file.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import weakref
from collections.abc import Sequence

import torch

from lowtide.device.disk import BLOCK, Disk


class Mapping(mmap.mmap):
    """A part of a file that is mapped; whoever holds a tensor in it holds its file, too."""

    file: FileHomes


class FileHomes:
    """A file that tensors live in; it is gone with the last of them."""

    def __init__(self, folder: str | os.PathLike[str] | None = None) -> None:
        self.disk = Disk(0, folder)
        self.end = 0  # bytes of the file that tensors live in; it may be longer
        self.mappings: list[Mapping] = []
        self.known: dict[int, tuple[int, int]] = {}  # address of a tensor -> offset in the file, and bytes
        self.tensors: list[weakref.ref[torch.Tensor]] = []
        _FILES.add(self)

    def locate(self, tensors: Sequence[torch.Tensor]) -> list[tuple[Disk, int]]:
        """The file and the offset of each tensor, for a step: those that are in no file yet move to this one.

        What their owner wrote is in the file then, and no page of it in memory.
        """
        strangers = [tensor for tensor in tensors if _find(tensor) is None]
        if strangers:
            self.move(strangers)
        found = [home for home in map(_find, tensors) if home is not None]
        for home in dict.fromkeys(home for home, _ in found):
            home.give_back()
        return [(home.disk, offset) for home, offset in found]

    def move(self, tensors: Sequence[torch.Tensor]) -> None:
        """Let tensors live in this file from now on; they stay the same objects."""
        start, places = self.end, []
        end = start
        for tensor in tensors:
            places.append(end)
            end += max(BLOCK, -(-_spanned(tensor) // BLOCK) * BLOCK)
        self.disk.grow(end)
        mapped = Mapping(self.disk.fileno(), end - start, offset=start)
        mapped.file = self
        self.mappings.append(mapped)
        for tensor, offset in zip(tensors, places, strict=True):
            nbytes = _spanned(tensor)
            self.disk.write(offset, _flat(tensor, nbytes)).wait()
            flat = torch.frombuffer(mapped, dtype=torch.uint8, count=max(1, nbytes), offset=offset - start)
            empty = torch.empty(0, dtype=tensor.dtype)
            tensor.data = empty.set_(flat.untyped_storage(), 0, tuple(tensor.shape), tuple(tensor.stride()))
            self.known[flat.data_ptr()] = offset, nbytes
            self.tensors.append(weakref.ref(tensor))
        self.end = end

    def forget(self, tensors: Sequence[torch.Tensor]) -> None:
        """Give up tensors that came last: others get their room, and nobody may look at them again."""
        gone = [self.known.pop(tensor.data_ptr())[0] for tensor in tensors if tensor.data_ptr() in self.known]
        self.tensors = [one for one in self.tensors if (left := one()) is not None and left.data_ptr() in self.known]
        self.end = min((*gone, self.end))

    def put_back(self) -> None:
        """Let all tensors live in memory again, with what they hold now."""
        for reference in self.tensors:
            tensor = reference()
            if tensor is not None and tensor.data_ptr() in self.known:
                kept = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
                tensor.data = kept.copy_(tensor.detach())
        self.known.clear()
        self.tensors.clear()
        self.give_back()

    def give_back(self) -> None:
        """Write what changed to the file, and let go of all its pages."""
        for mapped in self.mappings:
            mapped.flush()
            mapped.madvise(mmap.MADV_DONTNEED)
        with contextlib.suppress(OSError):
            os.posix_fadvise(self.disk.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def resident(self) -> int:
        """The bytes of the file that are in memory now."""
        return self.disk.resident()


_FILES: weakref.WeakSet[FileHomes] = weakref.WeakSet()  # all of this process


def lives_in_file(tensor: torch.Tensor) -> bool:
    """Whether a tensor is in a file of this process, not in memory."""
    return _find(tensor) is not None


def _find(tensor: torch.Tensor) -> tuple[FileHomes, int] | None:
    """The file that a tensor lives in, and its offset there."""
    for home in list(_FILES):
        offset, nbytes = home.known.get(tensor.data_ptr(), (-1, 0))
        if offset >= 0 and nbytes == _spanned(tensor):
            return home, offset
    return None


def _spanned(tensor: torch.Tensor) -> int:
    """The bytes from the tensor's first element to its last one."""
    if tensor.numel() == 0:
        return 0
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return int((1 + last) * tensor.element_size())


def _flat(tensor: torch.Tensor, nbytes: int) -> torch.Tensor:
    """The bytes that a tensor spans."""
    flat = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
    start = int(tensor.storage_offset()) * tensor.element_size()
    return flat[start : start + nbytes]
