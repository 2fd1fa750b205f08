"""Does a step keep its budget, at what time, and is anything else of torch better: races of real training steps.

A budget in percent is what persists between steps and that part of what eager's step adds to it; its own part, of any
contestant, is what its metered peak adds to what was there before the step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from lowtide.bench.peers import COMPILERS, EAGER, Contestant
from lowtide.bench.race import Racer, Retired, Say, groups, room, run_rounds, started, steps_of_a_turn, survey
from lowtide.budget import read_budget
from lowtide.models import catalog, parse
from lowtide.plan import TIME_LIMIT

LEAST = 0.0  # stands for the least feasible budget, in a list of percentages
BUDGETS = (100.0, 70.0, 50.0, 30.0, 20.0, LEAST)
ROUNDS = 15
OFF = 0.005  # of the metered peak; what the prediction may be off by
FRONT = ("resnet", "gpt")
FRONT_LIMITS = {100.0: 0.97, 50.0: 1.02, 30.0: 1.08}  # budget in percent -> the most time, of eager's, of these two
LIMITS = {50.0: 1.05}  # the same of every built-in model
PLANNED = ("predicted_peak", "overhead", "bound", "planning_seconds")  # fields of a cell that a plan knows


@dataclass(frozen=True)
class Survey:
    """What the budgets of a target are parts of."""

    target: str
    ops: int
    persistent: int  # bytes between steps
    eager_peak: int  # bytes, predicted
    least: int  # bytes, the least feasible budget
    capture_seconds: float
    measure_seconds: float
    least_seconds: float


@dataclass(frozen=True)
class Cell:
    """What one contestant reached on one target."""

    target: str
    contestant: str
    way: str
    percent: float | None = None  # of the step's own part; LEAST: the least feasible budget
    budget: int | None = None  # bytes
    predicted_peak: int | None = None  # bytes
    metered_peak: int | None = None  # bytes
    own: float | None = None  # own part of the metered peak, as a fraction of eager's
    seconds: float | None = None  # of a step, the median of all rounds
    time_ratio: float | None = None  # to eager's step of the same round, the median of all rounds
    ratios: tuple[float, ...] = ()  # the same of each round
    equal: bool | None = None  # whether all that the first steps changed is eager's, bit for bit
    overhead: float | None = None  # that was planned, as a fraction of the step without recomputation
    bound: float | None = None  # the least overhead that is possible, as the same fraction
    planning_seconds: float | None = None
    prepare_seconds: float | None = None  # of capture, measuring and planning
    arena_bytes: int | None = None
    mismatches: int | None = None  # allocations that were not as planned
    limit: float | None = None  # that time_ratio has
    missed: tuple[str, ...] = ()  # bars
    infeasible: bool = False  # nothing fits the budget
    reason: str | None = None  # why it did not race

    @property
    def ok(self) -> bool:
        """Whether every bar is met; others than lowtide have none."""
        return not self.missed

    @property
    def finished(self) -> bool:
        """Whether it raced to the end."""
        return self.time_ratio is not None and self.metered_peak is not None


@dataclass(frozen=True)
class Verdict:
    """Lowtide against one peer, by all of lowtide's cells of the same target or, after a duel, by that one alone."""

    target: str
    peer: str
    peer_own: float  # its own part, as a fraction of eager's
    peer_ratio: float  # its time, as a fraction of eager's
    quickest: str | None  # of lowtide's cells whose peak is at most the peer's
    quickest_ratio: float | None  # its time, as a fraction of eager's
    smallest: str | None  # of lowtide's cells that take at most the peer's time
    smallest_own: float | None  # its own part, as a fraction of eager's
    duel: bool = False  # whether a cell with the peer's peak as its budget raced against the peer again

    @property
    def faster(self) -> bool:
        """Whether lowtide is faster at the peer's peak."""
        return self.quickest_ratio is not None and self.quickest_ratio < self.peer_ratio

    @property
    def smaller(self) -> bool:
        """Whether lowtide's peak is lower at the peer's time."""
        return self.smallest_own is not None and self.smallest_own < self.peer_own

    @property
    def beaten_in(self) -> tuple[str, ...]:
        """In what the peer's point is better: in time at the same peak, in peak at the same time."""
        return tuple(word for word, good in (("time", self.faster), ("peak", self.smaller)) if not good)

    @property
    def ok(self) -> bool:
        """Whether lowtide is better in both."""
        return self.faster and self.smaller


