"""`lowtide bench low-memory`: each technique alone and some together, on real data: bytes, accuracy, time."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from lowtide.bench.cli.verbs import NOTHING, Markdown, Part, Row, finish
from lowtide.bench.low_memory import EAGER, TASKS, Store, Task, Way, difference, missing, ways_of
from lowtide.cli.plan import TimeLimit
from lowtide.cli.profile import Json
from lowtide.cli.talk import answering, counting
from lowtide.data.datasets import find
from lowtide.data.store import opened
from lowtide.errors import FileError, UsageError
from lowtide.plan import TIME_LIMIT
from lowtide.report import Table

MB = 10**6  # as the papers count
PATIENCE = 24 * 3600  # seconds for one run
BASELINE = 399.0  # MB: WRN-28-2 with batch 100 in dense single precision, as derived
NEAR = 0.03  # of that: how far the metered baseline may be
COLUMNS = (
    "parameters",
    "gradients",
    "optimizer state",
    "batch",
    "activations",
    "activation gradients",
    "temporaries inside ops",
)


@answering
def low_memory(
    tasks: Annotated[
        list[str] | None,
        typer.Argument(metavar="TASK", help="wrn-28-2 or dynamicconv; both by default.", show_default=False),
    ] = None,
    rows: Annotated[
        str | None,
        typer.Option(
            metavar="<names>",
            help="Only rows with such words in their names: one;other.",
        ),
    ] = None,
    steps: Annotated[int, typer.Option(min=0, help="Steps of training; 0: only memory.")] = 500,
    seeds: Annotated[int, typer.Option(min=1, help="Seeds of the headline rows; others have one.")] = 3,
    items: Annotated[int, typer.Option(min=1, help="Held-out images, or sentences to be translated.")] = 2000,
    resume: Annotated[
        Path | None, typer.Option(metavar="<file>", help="Keep rows here, and make only those that are missing.")
    ] = None,
    target: Annotated[
        str | None, typer.Option(metavar="<target>", help="A model of other sizes, for a single task.")
    ] = None,
    time_limit: TimeLimit = TIME_LIMIT,
    as_json: Json = False,
    markdown: Markdown = False,
) -> None:
    """Train in little memory: metered bytes, accuracy with its spread, and time, on real data."""
    chosen = _tasks(tasks, target)
    for task in chosen:
        opened(find(task.dataset))  # raises where it is not installed, before all work
    if resume is not None and resume.is_dir():
        raise FileError(f"{resume} is a folder.", hint="name a file.")
    store = Store(resume)
    asked = [
        (task, way, part)
        for task in chosen
        for way in _ways(task, rows)
        for part in ("memory", *(str(seed) for seed in range(seeds if way.headline else 1) if steps))
    ]
    with counting("bench low-memory") as progress:
        for done, (task, way, part) in enumerate(asked):
            progress(done, len(asked))
            said = {"task": task.name, "way": way.name, "part": part, "target": target or task.target}
            wanted = {**said, "steps": steps if part != "memory" else 0}
            if store.find(wanted) is None:
                more = {"items": items, "time_limit": time_limit, "plan": _plan_of(resume, wanted)}
                store.add({**wanted, **_run({**wanted, **more, "way": asdict(way)})})
    parts = [_part(task, store, _ways(task, rows), target or task.target, steps) for task in chosen]
    finish(parts, as_json, markdown)


def _tasks(names: Sequence[str] | None, target: str | None) -> list[Task]:
    known = {task.name: task for task in TASKS}
    for name in names or ():
        if name not in known:
            raise UsageError(f"there is no task {name!r}.", hint=f"there are {', '.join(known)}.")
    if target is not None and len(names or ()) != 1:
        raise UsageError("--target is of a single task.", hint="name one: lowtide bench low-memory wrn-28-2.")
    return [known[name] for name in dict.fromkeys(names or known)]


def _ways(task: Task, rows: str | None) -> list[Way]:
    """The rows that are asked for, and the one that all are compared with; without techniques that are not there."""
    words = None if rows is None else [word.strip() for word in rows.split(";" if ";" in rows else ",") if word.strip()]
    return [
        way
        for way in ways_of(task.kind)
        if not missing(way) and (words is None or way.name == EAGER or any(word in way.name for word in words))
    ]


def _plan_of(resume: Path | None, wanted: Row) -> str | None:
    """Where the plan of a way is kept beside the rows: its runs share it."""
    if resume is None:
        return None
    words = re.sub(r"[^a-z0-9.]+", "-", f"{wanted['target']} {wanted['way']}".lower())
    return str(resume.with_name(f"{resume.name}.plans") / f"{words}.json")


def _run(asked: dict[str, Any]) -> Row:
    """A run in a process of its own; what it ends with, or why it failed."""
    command = [sys.executable, "-W", "ignore", "-m", "lowtide.bench.low_memory.runs", json.dumps(asked)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    if done.returncode == 0:
        row: Row = json.loads(done.stdout.splitlines()[-1])
        return row
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    return {"failure": next((line for line in reversed(lines) if "Error" in line), lines[-1] if lines else "killed")}


def _part(task: Task, store: Store, ways: Sequence[Way], target: str, steps: int) -> Part:
    """The table of a task."""
    mine = [row for row in store.rows if row["task"] == task.name and row["target"] == target]
    memory = {row["way"]: row for row in mine if row["part"] == "memory"}
    trained = [row for row in mine if row["part"] != "memory" and row["steps"] == steps and "failure" not in row]
    scores = {way.name: {int(row["part"]): row for row in trained if row["way"] == way.name} for way in ways}
    base = memory.get(EAGER, {}).get("peak")
    cells = [_cells(way, memory.get(way.name, {}), scores[way.name], scores.get(EAGER, {}), base) for way in ways]
    titles = ["row", "MB", "times less", task.score, "difference", "loss", "s a step", *COLUMNS]
    table = Table("srrrrrr" + "r" * len(COLUMNS), cells, titles, ("bold", *[""] * (6 + len(COLUMNS))))
    found = [row for row in mine if row["part"] == "memory" or row["steps"] == steps]
    return Part(task.name, [{**row, "ok": _ok(row)} for row in found], [table], task.name, _lines(task, mine, steps))


def _cells(way: Way, memory: Row, scores: dict[int, Row], base: dict[int, Row], eager: int | None) -> list[str]:
    peak = memory.get("peak")
    off = difference(_column(scores, "score"), _column(base, "score")) if way.name != EAGER else None
    mean = _mean(scores, "score")
    categories = memory.get("categories", {})
    return [
        way.name,
        f"{peak / MB:.2f}" if peak else "failed" if "failure" in memory else NOTHING,
        f"{eager / peak:.1f}" if peak and eager else NOTHING,
        NOTHING if mean is None else f"{mean:.2f}",
        NOTHING if off is None else str(off),
        _shown(_mean(scores, "loss"), "{:.3f}"),
        _shown(memory.get("seconds"), "{:.2f}"),
        *(f"{categories.get(name, 0) / MB:.2f}" if categories else NOTHING for name in COLUMNS),
    ]


def _column(rows: dict[int, Row], key: str) -> dict[int, float]:
    return {seed: row[key] for seed, row in rows.items()}


def _mean(rows: dict[int, Row], key: str) -> float | None:
    found = list(_column(rows, key).values())
    return sum(found) / len(found) if found else None


def _shown(number: float | None, form: str) -> str:
    return NOTHING if number is None else form.format(number)


def _ok(row: Row) -> bool:
    """Whether a row is what it must be: made, as planned, and the baseline where it was derived to be."""
    if "failure" in row:
        return False
    if row["part"] != "memory" or not row.get("peak"):
        return True
    near: Callable[[float, float], bool] = lambda one, other: abs(one - other) <= NEAR * other  # noqa: E731
    whole = row["way"] != EAGER or row["target"] != TASKS[0].target or near(row["peak"], BASELINE * MB)
    return whole and near(row["peak"], row["planned"])


def _lines(task: Task, rows: Sequence[Row], steps: int) -> list[str]:
    """What stands below the table."""
    data = find(task.dataset)
    empty = [row["not_counted"] for row in rows if row.get("not_counted")]
    lines = [
        "MB: the metered peak of the whole step under the plan with the least: parameters, state, gradients, the "
        "batch, activations and temporaries inside ops. The columns to the right are its parts then, predicted.",
    ]
    if empty:
        lines.append(
            f"not counted: Python, torch and compiled code, {max(empty) / MB:.0f} MB resident before there is a model."
        )
    if steps:
        lines.append(
            f"{task.score} and loss on held-out data after {steps} steps, a rate that ends at zero, the same order of "
            "data for each seed; differences from eager over paired seeds, with the interval that has 95% of them."
        )
        lines.append("not resolved: the interval has both 0 and 0.4 points in it.")
    if task.kind == "pairs":
        lines.append("BLEU by sacrebleu on words in small letters; not IWSLT'14: no figure of a paper compares.")
    hashes = ", ".join(f"{package.name} sha256 {package.sha256[:12]}" for package in data.packages)
    lines.append(f"{data.name}: {hashes}; {data.licence}.")
    lines += [f"{row['way']}: {', '.join(row['rewrites'])}." for row in rows if row.get("rewrites")]
    failed = [row for row in rows if "failure" in row]
    return lines + [f"{row['way']} ({row['part']}): {row['failure']}" for row in failed]
