"""Long programs as loops: lines that follow one another again and again, but for the numbers in them, are written once.

`t7 = k2(t5, t6)` is the pattern `t# = k2(t#, t#)` with the numbers 7, 5 and 6. Where the same patterns come round and
round, one copy of them becomes the body of a loop over a table that has a row of numbers for each time. Variables whose
number changes from row to row live in a dictionary: `t[7]` for `t7`.
"""

from __future__ import annotations

import heapq
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

LONG = 4_000  # lines: what is shorter stays as it is
SAVED = 60  # lines that a loop must save
PERIODS = 400  # lengths of a loop's body that are tried, the most frequent distances first
WIDE, LONG_PERIODS = 64, 8  # lines that are alike far apart, and how many such distances are tried before all others

# A string, which stays as it is; a variable; a whole number that is no part of a name or of a float.
TOKEN = re.compile(r"""('[^']*'|"[^"]*")|\b([ts])(\d+)\b|(?<![\w.])(?<!e[-+])(\d+)(?![\w.])""")

Rows = list[tuple[int, ...]]


@dataclass(frozen=True)
class _Line:
    """A line: the text around its numbers, for each number the variable that it belongs to or "", and the numbers."""

    text: tuple[str, ...]
    names: tuple[str, ...]
    numbers: tuple[int, ...]


@dataclass(frozen=True)
class _Loop:
    """Lines `start` to `start + period * times` repeat the same patterns."""

    start: int
    period: int  # lines
    times: int

    @property
    def end(self) -> int:
        """The line after the last."""
        return self.start + self.period * self.times

    @property
    def saved(self) -> int:
        """How many lines it makes unnecessary."""
        return self.period * (self.times - 1)


def roll(lines: Sequence[str], *, long: int = LONG) -> tuple[list[str], dict[str, Rows]]:
    """The lines with loops in the place of repetitions, and the tables that the loops go over, by their names."""
    if len(lines) <= long:
        return list(lines), {}
    taken = [_take_apart(line) for line in lines]
    loops = sorted(_loops(taken), key=lambda loop: loop.start)
    if not loops:
        return list(lines), {}
    writer = _Writer(taken, loops)
    return writer.write(), writer.tables


def _take_apart(line: str) -> _Line:
    text, names, numbers, reached = [""], [], [], 0
    for found in TOKEN.finditer(line):
        text[-1] += line[reached : found.start()]
        reached = found.end()
        string, name, number, plain = found.groups()
        if string is not None:
            text[-1] += string
            continue
        names.append(name or "")
        numbers.append(int(number or plain))
        text.append("")
    text[-1] += line[reached:]
    return _Line(tuple(text), tuple(names), tuple(numbers))


