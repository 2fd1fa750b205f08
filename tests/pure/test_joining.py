"""Which ops may be joined, beside brute force: whether the graph of what is joined has a cycle."""

from __future__ import annotations

from random import Random

from graphs import make_step
from hypothesis import given
from hypothesis import strategies as st

from lowtide.graph import Graph, waits
from lowtide.rewrite.joining import Joining


def _has_cycle(graph: Graph, groups: list[frozenset[int]]) -> bool:
    of = {op: min(group) for group in groups for op in group}
    before: dict[int, set[int]] = {}
    for op, others in enumerate(waits(graph.ops, [op.updates for op in graph.ops])):
        mine = of.get(op, op)
        before.setdefault(mine, set()).update(of.get(other, other) for other in others)
        before[mine].discard(mine)
    while free := [op for op, others in before.items() if not others]:
        for op in free:
            del before[op]
        for others in before.values():
            others.difference_update(free)
    return bool(before)


@given(seed=st.integers(0, 10**6), size=st.integers(4, 24), data=st.data())
def test_ops_are_joined_where_that_makes_no_cycle(seed: int, size: int, data: st.DataObject) -> None:
    graph = make_step(Random(seed), size)
    joining, groups = Joining(graph), list[frozenset[int]]()
    ops = st.sets(st.integers(0, len(graph.ops) - 1), min_size=2, max_size=4)
    for wanted in data.draw(st.lists(ops, max_size=6)):
        group = frozenset(wanted)
        taken = any(group & other for other in groups)
        may = not taken and not _has_cycle(graph, [*groups, group])
        assert joining.join(group) == may
        if may:
            groups.append(group)
