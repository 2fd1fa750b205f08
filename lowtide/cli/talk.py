"""How the commands talk: data to stdout, talk to stderr, errors as answers."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout
from time import monotonic
from typing import Any, ParamSpec

import typer
from rich.console import Console, RenderableType
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from lowtide.errors import LowtideError
from lowtide.progress import Spoken

Arguments = ParamSpec("Arguments")
PATIENCE = 0.7  # seconds of silence before a progress bar appears


def talk() -> Console:
    """Where talk goes."""
    return Console(stderr=True, highlight=False)


def show(report: RenderableType) -> None:
    """Print a report."""
    Console(highlight=False).print(report, crop=False)


def show_text(text: str) -> None:
    """Print lines as they are, however wide the terminal."""
    sys.stdout.write(text + "\n")


def show_json(data: dict[str, Any]) -> None:
    """Print one JSON object."""
    sys.stdout.write(json.dumps(data, indent=2, allow_nan=False) + "\n")


def answering(command: Callable[Arguments, None]) -> Callable[Arguments, None]:
    """Let a command end with an answer instead of a traceback."""

    @functools.wraps(command)
    def answer(*args: Arguments.args, **kwargs: Arguments.kwargs) -> None:
        try:
            command(*args, **kwargs)
        except LowtideError as error:
            _tell("error", error.message, "bold red")
            if error.hint is not None:
                _tell("hint", error.hint, "bold")
            raise typer.Exit(error.exit_code) from None
        except MemoryError:
            _tell("error", "there is no memory left to go on with; nothing was saved.", "bold red")
            _tell("hint", "end what else uses the memory, or raise the limits of this process (ulimit -d, -v).", "bold")
            raise typer.Exit(1) from None
        except KeyboardInterrupt:
            _tell("interrupted", "nothing was saved.", "bold")
            raise typer.Exit(130) from None

    return answer


def _tell(word: str, message: str, style: str) -> None:
    console = talk()
    console.print(f"{word}:", style=style, end=" ")
    console.print(message, markup=False, soft_wrap=True)


def spoken(what: str) -> Spoken:
    """Progress in plain lines, for pipes and files."""
    return Spoken(what, lambda line: talk().print(line, markup=False, soft_wrap=True))


@contextmanager
def working(what: str) -> Iterator[None]:
    """Say what takes long; what other code prints meanwhile is talk, too."""
    console = talk()
    shown = console.status(f"{what}...") if console.is_terminal else spoken(what)
    with redirect_stdout(sys.stderr), shown:
        yield


@contextmanager
def telling(what: str) -> Iterator[Callable[[str], None]]:
    """Say what was done last."""
    console = talk()
    with redirect_stdout(sys.stderr):
        if not console.is_terminal:
            with spoken(what) as lines:
                yield lambda message: setattr(lines, "news", message)
            return
        with console.status(what) as status:
            yield lambda message: status.update(escape(message))


@contextmanager
def counting(what: str, *, patience: float = PATIENCE) -> Iterator[Callable[[int, int], None]]:
    """A progress bar that appears in a terminal once the work has taken a while; call it with (done, total)."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    bar = Progress(*columns, console=talk(), transient=True)
    task = bar.add_task(what, total=None)
    started = monotonic()
    lines = nullcontext() if bar.console.is_terminal else spoken(what)

    def progress(done: int, total: int) -> None:
        if not bar.live.is_started and bar.console.is_terminal and monotonic() - started > patience:
            bar.start()
        bar.update(task, completed=done, total=total)
        if isinstance(lines, Spoken):
            lines.news = f"{done} of {total}"

    try:
        with redirect_stdout(sys.stderr), lines:
            yield progress
    finally:
        if bar.live.is_started:
            bar.stop()