def _loops(lines: Sequence[_Line]) -> list[_Loop]:
    """Repetitions that do not meet, those that save the most lines first."""
    known: dict[tuple[tuple[str, ...], tuple[str, ...]], int] = {}
    patterns = np.array([known.setdefault((line.text, line.names), len(known)) for line in lines])
    queue = [(-loop.saved, loop.period, loop.start, loop.times) for loop in _repetitions(patterns)]
    heapq.heapify(queue)
    free = np.ones(len(lines), bool)
    found: list[_Loop] = []
    while queue:
        _, period, start, times = heapq.heappop(queue)
        end = start + period * times
        if free[start:end].all():
            loop = _at_an_instruction(lines, _Loop(start, period, times))
            free[loop.start : loop.end] = False
            found.append(loop)
            continue
        for first, last in _stretches(free[start:end]):  # what others have left of it
            rest = _Loop(start + first, period, (last - first) // period)
            if rest.saved >= SAVED:
                heapq.heappush(queue, (-rest.saved, period, rest.start, rest.times))
    return found


def _repetitions(patterns: NDArray[np.int64]) -> Iterator[_Loop]:
    """All runs of lines that repeat what stands a period before, by the periods that are frequent."""
    places: defaultdict[int, list[int]] = defaultdict(list)
    for place, pattern in enumerate(patterns.tolist()):
        places[pattern].append(place)
    distances: Counter[int] = Counter()
    for found in places.values():
        distances.update(np.diff(found).tolist())
    frequent = [period for period, _ in distances.most_common(PERIODS)]
    for period in dict.fromkeys([*_long_periods(patterns), *frequent]):
        if 2 * period > len(patterns):
            continue
        for first, last in _stretches(patterns[:-period] == patterns[period:]):
            loop = _Loop(first, period, (last - first) // period + 1)
            if loop.saved >= SAVED:
                yield loop


def _long_periods(patterns: NDArray[np.int64]) -> list[int]:
    """The most frequent distances of many lines to the same many lines: single ones repeat themselves within a body."""
    if len(patterns) <= WIDE:
        return []
    power = np.cumprod(np.full(WIDE, 6364136223846793005, np.uint64))
    rows = np.lib.stride_tricks.sliding_window_view(patterns.astype(np.uint64), WIDE)
    digests = np.zeros(len(rows), np.uint64)
    for column in range(WIDE):
        digests += rows[:, column] * power[column]
    order = np.argsort(digests, kind="stable")
    alike = digests[order][1:] == digests[order][:-1]
    distances = Counter(np.diff(order)[alike].tolist())
    return [period for period, _ in distances.most_common(LONG_PERIODS)]


def _stretches(flags: NDArray[np.bool_]) -> list[tuple[int, int]]:
    """Where flags are true: first, and the one after the last."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], flags, [False])).astype(np.int8)))
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))


def _at_an_instruction(lines: Sequence[_Line], loop: _Loop) -> _Loop:
    """The loop with a body that begins where an instruction does, if it has one row to spare for that."""
    for shift in range(loop.period):
        if lines[loop.start + shift].text[0].startswith("at["):
            return _Loop(loop.start + shift, loop.period, loop.times - bool(shift))
    return loop


class _Writer:
    """Writes lines and loops."""

    def __init__(self, lines: Sequence[_Line], loops: Sequence[_Loop]) -> None:
        self.lines, self.loops = lines, loops
        self.tables: dict[str, Rows] = {}
        self.indexed: set[tuple[str, int]] = set()  # variables that live in a dictionary
        self.columns = [list(self._columns(loop)) for loop in loops]
        for loop, columns in zip(loops, self.columns, strict=True):
            names = [name for line in lines[loop.start : loop.start + loop.period] for name in line.names]
            for name, column in zip(names, columns, strict=True):
                if name and min(column) != max(column):
                    self.indexed.update((name, number) for number in column)

    def _columns(self, loop: _Loop) -> Iterator[tuple[int, ...]]:
        """For each number of the body its values, time by time."""
        for place in range(loop.start, loop.start + loop.period):
            copies = self.lines[place : loop.end : loop.period]
            yield from zip(*(line.numbers for line in copies), strict=True)

    def write(self) -> list[str]:
        """All lines."""
        written = [f"{name} = {{}}" for name in sorted({name for name, _ in self.indexed})]
        reached = 0
        for loop, columns in zip(self.loops, self.columns, strict=True):
            written += [self._line(line, [None] * len(line.numbers)) for line in self.lines[reached : loop.start]]
            written += self._loop(loop, columns)
            reached = loop.end
        return written + [self._line(line, [None] * len(line.numbers)) for line in self.lines[reached:]]

    def _loop(self, loop: _Loop, columns: Sequence[tuple[int, ...]]) -> list[str]:
        changing = list(dict.fromkeys(column for column in columns if min(column) != max(column)))
        numbers = {column: f"n{place}" for place, column in enumerate(changing)}
        table = f"rows{len(self.tables)}"
        self.tables[table] = list(zip(*changing, strict=True)) if changing else [()] * loop.times
        names = "".join(f"{name}, " for name in numbers.values())
        written = [f"for {names.strip() or '_row'} in {table}:  # {loop.times} times"]
        reached = 0
        for line in self.lines[loop.start : loop.start + loop.period]:
            mine = columns[reached : reached + len(line.numbers)]
            written.append("  " + self._line(line, [numbers.get(column) for column in mine]))
            reached += len(line.numbers)
        return written

    def _line(self, line: _Line, changing: Sequence[str | None]) -> str:
        """The source of a line; where a number changes, the name that it has in the loop is given."""
        pieces = [line.text[0]]
        for text, name, number, index in zip(line.text[1:], line.names, line.numbers, changing, strict=True):
            if name and (index is not None or (name, number) in self.indexed):
                pieces += [f"{name}[{index or number}]", text]
            else:
                pieces += [f"{name}{index or number}", text]
        return "".join(pieces)
