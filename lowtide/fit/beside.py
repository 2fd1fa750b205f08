"""What eager's step would add to what is there: so much more may be held with an arena than without one."""

from __future__ import annotations

from dataclasses import replace

from lowtide.captured import Captured
from lowtide.costs import Costs
from lowtide.execute import dismissals
from lowtide.graph import Graph
from lowtide.kernels import HANDOVER
from lowtide.plan import as_eager
from lowtide.program import Run
from lowtide.simulate import simulate


def added_by_eager(captured: Captured, costs: Costs, eager_peak: int) -> tuple[int, int]:
    """The bytes at the peak before the handover and at the peak after it; both the same where there is none.

    What the caller's code has had at the handover counts as gone when the step needs it no more. Ops that stand for
    torch's hold other values than eager has, but neither half of eager's step adds more than the whole.
    """
    graph = captured.graph
    there = costs.persistent(graph) - costs.elsewhere(graph)
    program, most = as_eager(graph), eager_peak - there
    runs = [one.op if isinstance(one, Run) else -1 for one in program.instructions]
    handover = next((number for number, op in enumerate(runs) if op >= 0 and graph.ops[op].target == HANDOVER), None)
    if handover is None:
        return most, most
    gone, levels = dismissals(graph, program, captured.leaving), []
    for number, nbytes in enumerate(simulate(graph, _alone(graph, costs), replace(program, arena=0)).live):
        levels.append(nbytes - there)
        there += sum(costs.nbytes[value] for value in {graph.outputs[place].value for place in gone.get(number, ())})
    return min(most, max(levels[:handover], default=0)), min(most, max(levels[handover:]))


def _alone(graph: Graph, costs: Costs) -> Costs:
    """The costs without what others need while the step waits at its handover."""

    def of_its_own(nbytes: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(0 if graph.ops[op].target == HANDOVER else one for op, one in enumerate(nbytes))

    in_arena, in_heap = of_its_own(costs.arena_temporaries), of_its_own(costs.heap_temporaries)
    return replace(costs, arena_temporaries=in_arena, heap_temporaries=in_heap)
