"""Profile, shave and tidy where there is no compiler: what search.cpp does, in numpy, and some hundred times slower.

It decides as search.cpp does, so its sequences are the same ones; but it takes none of the alternatives. Ruin and
recreate, the exact planner and the layout of an arena are not here: they are nothing without speed.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from functools import cached_property
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from lowtide.plan.in_place import paired
from lowtide.plan.settings import PLAIN_LONGEST, PLAIN_LOOK, PLAIN_PLACE, PLAIN_ROUND, PLAIN_TRIAL, TOGETHER

if TYPE_CHECKING:
    from lowtide.plan.problem import Flags, Floats, Ints, Problem


def profile(problem: Problem, sequence: Ints) -> Ints:
    """The bytes in use during each run, without the persistent ones."""
    return Scene(problem, sequence).bytes


def shave(
    problem: Problem,
    sequence: Ints,
    budget: int,
    *,
    batch: int,
    penalty: float,
    weight: Floats,
    smallest: int,
    most_seconds: float,
    work: Ints,
) -> Ints:
    """Repeat runs until the profile is within the budget, or nothing helps, or no work is left.

    In each round go the idle values at the highest place that cost the least seconds for what they free above the
    budget; each is made again right before its next reader.
    """
    while True:
        scene = Scene(problem, sequence)
        work -= PLAIN_PLACE * len(sequence)
        excess = int(scene.bytes.max(initial=0)) - budget
        if excess <= 0 or not len(sequence) or work[0] < 0 or problem.time(sequence) > most_seconds:
            break
        work -= PLAIN_PLACE * (PLAIN_ROUND + 3 * len(sequence))
        idle = scene.cheapest(budget, batch, penalty, weight, smallest, work)
        if not idle:
            break
        freed = np.cumsum([problem.nbytes[one.value] for one in idle])
        chosen = [one for one in idle if one.score <= TOGETHER * idle[0].score]
        sequence = scene.without(chosen[: 1 + int((freed < excess).sum())])
    return prune(problem, sequence)


def tidy(problem: Problem, sequence: Ints, budget: int, *, passes: int, work: Ints) -> Ints:
    """Drop repeated runs, the slowest for their bytes first, while the profile stays within the budget."""
    for _ in range(passes):
        drops, candidates = Drops(Scene(problem, sequence), budget), _repeats(problem, sequence)
        work -= PLAIN_PLACE * (len(sequence) + PLAIN_TRIAL * len(candidates))
        for place in candidates:
            drops.drop(place)
        if drops.active.all():
            break
        sequence = sequence[drops.active]
    return sequence


def prune(problem: Problem, sequence: Ints) -> Ints:
    """The sequence without runs whose results nobody reads before they are made again."""
    places = list(enumerate(sequence.tolist()))
    runs = np.bincount(sequence, minlength=len(problem.seconds)).tolist()
    first = {op: place for place, op in reversed(places)}
    alive = set(np.flatnonzero(problem.required).tolist())
    kept = []
    for place, op in reversed(places):
        must = not problem.optional[op] if runs[op] == 1 else problem.pinned[op] and first[op] == place
        if not must and alive.isdisjoint(problem.make_rows[op]):
            runs[op] -= 1
            continue
        alive.difference_update(problem.make_rows[op])
        alive.update(problem.read_rows[op])
        kept.append(op)
    return np.array(kept[::-1], np.int64)


class Idle(NamedTuple):
    """A value that no run touches around the highest place, and where it is read next."""

    score: float  # weighted seconds to have it again, for the bytes above the budget that it frees until then
    value: int
    to: int


class Scene:
    """A sequence: which runs touch which values, that is, read or make them, and the bytes that are in use.

    The touches are sorted by value, then by place. Behind them is one of no value, so that each has a next one.
    """

    def __init__(self, problem: Problem, sequence: Ints) -> None:
        self.problem, self.sequence, self.length = problem, sequence, len(sequence)
        readers, reads = _entries(problem.read_start, sequence)
        makers, makes = _entries(problem.make_start, sequence)
        value = np.concatenate((problem.reads[reads], problem.makes[makes]))
        place = np.concatenate((readers, makers))
        order = np.argsort(value * self.length + place)
        self.value, self.place = np.append(value[order], -1), np.append(place[order], self.length)
        self.makes = np.append(order >= len(reads), True)
        self.key = self.value[:-1] * self.length + self.place[:-1]
        self.made = np.zeros(self.length, np.int64)  # bytes that each run makes
        np.add.at(self.made, makers, problem.nbytes[problem.makes[makes]])
        self.saved = self._saved()  # bytes of results that sit on dying arguments
        self.bytes = self._held() + self.made - self.saved + problem.temporaries[sequence]

    def needed(self, value: Ints, place: Ints) -> Flags:
        """Whether what these values are at these places is read there or later, or outlives the step."""
        touch = np.searchsorted(self.key, value * self.length + place)
        return np.where(self.value[touch] == value, ~self.makes[touch], self.problem.required[value] > 0)

    def _held(self) -> Ints:
        """The bytes that are there before each run."""
        value, place, makes = self.value[:-1], self.place[:-1], self.makes[:-1]
        nbytes = self.problem.nbytes[value]
        change = np.zeros(self.length + 1, np.int64)
        needed = self.needed(value, place + 1)
        for sign, chosen in ((1, makes & needed), (-1, ~makes & ~needed)):
            np.add.at(change, place[chosen] + 1, sign * nbytes[chosen])
        return change.cumsum()[:-1]

    def _saved(self) -> Ints:
        """The bytes of results that sit on dying arguments."""
        place, pairs = _entries(self.problem.over_start, self.sequence)
        read = self.problem.over_read[pairs]
        dying = ~self.needed(read, place + 1)
        saved = np.zeros(self.length, np.int64)
        for at, group in groupby(zip(place[dying].tolist(), read[dying].tolist(), strict=True), itemgetter(0)):
            possible = self.problem.over_rows[self.sequence[at]]
            for made, _ in paired(possible, {old for _, old in group}):
                saved[at] += self.problem.nbytes[made]
        return saved

    @cached_property
    def lists(self) -> tuple[list[int], list[int], list[int], list[bool]]:
        """The keys, values, places and makes of all touches, for looking at one of them."""
        return self.key.tolist(), self.value.tolist(), self.place.tolist(), self.makes.tolist()

    @cached_property
    def killed(self) -> Ints:
        """For each value the place of the run that writes over it for good, or the end."""
        first = np.full(len(self.problem.seconds) + 1, self.length)
        first[self.sequence[::-1]] = np.arange(self.length)[::-1]
        return first[self.problem.killer]  # no killer is -1, which is the last one

    def there(self, value: int, place: int) -> bool:
        """Whether a run at this place could read the value."""
        problem, (keys, values, places, makes) = self.problem, self.lists
        if problem.maker[value] < 0 or problem.once[value]:
            first = bisect_left(keys, value * self.length)
            made = problem.maker[value] < 0 or (values[first] == value and places[first] < place)
            return bool(made and self.killed[value] >= place)
        touch = bisect_left(keys, value * self.length + place)
        if values[touch] == value:
            return not makes[touch]
        return bool(problem.required[value]) and touch > 0 and values[touch - 1] == value

    def again(self, wanted: list[int], place: int) -> list[int] | None:
        """The ops that must run again before a place so that these values are there; None if they can't."""
        problem = self.problem
        ops = list(dict.fromkeys(problem.maker[wanted].tolist()))
        seen = set(ops)
        for op in ops:  # which grows on the way
            if not problem.repeatable[op] or len(ops) > PLAIN_LONGEST:
                return None
            for value in problem.read_rows[op]:
                if self.there(value, place):
                    continue
                maker = int(problem.maker[value])
                if maker < 0 or problem.once[value]:
                    return None
                if maker not in seen:
                    seen.add(maker)
                    ops.append(maker)
        return ops

    def idle(self, budget: int, smallest: int) -> tuple[Ints, Ints, Floats]:
        """The values that no run touches around the highest place, where each is read next, and what it could free.

        That is the area above the budget until then: bytes times places.
        """
        problem, top = self.problem, int(self.bytes.argmax())
        around = (self.place[:-1] < top) & (self.place[1:] > top) & (self.value[:-1] == self.value[1:])
        k = np.flatnonzero(around & ~self.makes[1:])
        value, start, to = self.value[k], self.place[k] + 1, self.place[k + 1]
        over = np.maximum(0, self.bytes - budget)
        above, count = (np.append(0, row.cumsum()) for row in (over, over > 0))
        area = np.minimum(above[to] - above[start], problem.nbytes[value] * (count[to] - count[start]))
        fit = (problem.nbytes[value] > smallest) & (problem.required[value] == 0) & (problem.maker[value] >= 0)
        fit &= area > 0
        return value[fit], to[fit], area[fit].astype(np.float64)

    def cheapest(
        self, budget: int, batch: int, penalty: float, weight: Floats, smallest: int, work: Ints
    ) -> list[Idle]:
        """Of the idle values at the highest place the cheapest, at most a batch of them."""
        problem = self.problem
        values, ends, areas = self.idle(budget, smallest)
        least = weight[values] * problem.seconds[problem.maker[values]] / areas  # no score is below this
        found: list[Idle] = []
        for k in np.argsort(least, kind="stable").tolist():
            if len(found) == batch and least[k] > found[-1].score:
                break
            value, to, area = int(values[k]), int(ends[k]), float(areas[k])
            ops = self.again([value], to)
            work -= PLAIN_PLACE * (PLAIN_LOOK + len(ops or ()))
            if ops is not None:
                seconds = self._seconds(ops, value, to, budget, penalty, area)
                found = sorted([*found, Idle(float(weight[value]) * seconds / area, value, to)])[:batch]
        return found

    def _seconds(self, ops: list[int], value: int, to: int, budget: int, penalty: float, area: float) -> float:
        """The seconds of these runs, dearer where their own bytes would stand out above the budget."""
        problem = self.problem
        seconds = sum(float(problem.seconds[op]) for op in ops)
        if penalty <= 0:
            return seconds
        widths = []
        for op in ops:
            lacking = [read for read in problem.read_rows[op] if not self.there(read, to)]
            widths.append(int(problem.temporaries[op] + problem.nbytes[problem.make_rows[op] + lacking].sum()))
        excess = int(self.bytes[to] - self.made[to] - problem.nbytes[value]) + max(widths) - budget
        return seconds * (1 + penalty * excess * len(ops) / area) if excess > 0 else seconds

    def without(self, chosen: list[Idle]) -> Ints:
        """The sequence in which these values are made again before they are read next."""
        places: list[int] = []
        ops: list[int] = []
        for to, group in groupby(sorted(chosen, key=lambda one: (one.to, one.value)), key=lambda one: one.to):
            again = self.again([one.value for one in group], to) or []
            ops += sorted(again)
            places += [to] * len(again)
        return np.insert(self.sequence, places, ops)


