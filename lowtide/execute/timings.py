"""What the ops of a program take in its first steps: in a step caches, pages and neighbours are other than alone."""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Mapping
from statistics import fmean, median

from lowtide.device import Device
from lowtide.program import Copy, Program, Run

STEPS = 3  # that are timed, after one more that nobody counts
CALM = 0.02  # of a step: where its threads wait longer for their cores, others had these, and nothing is learned
WAKING = 1e-3  # seconds: threads that wake up wait a little on a calm machine, too
PATIENCE = 12  # steps that are watched at most; on a machine that is never calm prices stay as they are
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
        self._runs: defaultdict[int, list[float]] = defaultdict(list)  # instruction -> its seconds in each timed step
        self._timed: list[float] = []  # seconds of each timed step
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
        if delay > max(WAKING, CALM * seconds):
            self._recent.append(spent)
            self.left = 0 if self._watched >= PATIENCE else self.left
            return
        self.left -= 1
        for number, begun, until in zip(watch.numbers, watch.begun, [*watch.begun[1:], end], strict=True):
            self._runs[number].append(max(0.0, until - begun - look))
        self._timed.append(spent)

    @property
    def step(self) -> float | None:
        """The seconds of a step, the median of the last ones; None before the first."""
        known = self._recent or self._timed
        return median(known) if known else None

    @property
    def ops(self) -> Mapping[int, float] | None:
        """For each op its seconds in a step, with its part of what a step does beside ops; None: not known yet.

        None of them where other processes had the cores in all steps.
        """
        if self.left or not self._watched:
            return None
        if not self._timed:
            return {}
        found: defaultdict[int, list[float]] = defaultdict(list)
        for number, run in enumerate(self._program.instructions):
            if isinstance(run, Run):
                found[run.op].append(min(self._runs[number]))
        total = sum(map(sum, found.values()))
        return {op: min(self._timed) / total * fmean(seconds) for op, seconds in found.items()} if total > 0 else {}

    def _look(self) -> float:
        """The seconds that it takes to note when an instruction begins."""
        watch = Stopwatch(array("q", [0]), self._device)
        for number in range(PROBES):
            watch[0] = number
        return (watch.begun[-1] - watch.begun[0]) / (PROBES - 1)