@dataclass(frozen=True)
class Fit:
    """All cells of a target, and the verdicts on its peers."""

    survey: Survey
    cells: tuple[Cell, ...]
    verdicts: tuple[Verdict, ...]

    @property
    def better_peers(self) -> dict[str, tuple[str, ...]]:
        """The peers whose point is better than any of lowtide's, and in what."""
        return {one.peer: one.beaten_in for one in self.verdicts if not one.ok}


def race_target(
    target: str,
    *,
    budgets: Sequence[float] = BUDGETS,
    peers: Sequence[Contestant] = (),
    rounds: int = ROUNDS,
    time_limit: float = TIME_LIMIT,
    duel: bool = True,
    say: Say = lambda _: None,
) -> Fit:
    """Race lowtide at each budget, and its peers, against eager; raises `Retired` where eager itself does not run."""
    say("capture, measure, and the least feasible budget")
    found = Survey(target=target, **survey(target))
    contestants = [*(_within(found, percent) for percent in budgets), *peers]
    cells: list[Cell] = []
    verdicts: list[Verdict] = []
    for number, group in enumerate(groups(contestants, eager_peak=found.eager_peak, room=room())):
        with ExitStack() as stack:
            contest = _Contest(stack, found, rounds=rounds, time_limit=time_limit, say=say)
            for contestant in group:
                contest.enter(contestant)
            raced = contest.race()
            cells += raced if number == 0 else raced[1:]
            for peer in raced:
                if peer.way in ("eager", "lowtide") or not peer.finished:
                    continue
                verdict = judge(peer, cells)
                if duel and not verdict.ok:
                    verdict, mine = contest.duel(peer)
                    cells.append(mine)
                verdicts.append(verdict)
    return Fit(found, tuple(sorted(cells, key=_place)), tuple(verdicts))


def _within(found: Survey, percent: float) -> Contestant:
    """Lowtide within a budget in percent."""
    if percent == LEAST:
        return Contestant("lowtide least", "lowtide", budget=found.least, percent=LEAST)
    budget = read_budget(f"{percent}%", persistent=found.persistent, eager_peak=found.eager_peak)
    return Contestant(f"lowtide {percent:g}%", "lowtide", budget=budget, percent=percent)


def _place(cell: Cell) -> int:
    """Eager first, then lowtide, then the others."""
    return ("eager", "lowtide").index(cell.way) if cell.way in ("eager", "lowtide") else 2


class _Contest:
    """Contestants that race at once, with eager; the processes end with the stack."""

    def __init__(self, stack: ExitStack, found: Survey, *, rounds: int, time_limit: float, say: Say) -> None:
        self._stack, self._survey = stack, found
        self._rounds, self._time_limit, self._say = rounds, time_limit, say
        self._racers: dict[str, Racer] = {}
        self._cells: dict[str, Cell] = {}  # of all that entered, without what only a race can tell
        say("starting eager")
        self._racers[EAGER.name] = stack.enter_context(started(found.target, EAGER, time_limit=time_limit))
        warm = self._racers[EAGER.name].ask("warm-up")
        self._digest = warm["digest"]
        self._steps = steps_of_a_turn(median(warm["warm_up_seconds"]))
        self._cells[EAGER.name] = Cell(found.target, EAGER.name, EAGER.way, predicted_peak=found.eager_peak, equal=True)

    def enter(self, contestant: Contestant) -> Cell:
        """Let a contestant prepare and warm up; one that fails has a cell that says why."""
        slow = ", which takes a minute or more" if contestant.way in COMPILERS else ""
        self._say(f"preparing {contestant.name}{slow}")
        target, percent = self._survey.target, contestant.percent
        cell = Cell(target, contestant.name, contestant.way, percent, contestant.budget)
        try:
            racer = self._stack.enter_context(started(target, contestant, time_limit=self._time_limit))
            warm = racer.ask("warm-up")
        except Retired as error:
            cell = _retired(cell, error)
        else:
            limit = None if percent is None else limit_of(target, percent)
            told: dict[str, Any] = {key: warm[key] for key in PLANNED if key in warm}
            cell = replace(cell, **racer.told, **told, equal=warm["digest"] == self._digest, limit=limit)
            self._racers[contestant.name] = racer
        self._cells[contestant.name] = cell
        return cell

    def race(self, names: Iterable[str] | None = None) -> list[Cell]:
        """The cells of all that entered, or of those with these names, after a race; eager's is the first."""
        chosen = [EAGER.name, *names] if names is not None else list(self._cells)
        racers = [self._racers[name] for name in chosen if name in self._racers]
        seconds, reasons = run_rounds(racers, rounds=self._rounds, steps=self._steps, say=self._say)
        metered: dict[str, dict[str, Any]] = {}
        for name in seconds:
            try:
                metered[name] = self._racers[name].ask("meter")
            except Retired as error:
                if name == EAGER.name:
                    raise
                reasons[name] = error.message
        for name, reason in reasons.items():
            self._cells[name] = _retired(self._cells[name], Retired(reason))
            del self._racers[name]
        eager_seconds, eager = seconds[EAGER.name], metered[EAGER.name]
        cells = []
        for name in chosen:
            cell = self._cells[name]
            if name in metered:
                found = metered[name]
                ratios = [one / other for one, other in zip(seconds[name], eager_seconds, strict=True)]
                cell = replace(
                    cell,
                    metered_peak=found["metered_peak"],
                    arena_bytes=found["arena_bytes"],
                    mismatches=found["mismatches"],
                    own=_own(found) / _own(eager) if _own(eager) else None,
                    seconds=median(seconds[name]),
                    time_ratio=median(ratios),
                    ratios=tuple(ratios),
                )
            cells.append(replace(cell, missed=missed_bars(cell)))
        return cells

    def duel(self, peer: Cell) -> tuple[Verdict, Cell]:
        """Race lowtide, with a byte less than the peer's peak for its budget, against the peer and eager.

        Only this race counts then: the best of several cells of an earlier one would have had more tries.
        """
        assert peer.metered_peak is not None
        name = f"lowtide for {peer.contestant}"
        mine = self.enter(Contestant(name, "lowtide", budget=peer.metered_peak - 1))
        if mine.reason is None:
            _, again, mine = self.race([peer.contestant, name])
            peer = again if again.finished else peer
            if name in self._racers:
                self._racers.pop(name).end()  # the next one needs its memory
        return replace(judge(peer, [mine]), duel=True), mine


