"""A plan run once in the head, to be asked about single values: when each is there, and what it costs to have again."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

from lowtide.costs import Costs
from lowtide.graph import Graph, Place
from lowtide.lifetimes import Lifetimes, lifetimes
from lowtide.program import Copy, Plan, Run
from lowtide.simulate import simulate


@dataclass(frozen=True)
class Presence:
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
class Trip:
    """A value goes to another place, and comes back."""

    place: Place
    start: int  # the run after which it goes; -1: it goes before the first
    end: int  # the run before which it comes back; the number of all runs where it does not


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
        self.numbers = [number for number, item in enumerate(instructions) if isinstance(item, Run)]
        self.reads = [graph.reads_of(run.op, again=run.again) for run in self.runs]
        self.makes = [graph.makes_of(run.op, again=run.again) for run in self.runs]
        live = simulate(graph, costs, plan.program).live
        staging = costs.staging if plan.program.copies else 0
        self.live = [live[number] + staging for number in self.numbers]  # bytes
        self.starts = [0.0]  # seconds since the step began, of each run and of the end
        for run in self.runs:
            self.starts.append(self.starts[-1] + costs.seconds[run.op])
        self.inputs = {item.value for item in graph.inputs}
        self.elsewhere = {item.value for item in graph.inputs if item.home != "device"}
        self.peak_run = max(range(len(self.live)), key=self.live.__getitem__)

    @cached_property
    def lifetimes(self) -> Lifetimes:
        """When each value is there, by instructions."""
        return lifetimes(self.graph, self.plan.program, self.costs.nbytes, self.costs.arena_temporaries)

    def _runs_before(self, instruction: int) -> int:
        """How many runs there are before an instruction."""
        return bisect_left(self.numbers, instruction)

    @cached_property
    def backward_start(self) -> int:
        """The first run of the backward; the number of all runs where there is none."""
        return self.graph.forward_ends(run.op for run in self.runs)

    def presences(self, value: int) -> list[Presence]:
        """When the value is there."""
        found = []
        for block, number in self.lifetimes.of.get(value, ()):
            held = block.holds[number]
            over = block.holds[number - 1].value if number else None
            under = block.holds[number + 1].value if number + 1 < len(block.holds) else None
            start = self._runs_before(held.first + 1) - 1
            end = (
                len(self.runs)
                if held.last == self.lifetimes.end
                else self._runs_before(held.last + (under is not None)) - 1
            )
            reads = (
                place for place in range(max(start, 0), min(end + 1, len(self.runs))) if value in self.reads[place]
            )
            found.append(Presence(start, end, tuple(reads), over, under))
        return found

    def trips(self, value: int) -> list[Trip]:
        """When the value is copied to another place, and back."""
        found: list[Trip] = []
        for number, item in enumerate(self.plan.program.instructions):
            match item:
                case Copy(copied, "device") if copied == value and found:
                    found[-1] = replace(found[-1], end=self._runs_before(number))
                case Copy(copied, place) if copied == value and place != "device":
                    found.append(Trip(place, self._runs_before(number) - 1, len(self.runs)))
                case _:
                    pass
        return found

    def longest(self, presences: list[Presence]) -> Gap | None:
        """The wait between two uses that takes the most time; those during which the value is gone come first."""
        gaps: list[Gap] = []
        before: int | None = None
        for presence in presences:
            uses = [max(presence.start, 0), *presence.reads]
            if before is not None:
                gaps.append(Gap(before, uses[1] if presence.reads else uses[0], held=False))
            gaps += [Gap(one, other, held=True) for one, other in pairwise(uses)]
            before = uses[-1]
        return max(gaps, key=lambda gap: (not gap.held, self.starts[gap.end] - self.starts[gap.start]), default=None)

    def present(self, place: int) -> set[int]:
        """The values that are there when a run begins."""
        number = self.numbers[place] if place < len(self.runs) else self.lifetimes.end
        return set(self.lifetimes.at(number - 1))

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
            if item in self.elsewhere and not self._written_over(item, place):
                continue  # it can be copied once more
            if op < 0:
                return f"it rests on %{item} {graph.values[item].name}, which is written over by then"
            if not graph.repeatable(op):
                return f"{graph.ops[op].name} writes to what outlives the step, and may run only once"
            needed.add(op)
            waiting += graph.reads_of(op, again=True)
        return sorted(needed)

    def _written_over(self, value: int, place: int) -> bool:
        """Whether a run before this one takes the bytes of a value."""
        return any(read == value for run in self.runs[:place] for _, read in run.over)

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
