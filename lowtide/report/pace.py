"""Where the seconds of a step go, by op and by module, against what the machine needs for them at least."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.text import Text

from lowtide.graph import Graph
from lowtide.limits import Limits, Work
from lowtide.program import Program, Run
from lowtide.report.bytes import bar, show_bytes, show_seconds, show_share
from lowtide.report.modules import Branch, fold, lines, pattern
from lowtide.report.profile import TOP
from lowtide.report.show import TIMES, WIDEST, Heading, paragraph, section
from lowtide.report.table import Table

NEEDED, ABOVE, AGAIN = "needed", "above", "again"  # parts of the time of a module
NANO = 10**9
FAR = 100  # times what it needs: such a call does next to nothing, and a factor says nothing
ROWS = 14  # of the table of ops
ARITHMETIC, BYTES = "arithmetic", "bytes"  # what holds an op up


@dataclass(frozen=True)
class Kind:
    """All ops that make the same call."""

    target: str
    runs: int  # in one step
    seconds: float  # of all runs
    again: float  # seconds of those that eager does without: second runs, narrow copies
    needed: float  # seconds that the machine needs for the first runs
    held_by: str
    operations: float  # floating point, of the first runs
    nbytes: int  # read and written at least by the first runs

    def to_json(self) -> dict[str, Any]:
        """All of it as plain data."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


@dataclass(frozen=True)
class Paced:
    """The time of one step, and what it is made of."""

    seconds: float  # of a step, the median of the rounds
    rounds: tuple[float, ...]  # seconds of the planned step in each of them
    eager_rounds: tuple[float, ...]  # the same of eager's step
    needed: float  # seconds that the machine needs for all ops
    kinds: tuple[Kind, ...]  # most seconds first
    modules: tuple[Branch, ...]  # nanoseconds: needed, above that, again
    held: Mapping[
        str, tuple[float, float]
    ]  # arithmetic, bytes -> seconds of first runs, and what the machine needs for them
    again: float  # seconds of second runs
    uncounted: float  # seconds of first runs of ops whose operations no rule counts
    quicker: float  # seconds of first runs of ops that took no longer than the limit: what they move was in a cache
    limits: Limits

    @property
    def in_ops(self) -> float:
        """The seconds of all ops, as the steps in which they were timed took."""
        return sum(kind.seconds for kind in self.kinds)

    @property
    def eager_seconds(self) -> float:
        """The median of eager's rounds."""
        return median(self.eager_rounds)

    @property
    def ratios(self) -> tuple[float, ...]:
        """The planned step's time as a fraction of eager's, round by round."""
        return tuple(one / other for one, other in zip(self.rounds, self.eager_rounds, strict=True))

    @property
    def distance(self) -> float:
        """How many times what the machine needs the step takes."""
        return self.seconds / self.needed if self.needed else 0.0

    def to_json(self) -> dict[str, Any]:
        """All of it as plain data."""
        held = {name: {"seconds": seconds, "needed": needed} for name, (seconds, needed) in self.held.items()}
        return {
            "seconds": self.seconds,
            "needed_seconds": self.needed,
            "distance": self.distance,
            "eager_seconds": self.eager_seconds,
            "time_ratio": median(self.ratios),
            "rounds": list(self.rounds),
            "eager_rounds": list(self.eager_rounds),
            "ratios": list(self.ratios),
            "held_by": held,
            "again_seconds": self.again,
            "uncounted_seconds": self.uncounted,
            "quicker_seconds": self.quicker,
            "limits": self.limits.to_json(),
            "ops": [kind.to_json() for kind in self.kinds],
            "modules": [_module(branch) for branch in self.modules],
        }


def _module(branch: Branch) -> dict[str, Any]:
    found = {name: branch.categories.get(name, 0) / NANO for name in (NEEDED, ABOVE, AGAIN)}
    return {
        "module": branch.path,
        "count": branch.count,
        "seconds": sum(found.values()),
        "needed": found[NEEDED],
        "again": found[AGAIN],
        "parts": [_module(part) for part in branch.parts],
    }


