"""Does a model train whose parameters and optimizer state are more than the memory that the system gives it?

`python -m lowtide.bench.beyond TARGET WAY BUDGET SLACK STEPS SECONDS` is the process that is held. Its limit is in
force from before the model is built: torch and lowtide are imported, and torch's threads run, but there is no tensor
yet. Where this system lets us make a control group of memory, that is the limit: it counts every page that the process
gets from then on, those of files among them, and who needs more is killed. Else limits are on its data (RLIMIT_DATA:
what it holds in memory of its own) and on its address space (RLIMIT_AS: with the files that it maps, so with room for
what lives in one), and VmHWM says how many pages, those of files among them, were resident at the most. What ops cost
is known by then: another process has measured it, which is not held.
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
from lowtide.bench import groups, limited
from lowtide.cli.target import build
from lowtide.errors import LowtideError
from lowtide.fit import Fitted, fit
from lowtide.models import SMALL
from lowtide.models.catalog import OPTIMIZER_OPTIONS, parse
from lowtide.peaks import resident, storage_bytes
from lowtide.plan import TIME_LIMIT
from lowtide.verify.compare import digest
from lowtide.verify.copies import lasting_tensors

TARGET = "gpt:context=128,batch=2,optimizer=adam"
STEPS = 5
PATIENCE = 3600  # seconds for all steps of one process
SLACK = 64 * 2**20  # bytes above the budget: what the libraries below torch keep for themselves
# Each thread that allocates would reserve address space of its own, which is no memory; and what is freed goes back to
# the system, instead of being kept for later.
HEAP = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
GROUP = "LOWTIDE_BENCH_GROUP"  # the environment variable that names the control group of a held process
HALF = 2  # parts of what persists between steps, of which the budget is one

Row = dict[str, Any]


@dataclass(frozen=True)
class Beyond:
    """How a step fared within half of what persists between its steps, and eager's without a limit and with it."""

    persistent: int  # bytes of parameters, state and batch
    budget: int  # bytes of the whole step
    slack: int  # bytes above it that the limits leave
    elsewhere: int  # bytes of parameters and state that live in a file
    limit: str  # what the system counts
    wanted: int  # steps
    fitted: int  # steps that it took
    fitted_end: str  # why it stopped; "": it took all
    eager: int  # steps that eager took within the same limits
    eager_end: str
    equal: bool  # whether all that steps change is eager's, bit for bit
    resident: int  # bytes: the most that was resident above what was before the model was built, pages of files too
    charged: int  # bytes: the most that the control group counted, a part of which the system takes back; 0: no group
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
    budget = 0
    for way in ("free", "fitted", "eager"):
        tell(f"{steps} steps, {way}")
        told[way] = _held(target, way, budget, slack, steps, time_limit)
        if way == "free":
            known, free, end = told["free"]
            if len(free) < steps or "persistent" not in known:
                raise LowtideError(f"{target} could not be prepared: {end}")
            budget = known["persistent"] // HALF
    (_, free, _), (known, fitted, end), (_, eager, eager_end) = told.values()
    return Beyond(
        persistent=told["free"][0]["persistent"],
        budget=budget,
        slack=slack,
        elsewhere=known.get("elsewhere", 0),
        limit=known.get("limit", ""),
        wanted=steps,
        fitted=len(fitted),
        fitted_end=end,
        eager=len(eager),
        eager_end=eager_end,
        equal=len(fitted) == steps and fitted[-1]["state"] == free[-1]["state"],
        resident=max((row["resident"] for row in fitted), default=0),
        charged=max((row["charged"] for row in fitted), default=0),
        pages=fitted[-1]["pages"] if fitted else 0,
        seconds=_median(fitted),
        eager_seconds=_median(free),
    )


def _median(rows: list[Row]) -> float | None:
    return median(row["seconds"] for row in rows[2:] or rows) if rows else None


