"""The allocator's library, built against the torch that is here."""

from __future__ import annotations

import ctypes
import threading
from pathlib import Path

import torch

from lowtide import native
from lowtide.errors import LowtideError

SOURCE = Path(__file__).with_name("allocator.cpp")
TORCH = Path(torch.__file__).parent
NUMBER, NUMBERS, HANDLE = ctypes.c_int64, ctypes.POINTER(ctypes.c_int64), ctypes.c_void_p
FUNCTIONS: native.Signatures = {
    "lowtide_installed": ([], NUMBER),
    "lowtide_hold": ([], NUMBER),
    "lowtide_let_go": ([], None),
    "lowtide_meter_start": ([], NUMBER),
    "lowtide_meter_read": ([NUMBER, NUMBERS], None),
    "lowtide_meter_stop": ([NUMBER, NUMBERS], None),
    "lowtide_meter_reset": ([NUMBER], None),
    "lowtide_record_start": ([NUMBER], NUMBER),
    "lowtide_record_stop": ([NUMBERS], None),
    "lowtide_record_take": ([NUMBERS], None),
    "lowtide_arena_map": ([NUMBER], HANDLE),
    "lowtide_arena_unmap": ([HANDLE], None),
    "lowtide_arena_blocks": ([HANDLE], NUMBER),
    "lowtide_arena_held": ([HANDLE], NUMBER),
    "lowtide_tape_make": ([NUMBER, NUMBERS, NUMBER, NUMBERS, NUMBERS], HANDLE),
    "lowtide_tape_drop": ([HANDLE], None),
    "lowtide_step_begin": ([NUMBER, HANDLE, HANDLE, HANDLE], NUMBER),
    "lowtide_step_expect": ([NUMBER], None),
    "lowtide_step_end": ([NUMBER], HANDLE),
    "lowtide_step_pause": ([NUMBER], None),
    "lowtide_step_resume": ([NUMBER, NUMBER, NUMBER], None),
    "lowtide_step_holds": ([NUMBER], NUMBER),
    "lowtide_step_read": ([HANDLE, NUMBERS], None),
    "lowtide_step_take": ([HANDLE, NUMBERS], None),
}

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
                _outcome = _library()
            except native.NativeUnavailable as error:
                _outcome = AllocatorUnavailable(error.message, hint=error.hint)
    if isinstance(_outcome, AllocatorUnavailable):
        raise AllocatorUnavailable(_outcome.message, hint=_outcome.hint)
    return _outcome


def loaded() -> ctypes.CDLL | None:
    """The library if this process has loaded it already."""
    return _outcome if isinstance(_outcome, ctypes.CDLL) else None


def torch_flags() -> tuple[str, ...]:
    """What the compiler is told where a source includes torch's headers, of its smallest library."""
    include = TORCH / "include"
    if not (include / "c10" / "core" / "CPUAllocator.h").exists():
        raise native.NativeUnavailable(
            f"torch {torch.__version__} has no C++ headers here: no c10/core/CPUAllocator.h in {include}.",
            hint="install torch from its wheels (pip install torch).",
        )
    abi = int(torch.compiled_with_cxx11_abi())
    return (f"-D_GLIBCXX_USE_CXX11_ABI={abi}", "-isystem", str(include), f"-L{TORCH / 'lib'}", "-lc10")


def torch_build() -> tuple[str, ...]:
    """What tells this torch from others that a library may have been compiled against."""
    return (torch.__version__, str(torch.version.git_version))


def _library() -> ctypes.CDLL:
    return native.library(SOURCE, FUNCTIONS, what="the allocator", flags=torch_flags(), depends=torch_build())
