"""C++ source -> loaded library, compiled on first use and kept in the cache folder."""

from __future__ import annotations

import ctypes
import errno
import hashlib
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lowtide import child
from lowtide.errors import LowtideError
from lowtide.files.cache import find, keep, looked_in, own_folder, private_folder
from lowtide.files.disk import is_full

COMPILERS = ("g++", "c++", "clang++")
INSTALL = "install a C++20 compiler (apt install g++, or conda install gxx) or name the one you have in $CXX."
OPTIONS = ("-O2", "-std=c++20", "-shared", "-fPIC")
INCLUDED = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"\n]+)"', re.MULTILINE)
FULL = re.compile(r"No space left on device|Disk quota exceeded|File too large")  # as compilers and linkers say it
COMPILE_SECONDS = 120  # a second or two is usual; a machine that swaps may need a minute

Signatures = Mapping[str, tuple[list[Any], Any]]  # for each function the types of its arguments and of its answer


class NativeUnavailable(LowtideError):
    """A library that can't be compiled or loaded here."""


def library(
    source: Path, signatures: Signatures, *, what: str, flags: Sequence[str] = (), depends: Sequence[str] = ()
) -> ctypes.CDLL:
    """Load the library of this source, compiling it when no earlier process has.

    `what` names it in errors, `flags` go behind the source in the command, `depends` are further things that it was
    compiled against. Without a compiler, one that an earlier process made from the same source does.
    """
    start = f"{source.stem}-{_key([*_texts(source), *OPTIONS, *flags, *depends, *_here()])}-"
    try:
        compiler = _compiler(what)
        version = _run([*compiler, "--version"]).stdout
    except NativeUnavailable as missing:
        found = _cached(start, signatures)
        if found is None:
            raise missing from None
        return found
    start += f"{_key([shlex.join(compiler), version])}-"
    found = _cached(start, signatures)
    if found is not None:
        return found
    command = [*compiler, *OPTIONS, str(source), *flags]
    for folder in (own_folder, private_folder):
        try:
            return _compile_into(folder(), start, command, source, signatures)
        except OSError as error:  # the folder can't be written or run from
            problem = error
    if is_full(problem):
        raise NativeUnavailable(
            f"{what}, compiled, can't be stored: the disk is full ({problem}).",
            hint="free some room on that disk, or name a folder on another one in $LOWTIDE_CACHE.",
        ) from problem
    raise NativeUnavailable(
        f"{what}, compiled, can't be stored or loaded: {problem}",
        hint="name a folder that can be written and run from in $LOWTIDE_CACHE.",
    ) from problem


def _cached(start: str, signatures: Signatures) -> ctypes.CDLL | None:
    """A library that an earlier process made, if it is still as it was then."""
    for folder in looked_in():
        try:
            path = find(folder, start, ".so")
            if path is not None:
                return _open(path, signatures)
        except OSError:  # unreadable, or it can't be run from there
            continue
    return None


def _compiler(what: str) -> list[str]:
    """The words of the compiler's command: $CXX, or the first of the usual names that is there."""
    try:
        named = shlex.split(os.environ.get("CXX", ""))
    except ValueError as error:  # a quotation that does not end
        raise NativeUnavailable(
            f"{what} needs a C++ compiler, and $CXX is no command: {error}.", hint=INSTALL
        ) from error
    if named:
        if shutil.which(named[0]) is None:
            raise NativeUnavailable(f"{what} needs a C++ compiler, and $CXX names none: {named[0]}.", hint=INSTALL)
        return named
    for name in COMPILERS:
        if found := shutil.which(name):
            return [found]
    raise NativeUnavailable(f"{what} needs a C++ compiler, and there is none of {', '.join(COMPILERS)}.", hint=INSTALL)


def _texts(source: Path, seen: set[Path] | None = None) -> list[str]:
    """The source, and the headers beside it that it includes, also through others."""
    seen = set() if seen is None else seen
    seen.add(source)
    text = source.read_text(encoding="utf-8")
    found = [text]
    for name in INCLUDED.findall(text):
        header = (source.parent / name).resolve()
        if header not in seen and header.is_file():
            found += _texts(header, seen)
    return found


def _here() -> tuple[str, ...]:
    """What a library depends on besides its source and the compiler: the kind of machine, and its C library."""
    return (platform.machine(), platform.system(), *platform.libc_ver())


def _key(parts: list[str]) -> str:
    """A name that changes with each of its parts."""
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def _compile_into(folder: Path, start: str, command: list[str], source: Path, signatures: Signatures) -> ctypes.CDLL:
    """Compile, put the library into the folder in one move, and load it."""
    workshop = Path(tempfile.mkdtemp(prefix=".build-", dir=folder))
    try:
        made = workshop / "made.so"
        result = _run([*command, "-o", str(made)], workshop)
        if result.returncode != 0:
            if FULL.search(result.stderr):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))
            raise NativeUnavailable(
                f"{source.name} did not compile with {command[0]}:\n{_first_errors(result.stderr)}", hint=INSTALL
            )
        return _open(keep(folder, start, ".so", made.read_bytes()), signatures)
    finally:
        for _ in range(2):  # a disk that failed once may not fail again
            shutil.rmtree(workshop, ignore_errors=True)


def interpreted(opened: ctypes.CDLL, signatures: Signatures) -> ctypes.PyDLL:
    """The same library, for functions that call into Python: its lock is held while they run."""
    again = ctypes.PyDLL(opened._name, handle=opened._handle)
    _give_types(again, signatures)
    return again


def _open(path: Path, signatures: Signatures) -> ctypes.CDLL:
    opened = ctypes.CDLL(str(path))
    try:
        _give_types(opened, signatures)
    except AttributeError as error:
        raise OSError(f"{path} has not all functions: {error}") from error
    return opened


def _give_types(opened: ctypes.CDLL | ctypes.PyDLL, signatures: Signatures) -> None:
    for name, (arguments, answer) in signatures.items():
        function = getattr(opened, name)
        function.argtypes, function.restype = arguments, answer


def _run(command: list[str], workshop: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run the compiler, whose own temporary files go to the workshop too."""
    environment = None if workshop is None else {**os.environ, "TMPDIR": str(workshop)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    try:
        with child.start(command, errors="replace", env=environment, **pipes) as process:
            try:
                said, complaints = process.communicate(timeout=COMPILE_SECONDS)
            except BaseException:
                process.kill()
                raise
        return subprocess.CompletedProcess(command, process.returncode, said, complaints)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NativeUnavailable(f"the C++ compiler {command[0]} can't be run: {error}", hint=INSTALL) from error


def _first_errors(text: str) -> str:
    lines = text.strip().splitlines()
    start = next((number for number, line in enumerate(lines) if "error" in line.lower()), 0)
    return "\n".join(lines[start : start + 5])
