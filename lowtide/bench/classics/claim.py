"""A claim: what others published, what we must reach, and what we found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from lowtide.report import show_seconds

Unit = Literal["bytes", "seconds", "time", "overhead", "share", "times", "count", "yes"]
DECIMALS = (("GB", 10**9), ("MB", 10**6), ("kB", 10**3))  # papers count in powers of ten


@dataclass(frozen=True)
class Figure:
    """One number, and the limits that it has."""

    what: str
    found: float
    unit: Unit  # "time": of eager's; "overhead": added, as a fraction; "times": less; "yes": 1 or 0
    published: str = ""  # what others reached
    most: float | None = None  # in the same unit; None: no such limit
    least: float | None = None

    @property
    def ok(self) -> bool:
        """Whether it is within its limits."""
        return (self.most is None or self.found <= self.most) and (self.least is None or self.found >= self.least)

    @property
    def shown(self) -> str:
        """The number as people read it."""
        return show(self.found, self.unit)

    @property
    def bar(self) -> str:
        """The limits as people read them."""
        if self.unit == "yes" and self.least is not None:
            return "yes"
        words = [f"at most {show(self.most, self.unit)}"] if self.most is not None else []
        words += [f"at least {show(self.least, self.unit)}"] if self.least is not None else []
        return ", ".join(words)


@dataclass(frozen=True)
class Found:
    """What came out of one claim."""

    figures: tuple[Figure, ...]
    data: dict[str, Any] = field(default_factory=dict)  # for plots, as JSON has it


@dataclass(frozen=True)
class Claim:
    """What we claim, and how to show it."""

    name: str
    summary: str  # one line
    run: Callable[[bool], Found]  # told whether sizes are to be tiny


def yes(what: str, good: bool, published: str = "") -> Figure:
    """A figure that must be a yes."""
    return Figure(what, float(good), "yes", published, least=1.0)


def show(number: float, unit: Unit) -> str:
    """A number in its unit, for people."""
    match unit:
        case "bytes":
            name, size = next((pair for pair in DECIMALS if abs(number) >= pair[1]), ("B", 1))
            return f"{number / size:.3g} {name}" if abs(number) < 1000 * size else f"{number / size:,.0f} {name}"
        case "seconds":
            return show_seconds(number)
        case "time":
            return f"{number:.3f}"
        case "overhead":
            return f"{round(number, 6) + 0.0:+.1%}"  # nothing has no sign
        case "share":
            return f"{number:.3g}" if 0 < abs(number) < 1e-3 else f"{number:.1%}"
        case "times":
            return f"{number:.2f} times"
        case "count":
            return f"{number:,.0f}"
        case "yes":
            return "yes" if number else "no"
