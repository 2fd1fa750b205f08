"""Products of matrices by kernels of ours that add in the order of torch's library, alone and inside of attention."""

from __future__ import annotations

import math
from dataclasses import replace

from lowtide.graph import Graph, Op, Read
from lowtide.kernels.attention_products import QUICK
from lowtide.kernels.products import ADDED, MANY, PRODUCT
from lowtide.rewrite.editor import Editor
from lowtide.rewrite.seeing import Seeing
from lowtide.rewrites import Setting

CALLS = {"aten.mm.default": PRODUCT, "aten.addmm.default": ADDED, "aten.bmm.default": MANY}
LEAST = 2**20  # pairs of numbers: for fewer, torch has multiplied them before we have asked


def multiplied(graph: Graph, without: Setting = None) -> Graph:
    """The graph whose products are ours; `without` names ops that stay torch's, with a plus between them."""
    left = frozenset(str(without or "").split("+"))
    if graph.device != "cpu":
        return graph
    editor, seeing = Editor(graph), Seeing(graph)
    found = False
    for index in graph.ordinary:
        op = graph.ops[index]
        target = QUICK.get(op.target) or (CALLS[op.target] if _is_ours(seeing, op) else None)
        if target is not None and op.name not in left:
            editor.change(index, replace(op, target=target))
            found = True
    return editor.grown() if found else graph


def _is_ours(seeing: Seeing, op: Op) -> bool:
    """Whether a product is one that ours may be quicker at."""
    if op.target not in CALLS or op.kwargs or op.forgotten:
        return False
    *under, one, other = op.args
    if not isinstance(one, Read) or not isinstance(other, Read):
        return False
    seen = [seeing.tensor(read) for read in (*under, one, other) if isinstance(read, Read)]
    if any(str(tensor.dtype) != "torch.float32" for tensor in seen):
        return False
    return math.prod(seen[-2].shape) * seen[-1].shape[-1] >= LEAST
