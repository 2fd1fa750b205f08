"""The rows of a table that takes hours: each is in the file as soon as it is there, and none is made twice."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lowtide.errors import FileError

Row = dict[str, Any]
SAME = ("task", "way", "part", "steps", "target")  # what makes two rows the same one


class Store:
    """Rows in a file, a line of JSON each; without a file they are kept here."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.rows: list[Row] = []
        if path is not None and path.exists():
            self.rows = [row for line in path.read_text(encoding="utf-8").splitlines() if (row := _row(path, line))]
            if self.rows and not path.read_text(encoding="utf-8").endswith("\n"):
                path.write_text("".join(f"{json.dumps(row)}\n" for row in self.rows), encoding="utf-8")

    def find(self, wanted: Mapping[str, Any]) -> Row | None:
        """The row that was made of the same, if there is one that did not fail."""
        return next((row for row in self.rows if "failure" not in row and _same(row, wanted)), None)

    def add(self, row: Row) -> None:
        """Keep a row; one that failed before is replaced in what is shown."""
        self.rows = [known for known in self.rows if not _same(known, row)] + [row]
        if self.path is not None:
            with open(self.path, "a", encoding="utf-8") as file:
                file.write(f"{json.dumps(row)}\n")
                file.flush()
                os.fsync(file.fileno())


def _same(row: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return all(row.get(key) == other.get(key) for key in SAME)


def _row(path: Path, line: str) -> Row | None:
    """A row of the file; the last one may have been cut off when the run was interrupted."""
    try:
        found = json.loads(line)
    except ValueError:
        return None
    if not isinstance(found, dict) or not set(SAME) <= found.keys():
        raise FileError(f"{path} has a line that is no row of this table.", hint="name another file.")
    return found
