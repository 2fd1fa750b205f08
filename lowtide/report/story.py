"""A plan run once in the head, to be asked about single values: when each is there, and what it costs to have again."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from lowtide.costs import Costs
from lowtide.graph import Graph
from lowtide.program import Copy, Free, Plan, Run
from lowtide.simulate import simulate


@dataclass(frozen=True)
class Stay:
    """A stretch of the program during which a value is there; places are numbers of runs."""

    start: int  # the run that makes it; -1: it was there before
    end: int  # the last run that finds it; the number of all runs where it is there at the end
    reads: tuple[int, ...]  # the runs that read it
    over: int | None = None  # the value whose bytes it took
    under: int | None = None  # the value that took its bytes


@dataclass(frozen=True)
class Gap:
    """A wait between two uses of a value."""

    start: int  # run
    end: int  # run
    held: bool  # whether the value is there meanwhile


@dataclass(frozen=True)
class Again:
    """Repeated runs, together with those whose results they need or that need theirs."""

    runs: frozenset[int]
    seconds: float
    nbytes: int  # regained: of values that first runs read, and that would have to be kept otherwise

    @property
    def price(self) -> float:
        """Seconds for each byte that is regained."""
        return self.seconds / self.nbytes if self.nbytes else 0.0


class Story:
    """The runs of a plan, with their times and the bytes in use."""

    def __init__(self, graph: Graph, costs: Costs, plan: Plan) -> None:
        self.graph, self.costs, self.plan = graph, costs, plan
        instructions = plan.program.instructions
        self.runs = [item for item in instructions if isinstance(item, Run)]
        self.reads = [graph.reads_of(run.op, again=run.again) for run in self.runs]
        self.makes = [graph.makes_of(run.op, again=run.again) for run in self.runs]
        live = simulate(graph, costs, plan.program).live
        self.live = [live[number] for number, item in enumerate(instructions) if isinstance(item, Run)]  # bytes
        self.starts = [0.0]  # seconds since the step began, of each run and of the end
        for run in self.runs:
            self.starts.append(self.starts[-1] + costs.seconds[run.op])
        self.inputs = {item.value for item in graph.inputs}
        self.peak_run = max(range(len(self.live)), key=self.live.__getitem__)

    @cached_property
    def turn(self) -> int:
        """The first run of the backward; the number of all runs where there is none."""
        phases = [self.graph.ops[run.op].phase for run in self.runs]
        return phases.index("backward") if "backward" in phases else len(phases)

    def stays(self, value: int) -> list[Stay]:
        """When the value is there."""
        found: list[Stay] = []
        start = -1 if value in self.inputs else None
        over: int | None = None
        reads: list[int] = []
        place = -1
        for item in self.plan.program.instructions:
            ends, taker = item == Free(value), None
            if isinstance(item, Run):
                place += 1
                reads += [place] if start is not None and value in self.reads[place] else []
                taker = next((made for made, read in item.over if read == value), None)
                ends = taker is not None
                if start is None and value in self.makes[place]:
                    start, over = place, next((read for made, read in item.over if made == value), None)
            if ends and start is not None:
                found.append(Stay(start, place, tuple(reads), over, taker))
                start, over, reads = None, None, []
        return found if start is None else [*found, Stay(start, len(self.runs), tuple(reads), over)]

    def longest(self, stays: list[Stay]) -> Gap | None:
        """The wait between two uses that takes the most time; those during which the value is gone come first."""
        gaps: list[Gap] = []
        before: int | None = None
        for stay in stays:
            uses = [max(stay.start, 0), *stay.reads]
            if before is not None:
                gaps.append(Gap(before, uses[1] if stay.reads else uses[0], held=False))
            gaps += [Gap(one, other, held=True) for one, other in pairwise(uses)]
            before = uses[-1]
        return max(gaps, key=lambda gap: (not gap.held, self.starts[gap.end] - self.starts[gap.start]), default=None)

    def present(self, place: int) -> set[int]:
        """The values that are there when a run begins."""
        there = set(self.inputs)
        number = -1
        for item in self.plan.program.instructions:
            match item:
                case Run(over=over):
                    number += 1
                    if number == place:
                        break
                    there |= set(self.makes[number])
                    there -= {read for _, read in over}
                case Free(value, "device"):
                    there.discard(value)
                case Copy(value, "device"):
                    there.add(value)
        return there

    def closure(self, value: int, place: int) -> list[int] | str:
        """The ops that would make the value right before a run, from what is there then; or why that cannot be."""
        graph, present = self.graph, self.present(place) - {value}
        needed: set[int] = set()
        waiting = [value]
        while waiting:
            item = waiting.pop()
            op = graph.maker[item]
            if item in present or op in needed:
                continue
            if op < 0:
                return f"it rests on %{item} {graph.values[item].name}, which is written over by then"
            if not graph.repeatable(op):
                return f"{graph.ops[op].name} writes to what outlives the step, and may run only once"
            needed.add(op)
            waiting += graph.reads_of(op, again=True)
        return sorted(needed)

    def led_to(self, place: int) -> list[int]:
        """The runs, beyond the first ones of ordinary ops, that a run rests on, itself included."""
        maker: dict[int, int] = {}
        rests: dict[int, set[int]] = {}
        for number, run in enumerate(self.runs[: place + 1]):
            if run.again or self.graph.ops[run.op].optional:
                rests[number] = {number}.union(*(rests.get(maker.get(v, -1), set()) for v in self.reads[number]))
            maker.update(dict.fromkeys(self.makes[number], number))
        return sorted(rests.get(place, {place}))

    @cached_property
    def recomputations(self) -> list[Again]:
        """The repeated runs of the plan, in groups that have nothing to do with each other."""
        leader: dict[int, int] = {}
        maker: dict[int, int] = {}

        def lead(place: int) -> int:
            while leader[place] != place:
                place = leader[place]
            return place

        for place, run in enumerate(self.runs):
            if run.again:
                leader[place] = place
                for other in {maker.get(value, -1) for value in self.reads[place]} & leader.keys():
                    leader[lead(other)] = place
            maker.update(dict.fromkeys(self.makes[place], place))
        groups: dict[int, set[int]] = {}
        for place in leader:
            groups.setdefault(lead(place), set()).add(place)
        return [
            Again(
                frozenset(places),
                sum(self.costs.seconds[self.runs[place].op] for place in places),
                sum(self.costs.nbytes[value] for value in set().union(*map(self._regained, places))),
            )
            for places in groups.values()
        ]

    @cached_property
    def _first(self) -> dict[int, int]:
        return {run.op: place for place, run in enumerate(self.runs) if not run.again}

    def _regained(self, place: int) -> set[int]:
        """The values that a repeated run makes and first runs read."""
        readers = self.graph.readers
        return {v for v in self.makes[place] if any(self._first.get(reader, -1) > place for reader in readers[v])}

    @cached_property
    def dearest(self) -> Again | None:
        """The recomputation that costs the most for each byte: the price at which the plan buys bytes."""
        return max((item for item in self.recomputations if item.nbytes), key=lambda item: item.price, default=None)

    def stored(self, value: int) -> int | None:
        """The run that stores what is kept instead of the value, if there is one."""
        stores = {row.store for row in self.graph.alternatives if row.value == value}
        return next((place for place, run in enumerate(self.runs) if run.op in stores), None)
