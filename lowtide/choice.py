"""Which graph is planned for a captured step, and by which plan: as it is, elsewhere in part, or changed by leave."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import get_args

from lowtide import device as devices
from lowtide.budget import read_budget
from lowtide.candidates import BROUGHT, LOOK, Choice, Chooser, Effort, Prices, Say, Search, eager_peak, eager_step
from lowtide.check import check
from lowtide.costs import Costs, lanes
from lowtide.device.disk import choose_folder
from lowtide.errors import BudgetError, FileError, UsageError
from lowtide.graph import Graph, Place
from lowtide.measure import roofline
from lowtide.plan import least
from lowtide.plan.infeasible import floor
from lowtide.plan.problem import problem
from lowtide.plan.settings import SAME_SECONDS
from lowtide.program import Plan, Program, rewrites_of
from lowtide.resized import Resized
from lowtide.rewrite import EXACT, TRIED, Rewritten, Trail, apply, leaving_bytes, named, offload, seen_after
from lowtide.rewrites import (
    BY_NAME,
    EXACTNESS,
    FORMS,
    KEEPS,
    LOSSY_ORDER,
    NOTHING,
    ROUNDING,
    Allowed,
    Rewrite,
    exactness,
    has_tried,
)
from lowtide.trials import with_tried

__all__ = [
    "BROUGHT",
    "EXACTLY",
    "FREE",
    "Away",
    "Choice",
    "Effort",
    "Leave",
    "Offload",
    "choose",
    "eager_peak",
    "eager_step",
    "given",
    "judged",
]

FREE = 0.9  # of the bytes that are free, here or in another place: what may be used where nothing is said
HINT_PARTS = 16  # that an error tries to run a step in, at most: its graph grows with them
HINT_SECONDS = 2.0  # after which an error no longer looks for what would help


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


@dataclass(frozen=True)
class Leave:
    """What may be done to a step that changes its bits, and the step at other sizes, which some of that needs."""

    allowed: Allowed = NOTHING
    resized: Resized | None = None  # None: the step can't be captured at other sizes
    always: tuple[Rewrite, ...] = ()  # what is done whatever fits: the form that parameters and state have already
    without: frozenset[str] = frozenset()  # what the manner of the step does not bear

    def __post_init__(self) -> None:
        missing = [name for name, _ in self.allowed.named if named(name) is None]
        if missing:
            raise UsageError(f"there is no {', '.join(missing)} here yet.", hint="leave it out of allow.")
        known = (*ROUNDING, *LOSSY_ORDER, *BY_NAME, *(one.name for one in TRIED))
        if strange := [name for name in self.allowed.refused if name not in known]:
            raise UsageError(
                f"there is no {', '.join(strange)} that could be refused.", hint=f"there are {', '.join(known)}."
            )
        if unborne := [name for name, _ in self.allowed.named if name in self.without]:
            raise UsageError(
                f"{', '.join(unborne)} would store parameters and optimizer state otherwise: here your loop has them.",
                hint="give the whole step to lowtide.fit, or leave it out of allow.",
            )

    def milds(self, graph: Graph) -> list[tuple[Rewrite, ...]]:
        """What changes the rounding, if allowed: nothing first, then each technique alone, then all together."""
        alone = [found for name in ROUNDING if (found := self.rungs(graph, name))]
        social = [rungs for rungs in alone if (one := named(rungs[0].name)) is None or not one.alone]
        longest = max(map(len, social), default=0)
        together = [tuple(rungs[min(place, len(rungs) - 1)] for rungs in social) for place in range(longest)]
        return [(), *((one,) for rungs in alone for one in rungs), *(together if len(social) > 1 else ())]

    def after(self, graph: Graph, lossy: tuple[Rewrite, ...]) -> list[tuple[Rewrite, ...]]:
        """What changes the rounding of a step that is changed by these already: what couples examples may be gone."""
        seen, sizes = seen_after(graph, lossy, self.resized)
        return replace(self, resized=sizes).milds(seen)

    def all_named(self, graph: Graph) -> list[Rewrite]:
        """All techniques that are named, each with its setting, or the mildest that there is."""
        names = [name for name, _ in self.allowed.named]
        first = [rungs[0] for name in names if _is_alike(name) and (rungs := self.rungs(graph, name))]
        seen, sizes = seen_after(graph, first, self.resized)
        then = replace(self, resized=sizes)
        return first + [rungs[0] for name in names if not _is_alike(name) and (rungs := then.rungs(seen, name))]

    def levels(self, graph: Graph, useful: Sequence[str] | None = None) -> list[list[tuple[Rewrite, ...]]]:
        """What loses more, if allowed: nothing first, then one technique after the other besides those before.

        At each level the mildest settings come first, and of two techniques the one that is taken later is spared more.
        """
        found: list[list[tuple[Rewrite, ...]]] = [[()]]
        taken: list[list[Rewrite]] = []
        for name in self.allowed.lossy if useful is None else useful:
            rungs = self.rungs(graph, name)
            if rungs:
                taken = [*(before for before in taken if before[0].name != _replaced(name)), rungs]
                found.append([row[::-1] for row in product(*reversed(taken))])
        return found

    def milder(self, graph: Graph, one: Rewrite) -> list[tuple[Rewrite, ...]]:
        """What a technique may be replaced by that changes less: the one that it took the place of, or else nothing."""
        return [(rung,) for rung in self.rungs(graph, _replaced(one.name))] or [()]

    def unalike(self, rewrites: tuple[Rewrite, ...]) -> tuple[Rewrite, ...]:
        """Those of them that the step at other sizes does not go through."""
        return tuple(one for one in rewrites if not _is_alike(one.name))

    def rungs(self, graph: Graph, name: str) -> list[Rewrite]:
        """A technique with the settings to try, the mildest first; nothing where it is not allowed, or not there."""
        one = named(name)
        if one is None or name not in self.allowed or name in self.without:
            return []
        said = self.allowed.setting(name)
        settings = one.settings(graph, self.resized)
        return [one.by(setting) for setting in (settings if said is None else settings and (said,))]

    def untried(self) -> Leave:
        """The same without calls of ours in place of torch's."""
        return replace(self, always=tuple(one for one in self.always if not one.tried))

    def refusing_tried(self) -> Leave:
        """The same, and no calls of ours are to be tried."""
        return replace(self, allowed=replace(self.allowed, refused=tuple(one.name for one in TRIED)))

    @property
    def keeping_forms(self) -> Leave:
        """The same for parameters and state that stay tensors of floats, and so may live elsewhere; if they are."""
        if any(one.name in FORMS for one in self.always):
            return replace(self, allowed=NOTHING)
        allowed, named = self.allowed, tuple(pair for pair in self.allowed.named if pair[0] not in FORMS)
        return replace(self, allowed=replace(allowed, named=named, refused=(*allowed.refused, *sorted(FORMS))))

    def apply(self, graph: Graph, rewrites: Iterable[Rewrite], trail: Trail | None = None) -> Rewritten:
        """The graph after these passes and all that keep every bit."""
        return apply(graph, (*EXACT, *self.always, *rewrites), self.resized, trail)