def _held(target: str, way: str, budget: int, slack: int, steps: int, time_limit: float) -> tuple[Row, list[Row], str]:
    """What a held process said before its first step, after each, and why it ended early, if it did."""
    command = [sys.executable, "-m", "lowtide.bench.beyond", target, way]
    command += [str(budget), str(slack), str(steps), str(time_limit)]
    root = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path, **HEAP}
    with groups.group() as place:
        if place is not None:
            environment[GROUP] = str(place)
        ended = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=PATIENCE, check=False)
    rows: list[Row] = [json.loads(line) for line in ended.stdout.splitlines()]
    taken = [row for row in rows if "step" in row]
    known = {key: item for row in rows if "step" not in row for key, item in row.items()}
    return known, taken, "" if len(taken) == steps else limited.why(ended, rows)


# ------------------------------------------------------------------------------------------ the process, from inside


def _main(target: str, way: str, budget: int, slack: int, steps: int, time_limit: float) -> None:
    """Take on the limit, build the model, prepare, and take the steps."""
    torch.manual_seed(0)
    _warm_up(target)
    here = _let_go()
    group = Path(os.environ[GROUP]) if GROUP in os.environ else None
    if way != "free":
        _say(limit=_limit(budget, slack, group))
    resident.reset_peak()
    step, model, optimizer, example = build(target)
    train: Fitted | None = None
    if way == "fitted":
        train = fit(step, model, optimizer, example=example, budget=budget, time_limit=time_limit, offload="disk")
        _say(elsewhere=train.costs.elsewhere(train.captured.graph))
    for number in range(steps):
        begun = perf_counter()
        step(model, optimizer, *example) if train is None else train(*example)
        seconds = perf_counter() - begun
        pages = 0 if train is None else sum(one.runner.away.resident for one in train._fits)
        told: Row = {"step": number + 1, "seconds": seconds, "resident": resident.peak() - here, "pages": pages}
        told["charged"] = 0 if group is None or way == "free" else groups.charged(group)
        if number + 1 == steps:  # to look at what lives in a file brings its pages to memory
            told["state"] = _state(model, optimizer)
        _say(**told)
    if way == "free":
        persistent = storage_bytes(_tensors([*lasting_tensors(model, optimizer, ()), *tree.flatten(example)[0]]))
        _say(persistent=persistent)
        # Prices are kept: who is held does not measure, in a process of its own that the group would count, too.
        fit(step, model, optimizer, example=example, budget=persistent // HALF, time_limit=time_limit, offload="disk")


def _warm_up(target: str) -> None:
    """Load all that is loaded at the first use, by a step of a tiny model of the same kind; torch's threads run."""
    left = torch.ones(512, 512, requires_grad=True)
    torch.mm(left, left).tanh().sum().backward()
    name, options = parse(target)
    shared = [f"{key}={options[key]}" for key in OPTIMIZER_OPTIONS if key in options]
    step, model, optimizer, example = build(",".join((SMALL[name], *shared)) if name in SMALL else target)
    train = fit(step, model, optimizer, example=example, time_limit=0.0, costs="roofline", offload="disk")
    train(*example)


def _let_go() -> int:
    """Give back what nobody needs, and say what is resident."""
    gc.collect()
    with contextlib.suppress(AttributeError):  # a system whose heap can't do that
        ctypes.CDLL(None).malloc_trim(0)
    return resident.now() or 0


def _tensors(found: Iterable[Any]) -> list[torch.Tensor]:
    return [tensor for tensor in found if isinstance(tensor, torch.Tensor)]


def _limit(budget: int, slack: int, group: Path | None) -> str:
    """Hold this process to so many bytes from now on, and say by what."""
    if group is not None:
        groups.join(group, budget + slack)
        return groups.NAME
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    now = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if line.startswith(("VmData", "VmSize"))}
    mapped = HALF * budget  # what persists, which may live in a file
    for kind, nbytes in ((resource.RLIMIT_DATA, now["VmData"]), (resource.RLIMIT_AS, now["VmSize"] + mapped)):
        resource.setrlimit(kind, (nbytes + budget + slack,) * 2)
    return "RLIMIT_DATA and RLIMIT_AS"


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
