"""Runs what the docs show: fenced blocks of a Markdown file, from top to bottom, in one folder of their own.

- A block ```` ```python title="name.py" ```` is a file of that name.
- A block ```` ```console ```` holds commands, each behind `$ `, and under each what it prints.
- `… s` in shown output stands for a time that the clock gives, in any unit (`0.3 s`, `41.3 ms`), and for nothing else:
  bytes are never left out so. A line `[…]` stands for lines that are left out, and is seen by the reader.
- A console block with `needs="name"` is run where lowtide has a door or a command of that name.
- `pip` and `make` are not run: other tests install lowtide, and what make is asked for is a target of the Makefile.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

FENCE = re.compile(r"^( *)```(\w*)(.*?)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
TITLE = re.compile(r'title="([^"]+)"')
NEEDS = re.compile(r'needs="([^"]+)"')
CLOCK, CUT = "… s", "[…]"
TIME = r"[\d.]+ (?:ns|µs|ms|s|min)"

Lowtide = Callable[[list[str], Path, Mapping[str, str]], str]


@dataclass(frozen=True)
class Block:
    """A fenced block."""

    language: str
    title: str | None
    needs: str | None  # a door or a command without which it can't be run
    text: str  # without the indentation of the fence
    indent: str
    start: int  # of its text in the file
    end: int


@dataclass(frozen=True)
class Command:
    """A command and what is shown under it."""

    line: str
    shown: str


def blocks(page: str) -> Iterator[Block]:
    """The fenced blocks of a page, in order."""
    for found in FENCE.finditer(page):
        title, needs = TITLE.search(found[3]), NEEDS.search(found[3])
        text = re.sub(rf"^{found[1]}", "", found[4], flags=re.MULTILINE)
        names = (title[1] if title else None, needs[1] if needs else None)
        yield Block(found[2], *names, text, found[1], found.start(4), found.end(4))


def commands(block: Block) -> list[Command]:
    """The commands of a console block."""
    rows = re.split(r"^\$ ", block.text, flags=re.MULTILINE)
    assert not rows[0].strip(), f"a console block begins with a command, not with {rows[0]!r}"
    return [Command(line, shown) for line, _, shown in (row.partition("\n") for row in rows[1:])]


def matches(shown: str, printed: str) -> bool:
    """Whether what is shown stands for what was printed."""
    pattern = []
    lines = shown.rstrip("\n").splitlines(keepends=True)
    for number, line in enumerate(lines, 1):
        if line.strip() == CUT:
            pattern.append(r"[\s\S]+" if number == len(lines) else r"(?:.*\n)+?")
        else:
            pattern.append(TIME.join(re.escape(part) for part in line.split(CLOCK)))
    return re.fullmatch("".join(pattern), printed.rstrip("\n")) is not None


def run(line: str, folder: Path, lowtide: Lowtide, environment: Mapping[str, str], makefile: str) -> str | None:
    """What a command prints, in a folder; None where it is not run."""
    words = shlex.split(line, comments=True)
    match words:
        case ["lowtide", *arguments]:
            return lowtide(arguments, folder, environment)
        case ["python", file] if not file.startswith("-"):
            command = [sys.executable, file]
            done = subprocess.run(
                command, cwd=folder, env=dict(environment), capture_output=True, text=True, check=False, timeout=300
            )
            assert done.returncode == 0, done.stderr
            return done.stdout
        case ["make", target, *_]:
            assert re.search(rf"^{re.escape(target)}:", makefile, re.MULTILINE), f"the Makefile has no {target}"
            return None
        case ["pip", "install", *_]:
            return None
    raise AssertionError(f"the docs show a command that no test knows how to run: {line}")
