"""Tables without lines that never cut a number: columns of names shrink in the middle, columns of words wrap."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from textwrap import wrap

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

GAP = 2  # characters between columns
NARROWEST = {"s": 8, "w": 24}  # characters that a column keeps, however little room there is


@dataclass(frozen=True)
class Table:
    """Rows of text; `Console.print` shows them, `markdown` writes them for a README."""

    justify: str  # a letter for each column: l, r; left ones where there is no room for all: s shrinks, w wraps
    rows: Sequence[Sequence[str]]
    titles: Sequence[str] = ()
    styles: Sequence[str] = ()  # for each column
    indent: int = 0

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        widths = self._widths(options.max_width)
        if self.titles:
            yield self._line(self.titles, widths, ["dim"] * len(widths))
        for row in self.rows:
            for line in self._wrapped(row, widths):
                yield self._line(line, widths, self.styles)

    def markdown(self) -> str:
        """The table as a README has it."""
        rule = ["---:" if letter == "r" else "---" for letter in self.justify]
        rows = [self.titles or [""] * len(self.justify), rule, *self.rows]
        return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows)

    def _widths(self, room: int) -> list[int]:
        """The width of each column: the widest one that may give way does, until all fit or it is short."""
        cells = [*([self.titles] if self.titles else []), *self.rows]
        widths = [max((len(row[place]) for row in cells), default=0) for place in range(len(self.justify))]
        yielding = [place for place, letter in enumerate(self.justify) if letter in NARROWEST]
        room -= self.indent + GAP * (len(widths) - 1)
        while sum(widths) > room:
            wide = [place for place in yielding if widths[place] > NARROWEST[self.justify[place]]]
            if not wide:
                break
            widths[max(wide, key=widths.__getitem__)] -= 1
        return widths

    def _wrapped(self, row: Sequence[str], widths: Sequence[int]) -> Iterator[tuple[str, ...]]:
        """The lines of a row: one, or more where words wrap."""
        cells = [
            wrap(cell, width) or [""] if letter == "w" else [cell]
            for cell, width, letter in zip(row, widths, self.justify, strict=True)
        ]
        return zip_longest(*cells, fillvalue="")

    def _line(self, row: Sequence[str], widths: Sequence[int], styles: Sequence[str]) -> Text:
        line = Text(" " * self.indent, no_wrap=True, overflow="ignore")
        for place, (cell, width) in enumerate(zip(row, widths, strict=True)):
            shown = shorten(cell, width)
            shown = shown.rjust(width) if self.justify[place] == "r" else shown.ljust(width)
            line.append(shown, style=styles[place] if styles else None)
            line.append(" " * GAP)
        line.rstrip()
        return line


def shorten(text: str, width: int) -> str:
    """The text with its middle left out where it is too long: `models/transf…er.py:51`."""
    if len(text) <= width:
        return text
    tail = (width - 1) // 2
    return f"{text[: width - 1 - tail]}…{text[len(text) - tail :]}"
