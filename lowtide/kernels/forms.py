"""Ops on tensors in other forms: 16 bits an element, 8 bits with a scale for each block, values where a mask has a bit.

`unpack` makes floats of the parts, `pack` makes the parts of floats, and `update` does what an optimizer does to each
element, from parts to parts, a block at a time: nothing is allocated inside. What is rounded by chance takes its
numbers from a counter of its own, never from torch's generator. Without a compiler `forms_plain` does the same.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lowtide import native
from lowtide.kernels import forms_plain
from lowtide.kernels.forms_plain import BLOCK, INSTRUCTIONS, Seen, Stored

SOURCE = Path(__file__).with_name("forms.cpp")
FLAGS = ("-O3", "-ffp-contract=off", "-fno-math-errno", "-Wno-psabi", "-ldl")
TYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.uint8)  # as forms.cpp numbers them
REGISTERS, DIMENSIONS = 16, 8  # as in forms.cpp
UNPACK, PACK, UPDATE, FROM_BYTES = (f"lowtide.{name}.default" for name in ("unpack", "pack", "update", "from_bytes"))

_POINTER, _INT = ctypes.c_void_p, ctypes.c_int64
SIGNATURES: native.Signatures = {
    "lowtide_forms_update": ([_POINTER, _INT, _INT], None),
    "lowtide_forms_unpack": ([_POINTER, _POINTER, _INT, _POINTER, _INT], None),
    "lowtide_forms_from_bytes": ([_POINTER] * 3 + [_INT] * 3 + [_POINTER, _INT], None),
}


class _Stored(ctypes.Structure):
    _fields_ = (("type", _INT), *((name, _POINTER) for name in ("values", "scales", "counter")), ("count", _INT))


class _Seen(ctypes.Structure):
    _fields_ = (("data", _POINTER), ("dims", _INT), ("size", _INT * DIMENSIONS), ("stride", _INT * DIMENSIONS))


class _Update(ctypes.Structure):
    _fields_ = (
        *((name, _POINTER) for name in ("stored", "seen", "numbers", "code")),
        ("instructions", _INT),
        ("mask", _POINTER),
        *((name, _INT) for name in ("elements", "count")),
    )


_LIBRARY = torch.library.Library("lowtide", "FRAGMENT")
_LIBRARY.define("unpack(Tensor values, Tensor? scales, Tensor? mask, int[] size, int[] stride) -> Tensor")
_LIBRARY.define(
    "pack(Tensor(a!) values, Tensor(b!)? scales, Tensor? mask, Tensor(c!)? counter, Tensor dense, int[] order) -> ()"
)
_LIBRARY.define(
    "update(Tensor(a!)[] values, Tensor(b!)[] others, int[] kinds, Tensor? mask, Tensor[] seen, int[] size, "
    "int[] order, float[] numbers, int[] code) -> ()"
)
_LIBRARY.define(
    "from_bytes(Tensor values, Tensor steps, Tensor zeros, int[] size, int[] stride, int first, int channel) -> Tensor"
)


@cache
def library() -> ctypes.CDLL | None:
    """Our kernels; None where they can't be compiled or loaded."""
    try:
        depends = (torch.__version__,)
        return native.library(SOURCE, SIGNATURES, what="lowtide's kernels of forms", flags=FLAGS, depends=depends)
    except native.NativeUnavailable:  # the arena has said so
        return None


# ------------------------------------------------------------------------------------------------------------- the ops


def unpack(values: Tensor, scales: Tensor | None, mask: Tensor | None, size: list[int], stride: list[int]) -> Tensor:
    """All elements as floats, zero where the mask has no bit; in the order of memory that the strides say."""
    elements = math.prod(size)
    stored = _checked(values, scales, None, None)
    _check_mask(mask, elements, stored.count)
    made = torch.empty_strided(size, stride, dtype=torch.float32)
    _demand(made.numel() * 4 == made.untyped_storage().nbytes(), "the result has gaps between its elements")
    if (compiled := library()) is None:
        forms_plain.unpack(stored, mask, _memory(made))
    elif elements:
        compiled.lowtide_forms_unpack(
            ctypes.byref(_native(stored)), _address(mask), elements, made.data_ptr(), torch.get_num_threads()
        )
    return made


