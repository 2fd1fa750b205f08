"""Lines over logarithmic axes, as an SVG file that needs nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from math import ceil, floor, log10

WIDTH, HEIGHT = 760, 480  # pixels
LEFT, RIGHT, TOP, BOTTOM = 70, 210, 40, 50  # margins, in pixels
COLOURS = ("#777777", "#d55e00", "#e69f00", "#0072b2", "#009e73")  # told apart by those who see few colours, too
DASHES = ("2 4", "8 4", "8 3 2 3", "", "")


Line = Sequence[float | None]  # None: no point there


def draw(title: str, across: Sequence[float], series: Mapping[str, Line], *, x: str, y: str) -> str:
    """The lines of `series` over `across`, each with its name at its end; one without points is left out."""
    lines = {
        name: [(at, value) for at, value in zip(across, line, strict=True) if value] for name, line in series.items()
    }
    values = [value for line in lines.values() for _, value in line]
    columns, rows = _decades(across), _decades(values)

    def place(column: float, row: float) -> tuple[float, float]:
        return (
            LEFT + (log10(column) - columns[0]) / (columns[-1] - columns[0]) * (WIDTH - LEFT - RIGHT),
            HEIGHT - BOTTOM - (log10(row) - rows[0]) / (rows[-1] - rows[0]) * (HEIGHT - TOP - BOTTOM),
        )

    parts = [_text(LEFT, TOP - 16, title, weight="bold")]
    for power in columns:
        at, low = place(10.0**power, 10.0 ** rows[0])
        parts.append(_line([(at, low), (at, TOP)], "#dddddd"))
        parts.append(_text(at, low + 18, f"{10**power:,}", anchor="middle"))
    for power in rows:
        left, at = place(10.0 ** columns[0], 10.0**power)
        parts.append(_line([(left, at), (WIDTH - RIGHT, at)], "#dddddd"))
        parts.append(_text(left - 8, at + 4, f"{10.0**power:,g}", anchor="end"))
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 10, x, anchor="middle"))
    parts.append(_text(8, TOP - 16, y))
    free = float(HEIGHT)  # names do not cover each other: each is above the one before
    drawn = [(number, name, line) for number, (name, line) in enumerate(lines.items()) if line]
    for number, name, line in sorted(drawn, key=lambda item: item[2][-1][1]):
        colour = COLOURS[number % len(COLOURS)]
        points = [place(column, row) for column, row in line]
        parts.append(_line(points, colour, width=2, dash=DASHES[number % len(DASHES)]))
        free = min(points[-1][1] + 4, free - 16)
        parts.append(_text(points[-1][0] + 8, free, name, colour=colour))
    size = f'width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12">'
    return "\n".join([head, '<rect width="100%" height="100%" fill="white"/>', *parts, "</svg>", ""])


def _decades(values: Sequence[float]) -> list[int]:
    """The powers of ten around all values, at least two."""
    low, high = floor(log10(min(values))), ceil(log10(max(values)))
    return list(range(low, max(high, low + 1) + 1))


def _line(points: Sequence[tuple[float, float]], colour: str, *, width: int = 1, dash: str = "") -> str:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    dashed = f' stroke-dasharray="{dash}"' if dash else ""
    return f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{width}"{dashed}/>'


def _text(x: float, y: float, words: str, *, anchor: str = "start", colour: str = "#222222", weight: str = "") -> str:
    bold = f' font-weight="{weight}"' if weight else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}"{bold}>{escape(words)}</text>'
