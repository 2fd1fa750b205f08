"""Does a model train whose parameters and optimizer state are more than the memory that the system gives it?

`python -m lowtide.bench.beyond TARGET WAY BUDGET SLACK STEPS SECONDS` is the process that is held. Its limits are on
its data (RLIMIT_DATA: what it holds in memory of its own) and on its address space (RLIMIT_AS: with the files that it
maps, so with the one that state and parameters live in). They are in force from the end of the first step: optimizer
state is made in memory, and moves to its file when that step begins. No limit of a process is on resident pages, those
of files among them; VmHWM says how many there were at the most.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch

from lowtide import tree
from lowtide.bench import limited
from lowtide.cli.target import build
from lowtide.device.homes import lives_in_file
from lowtide.errors import LowtideError
from lowtide.fit import Fitted, fit
from lowtide.peaks import resident, storage_bytes
from lowtide.plan import TIME_LIMIT
from lowtide.verify.compare import digest
from lowtide.verify.copies import lasting_tensors

TARGET = "gpt:context=128,batch=2,optimizer=adam"
STEPS = 5
PATIENCE = 3600  # seconds for all steps of one process
SLACK = 64 * 2**20  # bytes above the budget: what the libraries below torch keep for themselves
HALF = 2  # parts of what persists between steps, of which the budget is one

Row = dict[str, Any]


@dataclass(frozen=True)
class Beyond:
    """How a step fared within half of what persists between its steps, and eager's without a limit and with it."""

    persistent: int  # bytes of parameters, state and batch
    budget: int  # bytes of the whole step
    slack: int  # bytes above it that the limits leave
    elsewhere: int  # bytes of parameters and state that live in a file
    wanted: int  # steps
    fitted: int  # steps that it took
    fitted_end: str  # why it stopped; "": it took all
    eager: int  # steps that eager took within the same limits
    eager_end: str
    equal: bool  # whether all that steps change is eager's, bit for bit
    resident: int  # bytes: the most that was resident above what was before the model was built, pages of files too
    pages: int  # bytes of the offload files that are in memory after the last step
    seconds: float | None  # of a step, the median of all but the first two
    eager_seconds: float | None  # of eager's without a limit

    @property
    def ok(self) -> bool:
        """Whether it trained within its limits, as eager does without."""
        return self.equal and self.fitted == self.wanted and self.resident <= self.budget + self.slack


def beyond(
    target: str = TARGET,
    *,
    steps: int = STEPS,
    slack: int = SLACK,
    time_limit: float = TIME_LIMIT,
    tell: Callable[[str], None] = lambda _: None,
) -> Beyond:
    """Take steps within half of what persists between them, in a process that gets no more."""
    told: dict[str, tuple[Row, list[Row], str]] = {}
    for way in ("free", "fitted", "eager"):
        tell(f"{steps} steps, {way}")
        budget = told["fitted"][0].get("budget", 0) if way == "eager" else 0
        told[way] = _held(target, way, budget, slack, steps, time_limit)
    (_, free, free_end), (known, fitted, end), (_, eager, eager_end) = told.values()
    if len(free) < steps or "budget" not in known:
        raise LowtideError(f"{target} could not be prepared: {free_end or end}")
    return Beyond(
        persistent=known["persistent"],
        budget=known["budget"],
        slack=slack,
        elsewhere=known["elsewhere"],
        wanted=steps,
        fitted=len(fitted),
        fitted_end=end,
        eager=len(eager),
        eager_end=eager_end,
        equal=len(fitted) == steps and fitted[-1]["state"] == free[-1]["state"],
        resident=max((row["resident"] for row in fitted), default=0),
        pages=fitted[-1]["pages"] if fitted else 0,
        seconds=_median(fitted),
        eager_seconds=_median(free),
    )


def _median(rows: list[Row]) -> float | None:
    return median(row["seconds"] for row in rows[2:] or rows) if rows else None


