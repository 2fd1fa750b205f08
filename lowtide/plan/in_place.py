"""In place: which results may take the bytes of which arguments, and which do where some of these die.

The one definition of both; lives.hpp and exact.cpp have a twin of `paired` each, and tests hold them to this one.
"""

from __future__ import annotations

from collections.abc import Container, Iterable

from lowtide.costs import Costs
from lowtide.graph import Graph

Pair = tuple[int, int]  # (made, read): what is made takes the bytes of what is read


def pairs(graph: Graph, costs: Costs, op: int) -> list[Pair]:
    """What an op may do in place within the step: its updates, then what was measured to give the same bits.

    Both are of one size. A storage of the caller's is written by updates and by nothing else; where it is on the device
    its bytes are there all the time, and nothing is saved.
    """
    updates, lasting, there = graph.ops[op].updates, graph.lasting_storages, graph.device_storages
    measured = (pair for pair in costs.in_place[op] if not _any_in(graph, pair, lasting))
    return [
        pair
        for pair in dict.fromkeys((*updates, *measured))
        if costs.nbytes[pair[0]] == costs.nbytes[pair[1]] and not _any_in(graph, pair, there)
    ]


def _any_in(graph: Graph, pair: Pair, storages: Container[int]) -> bool:
    return any(graph.values[value].storage in storages for value in pair)


def paired(possible: Iterable[Pair], dying: Container[int]) -> list[Pair]:
    """Of the possible pairs those that come about: the first for each result whose argument dies and is not taken."""
    found: list[Pair] = []
    used: set[int] = set()  # a value is made or read by an op, never both
    for made, read in possible:
        if read in dying and made not in used and read not in used:
            found.append((made, read))
            used |= {made, read}
    return found
