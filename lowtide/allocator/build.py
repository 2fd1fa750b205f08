"""Source file -> loaded library, compiled on first use and kept in a cache folder."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
import threading
from pathlib import Path
from typing import Any

import torch

from lowtide.errors import LowtideError
from lowtide.files import cache_folder

SOURCE = Path(__file__).with_name("allocator.cpp")
TORCH = Path(torch.__file__).parent
COMPILERS = ("g++", "c++", "clang++")
INSTALL = "install a C++20 compiler (apt install g++, or conda install gxx) or name the one you have in $CXX."
NUMBER, NUMBERS = ctypes.c_int64, ctypes.POINTER(ctypes.c_int64)
FUNCTIONS: dict[str, tuple[list[Any], Any]] = {  # for each name the types of its arguments and of its answer
    "lowtide_installed": ([], NUMBER),
    "lowtide_meter_start": ([], NUMBER),
    "lowtide_meter_read": ([NUMBER, NUMBERS], None),
    "lowtide_meter_stop": ([NUMBER, NUMBERS], None),
    "lowtide_meter_reset": ([NUMBER], None),
    "lowtide_record_start": ([NUMBER], NUMBER),
    "lowtide_record_stop": ([NUMBERS], None),
    "lowtide_record_take": ([NUMBERS], None),
}
COMPILE_SECONDS = 120  # a second or two is usual; a machine that swaps may need a minute

_lock = threading.Lock()
_outcome: ctypes.CDLL | AllocatorUnavailable | None = None


class AllocatorUnavailable(LowtideError):
    """The allocator can't be compiled, loaded or installed here."""


def load() -> ctypes.CDLL:
    """Load the library, compiling it when no earlier process has; try once in each process."""
    global _outcome
    with _lock:
        if _outcome is None:
            try:
                _outcome = _compile_or_reuse()
            except AllocatorUnavailable as error:
                _outcome = error
    if isinstance(_outcome, AllocatorUnavailable):
        raise AllocatorUnavailable(_outcome.message, hint=_outcome.hint)
    return _outcome


def loaded() -> ctypes.CDLL | None:
    """The library if this process has loaded it already."""
    return _outcome if isinstance(_outcome, ctypes.CDLL) else None


def _compile_or_reuse() -> ctypes.CDLL:
    compiler = _compiler()
    command = _command(compiler)
    name = _file_name(command, _run([*compiler, "--version"]).stdout)
    try:
        cached = cache_folder() / name
        if cached.exists():
            return _open(cached)
    except (OSError, RuntimeError):  # damaged, unreadable, or there is no home folder
        pass
    try:
        return _compile_into(cache_folder(), name, command)
    except (OSError, RuntimeError):  # the folder can't be written or run from
        pass
    try:
        with tempfile.TemporaryDirectory(prefix="lowtide-") as folder:
            return _compile_into(Path(folder), name, command)
    except OSError as error:
        raise AllocatorUnavailable(
            f"the compiled allocator can't be stored or loaded: {error}",
            hint="name a folder that can be written and run from in $LOWTIDE_CACHE.",
        ) from error


def _compiler() -> list[str]:
    """The words of the compiler's command: $CXX, or the first of the usual names that is there."""
    named = shlex.split(os.environ.get("CXX", ""))
    if named:
        if shutil.which(named[0]) is None:
            raise AllocatorUnavailable(
                f"the memory meter needs a C++ compiler, and $CXX names none: {named[0]}.", hint=INSTALL
            )
        return named
    for name in COMPILERS:
        if found := shutil.which(name):
            return [found]
    raise AllocatorUnavailable(
        f"the memory meter needs a C++ compiler, and there is none of {', '.join(COMPILERS)}.", hint=INSTALL
    )


def _command(compiler: list[str]) -> list[str]:
    """The whole command but for the name of what it makes."""
    include = TORCH / "include"
    if not (include / "c10" / "core" / "CPUAllocator.h").exists():
        raise AllocatorUnavailable(
            f"torch {torch.__version__} has no C++ headers here: no c10/core/CPUAllocator.h in {include}.",
            hint="install torch from its wheels (pip install torch).",
        )
    abi = int(torch.compiled_with_cxx11_abi())
    return [
        *compiler,
        *("-O2", "-std=c++20", "-shared", "-fPIC", f"-D_GLIBCXX_USE_CXX11_ABI={abi}"),
        *("-isystem", str(include), str(SOURCE), f"-L{TORCH / 'lib'}", "-lc10"),
    ]


def _file_name(command: list[str], compiler_version: str) -> str:
    """A name that changes with whatever the compiled library depends on."""
    parts = [SOURCE.read_text(), shlex.join(command), compiler_version, platform.machine()]
    parts += [torch.__version__, str(torch.version.git_version)]
    return f"allocator-{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()[:32]}.so"


def _compile_into(folder: Path, name: str, command: list[str]) -> ctypes.CDLL:
    """Compile, put the library into the folder in one move, and load it."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".build-", dir=folder) as workshop:
        made = Path(workshop) / name
        result = _run([*command, "-o", str(made)])
        if result.returncode != 0:
            raise AllocatorUnavailable(
                f"{SOURCE.name} did not compile with {command[0]}:\n{_first_errors(result.stderr)}",
                hint=INSTALL,
            )
        os.replace(made, folder / name)
    return _open(folder / name)


def _open(path: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(path))
    for name, (arguments, answer) in FUNCTIONS.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, answer
    return library


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=COMPILE_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise AllocatorUnavailable(f"the C++ compiler {command[0]} can't be run: {error}", hint=INSTALL) from error


def _first_errors(text: str) -> str:
    lines = text.strip().splitlines()
    start = next((number for number, line in enumerate(lines) if "error" in line.lower()), 0)
    return "\n".join(lines[start : start + 5])
