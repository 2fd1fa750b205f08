"""One run of the table, in a process of its own: the least memory of a way, metered, or its training with one seed.

`python -m lowtide.bench.low_memory.runs JSON` writes the row as the last line of what it prints. What a lossy step
computes does not depend on its plan, to the bit: memory is metered under the plan with the least peak, and training
runs under one with room, which is quicker. Ways with a budget train within it, by the plan that was metered.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch

from lowtide import report
from lowtide.bench.low_memory.tasks import TASKS, Task
from lowtide.bench.low_memory.ways import EAGER, Way
from lowtide.bench.optimizers import AdamMini, GaLore, adapted
from lowtide.captured import Captured
from lowtide.choice import Leave
from lowtide.cli.profile import resized_target
from lowtide.cli.target import Built, build
from lowtide.data import source
from lowtide.fit import Fitted, fit
from lowtide.measure import measure
from lowtide.peaks import metered_peak, resident
from lowtide.plan import TIME_LIMIT, as_eager, plan
from lowtide.plan.planning import Planning
from lowtide.rewrites import read_allow
from lowtide.simulate import simulate

WARM = 3  # steps: the first learns what ops allocate, the others run in the arena
ROOM = 2  # times eager's peak: a budget for which nothing runs twice
Row = dict[str, Any]
OPTIMIZERS: dict[str, Callable[[Any, float], Any]] = {
    "adafactor": lambda model, lr: torch.optim.Adafactor(model.parameters(), lr=20 * lr),
    "galore": lambda model, lr: GaLore(model.parameters(), lr=4 * lr, rank=128),
    "adam-mini": lambda model, lr: AdamMini(model.parameters(), lr=lr),
    "lora": lambda model, lr: torch.optim.Adam(
        [item for item in adapted(model, 16).parameters() if item.requires_grad], lr=4 * lr
    ),
}


@dataclass(frozen=True)
class Effort:
    """How long a plan is searched for, and where that of a way with a budget is kept for its other runs."""

    time_limit: float = TIME_LIMIT  # seconds
    plan: Path | None = None  # None: each run searches for its own


def run(task: Task, target: str, way: Way, part: str, steps: int, items: int, effort: Effort | None = None) -> Row:
    """The row of a way: of its memory, or of its training with a seed."""
    empty = resident.now()
    torch.manual_seed(0 if part == "memory" else int(part))
    built, effort = _built(target, task, way), effort or Effort()
    if part == "memory":
        return {**_memory(built, way, effort), "not_counted": empty}
    return _training(task, target, built, way, int(part), steps, items, effort)


def _built(target: str, task: Task, way: Way) -> Built:
    built = build(f"{target},lr={task.lr}" if ":" in target else f"{target}:lr={task.lr}")
    if not way.optimizer:
        return built
    step, model, _, example = built
    return Built(step, model, OPTIMIZERS[way.optimizer](model, task.lr), example)


def _memory(built: Built, way: Way, effort: Effort) -> Row:
    """What is held at the peak, metered and by category."""
    from lowtide.capture import capture

    step, model, optimizer, example = built
    if way.name == EAGER:
        captured = capture(step, model, optimizer, example)
        costs = measure(captured.graph)
        program = as_eager(captured.graph)
        metered = metered_peak(captured, costs, lambda: step(model, optimizer, *example))
        found = report.profile(captured.graph, costs, program)
        seconds = sum(costs.seconds[op] for op in captured.graph.ordinary)
        return _row(found, metered, found.peak, seconds, ())
    begun = perf_counter()
    train = _fitted(built, way, effort, least=True)
    planning = perf_counter() - begun
    times = []
    for _ in range(WARM):
        begun = perf_counter()
        train(*example)
        times.append(perf_counter() - begun)
    found = report.profile(train.captured.graph, train.costs, train.program)
    said = tuple(report.show_rewrite(one) for one in train.plan.rewrites if one.exactness != "bitwise")
    return {**_row(found, train.peak, train.plan.peak, min(times[1:]), said), "planning_seconds": planning}


def _row(found: report.Profile, metered: int | None, planned: int, seconds: float, rewrites: tuple[str, ...]) -> Row:
    return {
        "peak": metered,
        "planned": planned,
        "persistent": found.persistent,
        "categories": dict(found.categories),
        "seconds": seconds,
        "rewrites": list(rewrites),
    }


def _fitted(built: Built, way: Way, effort: Effort, *, least: bool) -> Fitted:
    """The step of a way: within its budget, or under a plan of its own with the least peak, or with room."""
    from lowtide.capture import capture

    step, model, optimizer, example = built
    allow = way.allow or None
    if way.budget:
        known = effort.plan
        if known is not None and known.exists():
            return fit(step, model, optimizer, example=example, plan=known, allow=allow)
        limit = effort.time_limit
        train = fit(step, model, optimizer, example=example, budget=way.budget, allow=allow, time_limit=limit)
        if known is not None:
            known.parent.mkdir(parents=True, exist_ok=True)
            train.plan.save(known)
        return train
    captured = capture(step, model, optimizer, example)
    leave = Leave(read_allow(allow), resized_target(built, captured))
    rewritten = leave.apply(captured.graph, leave.all_named(captured.graph))
    costs = measure(rewritten.graph)
    if least:
        found = Planning(rewritten.graph, costs).least()
    else:
        found = plan(rewritten.graph, costs, ROOM * _eager_peak(captured), time_limit=0)
    found = replace(found, rewrites=rewritten.rewrites)
    return fit(step, model, optimizer, example=example, plan=found, allow=allow)


def _eager_peak(captured: Captured) -> int:
    return simulate(captured.graph, measure(captured.graph), as_eager(captured.graph)).peak


def _training(
    task: Task, target: str, built: Built, way: Way, seed: int, steps: int, items: int, effort: Effort
) -> Row:
    """Results on held-out data after so many steps, on batches that depend on the seed alone; the rate ends at zero."""
    step, model, optimizer, example = built
    batches = source(task.dataset, target, example, seed=seed)
    train: Any = None
    if way.name != EAGER:
        train = _fitted(built, way, effort, least=False)
    rates = [group["lr"] for group in optimizer.param_groups]
    losses, times = [], []
    torch.manual_seed(seed)
    for number in range(steps):
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * (1 - number / steps)
        batch = batches(number)
        begun = perf_counter()
        loss = step(model, optimizer, *batch) if train is None else train(*batch)
        times.append(perf_counter() - begun)
        losses.append(float(loss.detach()))
    dense = getattr(train, "dense", contextlib.nullcontext)
    with dense(), torch.no_grad():
        model.eval()
        scores = task.judge(model, task, target, example, items)
    last = losses[-max(1, steps // 10) :]
    return {**scores, "train_loss": sum(last) / len(last), "step_seconds": median(times)}


def main(asked: str) -> None:
    """Run what is asked for and print the row."""
    told = json.loads(asked)
    task = next(task for task in TASKS if task.name == told["task"])
    way = Way(**told["way"])
    effort = Effort(told["time_limit"], None if told["plan"] is None else Path(told["plan"]))
    row = run(task, told["target"], way, told["part"], told["steps"], told["items"], effort)
    print(json.dumps(row))


if __name__ == "__main__":
    main(sys.argv[1])