def pack(
    values: Tensor, scales: Tensor | None, mask: Tensor | None, counter: Tensor | None, dense: Tensor, order: list[int]
) -> None:
    """Make the parts of floats: by chance with a counter, which goes on by one, else to the nearest."""
    stored = _checked(values, scales, counter, None)
    code = [INSTRUCTIONS.index("see"), 0, 0, 0, 0, INSTRUCTIONS.index("store"), 0, 0, 0, 0]
    _run([stored], mask, [dense], list(dense.shape), order, [], code)


def update(
    values: list[Tensor],
    others: list[Tensor],
    kinds: list[int],
    mask: Tensor | None,
    seen: list[Tensor],
    size: list[int],
    order: list[int],
    numbers: list[float],
    code: list[int],
) -> None:
    """Run a program on each element of tensors in parts.

    `kinds` says for each tensor which of the others it has: 1 scales, 2 a counter, 3 both. The tensors that are seen
    have this size; `order` are its dimensions as they lie in memory.
    """
    _demand(len(kinds) == len(values), "each tensor has a kind")
    parts = iter(others)
    stored = []
    for tensor, kind in zip(values, kinds, strict=True):
        scales, counter = next(parts, None) if kind & 1 else None, next(parts, None) if kind & 2 else None
        stored.append(_checked(tensor, scales, counter, kind))
    _demand(next(parts, None) is None, "there are more parts than tensors have")
    _run(stored, mask, seen, size, order, numbers, code)


def from_bytes(
    values: Tensor, steps: Tensor, zeros: Tensor, size: list[int], stride: list[int], first: int, channel: int
) -> Tensor:
    """Bytes from the first one on as floats; each channel has its own step and zero, or all have one (-1)."""
    made = torch.empty_strided(size, stride, dtype=torch.float32)
    channels = size[channel] if 0 <= channel < len(size) else 1
    _demand(values.dtype == torch.uint8 and values.is_contiguous() and values.device.type == "cpu", "no such bytes")
    _demand(made.is_contiguous() and 0 <= first <= values.numel() - made.numel(), "there are too few bytes")
    for part in (steps, zeros):
        _demand(part.dtype == torch.float32 and part.is_contiguous() and part.numel() == channels, "no such channels")
    inner = math.prod(size[channel + 1 :]) if channel >= 0 else made.numel()
    outer = made.numel() // (channels * inner) if made.numel() else 0
    seen = values.view(-1)[first : first + made.numel()]
    if (compiled := library()) is None:
        floats = seen.view(outer, channels, inner).float()
        made.view(outer, channels, inner).copy_(floats.mul_(steps.view(1, -1, 1)).add_(zeros.view(1, -1, 1)))
    elif made.numel():
        tensors = [tensor.data_ptr() for tensor in (seen, steps, zeros)]
        threads = torch.get_num_threads()
        compiled.lowtide_forms_from_bytes(*tensors, outer, channels, inner, made.data_ptr(), threads)
    return made


def _made(values: Tensor, *rest: Any) -> Tensor:
    size, stride = [item for item in rest if isinstance(item, (list, tuple))][:2]
    return values.new_empty_strided(size, stride, dtype=torch.float32)


def _nothing(*_: Any) -> None:
    return None


for _name, _function, _fake in (
    ("unpack", unpack, _made),
    ("pack", pack, _nothing),
    ("update", update, _nothing),
    ("from_bytes", from_bytes, _made),
):
    torch.library.impl(f"lowtide::{_name}", "CPU", lib=_LIBRARY)(_function)
    torch.library.register_fake(f"lowtide::{_name}", _fake, lib=_LIBRARY)


def called(target: str) -> Any:
    """The function behind an op of this file, for who calls it without torch's dispatcher; None for all others."""
    return {UNPACK: unpack, PACK: pack, UPDATE: update, FROM_BYTES: from_bytes}.get(target)


# ------------------------------------------------------------------------------------------------------ what is checked


def _demand(holds: bool, what: str) -> None:
    if not holds:
        raise ValueError(f"tensors in parts do not fit together: {what}")