def _held(target: str, way: str, budget: int, slack: int, steps: int, time_limit: float) -> tuple[Row, list[Row], str]:
    """What a held process said when its limits came into force, after each step, and why it ended early, if it did."""
    command = [sys.executable, "-m", "lowtide.bench.beyond", target, way]
    command += [str(budget), str(slack), str(steps), str(time_limit)]
    root = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    # Each thread that allocates would reserve address space of its own, which is no memory.
    environment = {**os.environ, "PYTHONPATH": path, "MALLOC_ARENA_MAX": "1"}
    ended = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=PATIENCE, check=False)
    rows: list[Row] = [json.loads(line) for line in ended.stdout.splitlines()]
    taken = [row for row in rows if "step" in row]
    return next(iter(rows), {}), taken, "" if len(taken) == steps else limited.why(ended, rows)


# ------------------------------------------------------------------------------------------ the process, from inside


def _main(target: str, way: str, budget: int, slack: int, steps: int, time_limit: float) -> None:
    """Prepare, take a step, take on the limits, and take the others."""
    torch.manual_seed(0)
    step, model, optimizer, example = build(target)
    train: Fitted | None = None
    if way == "fitted":
        # State is made before the first step, so what persists is known only once the step is captured.
        known = fit(step, model, optimizer, example=example, budget="100%", time_limit=0.1, costs="roofline")
        persistent = known.costs.persistent(known.captured.graph)
        budget = persistent // HALF
        del known
        train = fit(step, model, optimizer, example=example, budget=budget, time_limit=time_limit, offload="disk")
        _say(budget=budget, persistent=persistent, elsewhere=train.costs.elsewhere(train.captured.graph))

    def run() -> None:
        step(model, optimizer, *example) if train is None else train(*example)

    run()
    here = _let_go() - _in_memory([*lasting_tensors(model, optimizer, ()), *tree.flatten(example)[0]])
    if way != "free":
        _limit(here, budget + slack)
    resident.reset_peak()
    for number in range(steps):
        begun = perf_counter()
        run()
        seconds = perf_counter() - begun
        pages = 0 if train is None else sum(one.runner.away.resident for one in train._fits)
        told: Row = {"step": number + 1, "seconds": seconds, "resident": resident.peak() - here, "pages": pages}
        if number + 1 == steps:  # to look at what lives in a file brings its pages to memory
            told["state"] = _state(model, optimizer)
        _say(**told)


def _let_go() -> int:
    """Give back what nobody needs, and say what is resident."""
    gc.collect()
    with contextlib.suppress(AttributeError):  # a system whose heap can't do that
        ctypes.CDLL(None).malloc_trim(0)
    return resident.now() or 0


def _in_memory(tensors: Iterable[Any]) -> int:
    """The bytes of these tensors that are in memory of the process: all but those in a file."""
    found = [tensor for tensor in tensors if isinstance(tensor, torch.Tensor)]
    return storage_bytes([tensor for tensor in found if not lives_in_file(tensor)])


def _limit(before: int, nbytes: int) -> None:
    """Hold this process to so many bytes more of data and of address space than it had resident before."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    now = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if line.startswith(("VmData", "VmSize"))}
    there = (resident.now() or 0) - before  # of the bytes that are to be held
    for kind, name in ((resource.RLIMIT_DATA, "VmData"), (resource.RLIMIT_AS, "VmSize")):
        resource.setrlimit(kind, (now[name] - there + nbytes,) * 2)


def _state(model: Any, optimizer: Any) -> str:
    """A digest of all that steps change."""
    found = blake2b(digest_size=8)
    for tensor in lasting_tensors(model, optimizer, ()):
        found.update(digest(tensor))
    return found.hexdigest()


def _say(**row: Any) -> None:
    print(json.dumps(row), flush=True)


if __name__ == "__main__":
    try:
        target, way, budget, slack, steps, seconds = sys.argv[1:]
        _main(target, way, int(budget), int(slack), int(steps), float(seconds))
    except Exception as error:
        _say(error=f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}")
        sys.exit(1)
