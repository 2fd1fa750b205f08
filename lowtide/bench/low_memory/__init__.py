"""How little memory a network can be trained in, and what that costs: each technique alone, and some together."""

from __future__ import annotations

from lowtide.bench.low_memory.spread import Difference, difference
from lowtide.bench.low_memory.store import Store
from lowtide.bench.low_memory.tasks import TASKS, Task
from lowtide.bench.low_memory.ways import EAGER, Way, missing, ways_of

__all__ = ["EAGER", "TASKS", "Difference", "Store", "Task", "Way", "difference", "missing", "ways_of"]
