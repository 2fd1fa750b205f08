"""The names of the tensor library that a graph may use: what it may call, and which constants it may pass.

Nothing here opens a file, gives a tensor another storage or another size of it, takes an address or skips the checks
of what it is given. Behind a name that passes, `kernels` finds an op of torch's dispatcher or says that there is none.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from types import MappingProxyType

OPERATORS = frozenset({"add", "sub", "mul", "truediv", "floordiv", "pow", "mod", "neg", "pos", "abs", "max", "min"})
NAMESPACES = frozenset({"aten", "prims", "lowtide"})  # of files; a graph in this process may call ops of its user too
NOT_OPS = frozenset({"prim", "profiler", "higher_order", "inductor", "fsdp", "debugprims"})
FORBIDDEN = re.compile(
    r"""from_file | save | load | _?print                               # files and terminals
    | .*resize.* | set_? | set_data | data | _version | swap_.*         # storages
    | data_ptr | .*_ptr | record_stream | _?pin_memory                  # addresses
    | _nested_view_.* | _reshape_from_tensor | .*_tensor_unsafe | _test_.* | _cufft_.*""",
    re.VERBOSE,
)
TARGET = re.compile(r"([A-Za-z_]\w*)\.([A-Za-z_]\w*)\.([A-Za-z_]\w*)", re.ASCII)
DEVICE = re.compile(r"[a-z]{1,20}(:[0-9]{1,4})?")

# Bytes of one element.
DTYPES: Mapping[str, int] = MappingProxyType(
    {
        **{f"{kind}{bits}": 1 for kind in ("int", "uint") for bits in range(1, 9)},
        **{"int16": 2, "uint16": 2, "int32": 4, "uint32": 4, "int64": 8, "uint64": 8, "bool": 1},
        **{"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8, "complex32": 4, "complex64": 8, "complex128": 16},
        **{"float8_e4m3fn": 1, "float8_e4m3fnuz": 1, "float8_e5m2": 1, "float8_e5m2fnuz": 1, "float8_e8m0fnu": 1},
        **{"float4_e2m1fn_x2": 1, "qint8": 1, "qint32": 4, "quint8": 1, "quint4x2": 1, "quint2x4": 1},
        **{"bits1x8": 1, "bits2x4": 1, "bits4x2": 1, "bits8": 1, "bits16": 2},
    }
)
CONSTANTS: Mapping[str, Collection[str]] = MappingProxyType(
    {
        "dtype": DTYPES.keys(),
        "layout": {
            "strided",
            "sparse_coo",
            "sparse_csr",
            "sparse_csc",
            "sparse_bsr",
            "sparse_bsc",
            "_mkldnn",
            "jagged",
        },
        "memory_format": {"contiguous_format", "preserve_format", "channels_last", "channels_last_3d"},
    }
)


def refusal(target: str, *, namespaces: Collection[str] | None = None) -> str | None:
    """Why a graph may not call this; None: it may, if torch has it. None for the namespaces: those of this process."""
    if type(target) is str and target.startswith("operator."):
        return None if target.removeprefix("operator.") in OPERATORS else f"no scalar op {ascii(target)[:80]}"
    named = TARGET.fullmatch(target) if type(target) is str else None
    if named is None:
        return f"{ascii(target)[:80]} is no name of an op"
    namespace, name, _ = named.groups()
    if namespace in NOT_OPS or (namespaces is not None and namespace not in namespaces):
        allowed = ", ".join(sorted(NAMESPACES if namespaces is None else namespaces))
        return f"{target[:80]} is not of a namespace that a graph may call: {allowed}"
    if FORBIDDEN.fullmatch(name):
        return f"{target[:80]} may not be called: it reaches beyond the tensors that it is given"
    return None


def unknown_constant(family: str, name: str) -> str | None:
    """Why this is no name of the tensor library; None: it is one."""
    if type(family) is not str or type(name) is not str:
        return "a constant is named by two texts"
    if family == "device":
        return None if DEVICE.fullmatch(name) else f"{name[:40]!a} is no device"
    if family not in CONSTANTS:
        return f"no constant of family {ascii(family)[:40]}"
    return None if name in CONSTANTS[family] else f"{name[:40]!a} is no {family}"