def paced(
    graph: Graph,
    program: Program,
    ops: Mapping[int, float],
    work: Sequence[Work],
    limits: Limits,
    *,
    rounds: Sequence[float],
    eager_rounds: Sequence[float],
) -> Paced:
    """Add up what the runs of a program take, against the limits of the machine.

    Ops that are alike take what they take on average: identical layers are one row then. An op that was quicker than
    the limit found its bytes in a cache, or had to touch fewer: then its own time is what it needed.
    """
    seconds = _evened(graph, ops)
    limits = limits.raised(work, seconds)
    runs = Counter(run.op for run in program.instructions if isinstance(run, Run))
    first = {op: seconds[op] for op in runs if not graph.ops[op].optional}
    limit = {op: work[op].needed(limits) for op in first}
    needed = {op: min(taken, limit[op]) for op, taken in first.items()}
    again = {op: seconds[op] * (count - (op in first)) for op, count in runs.items()}
    held_by = {op: ARITHMETIC if work[op].arithmetic(limits) > work[op].traffic(limits) else BYTES for op in runs}
    return Paced(
        seconds=median(rounds),
        rounds=tuple(rounds),
        eager_rounds=tuple(eager_rounds),
        needed=sum(needed.values()),
        kinds=tuple(_kinds(graph, runs, seconds, again, needed, work, held_by)),
        modules=fold(_weights(graph, first, needed, again), top=TOP),
        held={
            name: (
                sum(taken for op, taken in first.items() if held_by[op] == name),
                sum(taken for op, taken in needed.items() if held_by[op] == name),
            )
            for name in (ARITHMETIC, BYTES)
        },
        again=sum(again.values()),
        uncounted=sum(taken for op, taken in first.items() if work[op].operations is None),
        quicker=sum(taken for op, taken in first.items() if taken < limit[op]),
        limits=limits,
    )


def _evened(graph: Graph, ops: Mapping[int, float]) -> dict[int, float]:
    """The seconds of each op, those that are alike with the mean of theirs."""
    alike: defaultdict[tuple[Any, ...], list[int]] = defaultdict(list)
    for op in ops:
        item = graph.ops[op]
        shapes = tuple((graph.values[value].dtype, graph.values[value].shape) for value in (*item.reads, *item.makes))
        alike[item.target, item.phase, pattern(item.module), shapes].append(op)
    return {op: fmean(ops[one] for one in same) for same in alike.values() for op in same}


def _weights(
    graph: Graph, first: Mapping[int, float], needed: Mapping[int, float], again: Mapping[int, float]
) -> Iterator[tuple[str, str, int]]:
    for op, taken in again.items():
        parts = {AGAIN: taken, NEEDED: needed.get(op, 0.0), ABOVE: first.get(op, 0.0) - needed.get(op, 0.0)}
        yield from ((graph.ops[op].module, name, round(part * NANO)) for name, part in parts.items() if part)


def _kinds(
    graph: Graph,
    runs: Mapping[int, int],
    seconds: Mapping[int, float],
    again: Mapping[int, float],
    needed: Mapping[int, float],
    work: Sequence[Work],
    held_by: Mapping[int, str],
) -> list[Kind]:
    """What each call takes in all, most seconds first."""
    calls: defaultdict[str, list[int]] = defaultdict(list)
    for op in runs:
        calls[graph.ops[op].target].append(op)
    found = []
    for target, same in calls.items():
        first = [op for op in same if op in needed]
        in_bytes = sum(seconds[op] * (1 if held_by[op] == BYTES else -1) for op in same)
        found.append(
            Kind(
                target=target,
                runs=sum(runs[op] for op in same),
                seconds=sum(seconds[op] * runs[op] for op in same),
                again=sum(again[op] for op in same),
                needed=sum(needed[op] for op in first),
                held_by=BYTES if in_bytes >= 0 else ARITHMETIC,
                operations=sum(work[op].operations or 0.0 for op in first),
                nbytes=sum(work[op].nbytes for op in first),
            )
        )
    return sorted(found, key=lambda kind: -kind.seconds)


# ----------------------------------------------------------------------------------------------------------- to be read


@dataclass(frozen=True)
class PaceReport:
    """The time of a step with its heading and its notes; `Console.print` shows it."""

    heading: Heading
    ops: int
    budget: str  # as it was asked for
    paced: Paced
    notes: Sequence[str] = ()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = min(options.max_width, WIDEST)
        heading = self.heading
        yield Text(heading.target, style="bold")
        yield Text(f"{heading.optimizer} · {self.ops:,} ops · within {self.budget}")
        yield from section("Time of one step", _times(self.paced))
        yield from section("Against the machine", _against(self.paced, width))
        yield from section("By op", _by_op(self.paced))
        yield from section("By module", _by_module(self.paced, width))
        if self.notes:
            yield from section("Notes", (paragraph(note, width) for note in self.notes))


