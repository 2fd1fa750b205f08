"""A profile as a person reads it in a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from textwrap import fill

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.text import Text

from lowtide.costs import Costs
from lowtide.report.bytes import bar, show_bytes, show_difference, show_seconds, show_share
from lowtide.report.modules import lines
from lowtide.report.plot import plot
from lowtide.report.profile import TOP, Profile
from lowtide.report.table import Table

WEIGHTS = ("parameters", "gradients", "optimizer state", "buffers")
VALUES = 10  # rows of the table of the largest values
TIMES = "\N{MULTIPLICATION SIGN}"
WIDEST = 120  # columns; a report is not made wider than this


@dataclass(frozen=True)
class Heading:
    """What is profiled."""

    target: str
    optimizer: str
    costs: str  # where they come from, in a line
    capture_seconds: float | None = None  # None: not shown


def describe_costs(costs: Costs) -> str:
    """Where costs come from, in a line."""
    return f"costs: {'measured on' if costs.origin == 'measured' else 'roofline of'} {costs.machine}"


@dataclass(frozen=True)
class Peaks:
    """Peaks in bytes beside the one of the profile; None where there was no run."""

    eager_predicted: int
    program: int | None = None  # metered
    eager: int | None = None  # metered
    interpreter: int | None = None  # resident bytes of Python and torch before the model was built


@dataclass(frozen=True)
class Report:
    """A profile with its heading, the metered peaks and the notes; `Console.print` shows it."""

    heading: Heading
    profile: Profile
    peaks: Peaks
    notes: Sequence[str] = ()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = min(options.max_width, WIDEST)
        yield from _head(self.heading, self.profile)
        yield from section("Peak of one step", _peaks(self.profile, self.peaks, width))
        yield from section("Alive at the peak, by category", _categories(self.profile, width))
        yield from section("Alive at the peak, by module", _modules(self.profile, width))
        yield from section("Alive at the peak, largest values", _largest(self.profile, width))
        yield from section("Over the step", _curve(self.profile, width))
        if self.notes:
            yield from section("Notes", (paragraph(note, width) for note in self.notes))


def section(title: str, body: Iterable[RenderableType]) -> Iterator[RenderableType]:
    """What stands below a title."""
    yield Text(f"\n{title}", style="bold")
    yield from body


def paragraph(text: str, width: int, style: str = "") -> Text:
    """A text in lines of this width, moved in like the tables."""
    return Text(fill(text, width, initial_indent="  ", subsequent_indent="    "), style=style)


def _head(heading: Heading, profile: Profile) -> Iterator[RenderableType]:
    facts = [f"{profile.parameters:,} parameters", heading.optimizer, f"{profile.ops:,} ops"]
    if heading.capture_seconds is not None:
        facts.append(f"captured in {show_seconds(heading.capture_seconds)}")
    yield Text(heading.target, style="bold")
    yield Text(" · ".join(facts))
    yield Text(heading.costs, style="dim")


def _peaks(profile: Profile, peaks: Peaks, width: int) -> Iterator[RenderableType]:
    parts = f"{show_bytes(profile.persistent)} persists + {show_bytes(profile.own)} is the step's own"
    rows = [("predicted", profile.peak, parts)]
    if peaks.program is not None:
        rows.append(("metered", peaks.program, _against(peaks.program, profile.peak)))
    rows.append(("eager, predicted", peaks.eager_predicted, _beside(peaks.eager_predicted, profile.peak)))
    if peaks.eager is not None:
        rows.append(("eager, metered", peaks.eager, _against(peaks.eager, peaks.eager_predicted)))
    if peaks.interpreter is not None:
        rows.append(("not counted", peaks.interpreter, "Python and torch themselves"))
    yield Table("lrw", [(name, show_bytes(nbytes), text) for name, nbytes, text in rows], (), ("", "bold", ""), 2)
    peak_op = profile.peak_op
    module = f" of {peak_op.module}" if peak_op.module else ""
    source = f", {peak_op.source}" if peak_op.source else ""
    target = peak_op.target.removesuffix(".default")
    yield paragraph(f"reached in the {peak_op.phase}: {target}{module}{source}", width)


def _against(metered: int, predicted: int) -> str:
    return f"the prediction is off by {show_difference(metered, predicted)}"


def _beside(eager: int, program: int) -> str:
    if abs(eager - program) < program / 1000:
        return "as high"
    if eager > program:
        return f"{show_bytes(eager - program)} more: PyTorch frees some values later"
    return f"{show_bytes(program - eager)} less: PyTorch adds up gradients in place, or draws again"


def _categories(profile: Profile, width: int) -> Iterator[RenderableType]:
    held = {name: nbytes for name, nbytes in profile.categories.items() if nbytes}
    largest, room = max(held.values()), max(min(width - 52, 50), 1)
    rows = [
        (name, show_bytes(nbytes), show_share(nbytes, profile.peak), bar(nbytes, largest, room))
        for name, nbytes in held.items()
    ]
    yield Table("lrrl", [*rows, ("all", show_bytes(profile.peak), "100.0%", "")], (), ("", "bold", "", "cyan"), 2)
    empty = [name for name in profile.categories if name not in held]
    if empty:
        yield paragraph(f"nothing in {', '.join(empty)}", width, "dim")


def _modules(profile: Profile, width: int) -> Iterator[RenderableType]:
    shown = lines(profile.modules)
    largest, room = max(sum(line.categories.values()) for line in shown), min(width - 76, 24)
    rows = []
    for line in shown:
        nbytes = sum(line.categories.values())
        weights = sum(line.categories.get(name, 0) for name in WEIGHTS)
        row = [
            "  " * line.depth + line.label,
            _times(line.count),
            show_bytes(nbytes),
            show_share(nbytes, profile.peak),
            show_bytes(weights) if weights else "-",
            show_bytes(nbytes - weights) if nbytes > weights else "-",
        ]
        rows.append([*row, bar(nbytes, largest, room) if room > 6 else ""])
    titles = ("module", "", "all", "", "weights", "the rest", "")
    yield Table("srrrrrl", rows, titles, ("", "", "bold", "", "", "", "cyan"), 2)
    yield paragraph("weights: parameters, gradients, optimizer state and buffers", width, "dim")


def _times(count: int) -> str:
    return f"{TIMES}{count}" if count > 1 else ""


def _largest(profile: Profile, width: int) -> Iterator[RenderableType]:
    """One line a value where the terminal is wide enough, else two."""
    wide = width >= 110
    rows: list[tuple[str, ...]] = []
    for item in profile.largest[: VALUES if wide else VALUES - 2]:
        shape = f"{item.dtype}[{'x'.join(map(str, item.shape))}]" if item.dtype else ""
        module, source = item.module or TOP, item.source or "there before the step"
        row = (show_bytes(item.nbytes), _times(item.count), item.name)
        if wide:
            rows.append((*row, shape, module, source))
        else:
            rows += [(*row, shape), ("", "", module, source)]
    if wide:
        titles = ("all", "", "value", "", "module", "made at")
        yield Table("rrslss", rows, titles, ("bold", "", "", "", "", ""), 2)
    else:
        yield Table("rrss", rows, (), ("bold", "", "", ""), 2)


def _curve(profile: Profile, width: int) -> Iterator[RenderableType]:
    for line in plot(profile.curve, profile.persistent, width=min(width, 104) - 2):
        yield Text(f"  {line}".rstrip(), no_wrap=True, overflow="ignore")
    legend = f"░ persists between steps   █ the step's own part   {show_seconds(profile.seconds)} in all ops"
    yield Text(f"  {legend}", style="dim")
