"""Does a step keep to its budget where the system holds it to it, and for as long as one likes?

`python -m lowtide.bench.limited TARGET WAY BUDGET STEPS SLACK SECONDS` is the process that is held: it prepares, gives
itself a limit, and writes a line of JSON for what it knows before, and one for each step that it took.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lowtide import allocator, tree
from lowtide.cli.target import Built, build
from lowtide.errors import LowtideError
from lowtide.fit import fit
from lowtide.peaks import resident, storage_bytes
from lowtide.plan import TIME_LIMIT

SLACK = 64 * 2**20  # bytes above the budget: what the libraries below torch keep for themselves
PATIENCE = 3600  # seconds for all steps of one process
WARM_UP = 20  # steps after which a run has all that it needs
GROWTH = 8 * 2**20  # bytes: what the heap of a long run may have more in the end

Row = dict[str, Any]


@dataclass(frozen=True)
class Lived:
    """How far a fitted step and eager's came, each in a process that gets no more than the budget and some slack."""

    budget: int  # bytes of the whole step
    slack: int  # bytes above it
    wanted: int  # steps
    fitted: int  # steps that it took
    eager: int  # steps that eager took
    fitted_end: str  # why it stopped; "": it took all
    eager_end: str
    fitted_resident: int  # bytes: the most that was resident, beyond what was before there was a model

    @property
    def ok(self) -> bool:
        """Whether the limit is one, and the fitted step keeps to it."""
        return self.fitted == self.wanted > self.eager


@dataclass(frozen=True)
class Steady:
    """What a long run holds after its first steps, and in the end."""

    budget: int  # bytes
    peak: int | None  # bytes, metered
    steps: int
    early: int | None  # bytes that are resident after the first few steps
    late: int | None  # and after the last
    torch_growth: int  # bytes that torch holds more in the end, but for what the last step returned
    mismatches: int

    @property
    def growth(self) -> int:
        """Resident bytes that came after the first steps."""
        return 0 if self.early is None or self.late is None else self.late - self.early

    @property
    def ok(self) -> bool:
        """Whether nothing grew, and everything was where it was planned."""
        within = self.peak is not None and self.peak <= self.budget
        return within and self.growth <= GROWTH and self.torch_growth <= 0 and not self.mismatches


def live(
    target: str, *, budget: str = "25%", steps: int = 50, slack: int = SLACK, time_limit: float = TIME_LIMIT
) -> Lived:
    """Take steps within a limit of the system on all the data of the process, fitted and in eager PyTorch."""
    told, taken, end = _held(target, "fitted", budget, steps, slack, time_limit)
    if "budget" not in told:
        raise LowtideError(f"{target} could not be prepared: {end}")
    _, eager, eager_end = _held(target, "eager", str(told["budget"]), steps, slack, time_limit)
    return Lived(
        budget=told["budget"],
        slack=slack,
        wanted=steps,
        fitted=len(taken),
        eager=len(eager),
        fitted_end=end,
        eager_end=eager_end,
        fitted_resident=max((row["resident"] for row in taken), default=0),
    )


def steady(
    target: str,
    *,
    budget: str = "30%",
    steps: int = 500,
    time_limit: float = TIME_LIMIT,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Steady:
    """Take many steps within a budget, and compare what is held after the first ones and in the end."""
    step, model, optimizer, example = build(target)
    train = fit(step, model, optimizer, example=example, budget=budget, time_limit=time_limit)
    for done in range(WARM_UP):
        progress(done, steps)
        result = train(*example)
    gc.collect()
    early = resident.now()
    with allocator.meter() as meter:
        for done in range(WARM_UP, steps):
            progress(done, steps)
            result = train(*example)
        growth = meter.current - sum(leaf.nbytes for leaf in tree.flatten(result)[0] if isinstance(leaf, torch.Tensor))
    gc.collect()
    late = resident.now()
    assert train.plan.budget is not None
    return Steady(train.plan.budget, train.peak, steps, early, late, growth, train.mismatches)


def enforced() -> bool:
    """Whether this system holds processes to a limit on their data."""
    script = "import mmap, resource as r; r.setrlimit(r.RLIMIT_DATA, (1 << 28,) * 2); mmap.mmap(-1, 1 << 29, flags=34)"
    command = [sys.executable, "-c", script]
    return subprocess.run(command, capture_output=True, check=False, timeout=60).returncode == 1


# ----------------------------------------------------------------------------------------- the process, from outside


def _held(target: str, way: str, budget: str, steps: int, slack: int, seconds: float) -> tuple[Row, list[Row], str]:
    """What a held process said before its first step, after each, and why it ended early, if it did."""
    command = [sys.executable, "-m", "lowtide.bench.limited", target, way, budget]
    command += [str(steps), str(slack), str(seconds)]
    root = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path}
    ended = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=PATIENCE, check=False)
    rows: list[Row] = [json.loads(line) for line in ended.stdout.splitlines()]
    taken = [row for row in rows if "step" in row]
    return rows[0] if rows else {}, taken, "" if len(taken) == steps else why(ended, rows)


def why(ended: subprocess.CompletedProcess[str], rows: list[Row]) -> str:
    """Why a held process ended."""
    if rows and "error" in rows[-1]:
        return str(rows[-1]["error"])
    if ended.returncode < 0:
        return f"killed by {signal.Signals(-ended.returncode).name}"
    return (ended.stderr.strip().splitlines() or [f"the process ended with code {ended.returncode}"])[-1]


# ------------------------------------------------------------------------------------------ the process, from inside


def _main(target: str, way: str, budget: str, steps: int, slack: int, seconds: float) -> None:
    """Prepare, take on the limit, and take the steps."""
    built = build(target)
    run, nbytes = _prepare(built, way, budget, seconds)
    before = _before(built)
    data, here = _data() - before, (resident.now() or 0) - before
    limit = data + nbytes + slack
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    resident.reset_peak()
    _say(budget=nbytes, limit=limit)
    for number in range(steps):
        run()
        _say(step=number + 1, resident=resident.peak() - here)


def _prepare(built: Built, way: str, budget: str, seconds: float) -> tuple[Callable[[], Any], int]:
    """The step as it is to run, and the bytes of its budget."""
    step, model, optimizer, example = built
    if way == "eager":
        return lambda: step(model, optimizer, *example), int(budget)
    train = fit(step, model, optimizer, example=example, budget=budget, time_limit=seconds)
    assert train.plan.budget is not None
    return lambda: train(*example), train.plan.budget


def _before(built: Built) -> int:
    """The bytes of the budget that are there already, after everything that stays beside it is."""
    left = torch.ones(512, 512)
    torch.mm(left, left).tanh_().sum()  # the threads, and what they need
    del left
    gc.collect()
    return storage_bytes([*built.model.parameters(), *built.model.buffers(), *tree.flatten(built.example)[0]])


def _data() -> int:
    """The bytes that count for the limit."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmData:"))


def _say(**row: int | str) -> None:
    print(json.dumps(row), flush=True)


if __name__ == "__main__":
    try:
        target, way, budget, steps, slack, seconds = sys.argv[1:]
        _main(target, way, budget, int(steps), int(slack), float(seconds))
    except Exception as error:
        _say(error=f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}")
        sys.exit(1)
