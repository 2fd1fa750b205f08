"""PNG -> pixels, for what the datasets are made of: 8 bits, grey or colour, not interlaced.

The sheets of CIFAR-10 are all that needs it, and a decoder of one page is less than a dependency.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

SIGNATURE = b"\x89PNG\r\n\x1a\n"
CHANNELS = {0: 1, 2: 3}  # colour type -> numbers in a pixel
Row = NDArray[np.uint8]


def decode(data: bytes) -> NDArray[np.uint8]:
    """The pixels of a PNG file: (height, width, channels)."""
    if not data.startswith(SIGNATURE):
        raise ValueError("it is no PNG file")
    header, packed = b"", []
    for kind, content in _chunks(data):
        if kind == b"IHDR":
            header = content
        elif kind == b"IDAT":
            packed.append(content)
    width, height, depth, colour, _, _, interlaced = struct.unpack(">IIBBBBB", header)
    if depth != 8 or colour not in CHANNELS or interlaced:
        raise ValueError(f"a PNG of {depth} bits, colour type {colour}, interlaced {interlaced} can't be read")
    channels = CHANNELS[colour]
    stream = zlib.decompress(b"".join(packed))
    lines = np.frombuffer(stream, np.uint8).reshape(height, 1 + width * channels)
    pixels = np.empty((height, width, channels), np.uint8)
    above: Row = np.zeros((width, channels), np.uint8)
    for number, line in enumerate(lines):
        above = _restore(int(line[0]), line[1:].reshape(width, channels), above)
        pixels[number] = above
    return pixels


def _chunks(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    place = len(SIGNATURE)
    while place < len(data):
        length, kind = struct.unpack_from(">I4s", data, place)
        content = data[place + 8 : place + 8 + length]
        (checksum,) = struct.unpack_from(">I", data, place + 8 + length)
        if zlib.crc32(kind + content) != checksum:
            raise ValueError(f"its part {kind.decode(errors='replace')} is damaged")
        yield kind, content
        place += 12 + length


def _restore(kind: int, line: Row, above: Row) -> Row:
    """Undo the filter of one line: what is stored is the difference from a guess, modulo 256."""
    if kind == 0:
        return line
    if kind == 1:  # the guess is the pixel on the left
        return np.cumsum(line, axis=0, dtype=np.uint8)
    if kind == 2:  # the pixel above
        return line + above
    if kind not in (3, 4):
        raise ValueError(f"there is no filter {kind}")
    guess = _average if kind == 3 else _paeth
    channels = line.shape[1]
    left, corner = [0] * channels, [0] * channels
    made = []
    for stored, over in zip(line.tolist(), above.tolist(), strict=True):
        left = [(number + guess(*around)) % 256 for number, *around in zip(stored, left, over, corner, strict=True)]
        corner = over
        made.append(left)
    return np.array(made, np.uint8)


def _average(left: int, above: int, corner: int) -> int:
    return (left + above) // 2


def _paeth(left: int, above: int, corner: int) -> int:
    """Whichever of the three is nearest to left + above - corner."""
    plane = left + above - corner
    return min((left, above, corner), key=lambda number: abs(plane - number))