def _checked(values: Tensor, scales: Tensor | None, counter: Tensor | None, kind: int | None) -> Stored:
    """A tensor in parts, of sizes that belong together."""
    wanted = {values: TYPES, scales: (torch.float32,), counter: (torch.int64,)}
    for part, dtypes in ((part, dtypes) for part, dtypes in wanted.items() if part is not None):
        plain = part.device.type == "cpu" and part.layout is torch.strided and part.is_contiguous()
        _demand(plain and part.dtype in dtypes, f"a part is a {part.dtype}, or not contiguous")
    blocks = values.dtype in (torch.int8, torch.uint8)
    _demand((scales is not None) == blocks, "8 bits have scales, and no others do")
    _demand(scales is None or scales.numel() >= -(-values.numel() // BLOCK), "there are too few scales")
    _demand(counter is None or counter.numel() == 1, "a counter is one number")
    _demand(kind is None or kind == (scales is not None) + 2 * (counter is not None), "a part is missing")
    return Stored(values, scales, counter)


def _check_mask(mask: Tensor | None, elements: int, count: int) -> None:
    if mask is None:
        _demand(count == elements, f"{count} values for {elements} elements")
        return
    _demand(mask.dtype == torch.uint8 and mask.is_contiguous() and mask.device.type == "cpu", "the mask is no bytes")
    _demand(8 * mask.numel() >= elements and count <= elements, "the mask is too short")


def _run(
    stored: list[Stored],
    mask: Tensor | None,
    seen: Sequence[Tensor],
    size: list[int],
    order: list[int],
    numbers: Sequence[float],
    code: list[int],
) -> None:
    elements = math.prod(size)
    _demand(0 < len(stored) <= REGISTERS, "there are none, or too many")
    _demand(sorted(order) == list(range(len(size))) and len(size) <= DIMENSIONS, "they have other dimensions")
    forms_plain.check_code(code, len(stored), len(seen), len(numbers), REGISTERS)
    count = _count(stored, code)
    _check_mask(mask, elements, count)
    read = [_seen(tensor, size, order) for tensor in seen]
    if (compiled := library()) is None:
        forms_plain.run(stored, mask, read, numbers, code, elements, count)
    elif count:
        task = _Update(
            ctypes.cast((_Stored * len(stored))(*map(_native, stored)), _POINTER),
            ctypes.cast((_Seen * len(read))(*map(_native_seen, read)), _POINTER),
            ctypes.cast((ctypes.c_double * max(1, len(numbers)))(*numbers), _POINTER),
            ctypes.cast((_INT * len(code))(*code), _POINTER),
            len(code) // 5,
            _address(mask),
            elements,
            count,
        )
        compiled.lowtide_forms_update(ctypes.byref(task), len(stored), torch.get_num_threads())


def _count(stored: list[Stored], code: Sequence[int]) -> int:
    """How many values there are: what is only loaded, as a gradient is, may have room for more."""
    store = INSTRUCTIONS.index("store")
    written = {code[place + 1] for place in range(0, len(code), 5) if code[place] == store} or {0}
    counts = {stored[place].count for place in written}
    _demand(len(counts) == 1 and all(item.count >= min(counts) for item in stored), "their values differ in number")
    return min(counts)


def _seen(tensor: Tensor, size: list[int], order: list[int]) -> Seen:
    """A tensor of floats as it is read: its dimensions in the order in which the values lie."""
    plain = tensor.dtype == torch.float32 and tensor.device.type == "cpu" and tensor.layout is torch.strided
    _demand(plain and list(tensor.shape) == size, "what is read has another size, or is no float32")
    ordered = tensor.permute(order)
    return Seen(ordered, ordered.is_contiguous())


def _native(item: Stored) -> _Stored:
    parts = (item.values.data_ptr(), _address(item.scales), _address(item.counter))
    return _Stored(TYPES.index(item.values.dtype), *parts, item.count)


def _native_seen(item: Seen) -> _Seen:
    tensor, array = item.tensor, _INT * DIMENSIONS
    if item.plain:
        return _Seen(tensor.data_ptr(), 0, array(), array())
    return _Seen(tensor.data_ptr(), tensor.dim(), array(*tensor.shape), array(*tensor.stride()))


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _memory(tensor: Tensor) -> Tensor:
    """All elements of a tensor without gaps, as they lie in memory."""
    return tensor.as_strided((tensor.numel(),), (1,))
