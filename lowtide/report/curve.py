"""The bytes in use over one step."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from lowtide.costs import Costs
from lowtide.graph import Graph, Phase
from lowtide.program import Program, Run

POINTS = 512  # at most, in JSON


@dataclass(frozen=True)
class Stretch:
    """Instructions of one phase that follow each other."""

    phase: Phase
    start: int  # first instruction
    end: int  # half-open


@dataclass(frozen=True)
class Curve:
    """Bytes in use during each instruction, when it starts, and the phases."""

    nbytes: tuple[int, ...]  # for each instruction
    starts: tuple[float, ...]  # seconds since the step began, for each instruction
    seconds: float  # of all ops
    phases: tuple[Stretch, ...]

    def to_json(self) -> dict[str, Any]:
        """At most 512 points; a point stands for the instructions from its own to the next, and has their maximum."""
        count = len(self.nbytes)
        points = min(POINTS, count)
        edges = [place * count // points for place in range(points)] + [count]
        pairs = list(pairwise(edges))
        return {
            "instructions": count,
            "seconds": self.seconds,
            "at": [start for start, _ in pairs],
            "at_seconds": [round(self.starts[start], 9) for start, _ in pairs],
            "bytes": [max(self.nbytes[start:end]) for start, end in pairs],
            "phases": [{"phase": item.phase, "start": item.start, "end": item.end} for item in self.phases],
        }


def curve(graph: Graph, costs: Costs, program: Program, live: tuple[int, ...]) -> Curve:
    """The curve of a program whose bytes in use are known."""
    starts: list[float] = []
    now = 0.0
    phases: list[Stretch] = []
    for number, instruction in enumerate(program.instructions):
        starts.append(now)
        phase = phases[-1].phase if phases else "forward"
        if isinstance(instruction, Run):
            now += costs.seconds[instruction.op]
            phase = phase if instruction.again else graph.ops[instruction.op].phase
        if phases and phases[-1].phase == phase:
            phases[-1] = Stretch(phase, phases[-1].start, number + 1)
        else:
            phases.append(Stretch(phase, number, number + 1))
    return Curve(live, tuple(starts), now, tuple(phases))
