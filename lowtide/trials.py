"""Which calls of ours stand for torch's in a step: those that a trial here found equal to the bit, and quicker.

Every pass of `rewrite.TRIED` is looked at once, with those before it taken. What is measured of its ops anyway says of
each whether it has torch's bits; the pass is told to leave alone those that have not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from lowtide.candidates import Say
from lowtide.costs import Costs
from lowtide.graph import Graph
from lowtide.rewrite import TRIED, Pass, Trail
from lowtide.rewrites import Rewrite

if TYPE_CHECKING:
    from lowtide.choice import Leave

ROUNDS = 4  # of a pass, each without the ops that lacked torch's bits in the one before


def with_tried(
    leave: Leave, graph: Graph, price: Callable[[Graph], Costs], say: Say = lambda words: None
) -> tuple[Leave, float]:
    """What may be done to a step, and those tried passes besides that pay here; and its seconds without them."""
    trail, before = Trail(), 0.0
    for one in TRIED:
        if one.name in leave.allowed.refused:
            continue
        plain = leave.apply(graph, (), trail).graph
        found = _Trial(one, graph, leave, price, trail).run(plain, say)
        if found is not None:
            before = before or _seconds(plain, price(plain))
            leave = replace(leave, always=(*leave.always, found))
    return leave, before


class _Trial:
    """Of one pass over one step."""

    def __init__(self, one: Pass, graph: Graph, leave: Leave, price: Callable[[Graph], Costs], trail: Trail) -> None:
        self.one, self.graph, self.leave, self.price, self.trail = one, graph, leave, price, trail

    def run(self, plain: Graph, say: Say) -> Rewrite | None:
        """The pass without those ops whose bits are not torch's; None where nothing is left, or nothing gained."""
        name, names, without = self.one.name, {op.name for op in plain.ops}, set[str]()
        for _ in range(ROUNDS):
            rewrite = self.one.by("+".join(sorted(without)) or None)
            changed = self.leave.apply(self.graph, (rewrite,), self.trail).graph
            if changed.fingerprint == plain.fingerprint:
                return None
            before = self.price(plain)
            if before.differing is None:  # an estimate, which knows nothing of bits
                return None
            costs = self.price(changed)
            differing = {changed.ops[op].name for op in costs.differing or ()}
            if not differing:
                seconds = _seconds(plain, before), _seconds(changed, costs)
                say(f"{name}: every call has torch's bits; {seconds[1]:.3g} s, {seconds[0]:.3g} s without")
                return rewrite if seconds[1] < seconds[0] else None
            if not differing <= names - without:  # an op between others, which stands for none of torch's
                break
            without |= differing
        say(f"{name}: not taken, for here some calls have other bits than torch's")
        return None


def _seconds(graph: Graph, costs: Costs) -> float:
    return sum(costs.seconds[op] for op in graph.ordinary)
