"""A pebble game and ways to play it, in lines of text and as the document of a page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from lowtide.game import Game, Move, after
from lowtide.report.bytes import show_bytes, show_seconds

KIND, VERSION = "pebble", 1
NOW, BEFORE, NEVER = "●", "○", "·"


@dataclass(frozen=True)
class Play:
    """A way to play a game."""

    name: str  # "multi-shot with 4 pebbles"
    budget: int
    moves: tuple[Move, ...]
    seconds: float
    proven: bool  # that no other way is quicker within the budget
    once: bool  # the one-shot game

    def to_json(self) -> dict[str, Any]:
        """The play as plain data: a node for each move, below zero where its pebble is taken off (-1 - node)."""
        moves = [move.node if move.place else -1 - move.node for move in self.moves]
        return {
            "name": self.name,
            "budget": self.budget,
            "moves": moves,
            "seconds": self.seconds,
            "proven": self.proven,
            "once": self.once,
        }


@dataclass(frozen=True)
class PebblePage:
    """A game, the ways to play it, and the least time for each budget."""

    game: Game
    plays: Sequence[Play]
    least: int  # pebbles with which the multi-shot game can be won
    version: str = ""  # of lowtide

    def to_json(self) -> dict[str, Any]:
        """The document."""
        game = self.game
        return {
            "lowtide": KIND,
            "version": VERSION,
            "made_by": f"lowtide {self.version}".strip(),
            "game": {
                "name": game.name,
                "needs": [list(row) for row in game.needs],
                "labels": list(game.labels),
                "rows": list(game.rows),
                "columns": list(game.columns),
                "weights": list(game.weights),
                "seconds": list(game.seconds),
                "sinks": list(game.sinks),
                "folded": game.folded,
            },
            "least": self.least,
            "plays": [play.to_json() for play in self.plays],
        }


def show_amount(game: Game, amount: int) -> str:
    """What pebbles take: their number, or bytes."""
    return show_bytes(amount) if game.folded else f"{amount}"


def show_time(game: Game, seconds: float) -> str:
    """What placements take: their number, or seconds."""
    return show_seconds(seconds) if game.folded else f"{seconds:.0f} placement{'' if seconds == 1 else 's'}"


@dataclass(frozen=True)
class Frame:
    """The game after some moves."""

    number: int  # of moves so far
    pebbles: frozenset[int]
    had: frozenset[int]  # nodes that had a pebble at some time
    seconds: float  # of placements so far
    last: Move | None


def frames(game: Game, moves: Sequence[Move]) -> list[Frame]:
    """The game before the first move, and after each."""
    found = [Frame(0, frozenset(), frozenset(), 0.0, None)]
    for number, move in enumerate(moves, 1):
        one = found[-1]
        spent = one.seconds + (game.seconds[move.node] if move.place else 0.0)
        had = one.had | {move.node} if move.place else one.had
        found.append(Frame(number, after(one.pebbles, move), had, spent, move))
    return found


def show_board(game: Game, frame: Frame, *, width: int = 100) -> Iterator[str]:
    """The nodes in rows: ● has a pebble, ○ had one, · never had; the last move is between brackets."""
    for row in dict.fromkeys(game.rows):
        nodes = sorted((n for n in range(len(game.needs)) if game.rows[n] == row), key=lambda n: (game.columns[n], n))
        line = f"{row:<9}"
        for node in nodes:
            mark = NOW if node in frame.pebbles else BEFORE if node in frame.had else NEVER
            cell = f"{game.labels[node]} {mark}"
            cell = f"[{cell}]" if frame.last is not None and frame.last.node == node else f" {cell} "
            if len(line) + len(cell) > width:
                yield line.rstrip()
                line = " " * 9
            line += cell
        yield line.rstrip()


def show_count(game: Game, play: Play, frame: Frame) -> str:
    """How many pebbles are down, and what was spent."""
    used = game.weight(frame.pebbles)
    dots = "" if game.folded else f"{NOW * used}{BEFORE * max(0, play.budget - used)}  "
    return (
        f"{dots}{show_amount(game, used)} of {show_amount(game, play.budget)}, {show_time(game, frame.seconds)} "
        f"of {show_time(game, play.seconds)}"
    )


def show_moves(game: Game, play: Play) -> Iterator[str]:
    """Every move as a line."""
    room = max(map(len, game.labels))
    for frame in frames(game, play.moves)[1:]:
        assert frame.last is not None
        word = "take off" if not frame.last.place else "place   "
        again = ""
        if frame.last.place and sum(m == frame.last for m in play.moves[: frame.number]) > 1:
            again = "  again"
        yield (
            f"{frame.number:>4}  {word}  {game.labels[frame.last.node]:<{room}}  {show_count(game, play, frame)}{again}"
        )


def show_plays(page: PebblePage) -> Iterator[str]:
    """The least time for each budget, as a table."""
    game = page.game
    yield f"{game.name}: {len(game.needs)} nodes"
    unit = "" if game.folded else " pebbles"
    yield f"  at least {show_amount(game, page.least)}{unit}, if nodes may be computed again"
    for play in page.plays:
        word = "" if play.proven else ", not proven to be the best"
        yield f"  {play.name}: {show_time(game, play.seconds)}{word}"