def _times(found: Paced) -> Iterator[RenderableType]:
    ratios, count = found.ratios, len(found.rounds)
    rows = [
        ("planned", show_seconds(found.seconds), f"{_range(found.rounds)} in {count} rounds"),
        ("eager", show_seconds(found.eager_seconds), f"{_range(found.eager_rounds)}, by turns with it"),
        ("of eager's", f"{median(ratios):.3f}", f"{min(ratios):.3f} to {max(ratios):.3f} by round"),
        ("needed", show_seconds(found.needed), f"the step takes {found.distance:.2f} times what this machine needs"),
    ]
    yield Table("lrw", rows, (), ("", "bold", ""), 2)


def _range(rounds: Sequence[float]) -> str:
    return f"{show_seconds(min(rounds))} to {show_seconds(max(rounds))}"


def _against(found: Paced, width: int) -> Iterator[RenderableType]:
    whole = found.in_ops
    rows = [
        (f"held by {name}", show_seconds(taken), show_share(taken, whole), show_seconds(needed), _factor(taken, needed))
        for name, (taken, needed) in found.held.items()
    ]
    rows.append(("again", show_seconds(found.again), show_share(found.again, whole), "-", ""))
    rows.append(("all", show_seconds(whole), "100.0%", show_seconds(found.needed), _factor(whole, found.needed)))
    yield Table("lrrrr", rows, ("", "time", "", "needed", ""), ("", "bold", "", "", ""), 2)
    rates = ", ".join(f"{_rate(rate)} of {dtype} products" for dtype, rate in found.limits.operations.items())
    memory = f"{show_bytes(found.limits.bandwidth)}/s past the caches"
    words = [f"this machine: {rates}, {memory}; {found.limits.machine}"]
    words.append(f"no rule counts the operations of {show_share(found.uncounted, whole)} of the time: bytes only")
    if found.quicker:
        share = show_share(found.quicker, whole)
        words.append(f"{share} was quicker than memory, out of caches: what it took is what it needs")
    yield from (paragraph(word, width, "dim") for word in words)


def _factor(taken: float, needed: float) -> str:
    return f"{TIMES}{taken / needed:.2f}" if taken < FAR * needed else ""


def _count(number: int) -> str:
    return f"{TIMES}{number}" if number > 1 else ""


def _rate(operations: float) -> str:
    return f"{operations / 1e9:,.1f} GFLOP/s"


def _by_op(found: Paced) -> Iterator[RenderableType]:
    rows = [_row(found, kind) for kind in found.kinds[:ROWS]]
    rest = found.kinds[ROWS:]
    if rest:
        seconds, needed = sum(kind.seconds for kind in rest), sum(kind.needed for kind in rest)
        share = show_share(seconds, found.in_ops)
        runs = _count(sum(kind.runs for kind in rest))
        rows.append((f"({len(rest)} others)", runs, show_seconds(seconds), share, show_seconds(needed), "", ""))
    titles = ("op", "", "time", "", "needed", "", "reached")
    yield Table("srrrrrr", rows, titles, ("", "", "bold", "", "", "", ""), 2)


def _row(found: Paced, kind: Kind) -> tuple[str, ...]:
    first = kind.seconds - kind.again
    if not first:
        reached = ""
    elif kind.held_by == ARITHMETIC:
        reached = _rate(kind.operations / first)
    else:
        reached = f"{show_bytes(kind.nbytes / first)}/s"
    return (
        kind.target.removesuffix(".default"),
        _count(kind.runs),
        show_seconds(kind.seconds),
        show_share(kind.seconds, found.in_ops),
        show_seconds(kind.needed),
        _factor(first, kind.needed),
        reached,
    )


def _by_module(found: Paced, width: int) -> Iterator[RenderableType]:
    shown = lines(found.modules)
    taken = [sum(line.categories.values()) for line in shown]
    largest, room = max(taken), min(width - 76, 24)
    rows = []
    for line, whole in zip(shown, taken, strict=True):
        needed, again = line.categories.get(NEEDED, 0), line.categories.get(AGAIN, 0)
        row = [
            "  " * line.depth + line.label,
            _count(line.count),
            show_seconds(whole / NANO),
            show_share(whole, found.in_ops * NANO),
            show_seconds(needed / NANO),
            _factor(whole - again, needed),
            show_seconds(again / NANO) if again else "-",
        ]
        rows.append([*row, bar(whole, largest, room) if room > 6 else ""])
    titles = ("module", "", "time", "", "needed", "", "again", "")
    yield Table("srrrrrrl", rows, titles, ("", "", "bold", "", "", "", "", "cyan"), 2)
