"""What the ops of a program take in its first steps: in a step caches, pages and neighbours are other than alone."""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Mapping
from statistics import fmean, median

from lowtide.device import Device
from lowtide.program import Copy, Program, Run

STEPS = 3  # that are timed, after one more that nobody counts
PATIENCE = 12  # steps that are watched at most; on a machine that is never calm the quickest of them have to do
PROBES = 1000  # to find out what it takes to look at the clock
RECENT = 15  # steps whose time is kept


class Stopwatch:
    """A cursor that also notes when each instruction begins."""

    def __init__(self, cursor: array[int], device: Device) -> None:
        self._cursor, self._device = cursor, device
        self._delay = device.delay()
        self.numbers: list[int] = []  # of instructions
        self.begun: list[float] = []  # seconds, by the device's clock

    @property
    def delay(self) -> float:
        """The seconds that threads have waited for a core since this was made."""
        return self._device.delay() - self._delay

    def __getitem__(self, place: int) -> int:
        return self._cursor[place]

    def __setitem__(self, place: int, number: int) -> None:
        self._device.synchronise()
        self._cursor[place] = number
        self.numbers.append(number)
        self.begun.append(self._device.clock())


class Timings:
    """Times the steps of one program, and in a few of them its ops."""

    def __init__(self, program: Program, device: Device) -> None:
        self._program, self._device = program, device
        self._calm: list[tuple[float, dict[int, float]]] = []  # of each timed step its seconds, by instruction, too
        self._disturbed: list[tuple[float, dict[int, float]]] = []  # the same of those in which others had its cores
        self._recent: list[float] = []  # seconds of the last steps
        self._watched = 0  # steps
        copies = any(isinstance(one, Copy) for one in program.instructions)  # ops wait for them: that is not their time
        self.left = 0 if copies else STEPS  # timed steps to come

    def watch(self, cursor: array[int]) -> Stopwatch | None:
        """What stands in for the cursor in a step whose ops are timed; None: they are not."""
        return Stopwatch(cursor, self._device) if self.left else None

    def note(self, seconds: float, watch: Stopwatch | None) -> None:
        """After a step in the arena that took so long: what its ops took, unless other processes had its cores."""
        if watch is None:
            self._recent = [*self._recent[1 - RECENT :], seconds]
            return
        end, delay, look = self._device.clock(), watch.delay, self._look()
        self._watched += 1
        if self._watched == 1:
            return
        spent = seconds - look * len(watch.numbers)
        ends = [*watch.begun[1:], end]
        runs = {n: max(0.0, u - b - look) for n, b, u in zip(watch.numbers, watch.begun, ends, strict=True)}
        if self._device.calm(seconds, delay):
            self._calm.append((spent, runs))
            self.left -= 1
        else:
            self._disturbed.append((spent, runs))
            self.left = 0 if self._watched >= PATIENCE else self.left

    @property
    def step(self) -> float | None:
        """The seconds of a step, the median of the last ones; None before the first."""
        known = self._recent or [spent for spent, _ in (*self._calm, *self._disturbed)]
        return median(known) if known else None

    @property
    def ops(self) -> Mapping[int, float] | None:
        """For each op its seconds in a step, with its part of what a step does beside ops; None: not known yet.

        Where other processes had its cores in all of many steps, it is the least of these.
        """
        steps = self._calm or self._disturbed
        if self.left or not steps:
            return None
        found: defaultdict[int, list[float]] = defaultdict(list)
        for number, run in enumerate(self._program.instructions):
            if isinstance(run, Run):
                found[run.op].append(min(runs[number] for _, runs in steps))
        total, least = sum(map(sum, found.values())), min(spent for spent, _ in steps)
        return {op: least / total * fmean(seconds) for op, seconds in found.items()} if total > 0 else {}

    def _look(self) -> float:
        """The seconds that it takes to note when an instruction begins."""
        watch = Stopwatch(array("q", [0]), self._device)
        for number in range(PROBES):
            watch[0] = number
        return (watch.begun[-1] - watch.begun[0]) / (PROBES - 1)
