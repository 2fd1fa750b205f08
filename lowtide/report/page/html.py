"""A document -> one HTML file: its data packed inside, styles and scripts in place, nothing fetched from anywhere."""

from __future__ import annotations

import base64
import gzip
import html
import json
import os
import re
from io import BytesIO
from pathlib import Path
from typing import Any, Literal

from lowtide import files
from lowtide.errors import FileError
from lowtide.files.disk import advice

FOLDER = Path(__file__).parent / "assets"
SCRIPTS = {  # each kind of page and its own scripts, after those that all have
    "report": ("charts.js", "memory.js", "lanes.js", "frontier.js", "tables.js", "report.js"),
    "pebble": ("pebble.js",),
    "diff": ("charts.js", "tables.js", "diff.js"),
}
Kind = Literal["report", "pebble", "diff"]
MOST = 2**31  # bytes of a document, unpacked
DATA = re.compile(rb'<script id="document" type="application/octet-stream">([A-Za-z0-9+/=\s]*)</script>')
# The page may run what is written in it, and reach nothing else.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:; font-src data:"


def render(document: dict[str, Any], *, kind: Kind, title: str) -> str:
    """The page of a document."""
    data = json.dumps(document, separators=(",", ":"), allow_nan=False, ensure_ascii=False)
    packed = base64.b64encode(gzip.compress(data.encode("utf-8", "backslashreplace"), mtime=0)).decode("ascii")
    scripts = "\n".join(_asset(name) for name in ("page.js", *SCRIPTS[kind]))
    shell = _asset("page.html")
    for mark, text in (
        ("POLICY", POLICY),
        ("TITLE", html.escape(title)),
        ("STYLE", _asset("page.css")),
        ("DATA", packed),
        ("SCRIPT", scripts),
    ):
        shell = shell.replace(f"<!--{mark}-->", text, 1)
    return shell


def write_page(
    path: str | os.PathLike[str], document: dict[str, Any], *, kind: Kind, title: str, force: bool = False
) -> None:
    """Write the page of a document to one file; an existing one is overwritten only with `force`."""
    refuse_page(path, force=force)
    path = Path(path)
    try:
        files.write_atomically(path, render(document, kind=kind, title=title))
    except OSError as error:
        raise FileError(f"cannot write {path}: {error.strerror or error}.", hint=advice(error)) from error
    except ValueError as error:
        raise FileError(f"cannot write {str(path)!r}: {error}.", hint="choose another name.") from error


def refuse_page(path: str | os.PathLike[str], *, force: bool) -> None:
    """Raise where a page can't be written, before any work."""
    path = Path(path)
    if os.path.lexists(path) and not force:
        raise FileError(f"{path} exists already.", hint="choose another name, or pass force=True (--force).")
    if not path.absolute().parent.is_dir():
        raise FileError(f"there is no folder {path.parent}.", hint="make it first, or choose another place.")


def document_of(path: str | os.PathLike[str]) -> Any:
    """The document in a page, or in a file of JSON."""
    path = Path(path)
    try:
        content = path.read_bytes()
    except OSError as error:
        raise FileError(f"cannot read {path}: {error.strerror or error}.", hint="name a page or its JSON.") from error
    if found := DATA.search(content):
        try:
            content = _unpacked(found[1])
        except (OSError, EOFError, ValueError) as error:
            raise FileError(f"{path} is a damaged page: {error}.", hint="make it again.") from error
    try:
        return json.loads(content)
    except ValueError as error:
        raise FileError(f"{path} is neither a page nor JSON.", hint="make it with lowtide report.") from error


def _unpacked(packed: bytes) -> bytes:
    """The data of a page; a small file can't become an endless one."""
    with gzip.GzipFile(fileobj=BytesIO(base64.b64decode(packed))) as file:
        content = file.read(MOST + 1)
    if len(content) > MOST:
        raise ValueError(f"its data has more than {MOST:,} bytes")
    return content


def _asset(name: str) -> str:
    return (FOLDER / name).read_text(encoding="utf-8")