EXACTLY = Leave()


def _is_alike(name: str) -> bool:
    one = named(name)
    return one is not None and one.alike


def _replaced(name: str) -> str:
    one = named(name)
    return "" if one is None else one.instead_of


def choose(
    graph: Graph,
    price: Callable[[Graph], Costs],
    search: Search,
    *,
    leave: Leave = EXACTLY,
    away: Away | None = None,
    could: Away | None = None,
    glance: Callable[[Graph], Costs] | None = None,
    say: Say = lambda words: None,
) -> Choice:
    """The quickest plan of a captured graph, with the least that must be allowed.

    `search` plans a graph with its costs, given eager's peak in bytes. With a place to go to, values may wait there;
    and where that is quicker, or nothing else fits, optimizer state and then parameters live there between steps. An
    error says what would fit if there were a place to go to that is only named (`could`). At a `glance` prices are
    those of bytes, and seconds are known more or less: enough to see whether anything fits.
    """
    price = Prices(price, glance)
    if _beyond_exact(graph, price, search, leave, away):  # what saves time need not be tried
        return _choose(graph, price, search, leave, away, could, say)
    trying, seconds = with_tried(leave, graph, price, say)
    if trying is leave:
        return _choose(graph, price, search, leave, away, could, say)
    try:
        found = _choose(graph, price, search, trying, away, None, say)
    except BudgetError:
        say("nothing fits with kernels of ours: planning without")
        return _choose(graph, price, search, leave, away, could, say)
    kept = exactness(found.plan.rewrites)
    if found.plan.seconds <= seconds and kept == "bitwise":
        return found  # sooner than the step without them, even if that fitted as it is
    try:  # what was found with loss is sought again only as far as it changes less
        again = leave if kept != "lossy" else replace(leave, allowed=leave.allowed.milder)
        plain = _choose(graph, price, search, again, away, None, say)
    except BudgetError:
        return found
    return min(found, plain, key=_merit)


