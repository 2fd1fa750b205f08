"""The ops of `forms` in numpy, to the bit, where there is no compiler; and what their programs may say."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import Tensor

BLOCK = 256  # elements to a scale
CHUNK = 64 * BLOCK  # elements at a time
SURE = 1 / 1024
# What one line of a program does, in the order in which forms.cpp numbers them: (which, to, a, b, number).
INSTRUCTIONS = (
    *("load", "see", "store", "copy", "add", "subtract", "multiply", "divide"),
    *("add number", "multiply number", "divide number", "lerp", "root", "negate", "absolute", "sign"),
    *("maximum", "minimum", "fill"),
)
NUMBERED = frozenset({"add", "subtract", "add number", "multiply number", "divide number", "lerp", "fill"})

Array = Any  # of numpy: its own types do not know what arithmetic gives
F, U = numpy.float32, numpy.uint32


@dataclass(frozen=True)
class Stored:
    """A tensor in parts."""

    values: Tensor
    scales: Tensor | None  # one for each block, of 8 bits
    counter: Tensor | None  # of the times that it was rounded by chance

    @property
    def count(self) -> int:
        """How many values there are."""
        return self.values.numel()


@dataclass(frozen=True)
class Seen:
    """A tensor of floats that is read, and whether its elements follow each other."""

    tensor: Tensor
    plain: bool


def check_code(code: Sequence[int], stored: int, seen: int, numbers: int, registers: int) -> None:
    """Raise where a program reaches for what is not there."""
    if len(code) % 5 or not code:
        raise ValueError("tensors in parts do not fit together: the program is cut off")
    for place in range(0, len(code), 5):
        which, to, a, b, number = code[place : place + 5]
        name = INSTRUCTIONS[which] if 0 <= which < len(INSTRUCTIONS) else ""
        rooms = {"load": (registers, stored), "see": (registers, seen), "store": (stored, registers)}
        limits = rooms.get(name, (registers, registers))
        known = 0 <= number < numbers if name in NUMBERED else number == 0
        if not (name and known and 0 <= to < limits[0] and 0 <= a < limits[1] and 0 <= b < registers):
            raise ValueError("tensors in parts do not fit together: the program names what is not there")


def unpack(stored: Stored, mask: Tensor | None, out: Tensor) -> None:
    """All elements as floats, as they lie in memory."""
    if mask is None:
        for first in range(0, out.numel(), CHUNK):
            _put(out, slice(first, first + CHUNK), _load(stored, first, min(CHUNK, out.numel() - first)))
        return
    out.zero_()
    places = _places(mask, out.numel())[: stored.count]
    for first in range(0, len(places), CHUNK):
        part = places[first : first + CHUNK]
        out.numpy()[part] = _load(stored, first, len(part))


def run(
    stored: Sequence[Stored],
    mask: Tensor | None,
    seen: Sequence[Seen],
    numbers: Sequence[float],
    code: Sequence[int],
    elements: int,
    count: int,
) -> None:
    """Run a program on each of `count` values, many at a time."""
    places = None if mask is None else _places(mask, elements)
    seeds = [0 if item.counter is None else _seed(int(item.counter)) for item in stored]
    for first in range(0, count, CHUNK):
        some = min(CHUNK, count - first)
        registers: dict[int, Array] = {}
        at = None if places is None else places[first : first + some]
        for place in range(0, len(code), 5):
            which, to, a, b, number = code[place : place + 5]
            name = INSTRUCTIONS[which]
            if name == "load":
                registers[to] = _load(stored[a], first, some)
            elif name == "see":
                flat = seen[a].tensor.reshape(-1).numpy()
                registers[to] = flat[first : first + some].copy() if at is None else flat[at]
            elif name == "store":
                _store(stored[to], first, registers[a], seeds[to])
            else:
                k = F(numbers[number]) if name in NUMBERED else F(0)
                with numpy.errstate(all="ignore"):
                    registers[to] = _CALCULATE[name](registers.get(a), registers.get(b), k).astype(F)
                if name == "fill":
                    registers[to] = numpy.full(some, k, F)
    for place in range(0, len(code), 5):
        counter = stored[code[place + 1]].counter if INSTRUCTIONS[code[place]] == "store" else None
        if counter is not None:
            counter.add_(1)


def _lerp(a: Array, b: Array, k: Any) -> Array:
    return a + k * (b - a) if abs(k) < 0.5 else b - (b - a) * (F(1) - k)


_CALCULATE: dict[str, Callable[[Any, Any, Any], Array]] = {
    "copy": lambda a, b, k: a.copy(),
    "add": lambda a, b, k: a + k * b,
    "subtract": lambda a, b, k: a - k * b,
    "multiply": lambda a, b, k: a * b,
    "divide": lambda a, b, k: a / b,
    "add number": lambda a, b, k: a + k,
    "multiply number": lambda a, b, k: a * k,
    "divide number": lambda a, b, k: a / k,
    "lerp": _lerp,
    "root": lambda a, b, k: numpy.sqrt(a),
    "negate": lambda a, b, k: -a,
    "absolute": lambda a, b, k: numpy.abs(a),
    "sign": lambda a, b, k: (a > 0).astype(F) - (a < 0).astype(F),
    "maximum": lambda a, b, k: numpy.where((a > b) | (a != a), a, b),
    "minimum": lambda a, b, k: numpy.where((a < b) | (a != a), a, b),
    "fill": lambda a, b, k: numpy.zeros(1, F),
}


def _places(mask: Tensor, elements: int) -> Array:
    bits = numpy.unpackbits(mask.numpy(), bitorder="little")[:elements]
    return numpy.flatnonzero(bits)


def _put(out: Tensor, where: slice, numbers: Array) -> None:
    out.numpy()[where] = numbers


def _load(stored: Stored, first: int, count: int) -> Array:
    values = stored.values[first : first + count]
    if stored.scales is None:
        return values.float().numpy().copy()
    scales = numpy.repeat(stored.scales.numpy()[first // BLOCK : -(-(first + count) // BLOCK)], BLOCK)[:count]
    if values.dtype == torch.int8:
        part = values.numpy().astype(F) * F(1 / 127)
        return part * numpy.abs(part) * scales
    part = values.numpy().astype(F) * F(1 / 255)
    return (part * part) * (part * part) * scales


def _seed(counter: int) -> int:
    everything = 2**64 - 1
    z = (counter + 0x9E3779B97F4A7C15) & everything
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & everything
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & everything
    return (z ^ (z >> 31)) >> 32


def _noise(seed: int, first: int, count: int) -> Array:
    x = numpy.arange(first, first + count, dtype=numpy.uint64).astype(U) * U(0x9E3779B9) + U(seed)
    x = (x ^ (x >> U(16))) * U(0x85EBCA6B)
    x = (x ^ (x >> U(13))) * U(0xC2B2AE35)
    return x ^ (x >> U(16))


def _store(stored: Stored, first: int, numbers: Array, seed: int) -> None:
    dtype, count, by_chance = stored.values.dtype, len(numbers), stored.counter is not None
    if dtype == torch.float32:
        made: Array = numbers
    elif dtype == torch.bfloat16:
        made = _to_bfloat(numbers, _noise(seed, first, count) & U(0xFFFF) if by_chance else U(0x8000))
    elif dtype == torch.float16:
        made = _to_half(numbers, _noise(seed, first, count) & U(0x1FFF) if by_chance else numpy.full(count, 0x1000, U))
    else:
        drawn = (_noise(seed, first, count) >> U(8)).astype(F) * F(1 / 2**24)
        made = _to_codes(stored, first, numbers, drawn if by_chance else F(0.5))
    kind = {torch.bfloat16: torch.int16, torch.float16: torch.int16}.get(dtype, dtype)
    stored.values.view(kind)[first : first + count] = torch.from_numpy(made.view(_numpy(kind)))


def _numpy(dtype: torch.dtype) -> Any:
    return torch.empty(0, dtype=dtype).numpy().dtype


def _to_bfloat(numbers: Array, chance: Array) -> Array:
    bits = numbers.view(U)
    special = (bits & U(0x7F800000)) == U(0x7F800000)
    rounded = numpy.minimum((bits & U(0x7FFFFFFF)) + chance, U(0x7F7FFFFF)) | (bits & U(0x80000000))
    quiet = bits | numpy.where((bits & U(0x7FFFFF)) != 0, U(0x400000), U(0))
    return (numpy.where(special, quiet, rounded) >> U(16)).astype(numpy.uint16)


def _to_half(numbers: Array, chance: Array) -> Array:
    bits = numbers.view(U)
    sign, size = (bits >> U(16)) & U(0x8000), bits & U(0x7FFFFFFF)
    normal = numpy.minimum((size + chance - U(112 << 23)) >> U(13), U(0x7BFF))
    steps = numpy.minimum(size, U(113 << 23)).view(F) * F(2**24) + chance.astype(F) * F(1 / 8192)
    special = numpy.where(size > U(0x7F800000), U(0x7E00), U(0x7C00))
    found = numpy.where(size < U(113 << 23), steps.astype(U), normal)
    return (numpy.where(size >= U(0x7F800000), special, found) | sign).astype(numpy.uint16)


def _to_codes(stored: Stored, first: int, numbers: Array, chance: Array) -> Array:
    assert stored.scales is not None
    blocks = -(-len(numbers) // BLOCK)
    padded = numpy.zeros(blocks * BLOCK, F)
    padded[: len(numbers)] = numpy.abs(numbers)
    scales = padded.view(U).reshape(blocks, BLOCK).max(axis=1).view(F)
    stored.scales.numpy()[first // BLOCK : first // BLOCK + blocks] = scales
    spread = numpy.repeat(scales, BLOCK)[: len(numbers)]
    with numpy.errstate(all="ignore"):
        part = numpy.where(spread > 0, numbers / spread, F(0)).astype(F)
        signed = stored.values.dtype == torch.int8
        most, size = (F(127), numpy.abs(part)) if signed else (F(255), numpy.maximum(part, F(0)))
        root = numpy.sqrt(size) if signed else numpy.sqrt(numpy.sqrt(size))
        low = numpy.minimum(numpy.floor(root * most), most - F(1))
        inverse = F(1 / 127) if signed else F(1 / 255)
        at, after = low * inverse, (low + F(1)) * inverse
        at, after = (at * at, after * after) if signed else (at * at * at * at, after * after * after * after)
        way = numpy.where(after > at, ((size if signed else part) - at) / (after - at), F(0)).astype(F)
    up = numpy.where(way < F(SURE), F(0), numpy.where(way > F(1 - SURE), F(1), (way > chance).astype(F)))
    code = low + up
    if signed:
        return numpy.nan_to_num(numpy.where(part < 0, -code, code)).astype(numpy.int8)
    return numpy.nan_to_num(numpy.maximum(code, (part > 0).astype(F))).astype(numpy.uint8)
