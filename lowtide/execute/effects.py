"""What a step leaves in the caller's Python objects, put there after it has run."""

from __future__ import annotations

import array
import collections
from collections.abc import Sequence
from typing import Any

import numpy

from lowtide.guards import Effect


def repeat(effects: Sequence[Effect], values: Sequence[Any]) -> None:
    """Do what the step does to Python objects, with what it came to this time."""
    for effect, value in zip(effects, values, strict=True):
        holder = effect.place.holder
        match effect.how:
            case "put":
                effect.place.set(value)
            case "delete":
                effect.place.delete()
            case "append":
                holder.extend(value)
            case "replace":
                _replace(holder, value)
            case "call":
                args, kwargs = value
                holder(*args, **kwargs)


def _replace(holder: Any, value: Any) -> None:
    if isinstance(holder, numpy.ndarray):
        holder[...] = value
    elif isinstance(holder, (list, bytearray, array.array)):
        holder[:] = value
    else:
        holder.clear()
        holder.extend(value) if isinstance(holder, collections.deque) else holder.update(value)