def _beyond_exact(graph: Graph, price: Prices, search: Search, leave: Leave, away: Away | None) -> bool:
    """Whether one op or what persists is above the budget as long as nothing is lost, with kernels of ours or without.

    Then only a lossy plan can fit, and there kernels that are tried seldom stand for calls of the same sizes.
    """
    if not leave.allowed.lossy or away is not None:
        return False
    chooser = Chooser(graph, price, search, leave, lambda words: None)
    chooser.attempt((), effort=LOOK)
    tried = [one.by() for one in TRIED if one.name not in leave.allowed.refused]
    graphs = [leave.apply(graph, ()).graph, leave.apply(graph, tried).graph]
    return not chooser.fits and all(chooser.above(one, roofline(one)) for one in graphs)


def _merit(found: Choice) -> tuple[int, float]:
    return EXACTNESS.index(exactness(found.plan.rewrites)), found.plan.seconds


def _choose(
    graph: Graph,
    price: Prices,
    search: Search,
    leave: Leave,
    away: Away | None,
    could: Away | None,
    say: Say,
) -> Choice:
    """The same for what is always done and what is not."""
    chooser = Chooser(graph, price, search, leave, say)
    if away is not None:
        _elsewhere(chooser, away)
        return _chosen(chooser, leave)
    try:
        chooser.all_of(())
        return _chosen(chooser, leave)
    except BudgetError as error:
        raise error if could is None else _hinting(error, graph, price, could) from error.__cause__


def _elsewhere(chooser: Chooser, away: Away) -> None:
    """Look for the quickest plan with a place to go to: no slower than with recomputation, or with copies, alone.

    Each amount of state and parameters that may move out is tried, but where its copies alone take too long, or less of
    it does not fit. All of these searches together have the time limit once more. Lossy techniques come last: with all
    of it here and, where nothing fits so, elsewhere.
    """
    rungs, leave = away.homes(chooser.graph), chooser.leave
    exactly = replace(leave, allowed=NOTHING)
    chooser.effort = Effort(explain=not rungs)
    chooser.mildly(away.rewrites())
    here = chooser.best is not None
    chooser.effort, chooser.leave = Effort(1 / max(1, len(rungs)), explain=False), exactly
    for homes in rungs if here else reversed(rungs):
        best = chooser.best
        if best is not None and best.plan.seconds <= best.plan.base_seconds * (1 + SAME_SECONDS):
            break
        chooser.take(away.rewrites(homes))
        if not here and not chooser.fits:
            break
    chooser.leave, chooser.effort = leave, Effort(explain=not rungs)
    chooser.lossily(away.rewrites())
    if chooser.best is None and rungs and leave.keeping_forms.allowed.lossy:
        chooser.lossily_elsewhere(leave.keeping_forms, away.rewrites(max(rungs)))
    if chooser.best is None and rungs:  # with all of it elsewhere least is needed
        chooser.leave, chooser.effort = exactly, Effort(0.0)
        chooser.take(away.rewrites(max(rungs)))


def _chosen(chooser: Chooser, leave: Leave) -> Choice:
    """The best plan that was found, or the error that says what would fit."""
    if chooser.best is not None:
        return chooser.best
    assert chooser.failure is not None
    raise _with_hint(chooser.failure, chooser.graph, leave)


def _with_hint(failure: BudgetError, graph: Graph, leave: Leave) -> BudgetError:
    """The same error, with the names of techniques that may make the budget feasible and are not allowed."""
    found = _what_helps(graph, leave, failure.budget)
    if not found:
        return failure
    said = ",".join(found)
    kind = KEEPS[exactness(one.by() for name in found if (one := named(name)) is not None)]
    more = f'with allow="{said}" (--allow {said}) it may fit: {kind}.'
    if set(found) <= set(ROUNDING):
        more += " rounding=True (--rounding) allows all of that kind."
    return BudgetError(failure.message, hint=f"{failure.hint}\n{more}", least=failure.least, budget=failure.budget)


