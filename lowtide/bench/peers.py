"""Who takes part in a race: eager PyTorch, lowtide within a budget, and what torch has to need less memory or time."""

# mypy: allow-untyped-calls
# (torch leaves checkpoint and compile without annotations)

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from lowtide.errors import LowtideError, UsageError
from lowtide.private import keep_fraction

Way = Literal["survey", "eager", "lowtide", "malloc", "checkpoint", "aot_eager", "inductor"]
PEERS: tuple[Way, ...] = ("malloc", "checkpoint", "aot_eager", "inductor")
COMPILERS: tuple[Way, ...] = ("aot_eager", "inductor")
FRACTIONS: dict[Way, tuple[float, ...]] = {  # activation_memory_budget of each compiler; 1: it keeps what it likes
    "aot_eager": (0.5, 0.2),
    "inductor": (1.0, 0.5, 0.2),
}
KEPT = str(2**40)  # bytes: more than a process ever frees at once
MALLOC = {  # glibc then serves everything from one heap and gives nothing back, in pages of 2 MiB where it can
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": KEPT,
    "MALLOC_TOP_PAD_": str(64 * 2**20),
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
}


@dataclass(frozen=True)
class Contestant:
    """One that takes part, in a process of its own."""

    name: str
    way: Way
    budget: int | None = None  # bytes, of lowtide
    percent: float | None = None  # of the step's own part, that the budget stands for
    fraction: float | None = None  # of the activations, that a compiler may keep

    @property
    def environment(self) -> dict[str, str]:
        """What its process finds in its environment."""
        return MALLOC if self.way == "malloc" else {}


EAGER = Contestant("eager", "eager")


def peers(ways: Sequence[str]) -> list[Contestant]:
    """The contestants that lowtide is held against: all of a way, or the one that is named so."""
    known = [one for way in PEERS for one in _of(way)]
    wrong = [way for way in ways if way not in PEERS and way not in {one.name for one in known}]
    if wrong:
        names = ", ".join(dict.fromkeys((*PEERS, *(one.name for one in known))))
        raise UsageError(f"there is no peer {wrong[0]!r}.", hint=f"choose from {names}, all and none.")
    return [one for one in known if one.way in ways or one.name in ways]


def _of(way: Way) -> list[Contestant]:
    """A contestant for each fraction of a compiler, or the one there is."""
    if way not in FRACTIONS:
        return [Contestant(way, way)]
    return [Contestant(f"{way} {fraction:g}", way, fraction=fraction) for fraction in FRACTIONS[way]]


def compiled(model: nn.Module, backend: str, fraction: float) -> Any:
    """The model under torch.compile, which may keep this fraction of the activations."""
    keep_fraction(fraction)
    return torch.compile(model, backend=backend)


def checkpoint_blocks(name: str, model: nn.Module) -> None:
    """Put torch.utils.checkpoint around each block, as a person does by hand; `name` is that of a built-in model."""
    if name in BY_HAND:
        BY_HAND[name](model)
        return
    found = list(blocks(model))
    if not found:
        raise LowtideError("the model has no list of blocks to put checkpoints around.")
    for block in found:
        _checkpoint(block)


def blocks(module: nn.Module) -> Iterator[nn.Module]:
    """The outermost modules in lists of modules that have parts themselves."""
    for child in module.children():
        if isinstance(module, nn.Sequential | nn.ModuleList) and any(True for _ in child.children()):
            yield child
        else:
            yield from blocks(child)


def _checkpoint(block: nn.Module, *, random: bool = True) -> None:
    """Let a module keep its inputs only, and the state of the generator if it is random, and run again later."""
    block.forward = partial(checkpoint, block.forward, use_reentrant=False, preserve_rng_state=random)


def _layers(model: nn.Module) -> None:
    """A chain of layers in as many segments as a segment has layers."""
    assert isinstance(model, nn.Sequential)
    segments = math.isqrt(len(model))
    model.forward = lambda inputs: checkpoint_sequential(  # type: ignore[method-assign]
        model, segments, inputs, use_reentrant=False, preserve_rng_state=False
    )


def _chain(model: Any) -> None:
    """The chain of tanh in as many segments as a segment has nodes."""
    length = math.isqrt(model.length)

    def segment(node: Tensor, count: int) -> Tensor:
        for _ in range(count):
            node = torch.tanh(node)
        return node

    def forward(inputs: Tensor) -> Tensor:
        node: Tensor = inputs + model.offset
        for start in range(0, model.length, length):
            count = min(length, model.length - start)
            node = checkpoint(segment, node, count, use_reentrant=False, preserve_rng_state=False)
        return node

    model.forward = forward


def _dense_layers(model: nn.Module) -> None:
    """Each layer with the concatenation that it reads, which is what takes the memory."""

    def layer_of_all(layer: nn.Module, *features: Tensor) -> Any:
        return layer(torch.cat(features, dim=1))

    def forward(block: Any, images: Tensor) -> Tensor:
        features = [images]
        for layer in block.layers:
            features.append(checkpoint(layer_of_all, layer, *features, use_reentrant=False, preserve_rng_state=False))
        return torch.cat(features, dim=1)

    for block in blocks(model):
        block.forward = partial(forward, block)


def _cell(model: Any) -> None:
    """The cell at each time step."""
    _checkpoint(model.cell, random=False)


BY_HAND: dict[str, Callable[[Any], None]] = {
    "mlp": _layers,
    "tanh-chain": _chain,
    "densenet121": _dense_layers,
    "lstm-cell": _cell,
}