class Drops:
    """A sequence from which runs go, one after the other, while its profile stays within the budget."""

    def __init__(self, scene: Scene, budget: int) -> None:
        self.scene, self.problem, self.budget = scene, scene.problem, budget
        self.ops = scene.sequence.tolist()
        self.first = {op: place for place, op in reversed(list(enumerate(self.ops)))}  # of each op its first run
        self.bytes, self.saved = scene.bytes.copy(), scene.saved.tolist()
        self.there = bytearray(b"\1" * scene.length)  # of each place: whether its run is still there
        self.active = np.frombuffer(self.there, np.bool_)  # the same bytes

    def drop(self, candidate: int) -> None:
        """Drop a run, and those that only served it, if what it made can live on from runs before it."""
        changes: list[tuple[int, int, int]] = []  # from this place until before that one: so many bytes more
        unsaved: list[int] = []  # places at which arguments die no more
        waiting, gone = [candidate], list[int]()
        for place in waiting:
            if not self.there[place]:
                continue
            if not self._lengthen(place, changes, unsaved):
                break
            self.there[place] = 0
            gone.append(place)
            waiting += self._shorten(place, changes)
        else:
            if self._fits(changes, unsaved):
                return
        for place in gone:
            self.there[place] = 1

    def _lengthen(self, place: int, changes: list[tuple[int, int, int]], unsaved: list[int]) -> bool:
        """Let what this run makes live on from before; False if it was never made before."""
        for value in self.problem.make_rows[self.ops[place]]:
            if self._needed(value, place):
                touched, made = self._before(value, place)
                if made < 0:
                    return False
                changes.append((touched + 1, place, int(self.problem.nbytes[value])))
                unsaved += [touched] * (self.saved[touched] > 0)
        return True

    def _shorten(self, place: int, changes: list[tuple[int, int, int]]) -> list[int]:
        """Let go early what this run was the last to read, and return the runs that served nothing else."""
        idle = []
        for value in self.problem.read_rows[self.ops[place]]:
            touched, made = self._before(value, place)
            if made >= 0 and not self._needed(value, place):
                changes.append((touched + 1, place, -int(self.problem.nbytes[value])))
                idle += [made] * (touched == made and not self._useful(made))
        return idle

    def _useful(self, place: int) -> bool:
        """Whether a run has to stay, or something that it makes is needed."""
        op = self.ops[place]
        must = self.problem.pinned[op] and self.first[op] == place
        return bool(must) or any(self._needed(value, place) for value in self.problem.make_rows[op])

    def _needed(self, value: int, place: int) -> bool:
        """Whether what a value is after this place is read, or outlives the step."""
        keys, values, places, makes = self.scene.lists
        touch = bisect_right(keys, value * self.scene.length + place)
        while values[touch] == value:
            if self.there[places[touch]]:
                return not makes[touch]
            touch += 1
        return bool(self.problem.required[value])

    def _before(self, value: int, place: int) -> tuple[int, int]:
        """The last places before this one at which a value was touched, and made; -1 for none."""
        keys, values, places, makes = self.scene.lists
        touch, touched = bisect_left(keys, value * self.scene.length + place) - 1, -1
        while touch >= 0 and values[touch] == value:
            if self.there[places[touch]]:
                touched = max(touched, places[touch])
                if makes[touch]:
                    return touched, places[touch]
            touch -= 1
        return touched, -1

    def _fits(self, changes: list[tuple[int, int, int]], unsaved: list[int]) -> bool:
        """Change the profile; if it does not fit, change it back."""
        changes = changes + [(place, place + 1, self.saved[place]) for place in unsaved]
        for first, end, by in changes:
            self.bytes[first:end] += by
        risen = (slice(first, end) for first, end, by in changes if by > 0)
        if not any((self.bytes[part] > self.budget)[self.active[part]].any() for part in risen):
            for place in unsaved:
                self.saved[place] = 0
            return True
        for first, end, by in changes:
            self.bytes[first:end] -= by
        return False


def _repeats(problem: Problem, sequence: Ints) -> list[int]:
    """The places of runs that could go, the slowest for their bytes first."""
    seen: set[int] = set()
    places, gain = [], {}
    for place, op in enumerate(sequence.tolist()):
        makes = problem.make_rows[op]
        if op in seen or problem.restoring[op]:
            places.append(place)
            gain[place] = float(problem.seconds[op]) / max(1, int(problem.nbytes[makes].max(initial=0)))
        seen.add(op)
    return sorted(places, key=lambda place: -gain[place])


def _entries(start: Ints, sequence: Ints) -> tuple[Ints, Ints]:
    """Of a table with a row for each op: the places of the sequence, each as often as its row is long, and the rows."""
    lengths = start[sequence + 1] - start[sequence]
    place = np.repeat(np.arange(len(sequence)), lengths)
    ends = lengths.cumsum()
    return place, np.arange(len(place)) + np.repeat(start[sequence] - ends + lengths, lengths)
