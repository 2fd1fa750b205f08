"""One step and its plans: what the budgets and methods that are asked for share, and the search from top to bottom."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property

import numpy as np

from lowtide.check import check
from lowtide.costs import Costs
from lowtide.errors import UsageError
from lowtide.graph import Graph
from lowtide.plan.bound import bound_alone, bound_together, gates
from lowtide.plan.classics import CLASSICS
from lowtide.plan.emit import emit
from lowtide.plan.exact import exact, least_peak, useful
from lowtide.plan.gate import Gate, Web, holding
from lowtide.plan.infeasible import explain, floor
from lowtide.plan.layout import layout
from lowtide.plan.order import captured_order, early_updates, late_results
from lowtide.plan.pebble import one_shot
from lowtide.plan.problem import Ints, Problem, library, problem
from lowtide.plan.recompute import lowest, recompute
from lowtide.program import Plan, Program, Run
from lowtide.simulate import elapsed, simulate

TIME_LIMIT = 6.0  # seconds of search
CLOSE = 0.001  # of the step: a plan this near its bound needs no better bound
CHAINS = ("rockmate", "chen-budget", "gruslys-internal", "revolve")  # classics that are starts
SMALL = 64  # ops: a graph that may be solved exactly
STATES = 200_000  # that the exact solver may meet
ATTEMPTS = 8  # to get an arena into the budget, each time with a little less in use
LOWER = 0.4  # of what the arena has too much
FAR = 1.05  # times the budget: what the simulator can count otherwise is less
SLIGHT = 0.002  # of the budget: an excess from rounding and saved generator states
BEST, ONE_SHOT = "lowtide", "one-shot"
METHODS = (BEST, ONE_SHOT, *CLASSICS)

Progress = Callable[[float, float], None]  # told the best overhead so far, and the bound


class Planning:
    """A graph with its costs, and all that several plans of it share."""

    def __init__(
        self,
        graph: Graph,
        costs: Costs,
        *,
        time_limit: float = TIME_LIMIT,
        seed: int = 0,
        progress: Progress | None = None,
    ) -> None:
        self.graph, self.costs = graph, costs
        self.time_limit, self.seed, self.progress = time_limit, seed, progress
        self.arrays: Problem = problem(graph, costs)
        self.prepared: dict[str, Callable[[int | None], Ints | None]] = {}

    @cached_property
    def order(self) -> Ints:
        """Every op that has an effect once, in the order with the least peak of those that are quickly made."""
        early = early_updates(self.graph)
        orders = (early, captured_order(self.graph), late_results(self.arrays, early))
        wanted = np.isin(np.arange(len(self.graph.ops)), useful(self.arrays))
        return min((order[wanted[order]] for order in orders), key=self.arrays.peak)

    @cached_property
    def one_shot(self) -> Ints:
        """The order with the least peak that is found, which may be less good to recompute from."""
        return one_shot(self.arrays, self.order)

    @cached_property
    def base(self) -> float:
        """Seconds of the step without recomputation."""
        return self.arrays.time(self.order)

    @cached_property
    def gates(self) -> list[Gate]:
        """The moments at which bounds are looked for."""
        return gates(Web(self.arrays), self.order)

    def within(self, budget: int | None, method: str = BEST, known: Iterable[Plan] = ()) -> Plan:
        """The quickest plan that is found; without a budget nothing runs twice."""
        begun = time.monotonic()
        if method not in METHODS:
            raise UsageError(f"there is no method {method!r}.", hint=f"choose one of {', '.join(METHODS)}.")
        if method != BEST:
            return self._promise(self._by_name(method, budget), budget, 0.0, begun)
        for order in (self.order, self.one_shot):
            if budget is not None and self.arrays.peak(order) > FAR * budget:
                continue  # no need to lay it out
            program = self._finish(order, budget)
            if budget is None or self._fits(program, budget):
                return self._promise(program, budget, 0.0, begun)
        assert budget is not None
        fitting = [one for one in known if one.peak <= budget]
        found, bound = self._search(budget, [_sequence(one.program) for one in fitting], begun)
        candidates = [one.program for one in fitting] + ([found] if found is not None else [])
        program = min(candidates, key=self._seconds) if candidates else self._last_resort(budget)
        return self._promise(program, budget, bound, begun)

    def least(self) -> Plan:
        """The plan with the least peak that is found, whatever time it takes."""
        begun = time.monotonic()
        return self._promise(self._lowest, None, 0.0, begun)

    @cached_property
    def _lowest(self) -> Program:
        """The program with the least peak, with an arena or without one."""
        sequence = self._lowest_sequence
        programs = (self._finish(sequence, None), emit(self.arrays, sequence))
        return min(programs, key=lambda program: simulate(self.graph, self.costs, program).peak)

    @cached_property
    def _lowest_sequence(self) -> Ints:
        if len(self.order) <= SMALL and (found := least_peak(self.arrays, limit=STATES)).sequence is not None:
            return found.sequence
        own = floor(self.arrays)[0] - self.arrays.stays
        starts = [self.order, self.one_shot, *self._holding(own)]
        if library() is None:  # shaving is too slow to go far from where it starts
            starts += self._chains(None)
        return lowest(self.arrays, starts)

    def _last_resort(self, budget: int) -> Program:
        """The program with the least peak, if that is within the budget; else an error says what is."""
        peak = simulate(self.graph, self.costs, self._lowest).peak
        if peak > budget:
            raise explain(self.arrays, budget, peak)
        return self._lowest

    def _by_name(self, method: str, budget: int | None) -> Program:
        """What a classic finds, or the order with the least peak."""
        sequence = self.one_shot if method == ONE_SHOT else self._classic(method, budget)
        program = None if sequence is None else self._finish(sequence, budget)
        if program is None or not self._fits(program, budget):
            raise explain(self.arrays, budget or 0, simulate(self.graph, self.costs, self._lowest).peak, method)
        return program

    def _classic(self, name: str, budget: int | None) -> Ints | None:
        """What a classic finds, prepared once for all budgets."""
        if name not in self.prepared:
            self.prepared[name] = CLASSICS[name].prepare(self.arrays, self.order)
        return self.prepared[name](budget)

    def _search(self, budget: int, known: list[Ints], begun: float) -> tuple[Program | None, float]:
        """A program within the budget, None if none is found, and a lower bound on the seconds of recomputation."""
        proven = 0.0  # seconds of recomputation
        if len(self.order) <= SMALL and (found := exact(self.arrays, budget, limit=STATES)).proven:
            if found.sequence is None:
                return None, 0.0
            proven = found.bound_seconds - self.base
            optimal = self._finish(found.sequence, budget)
            if self._fits(optimal, budget):
                return optimal, proven
        own = budget - self.arrays.stays
        bound, gate = bound_alone(self.gates, own)
        if bound == float("inf"):
            return None, 0.0  # nothing fits
        bound = max(bound, proven)
        starts = [*known, *self._chains(budget), self.order, *self._holding(own, gate)]
        until = max(begun + self.time_limit, time.monotonic() + self.time_limit / 4)
        target, limit, program, quickest = budget, self.time_limit, None, 0.0
        for _ in range(ATTEMPTS):
            sequence = self._recompute(starts, target, bound, limit, until)
            if sequence is None:
                break
            quickest = quickest or self.arrays.time(sequence) - self.base
            program = self._finish(sequence, budget)
            excess = simulate(self.graph, self.costs, program).peak - budget
            if excess <= 0:
                break
            # The arena has gaps, and saved states of the random generator are not in the arrays: aim a little lower.
            # A small excess is not a matter of luck in the layout: all of it is taken off.
            part = 1.0 if excess < SLIGHT * budget else LOWER
            target = min(target, self.arrays.peak(sequence)) - max(1, int(part * excess))
            starts, limit, until = [sequence, *starts], limit / 4, until + self.time_limit / 8
            program = None
        if gate is not None and quickest - bound > CLOSE * self.base:
            bound = bound_together(self.gates, gate, own, bound, quickest, time.monotonic() + self.time_limit / 2)
        return program, bound

    def _recompute(self, starts: list[Ints], target: int, bound: float, limit: float, until: float) -> Ints | None:
        """The quickest sequence within the target from these starts, or from the one with the least peak."""
        enough = self.base * (1 + CLOSE / 10) + bound
        tell = None if self.progress is None else self._tell(bound)
        found = recompute(
            self.arrays, starts, target, limit=limit, until=until, enough=enough, seed=self.seed, progress=tell
        )
        if found is None and self.arrays.peak(self._lowest_sequence) <= target:
            return self._recompute([self._lowest_sequence], target, bound, limit, until)
        return found

    def _tell(self, bound: float) -> Callable[[float], None]:
        def tell(seconds: float) -> None:
            if self.progress is not None:
                self.progress(seconds / self.base - 1, bound / self.base)

        return tell

    def _holding(self, own: int, gate: Gate | None = None) -> Iterator[Ints]:
        """Sequences that hold a good set at the turn to the backward: cuts there and at the gate that binds most."""
        if not self.gates:
            return
        place = int(np.flatnonzero(self.order == self.gates[0].op)[0])
        for at in dict.fromkeys((self.gates[0], gate or self.gates[0])):
            _, cuts = at.search(own)
            sets = {cut.keep: cut.nbytes for cut in cuts}
            near = sorted(sets, key=lambda keep: abs(sets[keep] + at.work - own))[:6]
            sequences = (holding(self.arrays, self.order, place, keep) for keep in near)
            yield from (sequence for sequence in sequences if self.arrays.allows(sequence))

    def _chains(self, budget: int | None) -> Iterator[Ints]:
        """What the dynamic program for chains finds, which is good where budgets are tight and nets are deep."""
        found = (self._classic(name, budget) for name in CHAINS)
        yield from (sequence for sequence in found if sequence is not None)

    def _finish(self, sequence: Ints, budget: int | None) -> Program:
        """The program of a sequence, with offsets; without an arena where only that keeps a small graph's budget."""
        plain = emit(self.arrays, sequence)
        program = layout(self.graph, self.costs, plain, limit=budget, seed=self.seed)
        return plain if len(self.order) <= SMALL and not self._fits(program, budget) else program

    def _seconds(self, program: Program) -> float:
        return elapsed(self.graph, self.costs, program)

    def _fits(self, program: Program, budget: int | None) -> bool:
        return budget is None or simulate(self.graph, self.costs, program).peak <= budget

    def _promise(self, program: Program, budget: int | None, bound: float, begun: float) -> Plan:
        """The program, judged, with what it promises.

        Bounds are of recomputation. Where the graph offers copies instead, a program might do with none of it: the
        bound is then the time of all ordinary ops.
        """
        bound = 0.0 if any(row.place != "device" for row in self.graph.alternatives) else bound
        simulation = simulate(self.graph, self.costs, program)
        check(self.graph, self.costs, program, budget=budget)
        return Plan(
            program=program,
            budget=budget,
            peak=simulation.peak,
            seconds=simulation.seconds,
            base_seconds=self.base,
            bound_seconds=self.base + bound,
            least_bound=floor(self.arrays)[0],
            planning_seconds=time.monotonic() - begun,
        )


def _sequence(program: Program) -> Ints:
    return np.array([item.op for item in program.instructions if isinstance(item, Run)], np.int64)
