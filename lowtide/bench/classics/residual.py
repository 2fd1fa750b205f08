"""A deep residual RNN (Diamos et al. 2016): 110 layers where 9 fit, by plans and by small batches."""

# mypy: allow-untyped-calls
# (torch leaves Tensor.backward without annotations)

from __future__ import annotations

import gc
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from lowtide import allocator
from lowtide.bench.classics.claim import Figure, Found, yes
from lowtide.bench.classics.duel import Metered, duel, eager_memory
from lowtide.models import build
from lowtide.peaks import storage_bytes
from lowtide.plan import TIME_LIMIT

BATCH, LITTLE = 64, 4  # sequences at once, and as the paper has it
ROUNDS = 7
ROUNDING = 1e-4  # of the largest gradient of a parameter: what sums in another order may differ by
LONG = 30.0  # seconds of search for a plan of twenty thousand ops


@dataclass(frozen=True)
class Sizes:
    """Two nets of the same width, of which the deep one must fit where the shallow one does."""

    deep: int  # layers
    shallow: int  # layers
    width: int  # units
    length: int  # time steps

    def target(self, layers: int) -> str:
        """The net with so many layers."""
        return f"deep-rnn:layers={layers},width={self.width},length={self.length},batch={BATCH}"


FULL = Sizes(deep=110, shallow=9, width=16, length=16)
TINY = Sizes(deep=12, shallow=4, width=8, length=4)


def residual(small: bool) -> Found:
    """Train a deep net in the memory that plain PyTorch needs for a shallow one, in two ways."""
    sizes = TINY if small else FULL
    shallow = eager_memory(sizes.target(sizes.shallow))
    deep = sizes.target(sizes.deep)
    found = duel(
        deep,
        lambda _: shallow.peak,
        rounds=1 if small else ROUNDS,
        time_limit=TIME_LIMIT / 10 if small else LONG,
    )
    parts = by_parts(deep, LITTLE, rounds=1 if small else ROUNDS)
    nine, batch = f"{sizes.shallow} layers'", f"batch {LITTLE} for {BATCH}"
    published = "100 layers where 9 fitted"
    return Found(
        (
            Figure(
                f"{sizes.deep} layers: metered peak, the whole",
                found.lowtide.peak,
                "bytes",
                published,
                most=shallow.peak,
            ),
            Figure(f"{sizes.deep} layers: own part", found.lowtide.own, "bytes"),
            Figure(f"{nine} in eager, the whole", shallow.peak, "bytes"),
            Figure(f"{nine} own part in eager", shallow.own, "bytes"),
            Figure(f"{sizes.deep} layers in eager, the whole", found.eager.peak, "bytes"),
            Figure("time, of eager's with as many layers", found.time_ratio, "time"),
            Figure("planned overhead", found.overhead, "overhead"),
            yes("all that 5 steps change is eager's, bit for bit", found.equal),
            Figure(
                f"{batch}: activations", parts.memory.own - parts.gradients, "bytes", "16 times less", most=shallow.own
            ),
            Figure(f"{batch}: metered peak, the whole", parts.memory.peak, "bytes"),
            Figure(f"{batch}: time, of eager's", parts.time_ratio, "time"),
            Figure(f"{batch}: gradients differ by", parts.off, "share", most=ROUNDING),
        )
    )


@dataclass(frozen=True)
class Parts:
    """A step by small batches, whose gradients are added up, against one of the whole batch."""

    memory: Metered
    gradients: int  # bytes of the parameters', which stay from one small batch to the next
    off: float  # the most that a gradient differs by, of the largest one of its parameter
    time_ratio: float  # of the whole batch's time


def by_parts(target: str, size: int, *, rounds: int) -> Parts:
    """Train with batches of this size in plain PyTorch, and compare gradients, memory and time with the whole batch."""
    _, model, optimizer, (inputs, labels) = build(target)
    expected = _gradients(model, inputs, labels, inputs.size(0))
    found = _gradients(model, inputs, labels, size)
    pairs = zip(found, expected, strict=True)
    off = max(float((one - other).abs().max() / other.abs().max()) for one, other in pairs)
    seconds = []
    for _ in range(rounds + 1):
        times = []
        for batch in (size, inputs.size(0)):
            begun = perf_counter()
            _gradients(model, inputs, labels, batch)
            times.append(perf_counter() - begun)
        seconds.append(times[0] / times[1])
    optimizer.step()  # makes the momentum
    optimizer.zero_grad()
    del found, expected
    gc.collect()
    states = [tensor for state in optimizer.state.values() for tensor in state.values()]
    before = storage_bytes([*model.parameters(), *model.buffers(), *states, inputs, labels])
    with allocator.meter() as meter:
        _gradients(model, inputs, labels, size)
        optimizer.step()
    nbytes = sum(parameter.nbytes for parameter in model.parameters())
    return Parts(Metered(before, before + meter.peak), nbytes, off, median(seconds[1:]))


def _gradients(model: nn.Module, inputs: Tensor, labels: Tensor, size: int) -> list[Any]:
    """The gradients of the mean loss, by batches of this size."""
    model.zero_grad()
    count = inputs.size(0) // size
    for part, answers in zip(inputs.split(size), labels.split(size), strict=True):
        loss = F.cross_entropy(model(part).flatten(0, 1), answers.flatten()) / count
        loss.backward()
    return [parameter.grad for parameter in model.parameters()]