def _retired(cell: Cell, error: Retired) -> Cell:
    """A cell without a race; that nothing fits a budget is an answer, any other failure of lowtide is not."""
    missed = (error.message,) if cell.way == "lowtide" and not error.infeasible else ()
    return replace(cell, reason=error.message, infeasible=error.infeasible, missed=missed)


def _own(metered: dict[str, Any]) -> int:
    """Bytes that the step adds to what was there before it."""
    return int(metered["metered_peak"] - metered["before"])


def missed_bars(cell: Cell) -> tuple[str, ...]:
    """The bars that a cell of lowtide misses."""
    if cell.way != "lowtide" or cell.reason is not None:
        return cell.missed
    assert cell.budget is not None
    assert cell.predicted_peak is not None
    assert cell.metered_peak is not None
    assert cell.time_ratio is not None
    missed = []
    if cell.metered_peak > cell.budget:
        missed.append(f"{cell.metered_peak - cell.budget:,} bytes over the budget")
    if abs(off := cell.predicted_peak / cell.metered_peak - 1) > OFF:
        missed.append(f"prediction {off:+.2%} off")
    if not cell.equal:
        missed.append("differs from eager")
    if cell.limit is not None and cell.time_ratio > cell.limit:
        missed.append(f"time over {cell.limit:g}")
    return tuple(missed)


def limit_of(target: str, percent: float) -> float | None:
    """The most time that a budget of a target may take, of eager's; None where nothing is claimed."""
    stock = {entry.name: entry for entry in catalog()}
    name = target.partition(":")[0]
    if name not in stock:
        return None
    options = stock[name].options
    if any(value != options[key].default for key, value in parse(target).options.items()):
        return None
    return (FRONT_LIMITS if name in FRONT else LIMITS).get(percent)


def judge(peer: Cell, cells: Iterable[Cell]) -> Verdict:
    """Hold the cells of lowtide against one of a peer."""
    assert peer.metered_peak is not None
    assert peer.time_ratio is not None
    assert peer.own is not None
    mine = [cell for cell in cells if cell.way == "lowtide" and cell.finished and cell.equal]
    within = [cell for cell in mine if (cell.metered_peak or 0) <= peer.metered_peak]
    in_time = [cell for cell in mine if (cell.time_ratio or 0) <= peer.time_ratio]
    quickest = min(within, key=lambda cell: cell.time_ratio or 0, default=None)
    smallest = min(in_time, key=lambda cell: cell.metered_peak or 0, default=None)
    return Verdict(
        target=peer.target,
        peer=peer.contestant,
        peer_own=peer.own,
        peer_ratio=peer.time_ratio,
        quickest=quickest.contestant if quickest else None,
        quickest_ratio=quickest.time_ratio if quickest else None,
        smallest=smallest.contestant if smallest else None,
        smallest_own=smallest.own if smallest else None,
    )
