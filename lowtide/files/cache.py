"""The cache: a folder of what can be made again, which is believed only where nobody else can have written to it.

What is kept has the hash of its content in its name, so a file and its hash arrive in one move.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import os
import re
import shutil
import stat
import tempfile
import time
import warnings
from functools import cache
from pathlib import Path

from lowtide.errors import LowtideWarning
from lowtide.files.disk import write_atomically

LIMIT = 2**26  # bytes of all that is kept here, datasets aside; what was not used for longest goes first
BUILDS = 8  # of one library, for other sources, compilers and versions of torch; older ones go
LEFT = 3600  # seconds after which half-made files are nobody's any more
KEPT = re.compile(r"(?P<what>[\w-]+?)-[0-9a-f-]{16,}\.(so|json)")  # as we name files, and older versions did
HALF_MADE = re.compile(r"\.build-.*|\..*\.[0-9a-f]{16}")

_untrusted: set[Path] = set()  # folders that a warning was given for


def cache_folder() -> Path:
    """Where what can be made again is kept: $LOWTIDE_CACHE, or lowtide in the user's cache folder."""
    if named := os.environ.get("LOWTIDE_CACHE"):
        return Path(named).absolute()
    users = Path(os.environ.get("XDG_CACHE_HOME", ""))  # a relative one is to be ignored, as its specification says
    return (users if users.is_absolute() else Path.home() / ".cache") / "lowtide"


def own_folder() -> Path:
    """The cache folder, or one in its place where it can't be had or others may have written to it."""
    try:
        folder = cache_folder()
        doubt = _doubt(folder)
    except (OSError, RuntimeError):  # it can't be made, or there is no home folder
        return private_folder()
    if doubt is None:
        return folder
    if folder not in _untrusted:
        _untrusted.add(folder)
        warnings.warn(
            f"the cache folder {folder} is not used: {doubt}. What it keeps is made again in a private folder.\n"
            f"hint: chmod 700 {folder} once you have looked at what is in it, or name another in $LOWTIDE_CACHE.",
            LowtideWarning,
            stacklevel=2,
        )
    return private_folder()


def looked_in() -> list[Path]:
    """The folders in which something may have been kept, the likelier first."""
    found = []
    for folder in (own_folder, _kept_privately):
        with contextlib.suppress(OSError):  # there is no room for temporary files
            found.append(folder())
    return list(dict.fromkeys(path for path in found if path is not None))


def private_folder() -> Path:
    """A folder for temporary files that is this user's alone, or this process's where there is no such."""
    try:
        folder = _users()
        return folder if _doubt(folder) is None else _of_this_process()
    except OSError:
        return _of_this_process()


def _kept_privately() -> Path | None:
    return private_folder() if os.path.lexists(_users()) else None


def _users() -> Path:
    return Path(tempfile.gettempdir()) / f"lowtide-{os.geteuid()}"


@cache
def _of_this_process() -> Path:
    folder = tempfile.mkdtemp(prefix="lowtide-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


def _doubt(folder: Path) -> str | None:
    """Make the folder, if it is not there; say why what it holds can't be believed."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = os.lstat(folder)
    if stat.S_ISLNK(found.st_mode):
        return "it is a symbolic link"
    if not stat.S_ISDIR(found.st_mode):
        raise NotADirectoryError(f"{folder} is no folder")
    if found.st_uid != os.geteuid():
        return f"it belongs to user {found.st_uid}"
    if found.st_mode & 0o022:
        return f"others may write to it (mode {stat.S_IMODE(found.st_mode):o})"
    return None


def read_own(path: Path) -> bytes | None:
    """The content of a file that only this user can have written; None where there is none such."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    with open(file, "rb") as opened:
        found = os.fstat(file)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
            return None
        try:
            return opened.read(LIMIT)
        except OSError:
            return None


def find(folder: Path, start: str, ending: str) -> Path | None:
    """The newest file whose name begins so and whose content still has the hash at its end; others are removed."""
    found = [path for path in folder.iterdir() if path.name.startswith(start) and path.suffix == ending]
    for path in sorted(found, key=_last_use, reverse=True):
        content = read_own(path)
        if content is not None and path.stem.endswith(f"-{_hash(content)}"):
            with contextlib.suppress(OSError):
                os.utime(path, ns=(time.time_ns(), path.stat().st_mtime_ns))  # it is of use
            return path
        with contextlib.suppress(OSError):
            path.unlink()
    return None


def keep(folder: Path, start: str, ending: str, content: bytes) -> Path:
    """Put a file there whose name begins so and ends with its content's hash; what is too much goes."""
    path = folder / f"{start}{_hash(content)}{ending}"
    write_atomically(path, content, mode=0o600)
    trim(folder, spare=path)
    return path


def trim(folder: Path, *, spare: Path, limit: int = LIMIT) -> None:
    """Remove what was not used for longest, until few builds of each library and few enough bytes are left."""
    now, room, builds = time.time(), limit, dict[str, int]()
    for path in sorted(_entries(folder), key=_last_use, reverse=True):
        named = KEPT.fullmatch(path.name)
        with contextlib.suppress(OSError):
            if named is None:
                if HALF_MADE.fullmatch(path.name) and now - _last_use(path) > LEFT:
                    shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink()
                continue
            builds[named["what"]] = builds.get(named["what"], 0) + 1
            room -= path.lstat().st_size
            if path != spare and (room < 0 or builds[named["what"]] > BUILDS):
                path.unlink()


def _entries(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:32]


def _last_use(path: Path) -> float:
    try:
        found = path.lstat()
        return max(found.st_atime, found.st_mtime)
    except OSError:
        return 0.0
