"""`lowtide pebble`: the pebble game, watched and played."""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer
from rich.live import Live
from rich.text import Text

from lowtide import report
from lowtide.budget import read_budget
from lowtide.cli.profile import CostsFrom, Json, captured_target, costs_of
from lowtide.cli.report import Force
from lowtide.cli.talk import answering, show_json, show_text, talk, working
from lowtide.errors import BudgetError, UsageError
from lowtide.game import GAMES, Game, Move, after, folded, named, why_not
from lowtide.plan.games import Solution, frontier, least_once, least_pebbles, left, quickest
from lowtide.report.pebble import (
    Frame,
    PebblePage,
    Play,
    frames,
    show_amount,
    show_board,
    show_count,
    show_moves,
    show_plays,
    show_time,
)

GRAPH = (
    f"A graph to pebble: {', '.join(GAMES)}, as in chain:length=10; or a step as in `lowtide profile`, folded to its "
)
GRAPH += "modules."
PEBBLES = "How many pebbles there are; bytes (2MiB) for a step."
OUT = "Write the game as a page here, to watch and to play."
PAUSE = 0.35  # seconds between moves


@answering
def pebble(
    graph: Annotated[str, typer.Argument(help=GRAPH, show_default=False)],
    pebbles: Annotated[
        str | None, typer.Option(metavar="<number>", help=PEBBLES, show_default="somewhat less than is easy")
    ] = None,
    once: Annotated[bool, typer.Option("--one-shot", help="Compute nothing twice; then fewest pebbles win.")] = False,
    play: Annotated[bool, typer.Option("--play", help="Play by hand: 5 places a pebble, -5 takes it off.")] = False,
    out: Annotated[Path | None, typer.Option(dir_okay=False, metavar="<file>", help=OUT, show_default=False)] = None,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Watch the pebble game, or play it.

    Nodes are computations, pebbles are memory. In a terminal space plays and pauses, arrows step, q ends.
    """
    if out is not None:
        report.refuse_page(out, force=force)
    game = _game(graph)
    with working("solving the game"):
        page = _solved(game, _budget(game, pebbles), once)
    chosen = page.plays[0]
    if out is not None:
        report.write_page(out, page.to_json(), kind="pebble", title=f"{game.name} · pebbles", force=force)
        talk().print(f"saved to {out}", markup=False, soft_wrap=True)
    if as_json:
        show_json(page.to_json())
    elif play:
        _by_hand(game, chosen)
    elif out is None and sys.stdin.isatty() and sys.stdout.isatty():
        _watch(game, chosen)
    else:
        for line in show_plays(page):
            show_text(line)
        if out is None:
            show_text(f"\n{chosen.name}")
            for line in show_moves(game, chosen):
                show_text(line)


def _game(graph: str) -> Game:
    found = named(graph)
    if found is not None:
        return found
    _, captured, _ = captured_target(graph)
    return folded(graph, captured.graph, costs_of(captured.graph, CostsFrom.ROOFLINE))


def _budget(game: Game, pebbles: str | None) -> int | None:
    if pebbles is None:
        return None
    if game.folded:
        once = least_once(game).budget
        return read_budget(pebbles, persistent=0, eager_peak=once)
    if not pebbles.isdecimal() or not int(pebbles):
        raise UsageError(f"{pebbles!r} is no number of pebbles.", hint="write --pebbles 4.")
    return int(pebbles)


def _solved(game: Game, budget: int | None, once: bool) -> PebblePage:
    """The game with its plays, the one that is asked for first."""
    alone, (least, _) = least_once(game), least_pebbles(game)
    single = _play(game, alone, once=True)
    ladder = frontier(game)
    if once:
        if budget is not None and budget < alone.budget:
            raise _too_few(game, budget, alone.budget, "when nothing is computed twice")
        first = single
    else:
        if budget is not None and budget < least:
            raise _too_few(game, budget, least, "however often nodes are computed")
        wanted = budget if budget is not None else _fair(ladder, alone)
        found = quickest(game, wanted) or next((one for one in reversed(ladder) if one.budget <= wanted), alone)
        first = _play(game, Solution(wanted, found.moves, found.seconds, found.proven), once=False)
    others = [_play(game, one, once=False) for one in ladder]
    plays = [first, *(one for one in (*others, single) if (one.budget, one.once) != (first.budget, first.once))]
    return PebblePage(game, plays, least, version("lowtide"))


def _fair(ladder: list[Solution], alone: Solution) -> int:
    """A number of pebbles that asks for some thought: in the middle of the frontier."""
    return ladder[len(ladder) // 3].budget if ladder else alone.budget


def _play(game: Game, found: Solution, *, once: bool) -> Play:
    kind = "one-shot" if once else "multi-shot"
    amount = show_amount(game, found.budget)
    name = f"{kind} within {amount}" if game.folded else f"{kind} with {amount} pebbles"
    return Play(name, found.budget, found.moves, found.seconds, found.proven, once)


def _too_few(game: Game, budget: int, least: int, how: str) -> BudgetError:
    needed = show_amount(game, least)
    return BudgetError(
        f"{game.name} can't be pebbled with {show_amount(game, budget)}: it takes {needed}, {how}.",
        hint=f"pass --pebbles {least}.",
        least=least,
    )


# ----------------------------------------------------------------------------------------------------------- to watch


def _watch(game: Game, play: Play) -> None:
    """Play the moves in a terminal: space plays and pauses, arrows step, home and end jump, q ends."""
    found = frames(game, play.moves)
    at, playing = 0, True
    with _keys() as key, Live(_picture(game, play, found[0]), console=None, auto_refresh=False, screen=False) as live:
        while True:
            pressed = key(PAUSE if playing else None)
            if pressed == "q":
                break
            if pressed == " ":
                playing = not playing
            step = {"right": 1, "left": -1, "home": -len(found), "end": len(found)}.get(pressed, 0)
            if pressed == "" and playing:
                step = 1
            elif step:
                playing = False
            at = min(max(at + step, 0), len(found) - 1)
            live.update(_picture(game, play, found[at]), refresh=True)
            if playing and at == len(found) - 1:
                break


def _picture(game: Game, play: Play, frame: Frame) -> Text:
    lines = [f"{game.name}, {play.name}", "", *show_board(game, frame), "", show_count(game, play, frame)]
    lines.append(f"move {frame.number} of {len(play.moves)}   space: play or pause   ← →: step   q: end")
    return Text("\n".join(lines))


@contextmanager
def _keys() -> Iterator[Callable[[float | None], str]]:
    """Keys as they are pressed: a letter, or the name of an arrow; "" where none came in time."""
    import termios
    import tty

    file = sys.stdin.fileno()
    before = termios.tcgetattr(file)
    names = {"\x1b[C": "right", "\x1b[D": "left", "\x1b[H": "home", "\x1b[F": "end"}

    def key(patience: float | None) -> str:
        if not select.select([file], [], [], patience)[0]:
            return ""
        pressed = os.read(file, 8).decode("utf-8", "replace")
        return names.get(pressed, pressed[:1] or "q")

    try:
        tty.setcbreak(file)
        yield key
    finally:
        termios.tcsetattr(file, termios.TCSADRAIN, before)


# ------------------------------------------------------------------------------------------------------------ by hand


def _by_hand(game: Game, play: Play) -> None:
    """Moves from stdin, a line each, until every sink has its pebble; the optimum is told at the end, and how far."""
    pebbles: frozenset[int] = frozenset()
    had: frozenset[int] = frozenset()
    spent, number = 0.0, 0
    numbers = {label: node for node, label in enumerate(game.labels)}
    show_text(f"{game.name}, {play.name}. Write a node to place a pebble, -node to take it off; empty to end.")
    while not pebbles.issuperset(game.sinks):
        frame = Frame(number, pebbles, had, spent, None)
        for line in show_board(game, frame):
            show_text(line)
        show_text(f"{show_count(game, play, frame)}; {_distance(game, play, pebbles, had, spent)}")
        line = sys.stdin.readline().strip()
        if not line:
            show_text("not finished.")
            return
        label = line.removeprefix("-")
        if label not in numbers:
            show_text(f"there is no node {label}.")
            continue
        move = Move(not line.startswith("-"), numbers[label])
        reason = why_not(game, pebbles, move, budget=play.budget, done=had if play.once else None)
        if reason is not None:
            show_text(reason)
            continue
        pebbles, number = after(pebbles, move), number + 1
        if move.place:
            had, spent = had | {move.node}, spent + game.seconds[move.node]
    more = spent - play.seconds
    verdict = "that is the optimum" if play.proven else "as good as the best that is known"
    if more > 1e-9:
        verdict = f"the optimum is {show_time(game, play.seconds)}: {show_time(game, more)} more"
    show_text(f"done in {show_time(game, spent)}; {verdict}.")


def _distance(game: Game, play: Play, pebbles: frozenset[int], had: frozenset[int], spent: float) -> str:
    """How far a player is from the best that is still possible, and that from the optimum."""
    rest = left(game, pebbles, play.budget, had if play.once else None)
    if rest is None:
        return "how many more are needed is not known"
    if rest == float("inf"):
        return "from here it can't be won"
    more = spent + rest - play.seconds
    lost = "" if more < 1e-9 else f", {show_time(game, more)} more than the optimum"
    return f"at least {show_time(game, rest)} to go{lost}"
