"""Any noun -> something a person reads."""

from __future__ import annotations

from lowtide.report.bytes import show_bytes, show_difference, show_seconds
from lowtide.report.plan import PlanReport, Summary, show_overhead, summarize
from lowtide.report.profile import Profile, profile
from lowtide.report.show import Heading, Peaks, Report
from lowtide.report.table import Table

__all__ = [
    "Heading",
    "Peaks",
    "PlanReport",
    "Profile",
    "Report",
    "Summary",
    "Table",
    "profile",
    "show_bytes",
    "show_difference",
    "show_overhead",
    "show_seconds",
    "summarize",
]
