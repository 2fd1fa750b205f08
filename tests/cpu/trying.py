"""Calls of ours in a graph, each tried against torch's own."""

from __future__ import annotations

import json
from collections.abc import Callable

from lowtide.graph import Graph
from lowtide.kernels import TRIED
from lowtide.measure.bench_call import Call
from lowtide.measure.specimen import specimen
from lowtide.measure.trial import has_torch_bits
from lowtide.private import below_autograd


def assert_torchs_bits(graph: Graph) -> None:
    """Each call of ours that stands for torch's has torch's bits, with the sizes that it has here."""
    for index in range(len(graph.ops)):
        assert has_bits(graph, index), graph.show_op(index)


def exactly(run: Callable[..., Graph], graph: Graph) -> Graph:
    """The graph after a tried pass that leaves those ops to torch whose calls of ours have other bits here."""
    without: set[str] = set()
    while True:
        changed = run(graph, "+".join(sorted(without)) or None)
        differing = {op.name for index, op in enumerate(changed.ops) if not has_bits(changed, index)}
        if differing <= without:
            return changed
        without |= differing


def has_bits(graph: Graph, index: int) -> bool:
    """Whether an op is torch's own, or has torch's bits."""
    if graph.ops[index].target not in TRIED:
        return True
    with below_autograd():
        call = Call(json.loads(json.dumps(specimen(graph, index))))
        return bool(has_torch_bits(graph.ops[index].target, call.args))
