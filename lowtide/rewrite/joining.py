"""Which ops one op may stand for: none where an op between them waits for one of them, and another for it."""

from __future__ import annotations

from bisect import insort
from collections.abc import Collection

from lowtide.graph import Graph, waits


class Joining:
    """The ops of a graph, some of which are joined into one, and then others."""

    def __init__(self, graph: Graph) -> None:
        self._followers: list[list[int]] = [[] for _ in graph.ops]
        for op, before in enumerate(waits(graph.ops, [op.updates for op in graph.ops])):
            for one in before:
                self._followers[one].append(op)
        self._joined: dict[int, frozenset[int]] = {}  # op -> all that are joined with it
        self._spans: list[tuple[int, int]] = []  # the first and the last of what is joined, in order

    def join(self, ops: Collection[int]) -> bool:
        """Let these be one from now on, unless another op must run after one of them and before another one."""
        inside = frozenset(ops)
        if not inside.isdisjoint(self._joined) or self._leads_back(inside):
            return False
        self._joined |= dict.fromkeys(inside, inside)
        insort(self._spans, (min(inside), max(inside)))
        return True

    def _leads_back(self, inside: frozenset[int]) -> bool:
        last = max(inside)  # behind it only what is joined with others before it leads back
        for start, end in self._spans:
            if start > last:
                break
            last = max(last, end)
        waiting = [one for op in inside for one in self._followers[op] if one not in inside]
        seen = set[int]()
        while waiting:
            op = waiting.pop()
            if op in seen:
                continue
            together = self._joined.get(op, frozenset((op,)))
            seen |= together
            for one in (one for each in together for one in self._followers[each]):
                if one in inside:
                    return True
                if one <= last and one not in seen:
                    waiting.append(one)
        return False
