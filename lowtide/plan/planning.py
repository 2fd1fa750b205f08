"""One step and its plans: what the budgets and methods that are asked for share, and the search from top to bottom."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property

import numpy as np

from lowtide.check import check
from lowtide.costs import Costs
from lowtide.errors import BudgetError, UsageError
from lowtide.graph import Graph
from lowtide.plan.bound import bound_alone, bound_together, gates
from lowtide.plan.classics import CLASSICS
from lowtide.plan.classics.find import Find
from lowtide.plan.copies import all_on_device, copying, lives_elsewhere, offers_copies, sequence_of, weave
from lowtide.plan.emit import emit
from lowtide.plan.exact import exact, least_peak, useful
from lowtide.plan.gate import Gate, Web, holding
from lowtide.plan.infeasible import explain as explained
from lowtide.plan.infeasible import floor
from lowtide.plan.layout import layout
from lowtide.plan.order import captured_order, early_updates, late_results
from lowtide.plan.pebble import one_shot
from lowtide.plan.problem import Ints, Problem, library, problem
from lowtide.plan.recompute import Lead, Prove, lowest, recompute
from lowtide.plan.settings import (
    ARENA_ATTEMPTS,
    ARENA_STEP,
    CLOSE_TO_BOUND,
    FAR_OVER,
    MIXED_SHARE,
    PROOF_SHARE,
    SAME_SECONDS,
    SLIGHT_EXCESS,
    SMALL_GRAPH,
    SMALL_GRAPH_STATES,
    STRETCH_GAP,
    TIME_LIMIT,
    WINDOW_SHARE,
)
from lowtide.plan.stretches import stretches
from lowtide.plan.windows import Window, in_windows, windows
from lowtide.program import Plan, Program
from lowtide.simulate import elapsed, simulate

CHAINS = ("rockmate", "chen-budget", "gruslys-internal", "revolve")  # classics that are starts
BEST, ONE_SHOT, OFFLOAD = "lowtide", "one-shot", "offload"
METHODS = (BEST, ONE_SHOT, *CLASSICS)  # for any step; OFFLOAD is for those that offer copies

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
        clock: bool = True,
    ) -> None:
        self.graph, self.costs = graph, costs
        self.time_limit, self.seed, self.progress = time_limit, seed, progress
        self.clock = clock  # whether it ends searches, too, or only the work that the time limit stands for
        self.arrays: Problem = problem(all_on_device(graph), costs)  # of programs without copies
        self.elsewhere = lives_elsewhere(graph)
        self.inside: dict[bytes, Planning] = {}  # of windows that are unlike each other
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
    def copying(self) -> Problem | None:
        """The arrays of programs with copies; None where the graph offers none."""
        return self._copying(again=True)

    def _copying(self, *, again: bool) -> Problem | None:
        if not offers_copies(self.graph) or not (self.elsewhere or self.costs.lanes):
            return None
        if library() is None:
            raise UsageError(
                "plans with copies to other places are searched for by compiled code, and there is no C++ compiler.",
                hint="install one, or plan without offload.",
            )
        return copying(self.graph, self.costs, again=again)

    @cached_property
    def _floor(self) -> int:
        """Bytes that no program can do without."""
        return floor(self.arrays if self.copying is None else self.copying)[0]

    @cached_property
    def gates(self) -> list[Gate]:
        """The points at which bounds are looked for."""
        return gates(Web(self.arrays), self.order)

    def within(
        self, budget: int | None, method: str = BEST, known: Iterable[Plan] = (), *, explain: bool = True
    ) -> Plan:
        """The quickest plan that is found; without a budget nothing runs twice.

        Without `explain`, an error comes at once where one op alone needs more than the budget, and does not say how
        much could be planned.
        """
        begun = time.monotonic()
        if method not in (*METHODS, OFFLOAD):
            raise UsageError(f"there is no method {method!r}.", hint=f"choose one of {', '.join((*METHODS, OFFLOAD))}.")
        if not explain and budget is not None and self._floor > budget:
            raise BudgetError(f"one op needs {self._floor:,} bytes; the budget is {budget:,}.", budget=budget)
        if method != BEST:
            return self._promise(self._by_name(method, budget, explain), budget, 0.0, begun)
        fitting = [one for one in known if budget is None or one.peak <= budget]
        bound = 0.0
        program = None if self.elsewhere else self._kept(budget)
        if program is None and self.copying is not None:
            program = self._with_copies(self.copying, budget, [one.program for one in fitting])
        elif program is None:
            program, bound = self._without_copies(budget or 0, [one.program for one in fitting], begun)
        if program is None and not explain and budget is not None and not self._may_fit(budget):
            raise BudgetError(f"no plan keeps {budget:,} bytes.", budget=budget)
        if program is None:
            program = self._last_resort(budget)
        return self._promise(program, budget, bound, begun)

    def _kept(self, budget: int | None) -> Program | None:
        """A program that copies nothing and runs nothing twice, if one fits."""
        for order in (self.order, self.one_shot):
            if budget is not None and self.arrays.peak(order) > FAR_OVER * budget:
                continue  # no need to lay it out
            program = self._finish(self.arrays, order, budget)
            if budget is None or self._fits(program, budget):
                return program
        return None

    def _without_copies(self, budget: int, known: list[Program], begun: float) -> tuple[Program | None, float]:
        """The quickest program that copies nothing, None if none is found, and a lower bound on what it makes again."""
        still = [program for program in known if not program.copies]
        if self.windows:
            return self._quickest([*still, self._in_windows(budget)]), 0.0
        found, bound = self._search(budget, [sequence_of(self.arrays, program) for program in still], begun)
        return self._quickest([*still, found]), bound

    def _with_copies(self, arrays: Problem, budget: int | None, known: list[Program]) -> Program | None:
        """The quickest program, with copies or without: no slower than those that are known, or with either alone."""
        if budget is None:
            return self._finish(arrays, weave(arrays, self.order), None)
        best = self._quickest([*known, self._offloaded(budget)])
        if self._unbeaten(best):
            return best
        still = None if self.elsewhere else self._without_copies(budget, known, time.monotonic())[0]
        programs = [program for program in (best, still) if program is not None]
        starts = [sequence_of(arrays, program) for program in programs]
        orders = [weave(arrays, order) for order in (self.order, self.one_shot)]
        limit = self.time_limit * MIXED_SHARE
        until = self._until(time.monotonic() + limit)
        found, _ = self._within(arrays, [*starts, *orders], budget - self.costs.staging, 0.0, limit, until)
        return self._quickest([*programs, found])

    def _quickest(self, programs: Iterable[Program | None]) -> Program | None:
        return min((program for program in programs if program is not None), key=self._seconds, default=None)

    def _unbeaten(self, program: Program | None) -> bool:
        """Whether a program takes no longer than its ops once, but for the order in which seconds are added."""
        return program is not None and self._seconds(program) <= self.base * (1 + SAME_SECONDS)

    @cached_property
    def windows(self) -> list[Window]:
        """Pieces of the order that are steps of their own, many of them alike; none where it has no such pieces."""
        return [] if self.elsewhere else windows(self.arrays, self.order)

    def _joined(self, budget: int, find: Callable[[Planning, int], Ints | None]) -> Ints | None:
        """What is found for each window within the budget, one after the other; None where something does not fit."""

        def plan(window: Window, left: int) -> Ints | None:
            if window.signature not in self.inside:
                limit = self.time_limit * WINDOW_SHARE
                self.inside[window.signature] = Planning(window.graph, window.costs, time_limit=limit, seed=self.seed)
            return find(self.inside[window.signature], left)

        found = in_windows(self.windows, budget, plan)
        return found if found is not None and self.arrays.allows(found) else None

    def _in_windows(self, budget: int) -> Program | None:
        """A program whose windows are planned one by one, with identical ones run alike; None where there are none."""
        target = budget
        for _ in range(ARENA_ATTEMPTS if self.windows else 0):
            sequence = self._joined(target, Planning._sequence)
            if sequence is None:
                return None
            program = self._finish(self.arrays, sequence, budget)
            excess = simulate(self.graph, self.costs, program).peak - budget
            if excess <= 0:
                return program
            target = min(target, self.arrays.peak(sequence)) - max(1, int(ARENA_STEP * excess))
        return None

    def _sequence(self, budget: int) -> Ints | None:
        """The quickest sequence within the budget that is found; it has no offsets."""
        for order in (self.order, self.one_shot):
            if self.arrays.peak(order) <= budget:
                return order
        own, begun = budget - self.arrays.persistent, time.monotonic()
        bound, gate = bound_alone(self.gates, own)
        if bound == float("inf"):
            return None
        starts = [*self._chains(budget), self.order, *self._holding(own, gate)]
        lead, limit = self._lead(budget, bound), self.time_limit
        return self._recompute(self.arrays, starts, budget, bound, limit, begun + limit, lead)

    def least(self, method: str = BEST) -> Plan:
        """The plan with the least peak that is found, whatever time it takes; by copies only, or by every lever."""
        begun = time.monotonic()
        return self._promise(self._least_copying if method == OFFLOAD else self._lowest, None, 0.0, begun)

    @cached_property
    def _least_copying(self) -> Program:
        """The program with the least peak in which no op runs twice."""
        arrays = self._copying(again=False)
        if arrays is None:
            raise _no_copies()
        sequence = lowest(arrays, [weave(arrays, order) for order in (self.order, self.one_shot)])
        return min((self._finish(arrays, sequence, None), emit(arrays, sequence)), key=self._peak)

    @cached_property
    def _lowest(self) -> Program:
        """The program with the least peak, with an arena or without one; what copies go through is counted."""
        found = [] if self.elsewhere else [(self.arrays, self._lowest_sequence)]
        if self.copying is not None:
            found.append((self.copying, self._lowest_with_copies(self.copying)))
        programs = (one for pair in found for one in (self._finish(*pair, None), emit(*pair)))
        return min(programs, key=self._peak)

    def _lowest_with_copies(self, arrays: Problem) -> Ints:
        starts = [weave(arrays, order) for order in (self.order, self.one_shot)]
        return lowest(arrays, starts if self.elsewhere else [*starts, self._lowest_sequence])

    @cached_property
    def _lowest_sequence(self) -> Ints:
        if (
            len(self.order) <= SMALL_GRAPH
            and (found := least_peak(self.arrays, limit=SMALL_GRAPH_STATES)).sequence is not None
        ):
            return found.sequence
        if self.windows and (joined := self._joined(0, lambda inside, _: inside._lowest_sequence)) is not None:
            return min(joined, self.order, self.one_shot, key=self.arrays.peak)
        own = floor(self.arrays)[0] - self.arrays.persistent
        starts = [self.order, self.one_shot, *self._holding(own)]
        if library() is None:  # shaving is too slow to go far from where it starts
            starts += self._chains(None)
        return lowest(self.arrays, starts)

    def _may_fit(self, budget: int) -> bool:
        """Whether a sequence with the least peak fits; of windows, the first that does not fit is enough."""
        if self.copying is not None:
            return True

        def least(inside: Planning, left: int) -> Ints | None:
            sequence = inside._lowest_sequence
            return sequence if inside.arrays.peak(sequence) <= left else None

        return (self._joined(budget, least) if self.windows else least(self, budget)) is not None

    def _last_resort(self, budget: int | None) -> Program:
        """The program with the least peak, if that is within the budget; else an error says what is."""
        peak = self._peak(self._lowest)
        if budget is not None and peak > budget:
            raise explained(self.arrays if self.copying is None else self.copying, budget, peak)
        return self._lowest

    def _by_name(self, method: str, budget: int | None, explain: bool) -> Program:
        """What a classic finds, or the order with the least peak."""
        if method == OFFLOAD:
            program = self._offloaded(budget)
        elif self.elsewhere:
            raise UsageError(f"{method} plans no step with state elsewhere.", hint=f"plan by {BEST} or {OFFLOAD}.")
        else:
            sequence = self.one_shot if method == ONE_SHOT else self._classic(method, budget)
            program = None if sequence is None else self._finish(self.arrays, sequence, budget)
        if program is None or not self._fits(program, budget):
            if not explain:
                raise BudgetError(f"{method} finds no plan.", budget=budget)
            arrays = self.arrays if self.copying is None else self.copying
            raise explained(arrays, budget or 0, self._peak(self._lowest), method)
        return program

    def _offloaded(self, budget: int | None) -> Program | None:
        """The quickest program in which no op runs twice: what there is no room for is copied away."""
        arrays = self._copying(again=False)
        if arrays is None:
            raise _no_copies()
        orders = [weave(arrays, order) for order in (self.order, self.one_shot)]
        if budget is None:
            return self._finish(arrays, orders[0], None)
        until = self._until(time.monotonic() + self.time_limit)
        return self._within(arrays, orders, budget - self.costs.staging, 0.0, self.time_limit, until)[0]

    def _classic(self, name: str, budget: int | None) -> Ints | None:
        """What a classic finds, prepared once for all budgets."""
        if name not in self.prepared:
            self.prepared[name] = CLASSICS[name].prepare(self.arrays, self.order)
        return self.prepared[name](budget)

    def _search(self, budget: int, known: list[Ints], begun: float) -> tuple[Program | None, float]:
        """A program within the budget, None if none is found, and a lower bound on the seconds of recomputation."""
        proven = 0.0  # seconds of recomputation
        if len(self.order) <= SMALL_GRAPH and (found := exact(self.arrays, budget, limit=SMALL_GRAPH_STATES)).proven:
            if found.sequence is None:
                return None, 0.0
            proven = found.bound_seconds - self.base
            optimal = self._finish(self.arrays, found.sequence, budget)
            if self._fits(optimal, budget):
                return optimal, proven
        own = budget - self.arrays.persistent
        bound, gate = bound_alone(self.gates, own)
        if bound == float("inf"):
            return None, 0.0  # nothing fits
        bound = max(bound, proven)
        starts = [*known, *self._chains(budget), self.order, *self._holding(own, gate)]
        until = self._until(max(begun + self.time_limit, time.monotonic() + self.time_limit / 4))
        lead, proof = self._lead(budget, bound), _Proof(self.gates, gate, own, bound)

        def prove(seconds: float) -> float:
            return self._enough(proof.within(self.time_limit * PROOF_SHARE, seconds - self.base))

        early = prove if gate is not None and self.copying is None else None
        program, quickest = self._within(self.arrays, starts, budget, bound, self.time_limit, until, lead, early)
        if gate is not None and self.copying is None and quickest - proof.bound > CLOSE_TO_BOUND * self.base:
            now = time.monotonic()  # where the search took longer than it should, the bound gets less
            until = max(now + self.time_limit / 8, min(now + self.time_limit / 2, begun + 1.5 * self.time_limit))
            proof.within(until - now, quickest)
        return program, proof.bound

    def _until(self, end: float) -> float:
        return end if self.clock else float("inf")

    def _within(
        self,
        arrays: Problem,
        starts: list[Ints],
        budget: int,
        bound: float,
        limit: float,
        until: float,
        lead: Lead | None = None,
        prove: Prove | None = None,
    ) -> tuple[Program | None, float]:
        """The quickest program within the budget that the search finds, and the seconds that it first took more."""
        target, more, program, quickest = budget, limit / 8, None, 0.0
        for _ in range(ARENA_ATTEMPTS):
            sequence = self._recompute(arrays, starts, target, bound, limit, until, lead, prove)
            if sequence is None:
                break
            timed, seconds = arrays.retimed(sequence, target)
            quickest = quickest or seconds - self.base
            program = self._finish(arrays, timed, budget)
            excess = simulate(self.graph, self.costs, program).peak - budget
            if excess <= 0:
                break
            # The arena has gaps, and saved states of the random generator are not in the arrays: aim a little lower.
            # A small excess is not a matter of luck in the layout: all of it is taken off.
            part = 1.0 if excess < SLIGHT_EXCESS * budget else ARENA_STEP
            target = min(target, arrays.peak(timed)) - max(1, int(part * excess))
            starts, limit, until = [sequence, *starts], limit / 4, until + more
            program, lead = None, None
        return program, quickest

    def _recompute(
        self,
        arrays: Problem,
        starts: list[Ints],
        target: int,
        bound: float,
        limit: float,
        until: float,
        lead: Lead | None = None,
        prove: Prove | None = None,
    ) -> Ints | None:
        """The quickest sequence within the target from these starts, or from the one with the least peak."""
        tell = None if self.progress is None else self._tell(bound)
        found = recompute(
            arrays,
            starts,
            target,
            limit=limit,
            until=until,
            enough=self._enough(bound),
            seed=self.seed,
            progress=tell,
            lead=lead,
            prove=prove,
        )
        if found is None and arrays is self.arrays and arrays.peak(self._lowest_sequence) <= target:
            return self._recompute(arrays, [self._lowest_sequence], target, bound, limit, until)
        return found

    def _enough(self, bound: float) -> float:
        """The seconds of a sequence with which a search ends: no other saves more than a trifle."""
        return self.base * (1 + CLOSE_TO_BOUND / 10) + bound

    def _tell(self, bound: float) -> Callable[[float], None]:
        def tell(seconds: float) -> None:
            if self.progress is not None:
                self.progress(seconds / self.base - 1, bound / self.base)

        return tell

    def _holding(self, own: int, gate: Gate | None = None) -> Iterator[Ints]:
        """Sequences that hold a good set where the backward begins: cuts there and at the gate that binds most."""
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

    @cached_property
    def _stretches(self) -> Find:
        """Sequences of the chain whose segments may run several as one."""
        return stretches(self.arrays, self.order, seconds=self.time_limit)

    def _lead(self, budget: int, bound: float) -> Lead:
        """A start of stretches, for where the quickest of the others is still far from the bound."""

        def lead(seconds: float) -> Ints | None:
            far = seconds - self.base - bound > STRETCH_GAP * self.base
            return self._stretches(budget) if far and library() is not None else None

        return lead

    def _finish(self, arrays: Problem, sequence: Ints, budget: int | None) -> Program:
        """The program of a sequence, with offsets; without an arena where only that keeps a small graph's budget.

        The budget is for all but what copies go through.
        """
        plain = emit(arrays, sequence)
        program = layout(self.graph, self.costs, plain, limit=budget, seed=self.seed)
        if budget is None or len(self.order) > SMALL_GRAPH or simulate(self.graph, self.costs, program).peak <= budget:
            return program
        return plain

    def _seconds(self, program: Program) -> float:
        return elapsed(self.graph, self.costs, program)

    def _peak(self, program: Program) -> int:
        """The bytes of the device, with those that copies go through."""
        return simulate(self.graph, self.costs, program).peak + (self.costs.staging if program.copies else 0)

    def _fits(self, program: Program, budget: int | None) -> bool:
        return budget is None or self._peak(program) <= budget

    def _promise(self, program: Program, budget: int | None, bound: float, begun: float) -> Plan:
        """The program, judged, with what it promises.

        Bounds are of recomputation. Where the graph offers copies instead, a program might do with none of it: the
        bound is then the time of all ordinary ops.
        """
        bound = 0.0 if offers_copies(self.graph) else bound
        simulation = simulate(self.graph, self.costs, program)
        check(self.graph, self.costs, program, budget=budget)
        return Plan(
            program=program,
            budget=budget,
            peak=self._peak(program),
            seconds=simulation.seconds,
            base_seconds=self.base,
            bound_seconds=self.base + bound,
            least_bound=self._floor,
            planning_seconds=time.monotonic() - begun,
        )


class _Proof:
    """A lower bound on the seconds of recomputation, which gets better while there is time for it."""

    def __init__(self, gates: list[Gate], gate: Gate | None, own: int, bound: float) -> None:
        self.bound = bound
        self._gates, self._gate, self._own = gates, gate, own
        self._whole = gate is None  # nothing more can be proven

    def within(self, limit: float, quickest: float) -> float:
        """The bound after so many seconds more, where that is less than the quickest plan needs."""
        if not self._whole:
            assert self._gate is not None
            begun = time.monotonic()
            self.bound = bound_together(self._gates, self._gate, self._own, self.bound, quickest, begun + limit)
            self._whole = time.monotonic() - begun < limit / len(self._gates)  # no program was cut short
        return self.bound


def _no_copies() -> UsageError:
    return UsageError("the step offers no copies to other places.", hint='plan with offload="disk".')
