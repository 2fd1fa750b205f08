"""Where the memory of one step goes: its peak, what is alive then, and the curve that leads there."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lowtide.costs import Costs
from lowtide.graph import Graph, Phase
from lowtide.lifetimes import lifetimes
from lowtide.program import Program, Run
from lowtide.report.curve import Curve, curve
from lowtide.report.modules import Branch, fold, fold_paths, pattern
from lowtide.simulate import Simulation, memory_states, simulate

TOP = "(top level)"  # the step's own lines, those of the whole model, and the batch
TEMPORARIES, STATES, GAPS = "temporaries inside ops", "saved generator states", "gaps in the arena"
CATEGORIES = {  # kind of value -> category, in the order in which a report lists them
    "parameter": "parameters",
    "gradient": "gradients",
    "state": "optimizer state",
    "buffer": "buffers",
    "batch": "batch",
    "constant": "constants",
    "activation": "activations",
    "activation gradient": "activation gradients",
    "scalar": "scalars",
}
LARGEST = 64  # groups of values, in JSON


@dataclass(frozen=True)
class PeakOp:
    """What runs when the most bytes are in use."""

    instruction: int
    op: str
    target: str
    phase: Phase
    module: str
    source: str


@dataclass(frozen=True)
class Holding:
    """Values that are alive at the peak and alike: one, or one in each of several identical modules."""

    name: str
    category: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int  # of all of them together
    count: int
    module: str
    source: str  # of the op that made them; empty for what was there before the step


@dataclass(frozen=True)
class Profile:
    """Where the memory of one step goes under one program."""

    peak: int  # bytes
    persistent: int  # bytes of the inputs that persist between steps
    peak_op: PeakOp
    categories: Mapping[str, int]  # bytes at the peak; they add up to it
    modules: tuple[Branch, ...]  # bytes at the peak; they add up to it
    largest: tuple[Holding, ...]  # alive at the peak, most bytes first
    curve: Curve
    seconds: float  # of one step
    ops: int
    values: int
    parameters: int  # numbers that are trained or frozen, not bytes

    @property
    def own(self) -> int:
        """Bytes of the step's own part: what the step adds to what persists."""
        return self.peak - self.persistent

    def to_json(self) -> dict[str, Any]:
        """All of it as plain data."""
        peak_op = self.peak_op
        return {
            "predicted_peak": self.peak,
            "persistent": self.persistent,
            "own": self.own,
            "peak_at": {name: getattr(peak_op, name) for name in PeakOp.__dataclass_fields__},
            "categories": dict(self.categories),
            "modules": [branch.to_json() for branch in self.modules],
            "largest": [
                {
                    "name": item.name,
                    "category": item.category,
                    "dtype": item.dtype,
                    "shape": list(item.shape),
                    "bytes": item.nbytes,
                    "count": item.count,
                    "module": item.module,
                    "source": item.source,
                }
                for item in self.largest[:LARGEST]
            ],
            "curve": self.curve.to_json(),
            "seconds": self.seconds,
            "ops": self.ops,
            "values": self.values,
            "parameters": self.parameters,
        }


@dataclass(frozen=True)
class _Item:
    """Bytes that are in use at the peak, and where they belong."""

    category: str
    nbytes: int
    name: str
    module: str = ""
    source: str = ""
    dtype: str = ""
    shape: tuple[int, ...] = ()


def profile(graph: Graph, costs: Costs, program: Program) -> Profile:
    """Run the program in the head and look around at its peak."""
    simulation = simulate(graph, costs, program)
    peak_op = _peak_op(graph, program, simulation.at)
    items = list(_alive(graph, costs, program, simulation, peak_op))
    categories = dict.fromkeys([*CATEGORIES.values(), TEMPORARIES, STATES, GAPS], 0)
    for item in items:
        categories[item.category] += item.nbytes
    shown = ("scalars", STATES, GAPS)
    return Profile(
        peak=simulation.peak,
        persistent=costs.persistent(graph),
        peak_op=peak_op,
        categories={name: nbytes for name, nbytes in categories.items() if nbytes or name not in shown},
        modules=fold(((item.module, item.category, item.nbytes) for item in items if item.nbytes), top=TOP),
        largest=_largest(items),
        curve=curve(graph, costs, program, simulation.live),
        seconds=simulation.seconds,
        ops=len(graph.ordinary),
        values=sum(maker < len(graph.ordinary) for maker in graph.maker),
        parameters=sum(
            math.prod(graph.values[item.value].shape)
            for item in graph.inputs
            if graph.values[item.value].kind == "parameter"
        ),
    )


def _peak_op(graph: Graph, program: Program, at: int) -> PeakOp:
    """The op that runs at this instruction, or ran last."""
    ran = [item.op for item in program.instructions[: at + 1] if isinstance(item, Run)]
    op = graph.ops[ran[-1]]
    return PeakOp(at, op.name, op.target, op.phase, op.module, op.source)


def _alive(graph: Graph, costs: Costs, program: Program, simulation: Simulation, peak_op: PeakOp) -> Iterator[_Item]:
    """All that is in use at the peak."""
    memory = next(state for number, state in enumerate(memory_states(graph, costs, program)) if number == simulation.at)
    homes = _homes(graph)
    for value in lifetimes(graph, program, costs.nbytes, costs.arena_temporaries).at(simulation.at):
        item = graph.values[value]
        module, source = homes[item.storage]
        name = item.name.removeprefix(f"{module}.") if module else item.name
        yield _Item(CATEGORIES[item.kind], costs.nbytes[value], name, module, source, item.dtype, item.shape)
    yield _Item(TEMPORARIES, memory.temporaries, f"inside {peak_op.op}", peak_op.module, peak_op.source)
    yield _Item(STATES, memory.states, STATES)
    yield _Item(GAPS, simulation.peak - simulation.live[simulation.at], GAPS)


def _homes(graph: Graph) -> dict[int, tuple[str, str]]:
    """For each storage the module that it belongs to, and the line that first filled it."""
    homes: dict[int, tuple[str, str]] = {}
    for item in graph.inputs:
        value = graph.values[item.value]
        owned = value.kind in ("parameter", "buffer", "state", "gradient")
        homes[value.storage] = (str(item.path[0]).rpartition(".")[0] if owned else "", "")
    for op in graph.ops:
        for made in op.makes:
            homes.setdefault(graph.values[made].storage, (op.module, op.source))
    return homes


def _largest(items: Sequence[_Item]) -> tuple[Holding, ...]:
    """What is in use, what is alike together, most bytes first."""
    alike: dict[_Item, list[str]] = {}  # an item of the pattern of its module -> the modules
    for item in items:
        if item.nbytes:
            alike.setdefault(replace(item, module=pattern(item.module)), []).append(item.module)
    found = [
        Holding(
            name=item.name,
            category=item.category,
            dtype=item.dtype,
            shape=item.shape,
            nbytes=item.nbytes * len(modules),
            count=len(modules),
            module=fold_paths(modules),
            source=item.source,
        )
        for item, modules in alike.items()
    ]
    return tuple(sorted(found, key=lambda holding: (-holding.nbytes, holding.module, holding.name)))
