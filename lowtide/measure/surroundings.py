"""What an op finds in a step: which of its arguments are still in the processor's caches, and whose memory they are in.

An op alone, repeated, finds all that it reads in the nearest cache. In a step others have run since. So for each
argument the bytes are counted that ops have read and written since it was last touched, in eager's order; before an op
is timed, as many are read and written. What a plan changes about that order is not in it.
"""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path
from typing import Any

from lowtide.aten import UNWRITTEN
from lowtide.graph import Graph
from lowtide.measure.roofline import traffic
from lowtide.measure.specimen import read_order

CACHE = Path("/sys/devices/system/cpu/cpu0/cache")
USUAL = 2**25  # bytes of the last cache, where the system does not say
NEAR = 2**18  # bytes: what was touched so recently is in a cache of one core


def surroundings(graph: Graph) -> list[dict[str, Any]]:
    """For each op: bytes since each of its tensors was touched, and since its results' memory was; which are yours."""
    moved = traffic(graph)
    step = sum(moved[op] for op in graph.ordinary)
    touched: dict[int, int] = {}  # storage -> bytes moved until its last touch
    storages = [value.storage for value in graph.values]
    made = graph.maker
    now, found = 0, [(0,) * len(read_order(op)) for op in graph.ops]
    for lap in range(2):  # what the first op finds is what the step before has left
        for op in graph.ordinary:
            reads = read_order(graph.ops[op])
            if lap:
                found[op] = tuple(now - touched.get(storages[value], now - step) for value in reads)
            now += moved[op]
            if graph.ops[op].target not in UNWRITTEN:
                touched |= dict.fromkeys((storages[value] for value in (*reads, *graph.makes[op])), now)
    for op in range(len(graph.ordinary), len(graph.ops)):  # these run if a plan says so, and when it does
        found[op] = tuple(step for _ in read_order(graph.ops[op]))
    room = sum(value.nbytes for value, maker in zip(graph.values, made, strict=True) if maker >= 0)
    lasting = graph.lasting_storages
    return [
        {
            "since": [rounded(nbytes) for nbytes in since],
            "room": rounded(room),
            "yours": [place for place, value in enumerate(read_order(op)) if storages[value] in lasting],
        }
        for op, since in zip(graph.ops, found, strict=True)
    ]


def rounded(nbytes: int) -> int:
    """Bytes to the nearest power of 4, so that equal calls stay equal: 0 if they are few, and no more than matter."""
    if nbytes < NEAR:
        return 0
    return int(min(4 ** round(math.log(nbytes, 4)), 2 * last_cache()))


@cache
def last_cache() -> int:
    """The bytes of the processor's largest cache."""
    sizes = [USUAL] if not CACHE.is_dir() else [_size(file) for file in CACHE.glob("index*/size")]
    return max(sizes, default=USUAL) or USUAL


def _size(file: Path) -> int:
    """As the system writes it: 32768K."""
    try:
        text = file.read_text(encoding="ascii").strip()
        return int(text.rstrip("KMG")) << {"K": 10, "M": 20, "G": 30}.get(text[-1], 0)
    except (OSError, ValueError, IndexError):
        return 0
