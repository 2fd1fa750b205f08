"""How sparse weights are asked for, and how they move: the numbers of a pool of constant size.

A setting is a density and words behind it: `0.3`, `0.3/dense`, `0.3/move`, `0.3/move:200`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from lowtide.errors import UsageError
from lowtide.forms import BLOCK
from lowtide.rewrites import Setting

DENSITY = 0.3  # where nothing is said
DENSE = "dense"  # the word for dense weights while their layers run, and torch's kernels
MOVE = re.compile(r"move(?:[:=](\d+))?")  # the word for weights that move, every so many steps
EVERY = 100  # steps, where nothing is said
SHARE = 0.1  # of all sparse weights, the smallest of them, move at a time
GROWTH, LEAST_GROWTH = 0.25, 16384  # a layer may gain so large a part of its weights, or so many


@dataclass(frozen=True)
class Choice:
    """What a setting says."""

    density: float  # the part of the weights that there are
    kernels: bool = True  # products straight from the values
    every: int = 0  # steps after which weights move; 0: never


def read_choice(setting: Setting) -> Choice:
    """What a setting says."""
    number, *words = str(DENSITY if setting is None else setting).split("/")
    moves = [found for found in map(MOVE.fullmatch, words) if found is not None]
    every = int(moves[0][1] or EVERY) if moves else 0
    try:
        density = float(number)
    except ValueError:
        density = 0.0
    known = len(moves) + words.count(DENSE) == len(words) == len({word[:4] for word in words})
    if not 0 < density < 1 or not known or (moves and not every):
        raise UsageError(
            f"sparse has no setting {setting!r}.",
            hint="write sparse:0.3 for a density of 30%, sparse:0.3/move:200 for weights that move every 200 steps, or "
            "sparse:0.3/dense for dense weights while their layers run.",
        )
    return Choice(density, DENSE not in words, every)


def room(count: int, elements: int) -> int:
    """How many weights a layer may have at most that has so many at first."""
    more = max(int(GROWTH * count), LEAST_GROWTH) // BLOCK * BLOCK
    return max(count, min(count + more, elements // BLOCK * BLOCK))


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
