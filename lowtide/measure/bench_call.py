"""Run one specimen alone: how long it takes, what it allocates, and whether its result may sit on an argument."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from lowtide import kernels
from lowtide.allocator import Meter
from lowtide.graph import Arg, Constant, Read, decode_arg

BUDGET = 0.05  # seconds of repetitions for one call
MOST = 30  # repetitions


class Call:
    """A specimen with tensors made for it."""

    def __init__(self, specimen: dict[str, Any]) -> None:
        self.specimen = specimen
        self.device = torch.device(specimen["device"])
        self.function = kernels.kernel(specimen["target"])
        self.single = kernels.returns_one(specimen["target"])
        self.tensors = [self._make(item) for item in specimen["tensors"]]
        self.bind()

    def bind(self) -> None:
        """Make the arguments anew from the tensors."""
        self.args = [self._argument(decode_arg(arg)) for arg in self.specimen["args"]]
        self.kwargs = {key: self._argument(decode_arg(arg)) for key, arg in self.specimen["kwargs"].items()}

    def run(self) -> Any:
        """Call it."""
        return self.function(*self.args, **self.kwargs)

    def results(self, returned: Any) -> list[Any]:
        """What was returned, one entry for each output of the op."""
        return [returned] if self.single else list(returned)

    def _make(self, item: Any) -> Any:
        if item == "scalar":
            return 0.5
        if isinstance(item, dict):
            before = Call(item["from"])
            return before.results(before.run())[item["output"]]
        dtype, shape, stride, _ = item
        tensor = torch.empty_strided(shape, stride, dtype=getattr(torch, dtype), device=self.device)
        # Integers are taken as indices, of which only 0 is always right; numbers between 0 and 1 suit every float op.
        return tensor.uniform_() if tensor.dtype.is_floating_point else tensor.zero_()

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


def bench(specimen: dict[str, Any], meter: Meter | None) -> dict[str, Any]:
    """Measure one specimen."""
    call = Call(specimen)
    call.run()  # the first call may allocate for good, or choose a kernel
    local, returned = _peak_of(call.run, meter)
    fresh = [_own_bytes(item, call) for item in call.results(returned)]
    del returned
    extra = max(0, local - sum(item or 0 for item in fresh))
    pairs = [] if specimen["written"] else _sits_on(call, extra, meter)
    return {"seconds": _seconds(call.run), "extra": extra, "outputs": fresh, "in_place": pairs}


def _peak_of(function: Callable[[], Any], meter: Meter | None) -> tuple[int, Any]:
    """The most bytes that a call holds beyond those at its start, and what it returns."""
    if meter is None:
        return 0, function()
    meter.reset()
    before = meter.current
    returned = function()
    return meter.peak - before, returned


def _own_bytes(item: Any, call: Call) -> int | None:
    """The bytes of a result's own storage; None where it has none of its own."""
    if not isinstance(item, torch.Tensor):
        return None
    storage = item.untyped_storage()
    shared = any(isinstance(t, torch.Tensor) and t.untyped_storage()._cdata == storage._cdata for t in call.tensors)
    return None if shared else storage.nbytes()


def _seconds(function: Callable[[], Any]) -> float:
    """The least time of a few calls."""
    best, spent, runs = float("inf"), 0.0, 0
    while runs < 2 or (spent < BUDGET and runs < MOST):
        start = time.perf_counter()
        function()
        took = time.perf_counter() - start
        best, spent, runs = min(best, took), spent + took, runs + 1
    return best


def _sits_on(call: Call, extra: int, meter: Meter | None) -> list[list[int]]:
    """Which tensors the single result may overwrite: tried on each, and compared bit for bit."""
    writer = kernels.writes_to_out(call.specimen["target"])
    outputs = call.specimen["outputs"]
    if writer is None or len(outputs) != 1 or outputs[0] is None:
        return []
    overload, out = writer
    dtype, shape, stride, nbytes = outputs[0]
    found = []
    for place, item in enumerate(call.specimen["tensors"]):
        if not isinstance(item, list) or item[0] != dtype or item[3] != nbytes or nbytes == 0:
            continue
        kept = call.tensors[place]
        expected = call.run()
        call.tensors[place] = target = kept.clone()
        call.bind()
        try:
            onto = target.as_strided(shape, stride)
            held, _ = _peak_of(lambda onto=onto: overload(*call.args, **call.kwargs, **{out: onto}), meter)  # type: ignore[misc]
            same = _bits(expected) == _bits(onto)
        except RuntimeError:
            same, held = False, 0
        if same and held <= extra:
            found.append([0, place])
        call.tensors[place] = kept
        call.bind()
    return found


def _bits(tensor: torch.Tensor) -> Any:
    """Something that is equal for tensors of the same bits."""
    return _Bits(tensor.contiguous().view(torch.uint8)) if tensor.dim() else _Bits(tensor.reshape(1).view(torch.uint8))


class _Bits:
    def __init__(self, bits: torch.Tensor) -> None:
        self.bits = bits

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Bits) and torch.equal(self.bits, other.bits)

    __hash__ = None  # type: ignore[assignment]
