"""A page in a browser, and what it did besides."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Opened:
    """A page in the browser, and what it did besides."""

    page: Any
    complaints: list[str] = field(default_factory=list)  # of the console
    requests: list[str] = field(default_factory=list)  # besides the file itself

    def numbers(self) -> dict[str, float]:
        """Every number on the page that says which one of the document it is."""
        rows = self.page.eval_on_selector_all(
            "[data-key]", "found => found.map(one => [one.dataset.key, one.dataset.value])"
        )
        return {key: float(value) for key, value in rows if value != "null"}


Opening = Callable[..., Opened]
