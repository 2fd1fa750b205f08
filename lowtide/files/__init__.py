"""One text file for each noun: a header line that says what it is, then the noun itself as JSON."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any, NoReturn

from lowtide.errors import FileError
from lowtide.files.cache import cache_folder
from lowtide.files.disk import advice, write_atomically
from lowtide.files.shapes import Misshapen, Shape, record, text, whole

__all__ = ["cache_folder", "digest", "load", "parse", "save", "shaped", "write_atomically"]

VERSION = 1
LIMIT = 2**29  # bytes of a file; the longest loops that were ever planned take a tenth of it
DEPTH = 32  # lists in lists; nouns need six
NUMBERS = "look for what came out as nan or inf where it was measured."
HEADER = record({"lowtide": text, "version": whole(), "sha256": text})


def digest(payload: Any) -> str:
    """The sha256 of a JSON-like object, independent of how it is written."""
    text = json.dumps(payload, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def save(path: str | os.PathLike[str], kind: str, payload: Any, *, force: bool = False) -> None:
    """Save a noun of this kind; an existing file is overwritten only with `force`."""
    path = Path(path)
    if os.path.lexists(path) and not force:
        raise FileError(f"{path} exists already.", hint="choose another name, or pass force=True (--force).")
    try:
        header = {"lowtide": kind, "version": VERSION, "sha256": digest(payload)}
        body = json.dumps(payload, separators=(",", ":"), allow_nan=False)
    except ValueError as error:
        raise FileError(f"cannot write {path}: this {kind} has a number in it that is none.", hint=NUMBERS) from error
    try:
        write_atomically(path, json.dumps(header) + "\n" + body + "\n")
    except OSError as error:
        raise FileError(f"cannot write {path}: {error.strerror or error}.", hint=advice(error)) from error
    except ValueError as error:  # the system has no files of this name
        raise FileError(f"cannot write {str(path)!r}: {error}.", hint="choose another name.") from error


def load(path: str | os.PathLike[str], kind: str) -> Any:
    """Load what `save` wrote, or say why this file is not it."""
    path = Path(path)
    try:
        with open(path, "rb") as file:
            content = file.read(LIMIT + 1)
    except OSError as error:
        raise FileError(f"cannot read {path}: {error.strerror or error}.", hint=f"name a {kind} file.") from error
    except MemoryError as error:
        raise FileError(f"cannot read {path}: there is not enough memory.", hint="end what else uses it.") from error
    except ValueError as error:  # the system has no files of this name
        raise FileError(f"cannot read {str(path)!r}: {error}.", hint=f"name a {kind} file.") from error
    if len(content) > LIMIT:
        raise FileError(f"{path} has more than {LIMIT:,} bytes, which no {kind} has.", hint=f"name a {kind} file.")
    try:
        whole_text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise FileError(f"cannot read {path}: {error}.", hint=f"name a {kind} file.") from error
    first, _, body = whole_text.partition("\n")
    try:
        found, version, expected = HEADER(parse(first)).values()
    except ValueError as error:
        raise FileError(
            f"{path} is not a lowtide file: its first line is no header.", hint=f"name a {kind} file."
        ) from error
    if found != kind:
        raise FileError(f"{path} holds a {found[:40]}, not a {kind}.", hint=f"name a {kind} file.")
    if version != VERSION:
        raise FileError(f"{path} has version {version}; this lowtide reads version {VERSION}.", hint="make it again.")
    try:
        payload = parse(body)
    except ValueError as error:
        raise FileError(f"{path} is damaged: {error}", hint="make it again.") from error
    if digest(payload) != expected:
        raise FileError(f"{path} is damaged: its contents do not match its checksum.", hint="make it again.")
    return payload


def parse(text: str) -> Any:
    """Plain JSON: nothing but finite numbers, no name twice, nothing too deep; a ValueError for all else."""
    try:
        found = json.loads(text, parse_constant=_no_number, parse_float=_finite, object_pairs_hook=_object)
        _check_depth(found)
    except (RecursionError, MemoryError) as error:
        raise ValueError("it is too deep or too large") from error
    return found


def shaped(path: str | os.PathLike[str], payload: Any, shape: Shape, *, kind: str, hint: str) -> Any:
    """What a payload stands for, or a FileError that says which of its fields is wrong."""
    try:
        return shape(payload)
    except Misshapen as fault:
        raise FileError(f"{path} holds no valid {kind}: {fault}.", hint=hint) from fault


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number")


def _finite(text: str) -> float:
    found = float(text)
    if found in (float("inf"), float("-inf")):
        raise ValueError(f"{text[:40]} is too large a number")
    return found


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("an object has a name twice")
    return found


def _check_depth(found: Any) -> None:
    level = [found]
    for _ in range(DEPTH):
        level = [
            item
            for holder in level
            if type(holder) in (list, dict)
            for item in (holder.values() if type(holder) is dict else holder)
            if type(item) in (list, dict)
        ]
        if not level:
            return
    raise ValueError(f"it has lists in lists, more than {DEPTH} deep")
