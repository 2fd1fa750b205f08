"""What gives autograd the gradients of a source, and the order in which it comes: that is the order of the sum.

Of two nodes of autograd that are ready the one made later runs first. So all that was made after a part of a forward
runs before it in the backward, and all that was made before it, after; gradients that a part gives one by one are added
to those of others as eager adds them, and their sum would not be.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor

Edge = tuple[Any, int]  # a node of autograd, and which of its results goes on


def uses_of(
    roots: Sequence[Tensor], sources: Sequence[Tensor], stand_ins: Mapping[int, Tensor]
) -> dict[int, list[Edge | None]]:
    """For each source, by place, what gives autograd a gradient of it; None: it is a root itself.

    Where a source has a stand-in, a view of it, that is what is used.
    """
    places: dict[Any, int] = {id(source): place for place, source in enumerate(sources) if place not in stand_ins}
    nodes = {stand_in.grad_fn: place for place, stand_in in stand_ins.items()}
    found: dict[int, list[Edge | None]] = {}
    for root in roots:
        place = places.get(id(root), nodes.get(root.grad_fn))
        if place is not None:
            found.setdefault(place, []).append(None)
    seen, waiting = {*nodes}, [root.grad_fn for root in roots]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        for number, (following, _) in enumerate(node.next_functions):
            waiting.append(following)
            place = nodes.get(following, places.get(id(getattr(following, "variable", None))))
            if place is not None:
                found.setdefault(place, []).append((node, number))
    return found


class Arriving:
    """A `with` around a backward that keeps the gradients of some sources one by one, in the order of their coming."""

    def __init__(self, uses: Mapping[int, Sequence[Edge | None]]) -> None:
        self.places = frozenset(uses)
        self.order: tuple[int, ...] = ()  # the source of each, by place
        self.gradients: list[Tensor] = []
        self._uses = [(edge, place) for place, edges in uses.items() for edge in edges if edge is not None]
        self._hooks: list[Any] = []

    def __enter__(self) -> None:
        nodes: dict[Any, list[tuple[int, int]]] = {}
        for (node, number), place in self._uses:
            nodes.setdefault(node, []).append((number, place))
        self._hooks = [node.register_hook(partial(self._note, sorted(edges))) for node, edges in nodes.items()]

    def _note(self, edges: Sequence[tuple[int, int]], results: Sequence[Tensor | None], _: Any) -> None:
        for number, place in edges:
            if (gradient := results[number]) is not None:
                self.order += (place,)
                self.gradients.append(gradient)

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()
