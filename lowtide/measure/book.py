"""The book of answers: what this machine said of each specimen before, each with a hash of its own."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lowtide import files
from lowtide.files.cache import own_folder, read_own, trim
from lowtide.files.shapes import Absent, Misshapen, amount, flag, many, maybe, record, row, text, whole

Answer = dict[str, Any]
Change = tuple[int, int, int]  # of a file: its number, when it was written, its bytes

ANSWER = record(
    {
        "seconds": amount,
        "disturbed": flag,  # other processes had its cores whenever it ran
        "arena_temporaries": whole(),
        "apart_temporaries": whole(),
        "heap_temporaries": whole(),
        "outputs": many(maybe(whole())),
        "in_place": many(row(whole(), whole())),
        "code": whole(),
        "hurried": Absent(flag, False),  # it ran once only: its bytes are known, its seconds more or less
        "exact": Absent(flag, True),  # whether a call of ours has torch's bits here
        "in_step": Absent(amount, None),  # seconds as steps saw them
    }
)
ENTRY = record({"answer": ANSWER, "sha256": text})


_open: dict[Path, tuple[Change, Answers]] | None = None  # books that were read, while someone keeps them open


@contextmanager
def kept_open() -> Iterator[None]:
    """A context in which a book that nobody writes to is read once, however many graphs are measured."""
    global _open
    if _open is not None:
        yield
        return
    _open = {}
    try:
        yield
    finally:
        _open = None


def _last_change(path: Path) -> Change | None:
    """What is another one once a file was written; None where there is none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


class Book:
    """The answers that were given before, in one file; `depends` is all that they depend on besides the specimen."""

    def __init__(self, depends: list[Any]) -> None:
        self.path = own_folder() / f"costs-{files.digest(depends)[:16]}.json"
        self.answers = self._remembered()

    def add(self, answers: Mapping[str, Answer]) -> None:
        """Write new answers beside those that are there now; a folder that cannot be written is no failure.

        Nor is a file that can't be read just now a reason to lose what was in it.
        """
        try:
            new = {key: {"answer": answer, "sha256": files.digest([key, answer])} for key, answer in answers.items()}
            entries = {**self.answers.entries, **self._read(), **new}
            files.write_atomically(self.path, json.dumps(entries, allow_nan=False), mode=0o600)
            trim(self.path.parent, spare=self.path)
        except (OSError, ValueError):  # ValueError: a time that is no number
            return

    def _remembered(self) -> Answers:
        """The answers of the file, as they were read last where it is still the same."""
        found = _last_change(self.path)
        if _open is None or found is None:
            return Answers(self._read())
        if self.path not in _open or _open[self.path][0] != found:
            _open[self.path] = (found, Answers(self._read()))
        return _open[self.path][1]

    def _read(self) -> dict[str, Any]:
        """The entries of the file, whole or not."""
        content = read_own(self.path)
        if content is None:
            return {}
        try:
            entries = files.parse(content.decode("utf-8"))
        except ValueError:
            return {}
        return entries if type(entries) is dict else {}


class Answers(Mapping[str, Answer]):
    """The answers that are as they were written, each looked at when it is asked for; all others are asked again."""

    def __init__(self, entries: dict[str, Any]) -> None:
        self.entries = entries
        self._whole: dict[str, bool] = {}

    def __getitem__(self, key: str) -> Answer:
        entry = self.entries[key]
        if key not in self._whole:
            self._whole[key] = _is_whole(key, entry)
        if not self._whole[key]:
            raise KeyError(key)
        answer: Answer = entry["answer"]
        return answer

    def __iter__(self) -> Iterator[str]:
        return (key for key in self.entries if key in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)


def _is_whole(key: str, entry: Any) -> bool:
    try:
        ENTRY(entry)
    except Misshapen:
        return False
    return bool(files.digest([key, entry["answer"]]) == entry["sha256"])
