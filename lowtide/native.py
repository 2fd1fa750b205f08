"""C++ source -> loaded library, compiled on first use and kept in the cache folder."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lowtide.errors import LowtideError
from lowtide.files import cache_folder

COMPILERS = ("g++", "c++", "clang++")
INSTALL = "install a C++20 compiler (apt install g++, or conda install gxx) or name the one you have in $CXX."
COMPILE_SECONDS = 120  # a second or two is usual; a machine that swaps may need a minute

Signatures = Mapping[str, tuple[list[Any], Any]]  # for each function the types of its arguments and of its answer


class NativeUnavailable(LowtideError):
    """A library that can't be compiled or loaded here."""


def library(
    source: Path, signatures: Signatures, *, what: str, flags: Sequence[str] = (), depends: Sequence[str] = ()
) -> ctypes.CDLL:
    """Load the library of this source, compiling it when no earlier process has.

    `what` names it in errors, `flags` go behind the source in the command, `depends` are further things that it was
    compiled against.
    """
    compiler = _compiler(what)
    command = [*compiler, "-O2", "-std=c++20", "-shared", "-fPIC", str(source), *flags]
    name = _file_name(source, [shlex.join(command), _run([*compiler, "--version"]).stdout, *depends])
    try:
        cached = cache_folder() / name
        if cached.exists():
            return _open(cached, signatures)
    except (OSError, RuntimeError):  # damaged, unreadable, or there is no home folder
        pass
    try:
        return _compile_into(cache_folder(), name, command, source, signatures)
    except (OSError, RuntimeError):  # the folder can't be written or run from
        pass
    try:
        with tempfile.TemporaryDirectory(prefix="lowtide-") as folder:
            return _compile_into(Path(folder), name, command, source, signatures)
    except OSError as error:
        raise NativeUnavailable(
            f"{what}, compiled, can't be stored or loaded: {error}",
            hint="name a folder that can be written and run from in $LOWTIDE_CACHE.",
        ) from error


def _compiler(what: str) -> list[str]:
    """The words of the compiler's command: $CXX, or the first of the usual names that is there."""
    named = shlex.split(os.environ.get("CXX", ""))
    if named:
        if shutil.which(named[0]) is None:
            raise NativeUnavailable(f"{what} needs a C++ compiler, and $CXX names none: {named[0]}.", hint=INSTALL)
        return named
    for name in COMPILERS:
        if found := shutil.which(name):
            return [found]
    raise NativeUnavailable(f"{what} needs a C++ compiler, and there is none of {', '.join(COMPILERS)}.", hint=INSTALL)


def _file_name(source: Path, parts: list[str]) -> str:
    """A name that changes with whatever the compiled library depends on."""
    parts = [source.read_text(), *parts, platform.machine()]
    return f"{source.stem}-{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()[:32]}.so"


def _compile_into(folder: Path, name: str, command: list[str], source: Path, signatures: Signatures) -> ctypes.CDLL:
    """Compile, put the library into the folder in one move, and load it."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".build-", dir=folder) as workshop:
        made = Path(workshop) / name
        result = _run([*command, "-o", str(made)])
        if result.returncode != 0:
            raise NativeUnavailable(
                f"{source.name} did not compile with {command[0]}:\n{_first_errors(result.stderr)}", hint=INSTALL
            )
        os.replace(made, folder / name)
    return _open(folder / name, signatures)


def _open(path: Path, signatures: Signatures) -> ctypes.CDLL:
    opened = ctypes.CDLL(str(path))
    for name, (arguments, answer) in signatures.items():
        function = getattr(opened, name)
        function.argtypes, function.restype = arguments, answer
    return opened


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=COMPILE_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NativeUnavailable(f"the C++ compiler {command[0]} can't be run: {error}", hint=INSTALL) from error


def _first_errors(text: str) -> str:
    lines = text.strip().splitlines()
    start = next((number for number, line in enumerate(lines) if "error" in line.lower()), 0)
    return "\n".join(lines[start : start + 5])
