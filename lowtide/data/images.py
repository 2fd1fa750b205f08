"""Batches of images: bytes on disk, converted for one batch at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isqrt

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from lowtide.data.batches import Batches
from lowtide.data.store import Stored
from lowtide.data.wanted import Kind
from lowtide.errors import UsageError

FOREGROUND = 0.1  # how far from the border's brightness, of 0 to 1, what stands before the background is


def image_batches(
    stored: Stored, part: str, kind: Kind, leaves: Sequence[Tensor], limits: Mapping[str, int]
) -> Batches:
    """Make batches of images of the size of the first leaf, with what the second asks for."""
    pixels, labels = stored.array(f"{part}_images"), stored.array(f"{part}_labels")
    channels, height, width = _shape(kind, leaves[0])
    _check_classes(stored, kind, limits)
    mean = torch.tensor(stored.about["mean"]).view(-1, 1, 1)
    deviation = torch.tensor(stored.about["deviation"]).view(-1, 1, 1)

    def make(numbers: NDArray[np.int64], chance: torch.Generator) -> list[Tensor]:
        images = _resized(torch.from_numpy(pixels[numbers]).float() / 255, height, width)
        inputs = _coloured((images - mean) / deviation, channels)
        if kind == "segmented images":
            return [inputs, foreground(images)]
        answers = torch.from_numpy(labels[numbers]).long()
        return [inputs.flatten(1) if kind == "labelled rows" else inputs, answers]

    return Batches(len(labels), make, _words(pixels, kind, stored.about["classes"], channels, height, width))


def foreground(images: Tensor) -> Tensor:
    """Label with 1 the pixels that are brighter or darker than the median of the image's border, the rest with 0."""
    shades = images.mean(1)
    border = torch.cat([shades[:, 0], shades[:, -1], shades[:, :, 0], shades[:, :, -1]], dim=1)
    background = border.median(dim=1).values[:, None, None]
    return ((shades - background).abs() > FOREGROUND).long()


def _shape(kind: Kind, leaf: Tensor) -> tuple[int, int, int]:
    """Channels, height and width of an image; a row of numbers is a square one, grey or in colour."""
    if kind != "labelled rows":
        return leaf.size(1), leaf.size(2), leaf.size(3)
    features = leaf.size(1)
    for channels in (1, 3):
        side = isqrt(features // channels)
        if features == channels * side * side:
            return channels, side, side
    side = isqrt(features)
    raise UsageError(
        f"a row of {features} numbers is no square image, neither grey nor in colour",
        hint=f"use features={side * side} or features=784 for a grey one, features=3072 for one in colour.",
    )


def _check_classes(stored: Stored, kind: Kind, limits: Mapping[str, int]) -> None:
    needed = 2 if kind == "segmented images" else stored.about["classes"]
    if limits.get("classes", needed) < needed:
        raise UsageError(
            f"classes={limits['classes']} is too few: {stored.dataset.name} has {needed}",
            hint=f"use classes={needed} or more.",
        )


def _resized(images: Tensor, height: int, width: int) -> Tensor:
    if images.shape[2:] == (height, width):
        return images
    return F.interpolate(images, size=(height, width), mode="bilinear", antialias=True)


def _coloured(images: Tensor, channels: int) -> Tensor:
    if images.size(1) == channels:
        return images
    return images.mean(1, keepdim=True).expand(-1, channels, -1, -1)


def _words(pixels: NDArray[np.uint8], kind: Kind, classes: int, channels: int, height: int, width: int) -> str:
    stored = tuple(pixels.shape[2:])
    resized = "" if stored == (height, width) else f", resized to {height} x {width}"
    grey = ", made grey" if channels == 1 < pixels.shape[1] else ""
    answers = "foreground to be marked" if kind == "segmented images" else f"{classes} classes"
    return f"{len(pixels):,} images of {stored[0]} x {stored[1]}{resized}{grey}, normalised, {answers}"
