"""Calls of ours in a graph, each tried against torch's own."""

from __future__ import annotations

import json

from lowtide.graph import Graph
from lowtide.kernels import TRIED
from lowtide.measure.bench_call import Call
from lowtide.measure.specimen import specimen
from lowtide.measure.trial import has_torch_bits
from lowtide.private import below_autograd


def assert_torchs_bits(graph: Graph) -> None:
    """Each call of ours that stands for torch's has torch's bits, with the sizes that it has here."""
    with below_autograd():
        for index, op in enumerate(graph.ops):
            if op.target in TRIED:
                call = Call(json.loads(json.dumps(specimen(graph, index))))
                assert has_torch_bits(op.target, call.args), graph.show_op(index)
