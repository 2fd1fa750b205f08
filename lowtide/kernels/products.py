"""Products of matrices, quicker than torch's library where that does not use all of a processor: with the same bits.

A sum is the same in every bit if its products are added in the same order. Torch's library adds in blocks of so many,
which are found by trying; how matrices are cut into tiles, and on which vectors, leaves no trace.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lowtide import native
from lowtide.kernels import vectors
from lowtide.kernels.tried import Family, Own

SOURCE = Path(__file__).with_name("products.cpp")
BLOCKS = range(64, 1025, 8)  # of sums, as libraries have them
LONG = 2 * BLOCKS[-1] + 1  # products in a sum that shows any of these blocks

aten = torch.ops.aten
_POINTER, _INT = ctypes.c_void_p, ctypes.c_int64


class _Products(ctypes.Structure):
    _fields_ = (
        *((name, _POINTER) for name in ("a", "b", "bias", "out", "room")),
        *((name, _INT) for name in ("count", "rows", "columns", "depth")),
        *((name, _INT) for name in ("a_next", "a_row", "a_step", "b_next", "b_step", "b_column")),
        *((name, _INT) for name in ("bias_row", "out_next", "block")),
    )


SIGNATURES: native.Signatures = {
    "lowtide_products": ([_POINTER, _INT], None),
    "lowtide_products_room": ([_INT], _INT),
}


@cache
def library() -> ctypes.CDLL | None:
    """Our kernel; None where it can't be compiled or loaded."""
    return vectors.library(SOURCE, SIGNATURES, "products of matrices")


def product(one: Tensor, other: Tensor) -> Tensor:
    """The product of two matrices."""
    block = _block()
    if block is None or not _can(one, other, 2):
        return by_torch(one, other)
    made = one.new_empty((one.shape[0], other.shape[1]))
    _run(block, one.unsqueeze(0), other.unsqueeze(0), None, made.unsqueeze(0))
    return made


def added_product(bias: Tensor, one: Tensor, other: Tensor) -> Tensor:
    """The product of two matrices, added to what is given."""
    block = _block()
    if block is None or not _can(one, other, 2) or not _is_under(bias, other.shape[1]):
        return added_by_torch(bias, one, other)
    made = one.new_empty((one.shape[0], other.shape[1]))
    _run(block, one.unsqueeze(0), other.unsqueeze(0), bias, made.unsqueeze(0))
    return made


def products(one: Tensor, other: Tensor) -> Tensor:
    """The products of matrices, pair by pair."""
    block = _block()
    if block is None or not _can(one, other, 3):
        return many_by_torch(one, other)
    made = one.new_empty((one.shape[0], one.shape[1], other.shape[2]))
    _run(block, one, other, None, made)
    return made


def into(one: Tensor, other: Tensor, out: Tensor) -> Tensor:
    """The products of matrices, pair by pair, written to where they are wanted."""
    block, sizes = _block(), (one.shape[0], one.shape[1], other.shape[2])
    plain = tuple(out.shape) == sizes and out.dtype is torch.float32 and out.stride()[1:] == (sizes[2], 1)
    if block is None or not _can(one, other, 3) or not plain:
        return torch.bmm(one, other, out=out)
    _run(block, one, other, None, out)
    return out


def by_torch(one: Tensor, other: Tensor) -> Tensor:
    """The same by torch."""
    made: Tensor = aten.mm.default(one, other)
    return made


def added_by_torch(bias: Tensor, one: Tensor, other: Tensor) -> Tensor:
    """The same by torch."""
    made: Tensor = aten.addmm.default(bias, one, other)
    return made


def many_by_torch(one: Tensor, other: Tensor) -> Tensor:
    """The same by torch."""
    made: Tensor = aten.bmm.default(one, other)
    return made


def _can(one: Tensor, other: Tensor, dimensions: int) -> bool:
    """Whether these are floats in this memory, in plain or turned order, that belong together."""
    if any(
        tensor.dtype is not torch.float32
        or tensor.device.type != "cpu"
        or tensor.dim() != dimensions
        or 1 not in tensor.stride()[-2:]
        or 0 in tensor.shape
        for tensor in (one, other)
    ):
        return False
    return one.shape[-1] == other.shape[-2] and (dimensions == 2 or one.shape[0] == other.shape[0])


def _is_under(bias: Tensor, columns: int) -> bool:
    """Whether one row of floats is added to all rows."""
    return (
        bias.dtype is torch.float32
        and bias.device.type == "cpu"
        and tuple(bias.shape) == (columns,)
        and bias.is_contiguous()
    )


def _run(base: int, one: Tensor, other: Tensor, bias: Tensor | None, made: Tensor) -> None:
    compiled = library()
    assert compiled is not None
    count, rows, depth = one.shape
    block, threads = _block_of(depth, base), torch.get_num_threads()
    room = one.new_empty(threads * compiled.lowtide_products_room(block))
    task = _Products(
        one.data_ptr(),
        other.data_ptr(),
        None if bias is None else bias.data_ptr(),
        made.data_ptr(),
        room.data_ptr(),
        count,
        rows,
        other.shape[2],
        depth,
        *one.stride(),
        *other.stride(),
        0,
        made.stride(0),
        block,
    )
    compiled.lowtide_products(ctypes.byref(task), threads)


def _block_of(depth: int, base: int) -> int:
    """How many products are added from zero: as many as there are, halves of them, or the library's blocks."""
    return depth if depth <= base else depth // 2 if depth < 2 * base else base


@cache
def _block() -> int | None:
    """The blocks of torch's library; None where sums are added otherwise, or there is no kernel."""
    if library() is None:
        return None
    generator = torch.Generator().manual_seed(1)
    one, other = (torch.randn(size, generator=generator, dtype=torch.float32) for size in ((32, LONG), (LONG, 64)))
    wanted = by_torch(one, other)
    made = torch.empty_like(wanted)
    for block in BLOCKS:
        _run(block, one.unsqueeze(0), other.unsqueeze(0), None, made.unsqueeze(0))
        if torch.equal(made, wanted):
            return block
    return None


def get_ready() -> None:
    """Find out what the ops ask for when they run, before a step does."""
    _block()


def _operations(args: Sequence[Any], *, first: int) -> float:
    """Two for each pair of numbers that is multiplied."""
    one, other = args[first : first + 2]
    return float(2 * math.prod(one.shape) * other.shape[-1])


OWN = (
    Own(
        "product(Tensor one, Tensor other) -> Tensor",
        product,
        by_torch,
        operations=partial(_operations, first=0),
        ready=get_ready,
    ),
    Own(
        "added_product(Tensor bias, Tensor one, Tensor other) -> Tensor",
        added_product,
        added_by_torch,
        operations=partial(_operations, first=1),
        ready=get_ready,
    ),
    Own(
        "products(Tensor one, Tensor other) -> Tensor",
        products,
        many_by_torch,
        operations=partial(_operations, first=0),
        ready=get_ready,
    ),
)
PRODUCT, ADDED, MANY = (one.target for one in OWN)
FAMILY = Family(
    OWN,
    tuple(
        Path(__file__).with_name(name)
        for name in ("products.cpp", "vectors.hpp", "threads.hpp", "products.py", "vectors.py")
    ),
)
