"""Collectives as ops of a graph: what the ranks of a process group do together, in the order in which it stands there.

A call waits for its end. Generated code starts an all-reduce and waits before what it makes is first needed, so that it
runs beside the ops between; `start` and `wait` are these two halves. The backend gets the bytes of a bucket as a tensor
that does not own them: its threads let go of what they were given some time after the wait, when the arena has other
values there.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from lowtide.errors import RankError

ALL_REDUCE = "lowtide.all_reduce.default"
BROADCAST = "lowtide.broadcast.default"
GATHER = "lowtide.gather.default"
COLLECTIVES = frozenset({ALL_REDUCE, BROADCAST, GATHER})
ONCE = frozenset({ALL_REDUCE, BROADCAST})  # in a program; a gather changes nothing and may be repeated
GROUP = "group:0"  # the channel of the default process group

_in_flight: dict[int, tuple[Any, Tensor]] = {}  # address of a bucket -> its work, and its bytes as they were given


def define(registry: torch.library.Library) -> None:
    """Make the ops known to torch."""
    registry.define("all_reduce(Tensor(a!) bucket) -> ()")
    registry.define("broadcast(Tensor(a!)[] buffers) -> ()")
    registry.impl("all_reduce", _all_reduce, "CPU")
    registry.impl("broadcast", broadcast, "CPU")
    torch.library.register_fake("lowtide::all_reduce", lambda bucket: None, lib=registry)
    torch.library.register_fake("lowtide::broadcast", lambda buffers: None, lib=registry)
    registry.define("gather(Tensor shard, int rows) -> Tensor")
    registry.define("own_part(Tensor summed, int rows) -> Tensor")
    registry.impl("gather", gather, "CPU")
    registry.impl("own_part", own_part, "CPU")
    torch.library.register_fake("lowtide::gather", _rows_like, lib=registry)
    torch.library.register_fake("lowtide::own_part", _rows_like, lib=registry)


def start(bucket: Tensor) -> None:
    """Begin to add up a bucket over all ranks, in its place."""
    given = _not_owned(bucket)
    _in_flight[bucket.data_ptr()] = _begun(given), given


def wait(bucket: Tensor) -> None:
    """Wait until a bucket is added up."""
    work, _ = _in_flight[bucket.data_ptr()]
    _ended(work)
    del _in_flight[bucket.data_ptr()]


def drain() -> None:
    """After a failure: wait for all that was begun, whatever becomes of it, before its bytes are used otherwise."""
    while _in_flight:
        _, (work, _) = _in_flight.popitem()
        try:
            work.wait()
        except RuntimeError:
            continue  # the failure that is known already, or one that follows from it


def broadcast(buffers: list[Tensor]) -> None:
    """Give the buffers of all ranks the contents that they have on rank 0; those of one type travel together."""
    for dtype in dict.fromkeys(buffer.dtype for buffer in buffers):
        alike = [buffer for buffer in buffers if buffer.dtype == dtype]
        flat = torch.empty(sum(buffer.numel() for buffer in alike), dtype=dtype)
        parts = flat.split([buffer.numel() for buffer in alike])
        first = torch.distributed.get_rank() == 0
        if first:
            for part, buffer in zip(parts, alike, strict=True):
                part.view(buffer.shape).copy_(buffer)
        given = _not_owned(flat)
        try:
            torch.distributed.broadcast(given, 0)
        except RuntimeError as error:
            raise _failure(error) from error
        if not first:
            for part, buffer in zip(parts, alike, strict=True):
                buffer.copy_(part.view(buffer.shape))


def gather(shard: Tensor, rows: int) -> Tensor:
    """The whole of a tensor of so many rows, of which each rank has a shard: all but the last ones have as many.

    Each rank gives its rows to the others in their places: gloo's own all-gather holds all of them twice.
    """
    whole = _rows_like(shard, rows)
    ranks, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    parts = [whole.narrow(0, begin, end - begin) for begin, end in (part_of(rows, one, ranks) for one in range(ranks))]
    parts[rank].copy_(shard)
    try:
        begun = [
            torch.distributed.broadcast(_not_owned(part), one, async_op=True)
            for one, part in enumerate(parts)
            if part.numel()
        ]
        for work in begun:
            work.wait()
    except RuntimeError as error:
        raise _failure(error) from error
    return whole


def own_part(summed: Tensor, rows: int) -> Tensor:
    """This rank's rows of a tensor that was added up over all ranks, divided by their number."""
    together = torch.distributed.is_available() and torch.distributed.is_initialized()  # not where it is measured
    ranks, rank = (torch.distributed.get_world_size(), torch.distributed.get_rank()) if together else (1, 0)
    begin, _ = part_of(summed.shape[0], rank, ranks)
    return summed.narrow(0, begin, rows) / ranks


def part_of(rows: int, rank: int, ranks: int) -> tuple[int, int]:
    """The first row that a rank has of so many, and the one behind its last."""
    each = -(-rows // ranks)
    return min(rank * each, rows), min((rank + 1) * each, rows)


def _rows_like(tensor: Tensor, rows: int) -> Tensor:
    return tensor.new_empty((rows, *tensor.shape[1:]))


def _all_reduce(bucket: Tensor) -> None:
    _ended(_begun(_not_owned(bucket)))


def _begun(bucket: Tensor) -> Any:
    try:
        return torch.distributed.all_reduce(bucket, async_op=True)
    except RuntimeError as error:
        raise _failure(error) from error


def _ended(work: Any) -> None:
    try:
        work.wait()
    except RuntimeError as error:
        raise _failure(error) from error


def _failure(error: RuntimeError) -> RankError:
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    text = (str(error).strip().splitlines() or [""])[0].rstrip(".")
    return RankError(
        f"rank {rank} of {ranks} lost the others: {text}.",
        hint="a rank has died or was slower than the group's timeout: its own output says why. Start all of them again "
        "from the last checkpoint.",
    )


def _not_owned(tensor: Tensor) -> Tensor:
    """The same bytes as a flat tensor that does not keep them alive."""
    if tensor.numel() == 0:
        return tensor
    raw = (ctypes.c_char * (tensor.numel() * tensor.element_size())).from_address(tensor.data_ptr())
    return torch.frombuffer(raw, dtype=tensor.dtype)
