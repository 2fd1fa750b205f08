"""Documents of pages for tests, made of stored steps and of steps made by hand, without torch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from test_digests import stored

from lowtide import report
from lowtide.costs import Costs, declared
from lowtide.graph import Graph, Input, Op, Output, Phase, Read, Value
from lowtide.plan import as_eager, plan
from lowtide.plan.planning import Planning
from lowtide.program import Free, Instruction, Plan, Program, Run
from lowtide.simulate import simulate

HOSTILE = '</script><img src=x onerror="document.title=1">&amp;'


def planned(name: str, part: float) -> tuple[Graph, Costs, Plan]:
    """A stored step with a plan within this part of what eager adds to what persists."""
    graph, costs = stored(name)
    persistent = costs.persistent(graph)
    peak = simulate(graph, costs, as_eager(graph)).peak
    return graph, costs, plan(graph, costs, int(persistent + part * (peak - persistent)), time_limit=0.3)


def document(graph: Graph, costs: Costs, found: Plan, *, points: int = 0, target: str = "a:b=1", **more: Any) -> Any:
    """The document of a page, with a frontier of so many points."""
    heading = report.Heading(target, "SGD", report.describe_costs(costs))
    eager_peak = simulate(graph, costs, as_eager(graph)).peak
    frontier = None
    if points:
        planning = Planning(graph, costs, time_limit=0.2)
        low = planning.least().peak
        budgets = [low + (eager_peak - low) * n // (points - 1) for n in range(points)]
        rows = [planning.within(budget) for budget in budgets]
        dots = [report.Point(b, one.peak, one.overhead, one.bound, 0.1) for b, one in zip(budgets, rows, strict=True)]
        frontier = report.Frontier(
            heading, costs.persistent(graph), eager_peak, dots, {"chen-sqrt": [None, *dots[1:]]}, len(graph.ordinary)
        )
    page = report.Page(
        heading=heading,
        asked="50%",
        eager=report.Step(graph, costs, as_eager(graph)),
        plan=report.Step(graph, costs, found.program),
        promise=found,
        summary=report.summarize(graph, costs, found, eager_peak=eager_peak),
        frontier=frontier,
        **more,
    )
    return page.to_json()


def hostile() -> tuple[Graph, Costs, Plan]:
    """A tiny step whose names are markup."""
    graph, costs, found = planned("mlp-small", 0.8)
    ops = tuple(replace(op, name=HOSTILE, module=f"{HOSTILE}.layer", source=f"{HOSTILE}.py:3") for op in graph.ops)
    values = tuple(replace(value, name=HOSTILE) for value in graph.values)
    graph = replace(graph, ops=ops, values=values)
    return graph, replace(costs, graph=graph.fingerprint), found


def long_chain(length: int) -> tuple[Graph, Costs, Plan]:
    """A chain of so many ops forward and as many backward, and a plan that keeps everything in an arena."""
    values = [Value("x", 0, "batch", 0)]
    ops: list[Op] = []

    def add(name: str, reads: tuple[int, ...], phase: Phase, module: str) -> int:
        size = 4096 + 64 * (len(values) % 97)
        values.append(Value(name, size, "activation", len(values), shape=(size // 4,), stride=(1,)))
        source = f"models/deep.py:{len(values) % 700}"
        ops.append(
            Op(name, "aten.tanh.default", tuple(map(Read, reads)), outputs=(len(values) - 1,), phase=phase,
               module=module, source=source)
        )  # fmt: skip
        return len(values) - 1

    states = [0]
    for step in range(length):
        states.append(add(f"tanh_{step}", (states[-1],), "forward", f"layers.{step // 5}.{step % 5}"))
    gradient = add("loss", (states[-1],), "backward", "")
    for step in reversed(range(1, length)):
        module = f"layers.{step // 5}.{step % 5}"
        gradient = add(f"backward_{step}", (gradient, states[step]), "backward", module)
    graph = Graph(tuple(ops), tuple(values), (Input(0, (0,)),), (Output(gradient, "result", ()),))
    costs = replace(declared(graph), seconds=tuple(1e-5 * (1 + n % 7) for n in range(len(ops))))
    return graph, costs, _kept(graph, costs)


def _kept(graph: Graph, costs: Costs) -> Plan:
    """Every op once, each value freed after its last reader, at offsets of a stack: no search."""
    instructions: list[Instruction] = []
    offsets: dict[int, int] = {}
    top = 0
    free: list[int] = []
    room = max(costs.nbytes)
    for op in graph.ordinary:
        (made,) = graph.makes[op]
        at = free.pop() if free else top
        top = max(top, at + room)
        offsets[made] = at
        instructions.append(Run(op, (at, -1)))
        for value in graph.reads[op]:
            if value in offsets and graph.readers[value][-1] == op and value not in graph.required:
                instructions.append(Free(value))
                free.append(offsets[value])
    program = Program(graph.fingerprint, tuple(instructions), top)
    found = simulate(graph, costs, program)
    return Plan(program, None, found.peak, found.seconds, found.seconds, found.seconds, 0, 0.0)


__all__ = ["HOSTILE", "document", "hostile", "long_chain", "planned"]
