"""Nouns -> one page that opens anywhere: a JSON document, and the HTML that shows it."""

from __future__ import annotations

from lowtide.report.page.document import Advice, Metered, Page, Step, show_advice
from lowtide.report.page.html import document_of, refuse_page, write_page
from lowtide.report.page.track import Track, track

__all__ = [
    "Advice",
    "Metered",
    "Page",
    "Step",
    "Track",
    "document_of",
    "refuse_page",
    "show_advice",
    "track",
    "write_page",
]
