"""What does the same to every element of some tensors, as one short program: a pass over memory in place of several.

Each line is a call of torch's, with its rounding. Tensors are read and written in blocks that stay in the processor's
cache between the lines.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lowtide import native
from lowtide.kernels import vectors
from lowtide.kernels.tried import Family, Own

SOURCE = Path(__file__).with_name("chains.cpp")
LINES = (  # as chains.cpp numbers them
    *("load", "store", "add", "multiply", "divide", "add number", "multiply number", "divide number", "negate", "root"),
    *("add product", "add quotient", "lerp"),
)
WORDS = 6  # of a line: its number, where its result goes, three registers, and the place of its number
REGISTERS = 16
GRAIN = 2**15  # elements that torch leaves to one thread

aten = torch.ops.aten
_POINTER, _INT = ctypes.c_void_p, ctypes.c_int64


class _Chain(ctypes.Structure):
    _fields_ = (
        *((name, _POINTER) for name in ("read", "written", "code")),
        ("lines", _INT),
        ("numbers", _POINTER),
        *((name, _INT) for name in ("count", "fused", "chunk")),
        ("roots", _POINTER),
    )


@cache
def library() -> ctypes.CDLL | None:
    """Our kernel; None where it can't be compiled or loaded."""
    signatures: native.Signatures = {"lowtide_chain": ([_POINTER, _INT], None)}
    return vectors.library(SOURCE, signatures, "chains of calls")


def update(read: list[Tensor], written: list[Tensor], code: list[int], numbers: list[float]) -> None:
    """Run the lines on all elements: from what is read, and what was there, to what is written."""
    _refuse_unsound(read, written, code, numbers)
    way = _way()
    if way is None or not all(map(_is_plain, (*read, *written))):
        return by_torch(read, written, code, numbers)
    return _run(way, read, written, code, numbers)


