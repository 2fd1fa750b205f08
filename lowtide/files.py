"""One text file for each noun: a header line that says what it is, then the noun itself as JSON."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
from pathlib import Path
from typing import Any

from lowtide.errors import FileError

VERSION = 1


def digest(payload: Any) -> str:
    """The sha256 of a JSON-like object, independent of how it is written."""
    text = json.dumps(payload, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def write_atomically(path: Path, text: str) -> None:
    """Write `text` to `path` so that a reader sees the old file or the new one, never half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")  # with the rights that the user's files have
    try:
        with open(temporary, "x", encoding="utf-8") as file:
            file.write(text)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise


def cache_folder() -> Path:
    """Where what can be made again is kept: $LOWTIDE_CACHE, or lowtide in the user's cache folder."""
    if named := os.environ.get("LOWTIDE_CACHE"):
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lowtide"


def save(path: str | os.PathLike[str], kind: str, payload: Any, *, force: bool = False) -> None:
    """Save a noun of this kind; an existing file is overwritten only with `force`."""
    path = Path(path)
    if path.exists() and not force:
        raise FileError(f"{path} exists already.", hint="choose another name, or pass force=True (--force).")
    header = {"lowtide": kind, "version": VERSION, "sha256": digest(payload)}
    body = json.dumps(payload, separators=(",", ":"), allow_nan=False)
    try:
        write_atomically(path, json.dumps(header) + "\n" + body + "\n")
    except OSError as error:
        raise FileError(
            f"cannot write {path}: {error.strerror}.", hint="choose a folder that can be written."
        ) from error


def load(path: str | os.PathLike[str], kind: str) -> Any:
    """Load what `save` wrote, or say why this file is not it."""
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise FileError(f"cannot read {path}: {error}") from error
    first, _, body = text.partition("\n")
    try:
        header = json.loads(first)
        found, version, expected = header["lowtide"], header["version"], header["sha256"]
    except (ValueError, KeyError, TypeError) as error:
        raise FileError(f"{path} is not a lowtide file: its first line is no header.") from error
    if found != kind:
        raise FileError(f"{path} holds a {found}, not a {kind}.")
    if version != VERSION:
        raise FileError(f"{path} has version {version}; this lowtide reads version {VERSION}.")
    try:
        payload = json.loads(body)
    except ValueError as error:
        raise FileError(f"{path} is damaged: {error}", hint="make it again.") from error
    if digest(payload) != expected:
        raise FileError(f"{path} is damaged: its contents do not match its checksum.", hint="make it again.")
    return payload
