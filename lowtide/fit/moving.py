"""Sparse weights that move: the smallest of all layers are dropped, and as many begin at zero elsewhere.

Dynamic sparse reparameterization (Mostafa and Wang 2019, arXiv 1902.05967) with a fixed share of the weights: layers
that keep more of theirs get more of the new ones, at places drawn at random. All layers have one pool: its size, and so
the plan, stays. The draws depend on the names of weights and on the number of steps, and on nothing else.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy
import torch

from lowtide.forms import BLOCK, MASK, SCALES, VALUES
from lowtide.kernels import forms
from lowtide.packed import Content, Packed, mask_bits
from lowtide.program import Plan
from lowtide.rewrite.sparse import read_choice, room

SHARE = 0.1  # of all sparse weights, the smallest of them, move at a time
STEPS = "sparse steps"  # how a state_dict calls the number of steps that were taken
Array = numpy.ndarray[Any, Any]


class Moving:
    """Counts steps, and moves weights when it is time."""

    def __init__(self) -> None:
        self.steps = 0  # of plans with weights that move

    def state(self) -> dict[str, dict[str, torch.Tensor]]:
        """What a run depends on that goes on, in the form of parts; nothing where no weights move."""
        return {STEPS: {"steps": torch.tensor([self.steps])}} if self.steps else {}

    @staticmethod
    def taken_apart(state: Mapping[str, Mapping[str, torch.Tensor]]) -> tuple[dict[str, Any], int]:
        """The parts of a saved state, and the number of steps."""
        parts = {name: one for name, one in state.items() if name != STEPS}
        return parts, int(state[STEPS]["steps"]) if STEPS in state else 0

    def due(self, plan: Plan) -> bool:
        """Whether weights move after this step."""
        every = every_of(plan)
        self.steps += every > 0
        return every > 0 and self.steps % every == 0

    def move(self, model: torch.nn.Module) -> None:
        """Move the smallest of all sparse weights, if there are any."""
        pool = {
            name: tensor.content
            for name, tensor in model.named_parameters()
            if isinstance(tensor, Packed) and MASK in tensor.content.parts and not _count(tensor.content) % BLOCK
        }
        contents = [*pool.values()]
        counts = [_count(content) for content in contents]
        dropped = round(SHARE * sum(counts))
        if not dropped:
            return
        kept = _kept(contents, dropped)
        rooms = [room(content.layout.count or 0, math.prod(content.size)) for content in contents]
        targets = shared_out([int(one.sum()) for one in kept], counts, rooms)
        for name, some, target in zip(pool, kept, targets, strict=True):
            draws = numpy.random.default_rng([zlib.crc32(name.encode()), self.steps])
            pool[name].rearrange(_chosen(pool[name], some, target, draws))


def every_of(plan: Plan) -> int:
    """After how many steps the sparse weights of a plan move; 0: they stay, or there are none."""
    return max((read_choice(one.setting).every for one in plan.rewrites if one.name == "sparse"), default=0)


def shared_out(kept: Sequence[int], counts: Sequence[int], rooms: Sequence[int]) -> list[int]:
    """How many weights each layer has after a move: by what it keeps, in whole blocks, as many in all as before."""
    found = [max(1, -(-some // BLOCK)) for some in kept]  # in blocks
    most = [one // BLOCK for one in rooms]
    left = sum(counts) // BLOCK - sum(found)
    wanted = [some / max(1, sum(kept)) * sum(counts) / BLOCK for some in kept]
    while left > 0:
        open_ = [place for place in range(len(found)) if found[place] < most[place]]
        place = max(open_, key=lambda one: (wanted[one] - found[one], -one))
        found[place] += 1
        left -= 1
    return [blocks * BLOCK for blocks in found]


def _count(content: Content) -> int:
    return content.parts[VALUES].numel()


def _sizes(content: Content) -> Array:
    """How large the values are, without their signs."""
    values, scales = content.parts[VALUES], content.parts.get(SCALES)
    found: Array = forms.unpack(values, scales, None, [len(values)], [1]).abs_().numpy()
    return found


def _kept(contents: list[Content], dropped: int) -> list[Array]:
    """Which values stay when so many go, the smallest of all; of equal ones the first go."""
    limit = _limit(contents, dropped)
    equal = dropped - sum(int((_sizes(content) < limit).sum()) for content in contents)
    found = []
    for content in contents:
        sizes = _sizes(content)
        small = sizes < limit
        some = numpy.flatnonzero(sizes == limit)[:equal]
        small[some] = True
        equal -= len(some)
        found.append(~small)
    return found


def _limit(contents: list[Content], dropped: int) -> float:
    """The least size up to which there are at least so many values; found by halves, for a list of all takes memory."""
    low, high = 0, int(numpy.float32(numpy.inf).view(numpy.uint32))
    while low < high:
        middle = (low + high) // 2
        size = numpy.uint32(middle).view(numpy.float32)
        if sum(int((_sizes(content) <= size).sum()) for content in contents) >= dropped:
            high = middle
        else:
            low = middle + 1
    return float(numpy.uint32(low).view(numpy.float32))


def _chosen(content: Content, kept: Array, target: int, draws: numpy.random.Generator) -> Array:
    """The bits of a mask: those that are kept and others, where there were none before as far as that goes."""
    before = mask_bits(content.parts[MASK], math.prod(content.size))
    chosen = before.copy()
    chosen[numpy.flatnonzero(before)[: len(kept)][~kept]] = False
    for free in (~before, ~chosen):
        places = numpy.flatnonzero(free & ~chosen)
        missing = min(len(places), target - int(chosen.sum()))
        chosen[draws.choice(places, missing, replace=False)] = True
    return chosen