def _run(way: int, read: list[Tensor], written: list[Tensor], code: list[int], numbers: list[float]) -> None:
    compiled = library()
    assert compiled is not None
    tensors = [*read, *written]
    sources = (_POINTER * len(tensors))(*(tensor.data_ptr() for tensor in tensors))
    targets = (_POINTER * len(written))(*(tensor.data_ptr() for tensor in written))
    count, threads = written[0].numel(), torch.get_num_threads()
    shares = max(1, min(threads, -(-count // GRAIN)))
    lines, values = (_INT * len(code))(*code), (ctypes.c_double * (len(numbers) + 1))(*numbers)
    chain = _Chain(
        ctypes.addressof(sources),
        ctypes.addressof(targets),
        ctypes.addressof(lines),
        len(code) // WORDS,
        ctypes.addressof(values),
        count,
        way & 1,
        max(1, -(-count // shares)),
        _roots() if way & 2 else None,
    )
    compiled.lowtide_chain(ctypes.byref(chain), threads)


def by_torch(read: list[Tensor], written: list[Tensor], code: list[int], numbers: list[float]) -> None:
    """The same in torch's own calls, one for each line."""
    registers: dict[int, Any] = {}
    stores: list[tuple[Tensor, Tensor]] = []
    tensors = [*read, *written]
    for place in range(0, len(code), WORDS):
        line, to, *from_, number = code[place : place + WORDS]
        name = LINES[line]
        if name == "load":
            registers[to] = tensors[from_[0]].view(written[0].shape)
        elif name == "store":
            stores.append((written[to], registers[from_[0]]))
        else:
            one, other, third = (registers.get(register) for register in from_)
            registers[to] = _CALLS[name](one, other, third, numbers[number] if number < len(numbers) else None)
    for target, made in stores:
        target.copy_(made.view(target.shape))


_CALLS: dict[str, Callable[[Any, Any, Any, Any], Tensor]] = {
    "add": lambda a, b, c, k: aten.add.Tensor(a, b, alpha=k),
    "multiply": lambda a, b, c, k: aten.mul.Tensor(a, b),
    "divide": lambda a, b, c, k: aten.div.Tensor(a, b),
    "add number": lambda a, b, c, k: aten.add.Tensor(a, k),
    "multiply number": lambda a, b, c, k: aten.mul.Tensor(a, k),
    "divide number": lambda a, b, c, k: aten.div.Tensor(a, k),
    "negate": lambda a, b, c, k: aten.neg.default(a),
    "root": lambda a, b, c, k: aten.sqrt.default(a),
    "add product": lambda a, b, c, k: aten.addcmul.default(a, b, c, value=k),
    "add quotient": lambda a, b, c, k: aten.addcdiv.default(a, b, c, value=k),
    "lerp": lambda a, b, c, k: aten.lerp.Scalar(a, b, k),
}


def _refuse_unsound(read: list[Tensor], written: list[Tensor], code: list[int], numbers: list[float]) -> None:
    """Raise where lines name what is not there, or tensors have not as many elements."""
    sizes = {tensor.numel() for tensor in (*read, *written)}
    sound = bool(written) and len(sizes) == 1 and len(code) % WORDS == 0
    known: set[int] = set()
    for place in range(0, len(code) if sound else 0, WORDS):
        line, to, *from_, number = code[place : place + WORDS]
        name = LINES[line] if 0 <= line < len(LINES) else ""
        if name == "load":
            sound &= 0 <= from_[0] < len(read) + len(written)
        elif name == "store":
            sound &= 0 <= to < len(written) and from_[0] in known
        else:
            sound &= bool(name) and known.issuperset(from_[: _READS[name]]) and 0 <= number <= len(numbers)
            sound &= number < len(numbers) or name in ("multiply", "divide", "negate", "root")
        if name != "store":
            sound &= 0 <= to < REGISTERS
            known.add(to)
    if not sound:
        raise ValueError("a chain can't run: its lines do not belong to its tensors")


_READS = dict.fromkeys(LINES, 1) | dict.fromkeys(("add", "multiply", "divide", "lerp"), 2)
_READS |= dict.fromkeys(("add product", "add quotient"), 3)


def _is_plain(tensor: Tensor) -> bool:
    return tensor.dtype is torch.float32 and tensor.device.type == "cpu" and tensor.is_contiguous()


@cache
def _roots() -> int | None:
    """Where the roots of the library are that torch was built with; None: it was built without."""
    try:
        found = ctypes.CDLL(str(vectors.TORCH / "lib" / "libtorch_cpu.so")).vmsSqrt
    except (OSError, AttributeError):
        return None
    return ctypes.cast(found, _POINTER).value


@cache
def _way() -> int | None:
    """How torch adds a product and takes roots here, as chains.cpp numbers it; None: there is no kernel."""
    if library() is None:
        return None
    generator = torch.Generator().manual_seed(1)
    given = [torch.rand(4096, generator=generator, dtype=torch.float32) for _ in range(3)]
    loads = [0, 0, 2, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 2, 1, 0, 0, 0]
    product = [*loads, LINES.index("add product"), 3, 0, 1, 2, 0, 1, 0, 3, 0, 0, 0]
    root = [*loads, LINES.index("root"), 3, 1, 0, 0, 0, 1, 0, 3, 0, 0, 0]

    def exact(way: int, code: list[int]) -> bool:
        mine, theirs = given[2].clone(), given[2].clone()
        _run(way, given[:2], [mine], code, [0.1])
        by_torch(given[:2], [theirs], code, [0.1])
        return torch.equal(mine, theirs)

    return exact(1, product) + 2 * (_roots() is not None and exact(2, root))


def _get_ready() -> None:
    _way()


OWN = (
    Own(
        "chain(Tensor[] read, Tensor(a!)[] written, int[] code, float[] numbers) -> ()",
        update,
        by_torch,
        ready=_get_ready,
    ),
)
(CHAIN,) = (one.target for one in OWN)
FAMILY = Family(
    OWN,
    tuple(
        Path(__file__).with_name(name)
        for name in ("chains.cpp", "vectors.hpp", "threads.hpp", "chains.py", "vectors.py")
    ),
)
