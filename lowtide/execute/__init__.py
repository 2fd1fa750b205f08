"""Program -> tensors: the same kernels as eager, called in the program's order, each result at its planned place."""

from __future__ import annotations

from lowtide.execute.away import REMEMBERED
from lowtide.execute.batch import Batch, Key
from lowtide.execute.departures import dismissals
from lowtide.execute.halves import Half, Halves
from lowtide.execute.runner import Runner, execute
from lowtide.execute.stale import StaleError

__all__ = ["REMEMBERED", "Batch", "Half", "Halves", "Key", "Runner", "StaleError", "dismissals", "execute"]
