"""Throughput against batch size, as a table and bars."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from lowtide.report.bytes import bar, show_bytes
from lowtide.report.show import WIDEST
from lowtide.report.table import Table
from lowtide.rewrites import KEEPS, ROUNDING
from lowtide.sizes import Size, Sizes

NOTHING = "-"
WAYS = {
    "eager": "eager PyTorch",
    "sharing": "order, in place and one arena; nothing runs twice",
    "recompute": "values made again, or kept narrow, besides",
    "offload": "copies instead; nothing runs twice",
    "both": "recomputation and offload",
    "all": "what is allowed, besides these",
    "plan": "every lever",
}


@dataclass(frozen=True)
class BatchReport:
    """What `lowtide batch` shows."""

    target: str
    costs: str  # where they come from
    sizes: Sizes
    forward: bool = False  # of forwards without gradients, not of training steps

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = max(10, min(options.max_width, WIDEST) - 70)
        yield Text(self.target, style="bold")
        yield Text(f"within {show_bytes(self.sizes.budget)} \u00b7 costs: {self.costs}", style="dim")
        yield Text(f"\nThroughput{' of forwards' if self.forward else ''} against batch size", style="bold")
        titles = ["batch", "eager peak", "a second", "plan's peak", "a second", ""]
        yield Table("rrrrrl", list(self._rows(width)), titles, ("bold", "", "", "", "bold", ""), 2)
        yield Text("  eager in brackets does not fit; ~ follows from the sizes that were measured", style="dim")
        yield Text("\nLargest batch that fits", style="bold")
        eager = self.sizes.largest["eager"]
        rows = []
        for way, size in self.sizes.largest.items():
            meaning = WAYS.get(way) or KEEPS["rounding" if way in ROUNDING else "lossy"]
            times = f"{size / eager:.1f} times eager's" if size and eager and way != "eager" else ""
            speed = NOTHING if size is None else f"{self.sizes.throughput(size, way):.1f} a second"
            rows.append([way, NOTHING if size is None else f"{size:,}", times, speed, meaning])
        yield Table("lrrrs", rows, (), ("bold", "bold", "", "", "dim"), 2)
        yield Text(f"\nUse a batch of {self.sizes.knee}: larger ones are at most 5% quicker an example.", style="bold")

    def _rows(self, width: int) -> Iterator[list[str]]:
        throughputs = [size.throughput(size.plan) or 0.0 for size in self.sizes.points]
        best = max(throughputs, default=0.0)
        for size, throughput in zip(self.sizes.points, throughputs, strict=True):
            mark = " <- use this" if size.batch == self.sizes.knee else ""
            yield [*_cells(size), bar(throughput, best, width) + mark]


def _cells(size: Size) -> list[str]:
    eager = f"{size.throughput(size.eager):.1f}"
    return [
        f"{'' if size.measured else '~'}{size.batch:,}",
        show_bytes(size.eager.peak),
        eager if size.eager.fits else f"({eager})",
        NOTHING if size.plan is None else show_bytes(size.plan.peak),
        NOTHING if size.plan is None else f"{size.throughput(size.plan):.1f}",
    ]
