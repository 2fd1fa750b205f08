"""Any noun -> something a person reads."""

from __future__ import annotations

from lowtide.report.batch import BatchReport
from lowtide.report.bytes import show_bytes, show_difference, show_seconds
from lowtide.report.diff import Diff, diff, side
from lowtide.report.explain import Explanation, explain, find_values
from lowtide.report.fitted import Measured, show_fitted
from lowtide.report.frontier import Frontier, Point, Technique
from lowtide.report.offloaded import Offloaded, offloaded, show_offloaded
from lowtide.report.pace import Paced, PaceReport, paced
from lowtide.report.page import (
    Advice,
    Metered,
    Page,
    Step,
    Track,
    document_of,
    refuse_page,
    show_advice,
    track,
    write_page,
)
from lowtide.report.plan import PlanReport, Summary, show_overhead, show_rewrite, summarize
from lowtide.report.profile import Profile, profile
from lowtide.report.show import Heading, Peaks, Report, describe_costs
from lowtide.report.story import Story
from lowtide.report.table import Table
from lowtide.report.timeline import snapshot, trace_events

__all__ = [
    "Advice",
    "BatchReport",
    "Diff",
    "Explanation",
    "Frontier",
    "Heading",
    "Measured",
    "Metered",
    "Offloaded",
    "PaceReport",
    "Paced",
    "Page",
    "Peaks",
    "PlanReport",
    "Point",
    "Profile",
    "Report",
    "Step",
    "Story",
    "Summary",
    "Table",
    "Technique",
    "Track",
    "describe_costs",
    "diff",
    "document_of",
    "explain",
    "find_values",
    "offloaded",
    "paced",
    "profile",
    "refuse_page",
    "show_advice",
    "show_bytes",
    "show_difference",
    "show_fitted",
    "show_offloaded",
    "show_overhead",
    "show_rewrite",
    "show_seconds",
    "side",
    "snapshot",
    "summarize",
    "trace_events",
    "track",
    "write_page",
]
