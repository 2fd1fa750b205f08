"""In place: which results may take the bytes of which arguments, and which do where some of these die.

The one definition of both; search.cpp and exact.cpp have a twin of `paired` each, and tests hold them to this one.
"""

from __future__ import annotations

from collections.abc import Container, Iterable

from lowtide.costs import Costs
from lowtide.graph import Graph

Pair = tuple[int, int]  # (made, read): what is made takes the bytes of what is read


def pairs(graph: Graph, costs: Costs, op: int) -> list[Pair]:
    """What an op may do in place within the step: its updates, then what was measured to give the same bits.

    Both are of one size, and neither is in a storage of the caller's on the device: that is written when the op says so,
    and never otherwise.
    """
    lasting = graph.device_storages
    return [
        (made, read)
        for made, read in dict.fromkeys((*graph.ops[op].updates, *costs.in_place[op]))
        if costs.nbytes[made] == costs.nbytes[read]
        and not {graph.values[made].storage, graph.values[read].storage} & lasting
    ]


def paired(possible: Iterable[Pair], dying: Container[int]) -> list[Pair]:
    """Of the possible pairs those that come about: the first for each result whose argument dies and is not taken."""
    found: list[Pair] = []
    used: set[int] = set()  # a value is made or read by an op, never both
    for made, read in possible:
        if read in dying and made not in used and read not in used:
            found.append((made, read))
            used |= {made, read}
    return found
