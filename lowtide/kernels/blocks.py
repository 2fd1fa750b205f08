"""Numbers in blocks of 256 at 16, 8 or 4 bits each, and signs in one: ops that allocate nothing but their results."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from lowtide import native

SOURCE = Path(__file__).with_name("blocks.cpp")
FLAGS = ("-O3", "-ffp-contract=off", "-Wno-psabi", "-ldl")
PACK, UNPACK = "lowtide.pack_blocks.default", "lowtide.unpack_blocks.default"
SIGNS, GATE = "lowtide.pack_signs.default", "lowtide.gate_by_signs.default"
BITS = (16, 8, 4)
BLOCK, HEADER = 256, 8  # numbers of a block, and bytes of its least number and step

_POINTER, _INT = ctypes.c_void_p, ctypes.c_int64
SIGNATURES: native.Signatures = {
    "lowtide_pack": ([_POINTER, _INT, _INT, _POINTER, _INT], None),
    "lowtide_unpack": ([_POINTER, _INT, _INT, _POINTER, _INT], None),
    "lowtide_signs": ([_POINTER, _INT, _POINTER, _INT], None),
    "lowtide_gate": ([_POINTER, _POINTER, _INT, _POINTER, _INT], None),
}


def packed_bytes(count: int, bits: int) -> int:
    """The bytes of so many numbers, packed."""
    return -(-count // BLOCK) * HEADER + -(-count * bits // 8)


def dense(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether such a tensor has its numbers side by side in memory, in some order of its dimensions."""
    count = 1
    for step, size in sorted((step, size) for step, size in zip(stride, shape, strict=True) if size != 1):
        if step != count:
            return False
        count *= size
    return count > 0


def define(registry: torch.library.Library) -> None:
    """Add the ops to lowtide's."""
    registry.define("pack_blocks(Tensor numbers, int bits) -> Tensor")
    registry.define("unpack_blocks(Tensor packed, int bits, int[] size, int[] stride) -> Tensor")
    registry.define("pack_signs(Tensor numbers) -> Tensor")
    registry.define("gate_by_signs(Tensor numbers, Tensor signs) -> Tensor")
    made = {"pack_blocks": pack, "unpack_blocks": unpack, "pack_signs": pack_signs, "gate_by_signs": gate_by_signs}
    empty: tuple[Callable[..., Tensor], ...] = (_empty_packed, _empty_numbers, _empty_signs, _empty_gated)
    for (name, kernel), fake in zip(made.items(), empty, strict=True):
        registry.impl(name, kernel, "CPU")
        torch.library.register_fake(f"lowtide::{name}", fake, lib=registry)


def pack(numbers: Tensor, bits: int) -> Tensor:
    """The numbers of a tensor in blocks, in the order in which they are in memory."""
    packed = _empty_packed(numbers, bits)
    _library().lowtide_pack(numbers.data_ptr(), numbers.numel(), bits, packed.data_ptr(), torch.get_num_threads())
    return packed


def unpack(packed: Tensor, bits: int, size: Sequence[int], stride: Sequence[int]) -> Tensor:
    """A tensor of these sizes and strides with the numbers that were packed, each off by half a step at the most."""
    numbers = _empty_numbers(packed, bits, size, stride)
    _library().lowtide_unpack(packed.data_ptr(), numbers.numel(), bits, numbers.data_ptr(), torch.get_num_threads())
    return numbers


def pack_signs(numbers: Tensor) -> Tensor:
    """A bit for each number, in the order in which they are in memory: whether it is not zero or less."""
    signs = _empty_signs(numbers)
    _library().lowtide_signs(numbers.data_ptr(), numbers.numel(), signs.data_ptr(), torch.get_num_threads())
    return signs


def gate_by_signs(numbers: Tensor, signs: Tensor) -> Tensor:
    """The numbers whose bit is set, each above zero, and zeros: a ReLU that rectifies what another one did."""
    gated = _empty_gated(numbers, signs)
    _library().lowtide_gate(
        numbers.data_ptr(), signs.data_ptr(), numbers.numel(), gated.data_ptr(), torch.get_num_threads()
    )
    return gated


def _empty_signs(numbers: Tensor) -> Tensor:
    if numbers.dtype is not torch.float32 or not dense(numbers.shape, numbers.stride()):
        raise ValueError(f"{numbers.dtype} {list(numbers.shape)} have no signs that can be packed")
    return numbers.new_empty(-(-numbers.numel() // 8), dtype=torch.uint8)


def _empty_gated(numbers: Tensor, signs: Tensor) -> Tensor:
    plain = numbers.dtype is torch.float32 and dense(numbers.shape, numbers.stride())
    if not plain or signs.dtype is not torch.uint8 or list(signs.shape) != [-(-numbers.numel() // 8)]:
        raise ValueError(f"{list(numbers.shape)} have other signs than {signs.dtype} {list(signs.shape)}")
    return numbers.new_empty_strided(numbers.shape, numbers.stride())


def _empty_packed(numbers: Tensor, bits: int) -> Tensor:
    if numbers.dtype is not torch.float32 or bits not in BITS or not dense(numbers.shape, numbers.stride()):
        raise ValueError(f"{numbers.dtype} {list(numbers.shape)} can't be packed to {bits} bits")
    return numbers.new_empty(packed_bytes(numbers.numel(), bits), dtype=torch.uint8)


def _empty_numbers(packed: Tensor, bits: int, size: Sequence[int], stride: Sequence[int]) -> Tensor:
    fits = packed.dtype is torch.uint8 and packed.dim() == 1 and bits in BITS and dense(size, stride)
    if not fits or packed.numel() != packed_bytes(math.prod(size), bits):
        raise ValueError(f"{packed.dtype} {list(packed.shape)} are not {list(size)} at {bits} bits")
    return packed.new_empty_strided(size, stride, dtype=torch.float32)


@cache
def _library() -> ctypes.CDLL:
    return native.library(SOURCE, SIGNATURES, what="the packing of activations", flags=FLAGS)
