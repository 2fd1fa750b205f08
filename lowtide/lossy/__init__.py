"""Graph -> Graph: techniques that change the rounding or more; each is off unless it is named."""

from __future__ import annotations

from lowtide.lossy.chunks import RECURRENT, cut, longest

__all__ = ["RECURRENT", "cut", "longest"]
