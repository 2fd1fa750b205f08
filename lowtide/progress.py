"""What takes long says so: plain lines, the first once it has taken a while, then now and then."""

from __future__ import annotations

import sys
from collections.abc import Callable
from threading import Event, Thread
from time import monotonic

SILENCE = 2.0  # seconds of work before the first line
APART = 10.0  # seconds between lines


def to_stderr(line: str) -> None:
    """Write a line to where talk goes, if there is such a place."""
    if sys.stderr is not None:
        print(line, file=sys.stderr, flush=True)


class Spoken:
    """A context in which `news` is what was done last; what is over in two seconds says nothing."""

    def __init__(self, what: str, say: Callable[[str], None] = to_stderr) -> None:
        self.what, self.news = what, ""
        self._write = say
        self._said: str | None = None

    def __enter__(self) -> Spoken:
        self.news, self._said = "", None
        self._begun, self._over = monotonic(), Event()
        self._thread = Thread(target=self._speak, args=(self._over,), daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        if self._said is not None:
            self._write(f"{self.what}: {monotonic() - self._begun:.1f} s")

    def _speak(self, over: Event) -> None:
        pause = SILENCE
        while not over.wait(pause):
            pause = APART
            line = f"{self.what}: {self.news}" if self.news else f"{self.what}..."
            if line != self._said:
                self._said = line
                self._write(line)
