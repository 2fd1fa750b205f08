"""Sources of ours that include torch's vectors, compiled for the processor that torch found."""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch

from lowtide import native

TORCH = Path(torch.__file__).parent
HEADER = TORCH / "include" / "ATen" / "cpu" / "vec" / "vec.h"
FLAGS = ("-O3", "-ffp-contract=off", "-fno-math-errno", "-Wno-psabi")
PROCESSORS = {  # what torch calls them -> what makes the compiler use them as torch's own build does
    "AVX512": ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma", "-mf16c"),
    "AVX2": ("-mavx2", "-mfma", "-mf16c"),
}


def library(source: Path, signatures: native.Signatures, what: str) -> ctypes.CDLL | None:
    """The compiled source; None where it can't be compiled or loaded, or torch's headers are missing."""
    if not HEADER.exists():
        return None
    kind = torch.backends.cpu.get_cpu_capability()
    named = kind if kind in PROCESSORS else "DEFAULT"
    processor = (f"-DCPU_CAPABILITY={named}", f"-DCPU_CAPABILITY_{named}", *PROCESSORS.get(kind, ()))
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    linked = (f"-L{TORCH / 'lib'}", "-ltorch_cpu", "-lc10", "-ldl")
    flags = (*FLAGS, *processor, abi, "-isystem", str(HEADER.parents[3]), *linked)
    depends = (torch.__version__, str(torch.version.git_version))
    try:
        return native.library(source, signatures, what=what, flags=flags, depends=depends)
    except native.NativeUnavailable:  # the arena has said so
        return None
