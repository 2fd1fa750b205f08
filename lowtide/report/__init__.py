"""Any noun -> something a person reads."""

from __future__ import annotations

from lowtide.report.batch import BatchReport
from lowtide.report.bytes import show_bytes, show_difference, show_seconds
from lowtide.report.explain import Explanation, explain, find_values
from lowtide.report.fitted import Measured, show_fitted
from lowtide.report.frontier import Frontier, Point, Technique
from lowtide.report.offloaded import Offloaded, offloaded, show_offloaded
from lowtide.report.plan import PlanReport, Summary, show_overhead, show_rewrite, summarize
from lowtide.report.profile import Profile, profile
from lowtide.report.show import Heading, Peaks, Report
from lowtide.report.story import Story
from lowtide.report.table import Table

__all__ = [
    "BatchReport",
    "Explanation",
    "Frontier",
    "Heading",
    "Measured",
    "Offloaded",
    "Peaks",
    "PlanReport",
    "Point",
    "Profile",
    "Report",
    "Story",
    "Summary",
    "Table",
    "Technique",
    "explain",
    "find_values",
    "offloaded",
    "profile",
    "show_bytes",
    "show_difference",
    "show_fitted",
    "show_offloaded",
    "show_overhead",
    "show_rewrite",
    "show_seconds",
    "summarize",
]
