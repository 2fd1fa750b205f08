"""What a step costs that is known at a larger size: the same ops on smaller tensors, as batches of other lengths bring.

Nothing is measured: seconds go down as an estimate says, and what ops hold inside is taken to be no more than before.
The first step at the new size shows what it really holds, and is planned anew where that is too much.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from lowtide.costs import Costs
from lowtide.graph import Graph
from lowtide.measure.roofline import roofline


def smaller(old: Graph, new: Graph) -> bool:
    """Whether a graph has the ops of another, one for one, that make no value larger and some smaller."""
    if len(old.ops) != len(new.ops):
        return False
    pairs = zip(old.ops, new.ops, strict=True)
    alike = all(
        (one.target, one.phase, one.module, one.optional, len(one.makes))
        == (other.target, other.phase, other.module, other.optional, len(other.makes))
        for one, other in pairs
    )
    if not alike:
        return False
    sizes = [(old.values[one].nbytes, new.values[other].nbytes) for one, other in _made(old, new)]
    return all(one >= other for one, other in sizes) and any(one > other for one, other in sizes)


def scaled(known: Costs, old: Graph, new: Graph, before: Costs) -> Costs:
    """The costs of a smaller graph from those of a larger one, whose estimate is `before`."""
    after = roofline(new)
    rows = zip(known.seconds, before.seconds, after.seconds, strict=True)
    nbytes = list(after.nbytes)
    for one, other in _made(old, new):
        if known.nbytes[one] != before.nbytes[one]:  # more than the graph declares, and less for a smaller one
            nbytes[other] = known.nbytes[one]
    return replace(
        after,
        seconds=tuple(seconds * (now / then if then > 0 else 1.0) for seconds, then, now in rows),
        arena_temporaries=known.arena_temporaries,
        heap_temporaries=known.heap_temporaries,
        nbytes=tuple(nbytes),
        machine=known.machine,
        lanes=known.lanes,
        staging=known.staging,
        code=known.code,
        notes=known.notes,
    )


def _made(old: Graph, new: Graph) -> Iterator[tuple[int, int]]:
    """The values of two graphs that the same ops make."""
    for one, other in zip(old.ops, new.ops, strict=True):
        yield from zip(one.makes, other.makes, strict=True)
