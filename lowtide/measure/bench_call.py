"""Run one specimen alone: how long it takes, what it allocates, and whether its result may sit on an argument."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, pairwise, zip_longest
from pathlib import Path
from statistics import median
from typing import Any

import torch

from lowtide import device, kernels
from lowtide.allocator.arena import Arena, Tape
from lowtide.allocator.scratch import NEVER, aligned, arrange, blocks_of, height, most
from lowtide.device import Device
from lowtide.graph import Arg, Constant, Read
from lowtide.graph.decode import decode_arg
from lowtide.kernels import sparse
from lowtide.measure.trial import has_torch_bits
from lowtide.private import storage_key

BUDGET = 0.1  # seconds of repetitions for one call
LEAST, MOST = 3, 10  # repetitions that count: those in which other processes had none of its cores
PATIENCE = 0.4  # seconds after which those have to do in which others had them, the quickest of all
CHILLS = 15  # repetitions of a call that does nearly nothing
PAGE = 2**12  # bytes
SCALAR = 0.3  # for a number that is known only when the step runs: products with it are rounded, unlike halves
PLACED = 2**16  # bytes from which it matters in whose memory a tensor is


class Call:
    """A specimen with tensors made for it."""

    def __init__(self, specimen: dict[str, Any], *, placed: bool = False) -> None:
        self.specimen = specimen
        self.place = torch.device(specimen["device"])
        self.device = device.of(specimen["device"])
        self.function = kernels.kernel(specimen["target"], self.device.own_kernel)
        self.single = kernels.returns_one(specimen["target"])
        self.tensors = [self._make(item) for item in specimen["tensors"]]
        if placed:
            self._place()
        self.bind()
        sparse.spread(specimen["target"], self.args)

    def bind(self) -> None:
        """Make the arguments anew from the tensors."""
        self.args = [self._argument(decode_arg(arg)) for arg in self.specimen["args"]]
        self.kwargs = {key: self._argument(decode_arg(arg)) for key, arg in self.specimen["kwargs"].items()}

    def run(self) -> Any:
        """Call it."""
        return self.function(*self.args, **self.kwargs)

    def results(self, returned: Any) -> list[Any]:
        """What was returned, one entry for each output of the op."""
        return [returned] if self.single else list(returned or ())

    def _make(self, item: Any) -> Any:
        if item == "scalar":
            return SCALAR
        if isinstance(item, dict):
            before = Call(item["from"])
            return before.results(before.run())[item["output"]]
        dtype, shape, stride, _ = item
        tensor = torch.empty_strided(shape, stride, dtype=getattr(torch, dtype), device=self.place)
        if tensor.dtype == torch.bool:
            return tensor.bernoulli_()  # a mask that is all alike would make branches look cheap
        # Integers are taken as indices, of which only 0 is always right; numbers between 0 and 1 suit every float op.
        return tensor.uniform_() if tensor.dtype.is_floating_point else tensor.zero_()

    def _place(self) -> None:
        """Move what a step makes into an arena, as in a planned step: its pages are other ones than the heap's."""
        yours = self.specimen.get("yours", ())
        moved = {
            place: tensor.untyped_storage().nbytes()
            for place, (tensor, item) in enumerate(zip(self.tensors, self.specimen["tensors"], strict=True))
            if isinstance(item, list) and place not in yours and tensor.untyped_storage().nbytes() >= PLACED
        }
        if not moved:
            return
        ends = list(accumulate((-(-nbytes // PAGE) * PAGE for nbytes in moved.values()), initial=0))
        tape, arena = Tape(range(len(moved) + 1), list(moved.values()), ends[:-1]), Arena(ends[-1])
        cursor = array("q", [0])
        with self.device.stepping(cursor, tape, arena):
            for number, place in enumerate(moved):
                cursor[0] = number
                tensor = self.tensors[place]
                self.tensors[place] = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype).copy_(
                    tensor
                )
        arena.close()  # once the last tensor in it is gone

    def _argument(self, arg: Arg) -> Any:
        match arg:
            case Read(place, None):
                return self.tensors[place]
            case Read(place, view):
                seen = self.tensors[place]
                for target, args, item in self.specimen["views"][str(view)]:
                    seen = kernels.kernel(target)(seen, *(self._argument(part) for part in decode_arg(args)))  # type: ignore[union-attr]
                    seen = seen if item is None else seen[item]
                return seen
            case Constant(family, name):
                return kernels.constant(family, name)
            case tuple():
                return [self._argument(item) for item in arg]
            case _:
                return arg


def bench(specimen: dict[str, Any], *, metered: bool) -> dict[str, Any]:
    """Measure one specimen; without a meter its temporaries stay unknown, and nothing is certified."""
    call = Call(specimen, placed=metered)
    code = _code()
    call.run()  # the first call may allocate for good, or choose a kernel, or compile one
    code = max(0, _code() - code)
    room, returned = _room(call.device, call.run) if metered else (None, call.run())
    fresh = [_own_bytes(item, call) for item in call.results(returned)]
    del returned
    pairs = _sits_on(call, room.arena_temporaries) if room is not None and not specimen["written"] else []
    exact = has_torch_bits(specimen["target"], call.args)
    hurried = specimen.get("hurried", False)
    seconds, calm = _seconds(call, room, hurried=hurried)
    return {
        **({} if exact is None else {"exact": exact}),
        **({"hurried": True} if hurried else {}),
        "seconds": seconds,
        "disturbed": not calm,
        "arena_temporaries": 0 if room is None else room.arena_temporaries,
        "apart_temporaries": 0 if room is None else room.apart_temporaries,
        "heap_temporaries": 0 if room is None else room.heap_temporaries,
        "outputs": fresh,
        "in_place": pairs,
        "code": code,
    }


def _code() -> int:
    """The bytes of address space for code that this process compiled itself: it may both write to them and run them."""
    try:
        lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):
        return 0
    spans = (line.split()[0].split("-") for line in lines if line.split()[1] == "rwxp")
    return sum(int(end, 16) - int(start, 16) for start, end in spans)


@dataclass(frozen=True)
class Room:
    """What a call allocates, each block with an offset in one arena."""

    arena_temporaries: int  # bytes in one piece beside the results, which are in the same arena
    apart_temporaries: int  # bytes in one piece where the results are not
    heap_temporaries: int  # bytes of the heap at its peak, less those of the results
    arena: int  # bytes of all
    nbytes: list[int]
    offset: list[int]


def _room(where: Device, function: Callable[[], Any]) -> tuple[Room, Any]:
    """The room that a call needs, and what it returns."""
    with where.stepping(array("q", [0]), None, None) as step:
        returned = function()
    blocks = blocks_of(step.events)
    results = [block for block in blocks if block.freed == NEVER]
    passing = [block for block in blocks if block.freed != NEVER]
    places, apart = arrange(passing, results), arrange(passing, ())
    ends = list(accumulate((aligned(block.nbytes, where.alignment) for block in results), initial=height(places)))
    starts = [aligned(start, where.alignment) for start in ends]
    at = {block.made: start for block, start in zip(results, starts, strict=False)}
    at |= {place.block.made: place.offset + (at[place.under.made] if place.under else 0) for place in places}
    offset = [at[block.made] for block in blocks]
    in_heap = most(blocks) - sum(block.nbytes for block in results)
    room = Room(
        arena_temporaries=height(places),
        apart_temporaries=height(apart),
        heap_temporaries=max(0, in_heap),
        arena=starts[-1],
        nbytes=[block.nbytes for block in blocks],
        offset=offset,
    )
    return room, returned


def _own_bytes(item: Any, call: Call) -> int | None:
    """The bytes of a result's own storage; None where it has none of its own."""
    if not isinstance(item, torch.Tensor):
        return None
    shared = any(isinstance(t, torch.Tensor) and storage_key(t) == storage_key(item) for t in call.tensors)
    return None if shared else item.untyped_storage().nbytes()


def _seconds(call: Call, room: Room | None, *, hurried: bool = False) -> tuple[float, bool]:
    """The median time of a few calls, in an arena as in a planned step: fresh pages would cost time of their own.

    Calls beside which other processes ran are left out; where all are, the quickest has to do, and False says so.
    Hurried, a single one has to do.
    """
    cursor, where = array("q", [0]), call.device
    before = Before.of(call)
    with ExitStack() as stack:
        if room is not None and room.arena:
            count = len(room.nbytes)
            tape = Tape([0, count, 2 * count, 2 * count], 2 * room.nbytes, 2 * room.offset)
            arena = Arena(room.arena)
            stack.callback(arena.close)
            stack.enter_context(where.stepping(cursor, tape, arena))
            cursor[0] = 1
            call.run()  # touches the pages
        times: list[float] = []
        disturbed: list[float] = []
        warm: list[float] = []
        begun, spent = where.clock(), 0.0
        while (len(times) < LEAST and spent < PATIENCE) or (len(times) < MOST and spent < BUDGET) or not warm:
            delay = where.delay()  # not between the two: the threads of the last op would fall asleep
            cursor[0] = 2  # an instruction without places
            before.happen()
            cursor[0] = 0
            seconds = _clocked(where, call.run)
            (times if where.calm(seconds, where.delay() - delay) else disturbed).append(seconds)
            cursor[0] = 1  # another instruction, with the same places
            warm.append(_clocked(where, call.run))
            spent = where.clock() - begun
            if hurried:
                break
    chill = _chill(call.specimen["device"], sum(before.swept))
    return max(min(warm), (median(times) if times else min(disturbed)) - chill), bool(times)


def _clocked(where: Device, function: Callable[[], Any]) -> float:
    where.synchronise()
    start = where.clock()
    function()
    where.synchronise()
    return where.clock() - start


class Before:
    """What other ops do before a call: as many bytes as in a step go through the caches after each of its tensors."""

    def __init__(self, tensors: list[torch.Tensor], swept: list[int], place: torch.device) -> None:
        self.tensors = tensors  # in the order in which they are touched
        self.swept = swept  # bytes before each of them, and in the end
        self._others = torch.zeros(max(1, max(swept) // 8), dtype=torch.int64, device=place)
        self._at = 0  # of the others

    @classmethod
    def of(cls, call: Call) -> Before:
        """What a specimen says; nothing where it says nothing."""
        since = call.specimen.get("since", ())
        known = [(nbytes, _whole(tensor)) for nbytes, tensor in zip(since, call.tensors, strict=False)]
        order = sorted(((n, tensor) for n, tensor in known if tensor is not None), key=lambda item: -item[0])
        bytes_ = [max((call.specimen.get("room", 0), *since)), *(nbytes for nbytes, _ in order), 0]
        return cls([tensor for _, tensor in order], [more - less for more, less in pairwise(bytes_)], call.place)

    def happen(self) -> None:
        """Touch the tensors in turn, and others between them."""
        for tensor, nbytes in zip_longest(self.tensors, self.swept):
            self._sweep(nbytes // 8)
            if tensor is not None:
                tensor.bitwise_or_(0)

    def _sweep(self, count: int) -> None:
        if self._at + count > len(self._others):
            self._at = 0
        self._others[self._at : self._at + count].add_(1)
        self._at += count


@cache
def _chill(name: str, nbytes: int) -> float:
    """The seconds that any call takes longer after so many bytes: code and tables, which a step uses all the time."""
    where, least = device.of(name), torch.zeros(8, device=name)
    before = Before([], [nbytes], least.device)
    times: list[tuple[float, float]] = []
    for _ in range(CHILLS):
        before.happen()
        cold = _clocked(where, least.neg)
        times.append((cold, _clocked(where, least.neg)))
    return max(0.0, median(cold for cold, _ in times) - median(warm for _, warm in times))


def _whole(tensor: Any) -> torch.Tensor | None:
    """All bytes of a tensor's storage, as numbers that no bit is special in."""
    if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.strided:
        return None
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage, 0, (storage.nbytes(),), (1,))


def _sits_on(call: Call, in_arena: int) -> list[list[int]]:
    """Which tensors the single result may overwrite: tried on each, and compared bit for bit."""
    target, outputs = call.specimen["target"], call.specimen["outputs"]
    if len(outputs) != 1 or outputs[0] is None:
        return []
    if kernels.is_product(target) and not sparse.is_product(target):
        return []
    dtype, _, _, nbytes = outputs[0]
    return [
        [0, place]
        for place, item in enumerate(call.specimen["tensors"])
        if isinstance(item, list) and item[0] == dtype and item[3] == nbytes > 0 and _fits(call, place, in_arena)
    ]


def _fits(call: Call, place: int, in_arena: int) -> bool:
    """Whether the result on this tensor has the same bits, with no more temporaries than beside it."""
    _, shape, stride, _ = call.specimen["outputs"][0]
    itself = call.specimen["args"][0] == {"read": [place, None]} and call.specimen["tensors"][place][1:3] == [
        shape,
        stride,
    ]
    writer = kernels.overwriter(call.specimen["target"], itself=itself) or kernels.overwriter(
        call.specimen["target"], itself=False
    )
    if writer is None:
        return False
    overload, out = writer
    kept, expected = call.tensors[place], call.run()
    call.tensors[place] = kept.clone()
    call.bind()
    onto = call.tensors[place].as_strided(shape, stride)
    kwargs = call.kwargs if out is None else {**call.kwargs, out: onto}
    try:
        room, _ = _room(call.device, lambda: overload(*call.args, **kwargs))
        return room.arena_temporaries <= in_arena and torch.equal(_bits(expected), _bits(onto))
    except RuntimeError:  # torch refuses the overlap
        return False
    finally:
        call.tensors[place] = kept
        call.bind()


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)
