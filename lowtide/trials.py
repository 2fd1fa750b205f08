"""Which calls of ours stand for torch's in a step: those that a trial here found equal to the bit, and quicker.

Every pass of `rewrite.TRIED` is looked at once, with those before it taken. What is measured of its ops anyway says of
each whether it has torch's bits; the pass is told to leave alone those that have not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from lowtide.candidates import Say
from lowtide.costs import Costs
from lowtide.graph import Graph
from lowtide.rewrite import TRIED, Pass, Trail

if TYPE_CHECKING:
    from lowtide.choice import Leave

ROUNDS = 4  # of a pass, each without the ops that lacked torch's bits in the one before


def with_tried(
    leave: Leave, graph: Graph, price: Callable[[Graph], Costs], say: Say = lambda words: None
) -> tuple[Leave, float]:
    """What may be done to a step, and those tried passes besides that pay here; and its seconds without them.

    A pass that does not pay is looked at once more with the next one, which may make it worth it.
    """
    trail, best = Trail(), _Tried(leave, 0.0)
    begun: float | None = None
    unpaid: _Tried | None = None
    for one in TRIED:
        if one.name in leave.allowed.refused:
            continue
        bases = [best.leave] if unpaid is None else [best.leave, unpaid.leave]
        found = [trial for base in bases if (trial := _Trial(one, graph, base, price, trail).run(say)) is not None]
        if not found:
            continue
        if begun is None:
            plain = leave.apply(graph, (), trail).graph
            begun = _seconds(plain, price(plain))
            best = _Tried(leave, begun)
        quickest = min(found, key=lambda trial: trial.seconds)
        if quickest.seconds < best.seconds:
            best, unpaid = quickest, None
        else:
            unpaid = quickest
    return best.leave, begun or 0.0


@dataclass(frozen=True)
class _Tried:
    """What may be done to a step, with passes whose every call has torch's bits, and its seconds then."""

    leave: Leave
    seconds: float


class _Trial:
    """Of one pass over one step."""

    def __init__(self, one: Pass, graph: Graph, leave: Leave, price: Callable[[Graph], Costs], trail: Trail) -> None:
        self.one, self.graph, self.leave, self.price, self.trail = one, graph, leave, price, trail

    def run(self, say: Say) -> _Tried | None:
        """The pass without those ops whose bits are not torch's; None where nothing is left."""
        plain = self.leave.apply(self.graph, (), self.trail).graph
        name, names, without = self.one.name, {op.name for op in plain.ops}, set[str]()
        for _ in range(ROUNDS):
            rewrite = self.one.by("+".join(sorted(without)) or None)
            changed = self.leave.apply(self.graph, (rewrite,), self.trail).graph
            if changed.fingerprint == plain.fingerprint:
                return None
            before = self.price(plain)
            if before.differing is None:  # an estimate, or numbers are rounded otherwise here than where they are tried
                return None
            costs = self.price(changed)
            differing = {changed.ops[op].name for op in costs.differing or ()}
            if not differing:
                seconds = _seconds(plain, before), _seconds(changed, costs)
                say(f"{name}: every call has torch's bits; {seconds[1]:.3g} s, {seconds[0]:.3g} s without")
                return _Tried(replace(self.leave, always=(*self.leave.always, rewrite)), seconds[1])
            if not differing <= names - without:  # an op between others, which stands for none of torch's
                break
            without |= differing
        say(f"{name}: not taken, for here some calls have other bits than torch's")
        return None


def _seconds(graph: Graph, costs: Costs) -> float:
    return sum(costs.seconds[op] for op in graph.ordinary)
