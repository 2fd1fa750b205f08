"""The frontier of a step: the least time that was found for each peak, beside what cannot be and what others do."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from textwrap import fill
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.text import Text

from lowtide.report.bytes import show_bytes, show_seconds
from lowtide.report.plan import show_overhead
from lowtide.report.show import WIDEST, Heading
from lowtide.report.table import Table

HEIGHT = 12  # rows of the plot
NOTHING = "-"  # where a classic has no plan


@dataclass(frozen=True)
class Point:
    """A plan in three numbers."""

    budget: int  # bytes
    peak: int  # bytes, predicted
    overhead: float  # added seconds as a fraction of the step without recomputation
    bound: float  # the least overhead that any program within the budget can have
    planning_seconds: float

    @property
    def gap(self) -> float:
        """How far the overhead may be from the least possible."""
        return self.overhead - self.bound


@dataclass(frozen=True)
class Technique:
    """What one technique that changes bits does to the frontier, or several together."""

    name: str
    keeps: str  # in words
    points: Sequence[Point]  # by budget; overheads are against the step as it is

    @property
    def least(self) -> Point:
        """The point with the least peak."""
        return min(self.points, key=lambda point: point.peak)

    def within(self, budget: int) -> Point | None:
        """The quickest point within a budget."""
        return min((one for one in self.points if one.peak <= budget), key=lambda one: one.overhead, default=None)


@dataclass(frozen=True)
class Frontier:
    """The points of a step, by budget, and those of each classic at the same budgets; `Console.print` shows it."""

    heading: Heading
    persistent: int  # bytes of the inputs that persist between steps
    eager_peak: int  # bytes, predicted
    points: Sequence[Point]
    classics: Mapping[str, Sequence[Point | None]]  # None: no plan within that budget
    ops: int
    notes: Sequence[str] = ()
    techniques: Sequence[Technique] = ()  # that are allowed: each alone, then all together

    def part(self, budget: int) -> float:
        """A budget's own part as a fraction of eager's."""
        return (budget - self.persistent) / max(1, self.eager_peak - self.persistent)

    @property
    def least_feasible(self) -> int | None:
        """The least peak that was found, in bytes."""
        return min((point.peak for point in self.points), default=None)

    @property
    def planning_seconds(self) -> float:
        """Of all points together, the classics aside."""
        return sum(point.planning_seconds for point in self.points)

    def best_classic(self, number: int) -> tuple[str, Point] | None:
        """The quickest classic at a budget."""
        found = [(name, point) for name, points in self.classics.items() if (point := points[number]) is not None]
        return min(found, key=lambda item: item[1].overhead, default=None)

    def to_json(self) -> dict[str, Any]:
        """All of it as plain data."""
        return {
            "eager_peak": self.eager_peak,
            "rows": [{**_row(point), "part": self.part(point.budget), "gap": point.gap} for point in self.points],
            "classics": {
                name: [None if point is None else _row(point) for point in points]
                for name, points in self.classics.items()
            },
            "techniques": {
                one.name: [{**_row(point), "part": self.part(point.budget)} for point in one.points]
                for one in self.techniques
            },
        }

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = min(options.max_width, WIDEST)
        yield Text(self.heading.target, style="bold")
        planned = f"{len(self.points)} budgets planned in {show_seconds(self.planning_seconds)}"
        yield Text(f"{self.heading.optimizer} · {self.ops:,} ops · {planned}")
        yield Text(self.heading.costs, style="dim")
        yield Text("\nLeast time against peak", style="bold")
        yield self._table()
        yield Text(
            f"  of eager: the budget without the persistent {show_bytes(self.persistent)} as a part of what eager adds",
            style="dim",
        )
        yield Text("\nOverhead against budget", style="bold")
        for line in self._plot(min(width, 100) - 2):
            yield Text(f"  {line}".rstrip(), no_wrap=True, overflow="ignore")
        if self.classics:
            yield from self._classics(width)
        if self.techniques:
            yield Text("\nWhat is allowed besides, alone and together", style="bold")
            yield self._techniques()
        if self.notes:
            yield Text("\nNotes", style="bold")
            yield from (Text(fill(note, width, initial_indent="  ", subsequent_indent="    ")) for note in self.notes)

    def _table(self) -> Table:
        rows = []
        for number, point in enumerate(self.points):
            classic = self.best_classic(number)
            rows.append(
                [
                    show_bytes(point.budget),
                    f"{100 * self.part(point.budget):.1f}%",
                    show_bytes(point.peak),
                    show_overhead(point.overhead),
                    show_overhead(point.bound),
                    f"{abs(100 * point.gap):.2f}",
                    NOTHING if classic is None else f"{show_overhead(classic[1].overhead)} {classic[0]}",
                ]
            )
        titles = ["budget", "of eager", "peak", "overhead", "bound", "gap", "best classic"]
        styles = ["bold", "", "", "bold", "", "", ""]
        if not self.classics:
            rows, titles, styles = [row[:-1] for row in rows], titles[:-1], styles[:-1]
        return Table("rrrrrrs"[: len(titles)], rows, titles, styles, 2)

    def _classics(self, width: int) -> Iterator[RenderableType]:
        """Each classic's overhead at as many budgets as there is room for."""
        names = {"lowtide": self.points, **self.classics}
        room = max(2, (width - 2 - max(map(len, names))) // 6)
        count = len(self.points)
        shown = sorted({round(n * (count - 1) / max(1, min(room, count) - 1)) for n in range(min(room, count))})
        rows = [[name, *(_percent(points[number]) for number in shown)] for name, points in names.items()]
        titles = ["of eager", *(f"{100 * self.part(self.points[number].budget):.0f}%" for number in shown)]
        yield Text("\nOverhead of each method, in percent", style="bold")
        yield Table("l" + "r" * len(shown), rows, titles, ("bold", *[""] * len(shown)), 2)
        yield Text(f"  {NOTHING}: it has no plan within that budget", style="dim")

    def _techniques(self) -> Table:
        """How far down each technique goes, and what it costs there and where nothing is changed at all."""
        least = self.least_feasible or 0
        rows = []
        for one in self.techniques:
            there, here = one.least, one.within(least)
            share = f"{100 * self.part(there.peak):.1f}%"
            costs = [show_overhead(there.overhead), NOTHING if here is None else show_overhead(here.overhead)]
            rows.append([one.name, show_bytes(there.peak), share, *costs, one.keeps])
        at = f"at {show_bytes(least)}"
        return Table("lrrrrs", rows, ["technique", "least", "of eager", "overhead", at, ""], ("bold", *[""] * 5), 2)

    def _plot(self, width: int) -> Iterator[str]:
        """What no plan can do is solid, what is not known shaded; its upper edge is the frontier."""
        best = [self.best_classic(number) for number in range(len(self.points))]
        classics = [item[1] for item in best if item is not None]
        top = _top([point.overhead for point in self.points], [point.overhead for point in classics])
        low, high = self.points[0].budget, self.points[-1].budget
        labels = {HEIGHT - 1: show_overhead(top), HEIGHT // 2 - 1: show_overhead(top * (HEIGHT // 2) / HEIGHT)}
        margin = max(map(len, labels.values()))
        columns = max(width - margin - 2, 10)
        cells = [self._column(low + (high - low) * n / max(1, columns - 1), top, classics) for n in range(columns)]
        for row in reversed(range(HEIGHT)):
            yield f"{labels.get(row, ''):>{margin}} ┤{''.join(column[row] for column in cells)}"
        yield f"{'0%':>{margin}} ┼{'─' * columns}"
        left, right = show_bytes(low), show_bytes(high)
        yield " " * (margin + 2) + left + " " * max(1, columns - len(left) - len(right)) + right
        legend = ["█ no plan can be here", "▒ not known", "above: lowtide's plans"]
        legend += ["○ the best classic"] if classics else []
        legend += ["▲ goes on"] if any("▲" in column for column in cells) else []
        yield " " * (margin + 2) + "   ".join(legend)

    def _column(self, budget: float, top: float, classics: Sequence[Point]) -> str:
        """The characters above one budget, the lowest first."""
        found = min((point.overhead for point in self.points if point.peak <= budget), default=top)
        bound = next((point.bound for point in self.points if point.budget >= budget), 0.0)
        cells = []
        for row in range(HEIGHT):
            level = (row + 0.5) / HEIGHT * top
            cells.append("█" if level <= bound else "▒" if level <= found else " ")
        if found > top:
            cells[-1] = "▲"
        classic = min((point.overhead for point in classics if point.peak <= budget), default=None)
        if classic is not None and classic <= top:
            cells[min(HEIGHT - 1, int(classic / top * HEIGHT))] = "○"
        return "".join(cells)


def _top(ours: Sequence[float], classics: Sequence[float]) -> float:
    """The highest overhead of a plot; the few budgets that are far dearer than all others run out of it."""
    rest = max((*ours[1:], *classics[1:]), default=0.0)
    highest = max((*ours, *classics))
    return (highest if highest <= 3 * rest else 1.2 * rest) or highest or 0.01


def _row(point: Point) -> dict[str, Any]:
    row = asdict(point)
    return {"predicted_peak" if key == "peak" else key: amount for key, amount in row.items()}


def _percent(point: Point | None) -> str:
    if point is None:
        return NOTHING
    percent = abs(100 * point.overhead)
    return f"{percent:.0f}" if percent >= 100 else f"{percent:.1f}"
