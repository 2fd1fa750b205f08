"""The layout in which oneDNN, torch's library of convolutions, works: blocks of 16 channels side by side.

A tensor of (images, channels, height, width) lies in it as (images, channels / 16, height, width, 16). We hold it as
what torch knows too: (images * channels / 16, 16, height, width) with the channels last. `opened` shows such a tensor
to the library as one of its own, `closed` shows a tensor of the library's as such a one; neither copies.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import product
from typing import Any

import torch
from torch import Tensor

from lowtide.allocator import hold
from lowtide.private import opaque_description, opaque_memory, opaque_over

BLOCK = 16  # channels
Sizes = tuple[int, int, int, int]  # images, channels, height, width
PROBES: tuple[Sizes, ...] = ((3, 48, 7, 11), (5, 80, 13, 17), (2, 32, 19, 3))  # no two numbers in a description alike
NUMBERS: Mapping[str, Callable[[int, int, int, int], int]] = {  # what a description says of the sizes
    "images": lambda n, c, h, w: n,
    "channels": lambda n, c, h, w: c,
    "height": lambda n, c, h, w: h,
    "width": lambda n, c, h, w: w,
    "image": lambda n, c, h, w: c * h * w,
    "block": lambda n, c, h, w: BLOCK * h * w,
    "row": lambda n, c, h, w: BLOCK * w,
}


def strides(sizes: Sequence[int]) -> tuple[int, int, int, int]:
    """The strides of a blocked tensor as we hold it, for any sizes as we hold them."""
    _, _, height, width = sizes
    return (BLOCK * height * width, 1, BLOCK * width, BLOCK)


def held(sizes: Sizes) -> Sizes:
    """The sizes of a blocked tensor as we hold it."""
    images, channels, height, width = sizes
    return (images * channels // BLOCK, BLOCK, height, width)


def fresh(like: Tensor, sizes: Sizes, dtype: torch.dtype | None = None) -> Tensor:
    """A blocked tensor of these sizes without contents."""
    return torch.empty_strided(held(sizes), strides(held(sizes)), dtype=dtype or like.dtype, device=like.device)


def refuse_unblocked(tensor: Tensor, images: int) -> Sizes:
    """The sizes of what a blocked tensor holds of so many images; anything else is refused."""
    shape = tuple(tensor.shape)
    sound = len(shape) == 4 and tensor.shape[1] == BLOCK and images > 0 and tensor.shape[0] % images == 0
    if not (sound and tensor.stride() == strides(shape) and tensor.device.type in ("cpu", "meta")):
        raise ValueError(f"sizes {list(tensor.shape)}, strides {list(tensor.stride())} are no {images} blocked images")
    return (images, tensor.shape[0] // images * BLOCK, tensor.shape[2], tensor.shape[3])


def opened(tensor: Tensor, images: int) -> Tensor:
    """A blocked tensor as one of the library's, over the same memory: it must not outlive it."""
    sizes = refuse_unblocked(tensor, images)
    return opaque_over(tensor.data_ptr(), sizes, description(sizes))


def closed(tensor: Tensor) -> Tensor:
    """A tensor of the library's as a blocked one, over the same memory where that is so laid out."""
    sizes = _sizes(tensor)
    address, nbytes = opaque_memory(tensor)
    if nbytes != 4 * tensor.numel() or opaque_description(tensor) != description(sizes):
        return blocked(tensor.to_dense())
    memory: Any = _holder(tensor.numel()).from_address(address)
    memory.keep, memory.let_go = tensor, hold()
    del tensor
    flat = torch.frombuffer(memory, dtype=torch.float32)
    return flat.as_strided(held(sizes), strides(held(sizes)))


def blocked(tensor: Tensor) -> Tensor:
    """A copy of a plain tensor in blocks."""
    made = fresh(tensor, _sizes(tensor), tensor.dtype)
    return made.copy_(tensor.reshape(made.shape))


def plain(tensor: Tensor, images: int) -> Tensor:
    """A copy of a blocked tensor in plain order."""
    made = tensor.new_empty(refuse_unblocked(tensor, images))
    made.view(tensor.shape).copy_(tensor)
    return made


@cache
def works() -> bool:
    """Whether torch's library lays out what convolutions make as we think, and takes and gives tensors of ours."""
    try:
        return _template() is not None and _round_trip()
    except (AttributeError, OSError, RuntimeError, ValueError, struct.error):  # another torch, or built without it
        return False


@cache
def description(sizes: Sizes) -> bytes:
    """The library's description of the layout with these sizes."""
    template = _template()
    if template is None:
        raise RuntimeError("the library of convolutions has another layout here")
    words, places = template
    found = bytearray(words)
    for place, name in places:
        struct.pack_into("<q", found, place, NUMBERS[name](*sizes))
    return bytes(found)


@cache
def _template() -> tuple[bytes, tuple[tuple[int, str], ...]] | None:
    """A description, and where which number is in it: found from a few, and None where it does not explain them all."""
    seen = [_probe(sizes) for sizes in PROBES]
    if len({len(words) for words in seen}) != 1:
        return None
    places = []
    for place in range(0, len(seen[0]) - 7, 8):
        numbers = [struct.unpack_from("<q", words, place)[0] for words in seen]
        name = next((name for name, of in NUMBERS.items() if [of(*sizes) for sizes in PROBES] == numbers), None)
        if name is not None:
            places.append((place, name))
    for sizes, words in zip(PROBES, seen, strict=True):
        made = bytearray(seen[0])
        for place, name in places:
            struct.pack_into("<q", made, place, NUMBERS[name](*sizes))
        if bytes(made) != words:
            return None
    return seen[0], tuple(places)


def _probe(sizes: Sizes) -> bytes:
    """The description of what a small convolution of the library makes."""
    return opaque_description(_convolved(torch.zeros(sizes[0], BLOCK, *sizes[2:]), sizes[1]))


def _convolved(images: Tensor, channels: int) -> Tensor:
    weight = torch.ones(channels, images.shape[1], 1, 1, dtype=torch.float32)
    plain_sizes = ([1, 1], [0, 0], [1, 1], False, [0, 0], 1)
    made: Tensor = torch.ops.aten.convolution(images.float().to_mkldnn(), weight, None, *plain_sizes)
    return made


def _round_trip() -> bool:
    """Whether every element is where we think it is, both ways."""
    for images, channels in product((1, 2), (16, 48)):
        numbers = torch.arange(images * channels * 15, dtype=torch.float32).view(images, channels, 3, 5)
        mine = blocked(numbers)
        seen = opened(mine, images)
        opaque = _convolved(numbers[:, :BLOCK].contiguous(), channels)
        if not torch.equal(seen.to_dense(), numbers) or not torch.equal(
            plain(closed(opaque), images), opaque.to_dense()
        ):
            return False
    return True


def _sizes(tensor: Tensor) -> Sizes:
    images, channels, height, width = tensor.shape
    return (images, channels, height, width)


@cache
def _holder(count: int) -> type[ctypes.Array[ctypes.c_float]]:
    """Memory of so many floats that is another's, which it holds."""
    return type("Holder", (ctypes.c_float * count,), {"__del__": _give_back})


def _give_back(holder: Any) -> None:
    """Free the memory while the allocator that it goes back to is in place: the library asks torch for that one."""
    let_go, holder.keep = holder.let_go, None
    if let_go is not None:
        let_go()
