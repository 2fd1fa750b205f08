"""A fitted step: what its plan promises, and what was measured of it."""

from __future__ import annotations

from dataclasses import dataclass
from io import StringIO

from rich.console import Console

from lowtide.report.bytes import show_bytes, show_difference, show_seconds
from lowtide.report.forgotten import forgotten_values
from lowtide.report.offloaded import show_offloaded
from lowtide.report.plan import Summary, show_overhead, show_rewrite
from lowtide.report.table import Table
from lowtide.rewrites import KEEPS, exactness


@dataclass(frozen=True)
class Measured:
    """What the steps of a fitted step did."""

    peak: int | None  # bytes, metered; None: not yet, or there is no meter
    arena: int  # bytes
    mismatches: int  # allocations that did not come as planned
    shapes: int  # of batches that were planned
    seconds: float | None = None  # of a step; None: not yet
    resident: int = 0  # bytes of offload files that are in memory now


def show_fitted(summary: Summary, measured: Measured) -> str:
    """The fitted step as text."""
    peak = "-" if measured.peak is None else show_bytes(measured.peak)
    off = "no step has run in the arena yet" if measured.peak is None else ""
    if measured.peak is not None:
        off = f"the prediction is off by {show_difference(measured.peak, summary.peak)}"
    took, wrong = "-", ""
    if measured.seconds is not None:
        took = show_seconds(measured.seconds)
        wrong = f"the prediction is off by {summary.seconds / measured.seconds - 1:+.1%}"
    rows = [
        ("budget", "-" if summary.budget is None else show_bytes(summary.budget), ""),
        ("predicted peak", show_bytes(summary.peak), f"{show_bytes(summary.persistent)} persists between steps"),
        ("metered peak", peak, off),
        ("arena", show_bytes(measured.arena), "one block, kept between steps"),
        ("eager, predicted", show_bytes(summary.eager_peak), ""),
        ("predicted step", show_seconds(summary.seconds), ""),
        ("measured step", took, wrong),
        ("overhead", show_overhead(summary.overhead), f"the bound is {show_overhead(summary.bound)}"),
        ("runs", f"{summary.runs:,}", f"of {summary.ops:,} ops; planned in {show_seconds(summary.planning_seconds)}"),
    ]
    if changing := [one for one in summary.rewrites if one.exactness != "bitwise"]:
        rows.append(("rewritten", ", ".join(map(show_rewrite, changing)), KEEPS[exactness(changing)]))
    if tried := [one for one in summary.rewrites if one.tried]:
        rows.append(
            ("own kernels", ", ".join(map(show_rewrite, tried)), "tried here: torch's bits in every call, sooner")
        )
    rows += show_offloaded(summary.offloaded)
    if summary.offloaded:
        rows.append(("pages in memory", show_bytes(measured.resident), "now, of offload files; beside the peak"))
    for item in summary.forgotten:
        again = f"lowtide.recompute of {item.function}: {forgotten_values([item])}"
        rows.append(("forgotten by hand", show_seconds(item.seconds), again))
    if measured.mismatches:
        rows.append(("mismatches", f"{measured.mismatches:,}", "allocations that came otherwise than planned"))
    if measured.shapes > 1:
        rows.append(("shapes", str(measured.shapes), "of batches, each with a plan of its own"))
    text = StringIO()
    Console(file=text, width=120, color_system=None).print(Table("lrw", rows))
    return text.getvalue().rstrip()
