"""A curve as a plot of characters."""

from __future__ import annotations

from lowtide.graph import Phase
from lowtide.report.bytes import show_bytes
from lowtide.report.curve import Curve

TOPS = " ▁▂▃▄▅▆▇█"
STAYS = "░"


def plot(curve: Curve, persistent: int, *, width: int = 80, height: int = 10) -> list[str]:
    """The bytes in use over the seconds of one step: what persists is shaded, the step's own part solid."""
    peak = max(curve.nbytes, default=0)
    labels = {round(height * persistent / peak) - 1 if peak else 0: show_bytes(persistent)}
    labels[height - 1] = show_bytes(peak)  # last: where all persists, the two are one row
    margin = max(map(len, labels.values()))
    columns = max(width - margin - 2, 10)
    tops, phases = _columns(curve, columns)
    lines = [" " * (margin + 2) + _marker(tops, columns)]
    for row in reversed(range(height)):
        cells = "".join(_cell(row, top, persistent, peak, height) for top in tops)
        lines.append(f"{labels.get(row, ''):>{margin}} ┤{cells}")
    lines.append(f"{'0 B':>{margin}} ┼{_axis(phases)}")
    lines.append(" " * (margin + 2) + _names(phases))
    return lines


def _columns(curve: Curve, columns: int) -> tuple[list[int], list[Phase]]:
    """For each column the most bytes in it, and the phase that it starts in."""
    tops = [0] * columns
    phases: list[Phase] = ["forward"] * columns
    scale = columns / curve.seconds if curve.seconds else 0.0
    ends = (*curve.starts[1:], curve.seconds)
    for stretch in curve.phases:
        for number in range(stretch.start, stretch.end):
            first = min(int(curve.starts[number] * scale), columns - 1)
            last = max(first, min(int(ends[number] * scale), columns - 1))
            for column in range(first, last + 1):
                tops[column] = max(tops[column], curve.nbytes[number])
                phases[column] = stretch.phase
    return tops, phases


def _cell(row: int, top: int, persistent: int, peak: int, height: int) -> str:
    """One character: an eighth of it is the smallest step upwards."""
    eighths = min(max(round(8 * height * top / peak) - 8 * row, 0), 8) if peak else 0
    if eighths and row < round(height * persistent / peak):
        return STAYS
    return TOPS[eighths]


def _marker(tops: list[int], columns: int) -> str:
    """The arrow over the highest column, with its name on the side where there is room."""
    at = tops.index(max(tops))
    return f"{' ' * at}▼ peak" if at + 6 <= columns else f"{' ' * (at - 5)}peak ▼"


def _runs(phases: list[Phase]) -> list[tuple[Phase, int]]:
    """Phases that follow each other, with their number of columns."""
    runs: list[tuple[Phase, int]] = []
    for phase in phases:
        if runs and runs[-1][0] == phase:
            runs[-1] = (phase, runs[-1][1] + 1)
        else:
            runs.append((phase, 1))
    return runs


def _axis(phases: list[Phase]) -> str:
    """The line under the plot, with a mark where a phase begins."""
    line = "".join("┬" + "─" * (length - 1) for _, length in _runs(phases))
    return "─" + line[1:]


def _names(phases: list[Phase]) -> str:
    """The name of each phase under its beginning, as far as there is room."""
    columns = len(phases)
    line = [" "] * columns
    free = 0
    start = 0
    for phase, length in _runs(phases):
        name = str(phase)
        at = min(start, columns - len(name))
        if at >= free:
            line[at : at + len(name)] = name
            free = at + len(name) + 1
        start += length
    return "".join(line).rstrip()
