"""Which graph is planned for a captured step, and by which plan: as it is, with state elsewhere, or cut in time."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import get_args

from lowtide import device as devices
from lowtide.aten import RECURRENT
from lowtide.budget import read_budget
from lowtide.check import check
from lowtide.costs import Costs, lanes
from lowtide.device.disk import choose_folder
from lowtide.errors import BudgetError, FileError, UsageError
from lowtide.graph import Graph, Place
from lowtide.plan import as_eager, least
from lowtide.plan.infeasible import floor
from lowtide.plan.problem import problem
from lowtide.program import Plan, Program, rewrites_of
from lowtide.rewrite import EXACT, Rewritten, apply, chunks, leaving_bytes, longest, offload
from lowtide.rewrites import Rewrite, exactness
from lowtide.simulate import simulate

SHORTEST = 4  # time steps of a chunk: with fewer, a call has more to do around its time steps than with them
AS_EAGER = {"sizes", "narrow", "offload"}  # rewrites after which eager's own program is still one of the graph
ELSEWHERE = {"offload", "homes"}  # rewrites that a plan brings with it: they need no leave, every bit stays
FREE = 0.9  # of the bytes that are free, here or in another place: what may be used where nothing is said
WORTH = 0.01  # of the step's seconds that a cut must save, where the layers fit as they are

Search = Callable[[Graph, Costs, int, float], Plan]  # graph, costs, eager's peak, and the part of the time that it has


@dataclass(frozen=True)
class Choice:
    """A plan, and what it is a plan of."""

    graph: Graph  # with its optional ops
    costs: Costs
    plan: Plan  # which says what rewrites led from the captured graph to this one
    eager_peak: int  # bytes, predicted; eager's layers are whole

    @property
    def chunks(self) -> int:
        """Into how many recurrent layers are cut in time; 1: they are whole."""
        return next((int(one.setting or 1) for one in self.plan.rewrites if one.name == "chunks"), 1)


@dataclass(frozen=True)
class Away:
    """Where values may wait, and state and parameters live, that the device has no room for."""

    place: Place
    most: int | None = None  # bytes that may be there; None: no limit
    lasting: bool = True  # whether state and parameters may live there

    @staticmethod
    def nearest(device: str, *, lasting: bool = True) -> Away | None:
        """The place that can be asked for first, if this device has any."""
        place = next(iter(devices.of(device).stores), None)
        return None if place is None else Away(place, lasting=lasting)

    def rewrites(self, homes: int = 0) -> tuple[Rewrite, ...]:
        """The passes that allow it, with state and parameters of so many bytes out of the device."""
        return offload(self.place, most=None if self.most is None else max(0, self.most - homes), homes=homes)

    def homes(self, graph: Graph) -> list[int]:
        """The bytes of state and parameters whose moving out is tried: half of the state, all, then parameters."""
        state, parameters = leaving_bytes(graph) if self.lasting else (0, 0)
        rungs = (state // 2, state, state + parameters // 2, state + parameters)
        return sorted({rung for rung in rungs if rung > 0 and (self.most is None or rung <= self.most)})


@dataclass(frozen=True)
class Offload:
    """What is asked for: a place, the bytes that may be there, and the folder of its file; wrong words are refused."""

    place: Place | None = None  # None: nothing may go anywhere
    budget: int | str | None = None  # bytes; None: most of what is free there
    folder: str | os.PathLike[str] | None = None  # None: the usual one

    def __post_init__(self) -> None:
        places = [place for place in get_args(Place) if place != "device"]
        if self.place is not None and self.place not in places:
            known = " or ".join(f'"{place}"' for place in places)
            raise UsageError(f"there is no place {self.place!r} to offload to.", hint=f"use {known}.")
        if self.budget is not None and str(self.budget).strip().endswith("%"):
            raise UsageError("offload_budget (--offload-budget) is in bytes.", hint='write "20GiB".')
        if self.budget is not None:
            read_budget(self.budget, persistent=1, eager_peak=1)
        if self.folder is not None:
            choose_folder(self.folder)

    def refuse(self, *, planned: bool) -> None:
        """Raise where the words do not go together; a plan from before says itself what goes where."""
        if planned and self.place is not None:
            raise UsageError(
                "a saved plan has its own offload settings.",
                hint="leave out offload, or give a budget in place of the plan.",
            )
        unused = self.budget is not None or (self.folder is not None and not planned)
        if self.place is None and unused:
            raise UsageError(
                "offload_budget or offload_dir is given without offload.",
                hint='add offload="disk" (--offload disk), or leave them out.',
            )

    def away(self, device: str, *, lasting: bool = True) -> Away | None:
        """Where values may go from this device, and how many bytes of them; `lasting`: state and parameters, too."""
        if self.place is None:
            return None
        where = devices.of(device)
        devices.refuse_place(where, self.place)
        if self.budget is not None:
            return Away(self.place, read_budget(self.budget, persistent=0, eager_peak=0), lasting)
        return Away(self.place, int(FREE * where.room[self.place](self.folder)), lasting)


def candidates(graph: Graph, *, rounding: bool, besides: Iterable[Rewrite] = ()) -> Iterator[Rewritten]:
    """What may be planned for a captured graph: the exact one first, then those with layers in ever more chunks."""
    always = (*EXACT, *besides)
    yield apply(graph, always)
    count, time_steps = 2, longest(graph) if rounding else 0
    while time_steps >= SHORTEST * count:
        yield apply(graph, (chunks(count), *always))
        count *= 2


def eager_peak(captured: Graph, rewritten: Rewritten, costs: Costs, price: Callable[[Graph], Costs]) -> int:
    """The bytes that eager needs for a captured step, predicted; it makes the second runs that plans do without."""
    same = not {rewrite.name for rewrite in rewritten.rewrites} - AS_EAGER
    whole = rewritten.graph if same else apply(captured, [one for one in EXACT if one.name in AS_EAGER]).graph
    return simulate(whole, costs if same else price(whole), as_eager(whole)).peak


def choose(
    graph: Graph,
    price: Callable[[Graph], Costs],
    search: Search,
    *,
    rounding: bool,
    away: Away | None = None,
    could: Away | None = None,
) -> Choice:
    """The quickest plan of a captured graph; with rounding, recurrent layers may be cut in time where that pays.

    `search` plans a graph with its costs, given eager's peak in bytes. With a place to go to, values may wait there;
    and where that is quicker, or nothing else fits, optimizer state and then parameters live there between steps. An
    error says what would fit if there were a place to go to that is only named (`could`).
    """
    if away is None:
        try:
            return _choose(graph, price, search, rounding=rounding)
        except BudgetError as error:
            raise error if could is None else _hinting(error, graph, price, could) from error.__cause__
    rungs = away.homes(graph)
    try:
        best = _choose(graph, price, search, rounding=rounding, besides=away.rewrites())
    except BudgetError as failure:
        best, least = None, failure
    if best is not None and best.plan.overhead <= WORTH:
        return best
    # Where something fits already, ever more moves out as long as that is quicker; else all of it does, and then less.
    part = 1 / max(1, len(rungs))
    for homes in rungs if best is not None else reversed(rungs):
        try:
            found = _choose(graph, price, search, rounding=False, besides=away.rewrites(homes), part=part)
        except BudgetError as failure:
            if best is not None:
                break
            raise min(least, failure, key=lambda one: float("inf") if one.least is None else one.least) from None
        if best is not None and found.plan.seconds >= best.plan.seconds:
            break
        best = found
    if best is None:
        raise least
    return best


def _choose(
    graph: Graph,
    price: Callable[[Graph], Costs],
    search: Search,
    *,
    rounding: bool,
    besides: tuple[Rewrite, ...] = (),
    part: float = 1.0,
) -> Choice:
    """The quickest plan of a captured graph, whole or with layers cut in time, with these passes besides."""
    best: Choice | None = None
    failure: BudgetError | None = None
    eager = 0
    for rewritten in candidates(graph, rounding=rounding, besides=besides):
        candidate, exact = rewritten.graph, exactness(rewritten.rewrites) == "bitwise"
        costs = price(candidate)
        if exact:
            eager = eager_peak(graph, rewritten, costs, price)
        if best is not None and sum(costs.seconds[op] for op in candidate.ordinary) >= best.plan.seconds:
            continue  # slower, even if nothing runs twice
        try:
            found = replace(search(candidate, costs, eager, part), rewrites=rewritten.rewrites)
        except BudgetError as error:
            if not rounding:
                if not _helps(graph, candidate, costs):
                    raise
                more = "with rounding=True (--rounding) recurrent layers are cut in time, which needs less"
                raise BudgetError(error.message, hint=f"{error.hint}\n{more}.", least=error.least) from error
            failure = min(failure or error, error, key=lambda one: float("inf") if one.least is None else one.least)
            continue
        limit = float("inf") if best is None else best.plan.seconds * (1 - WORTH if best.chunks == 1 else 1)
        if found.seconds < limit:
            best = Choice(candidate, costs, found, eager)
        if exact and found.seconds <= found.base_seconds:
            break  # nothing runs twice, and every bit is eager's
    if best is None:
        assert failure is not None
        raise failure
    return best


def _hinting(error: BudgetError, graph: Graph, price: Callable[[Graph], Costs], could: Away) -> BudgetError:
    """The same error; where less would do with offload, its hint says so."""
    device = devices.of(graph.device)
    elsewhere = apply(graph, (*EXACT, *could.rewrites(max(could.homes(graph), default=0)))).graph
    known = price(apply(graph, EXACT).graph)  # of the same ops and values
    # How quick the place is does not matter to the least peak.
    costs = replace(known, graph=elsewhere.fingerprint, lanes=lanes([(could.place, 1e9)]), staging=device.staging)
    try:
        found = least(elsewhere, costs).peak
    except UsageError:  # there is no compiler
        return error
    if error.least is not None and found >= error.least:
        return error
    more = f'with offload="{could.place}" (--offload {could.place}) {found:,} bytes can be planned'
    return BudgetError(error.message, hint=f"{error.hint}\n{more}.", least=error.least)


def _helps(captured: Graph, graph: Graph, costs: Costs) -> bool:
    """Whether a recurrent layer that can be cut is what needs most."""
    _, op = floor(problem(graph, costs))
    return op >= 0 and graph.ops[op].target in RECURRENT and longest(captured) >= 2 * SHORTEST


def judged(graph: Graph, costs: Costs, program: Program, *, budget: int | None) -> int:
    """The peak of a valid program, with the bytes that its copies go through; a ProgramError for any other."""
    staging = costs.staging if program.copies else 0
    return staging + check(graph, costs, program, budget=None if budget is None else budget - staging)


def given(
    plan: Plan | str | os.PathLike[str], graph: Graph, price: Callable[[Graph], Costs], *, rounding: bool
) -> Choice:
    """A plan that was made before, with what it is a plan of; whether it keeps its promise is for the judge to say."""
    failure: FileError | None = None
    known = plan.rewrites if isinstance(plan, Plan) else rewrites_of(plan)
    besides = [rewrite for rewrite in known if rewrite.name in ELSEWHERE]
    for rewritten in candidates(graph, rounding=rounding, besides=besides):
        candidate = rewritten.graph
        if isinstance(plan, Plan) and plan.program.graph != candidate.fingerprint and rounding:
            continue
        try:
            found = plan if isinstance(plan, Plan) else Plan.load(plan, candidate)
        except FileError as error:
            failure = failure or error
            continue
        costs = price(candidate)
        if found.rewrites != rewritten.rewrites:  # a file from before plans said which
            found = replace(found, rewrites=rewritten.rewrites)
        return Choice(candidate, costs, found, eager_peak(graph, rewritten, costs, price))
    if failure is None:
        raise UsageError("the plan is one of another step.", hint="plan this step.")
    if rounding or not longest(graph):
        raise failure
    raise FileError(failure.message, hint=f"{failure.hint} A plan with rounding needs it here too.") from failure