def _what_helps(graph: Graph, leave: Leave, budget: int | None) -> tuple[str, ...]:
    """The first technique that is not allowed yet and brings the floor under the budget; else the fewest of all.

    What is not looked at within `HINT_SECONDS` is left out; to see what splits is what takes longest.
    """
    if budget is None:
        return ()
    until = time.monotonic() + HINT_SECONDS
    all_ = Leave(Allowed("lossy"), leave.resized, without=leave.without)
    known = (*ROUNDING, *LOSSY_ORDER)
    allowed = tuple(rungs[-1] for name in known if (rungs := leave.rungs(graph, name)))

    def fits(*more: Rewrite) -> bool:
        rewritten = leave.apply(graph, (*allowed, *more)).graph
        return floor(problem(rewritten, roofline(rewritten)))[0] <= budget

    others: list[Rewrite] = []
    for name in (name for name in known if name not in leave.allowed and name not in leave.without):
        if time.monotonic() > until:
            break
        rungs = [
            one for one in all_.rungs(graph, name) if not isinstance(one.setting, int) or one.setting <= HINT_PARTS
        ]
        if rungs:
            if fits(rungs[-1]):
                return (name,)
            others.append(rungs[-1])
    for count in range(2, len(others) + 1):
        if time.monotonic() > until:
            break
        if fits(*others[:count]):
            return tuple(one.name for one in others[:count])
    return ()


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
    return BudgetError(error.message, hint=f"{error.hint}\n{more}.", least=error.least, budget=error.budget)


def judged(graph: Graph, costs: Costs, program: Program, *, budget: int | None) -> int:
    """The peak of a valid program, with the bytes that its copies go through; a ProgramError for any other."""
    staging = costs.staging if program.copies else 0
    return staging + check(graph, costs, program, budget=None if budget is None else budget - staging)


def given(
    plan: Plan | str | os.PathLike[str], graph: Graph, price: Callable[[Graph], Costs], leave: Leave = EXACTLY
) -> Choice:
    """A plan that was made before, with what it is a plan of; whether it keeps its promise is for the judge to say."""
    known = plan.rewrites if isinstance(plan, Plan) else rewrites_of(plan)
    changing = [one for one in known if one.exactness != "bitwise"]
    if forbidden := [one.name for one in changing if one.name not in leave.allowed]:
        said = ",".join(forbidden)
        why = "rounding" if set(forbidden) <= set(ROUNDING) else "lossy"
        raise FileError(
            f"the plan changes the step by {', '.join(map(str, changing))}: {KEEPS[exactness(changing)]}.",
            hint=f'a plan with {why} needs leave here too: allow="{said}" (--allow {said}).',
        )
    if unwanted := [one.name for one in known if one.name in leave.allowed.refused]:
        raise FileError(f"the plan has {', '.join(unwanted)}, which is refused here.", hint="plan the step without it.")
    rewritten = leave.apply(graph, [*changing, *(one for one in known if one.name in BROUGHT)])
    candidate = rewritten.graph
    if isinstance(plan, Plan) and plan.program.graph != candidate.fingerprint:
        raise UsageError("the plan is one of another step.", hint="plan this step.")
    found = plan if isinstance(plan, Plan) else Plan.load(plan, candidate)
    costs = price(candidate)
    if has_tried(rewritten.rewrites):
        _refuse_other_bits(candidate, costs)
    if found.rewrites != rewritten.rewrites:  # a file from before plans said which
        found = replace(found, rewrites=rewritten.rewrites)
    return Choice(candidate, costs, found, eager_peak(graph, rewritten, costs, price))


def _refuse_other_bits(graph: Graph, costs: Costs) -> None:
    """Raise where a plan has calls of ours that are not known to have torch's bits on this machine."""
    if costs.differing == ():
        return
    differing = ", ".join(graph.ops[op].name for op in (costs.differing or ())[:4])
    why = f"some of them have other bits than torch's here: {differing}" if differing else "they were not tried here"
    raise FileError(
        f"the plan has calls of lowtide's own in place of torch's, and {why}.",
        hint='plan the step on this machine, with measured costs (costs="measured").',
    )
