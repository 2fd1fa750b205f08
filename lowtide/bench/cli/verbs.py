"""`lowtide bench` for single verbs, and the rows and tables of all benches."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from statistics import median
from typing import Annotated, Any

import typer

from lowtide.bench import capture as captures
from lowtide.bench import execute as executions
from lowtide.bench import guards as guard_costs
from lowtide.bench import seconds
from lowtide.cli.profile import Json
from lowtide.cli.talk import answering, counting, show, show_json, show_text, working
from lowtide.cli.target import build
from lowtide.device import CPU
from lowtide.errors import UsageError
from lowtide.models import SMALL, catalog
from lowtide.peaks import predict as predictions
from lowtide.report import Table, show_bytes, show_seconds

Row = dict[str, Any]
Markdown = Annotated[bool, typer.Option("--markdown", help="Print the table as Markdown.")]
NOTHING = "-"
EXECUTED = ("resnet:depth=50,batch=16,size=128", "gpt")

app = typer.Typer(help="Measure what lowtide claims.")


@app.command()
@answering
def predict(
    targets: Annotated[
        list[str] | None, typer.Argument(help="Targets to run instead of every built-in model.", show_default=False)
    ] = None,
    small: Annotated[bool, typer.Option("--small", help="Tiny sizes instead of the defaults.")] = False,
    rounds: Annotated[
        int, typer.Option(min=0, help="Timed turns of the steps within each budget; 0: only peaks.")
    ] = seconds.ROUNDS,
    time_limit: Annotated[
        float, typer.Option(min=0, metavar="<seconds>", help="Seconds of search for each budget.")
    ] = seconds.TIME_LIMIT,
    as_json: Json = False,
    markdown: Markdown = False,
) -> None:
    """Compare predicted peaks with metered ones, and predicted seconds of a step with measured ones."""

    def one(target: str) -> Row:
        found = predictions.predict(*build(target))
        timed = seconds.time_budgets(lambda: build(target), rounds=rounds, time_limit=time_limit) if rounds else []
        row = {**asdict(found), "error": found.error, "eager_error": found.eager_error, "peaks_ok": found.ok}
        return {**row, "seconds": [_timed(item) for item in timed], "ok": found.ok and all(item.ok for item in timed)}

    chosen = targets or [SMALL[entry.name] if small else entry.name for entry in catalog()]
    rows = rows_of("predict", chosen, one, "--rounds", str(rounds), "--time-limit", str(time_limit))
    finish([Part("rows", rows, _predictions(rows, small=small))], as_json, markdown)


def _timed(item: seconds.Timed) -> Row:
    errors = {"error": item.error, "error_alone": item.error_alone}
    return {**asdict(item), "measured": item.measured, **errors, "ok": item.ok}


def _predictions(rows: Sequence[Row], *, small: bool) -> list[Table]:
    """The table of peaks and, where steps were timed, the one of seconds."""
    done = [row for row in rows if "failure" not in row]
    names = [row["target"].partition(":")[0] if small else row["target"] for row in done]
    peaks = [
        [
            name,
            show_bytes(row["predicted_peak"]),
            show_bytes(row["metered_peak"]),
            f"{row['error']:+.3%}",
            show_bytes(row["eager_predicted_peak"]),
            show_bytes(row["eager_metered_peak"]),
            f"{row['eager_error']:+.3%}",
            "ok" if row["peaks_ok"] else f"over {predictions.LIMIT:.1%}",
        ]
        for name, row in zip(names, done, strict=True)
    ]
    titles = ["target", "predicted", "metered", "error", "eager pred", "metered", "error", ""]
    tables = [Table("srrrrrrl", peaks, titles, ("bold", "", "", "", "", "", "", ""))]
    times = [
        [
            name if number == 0 else "",
            f"{item['percent']:g}%",
            *([NOTHING] * 5 if item["measured"] is None else _seconds_cells(item)),
            "nothing fits" if item["measured"] is None else "ok" if item["ok"] else f"over {seconds.LIMIT:.0%}",
        ]
        for name, row in zip(names, done, strict=True)
        for number, item in enumerate(row["seconds"])
    ]
    if times:
        titles = ["target", "budget", "measured", "ops alone", "error", "corrected", "error", ""]
        tables.append(Table("srrrrrrl", times, titles, ("bold", "", "", "", "", "", "", "")))
    return tables


def _seconds_cells(item: Row) -> list[str]:
    return [
        show_seconds(item["measured"]),
        show_seconds(item["alone"]),
        f"{item['error_alone']:+.1%}",
        show_seconds(item["predicted"]),
        f"{item['error']:+.1%}",
    ]


@app.command()
@answering
def execute(
    targets: Annotated[
        list[str] | None, typer.Argument(help="Targets to run instead of resnet 50 and gpt.", show_default=False)
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Timed steps of each, taken by turns.")] = 7,
    as_json: Json = False,
    markdown: Markdown = False,
) -> None:
    """Compare the time of programs with eager PyTorch's."""

    def one(target: str) -> Row:
        times = executions.time_steps(lambda: build(target), rounds=rounds)
        return {**asdict(times), "time_ratio": times.time_ratio, "ok": times.ok}

    rows = rows_of("execute", targets or EXECUTED, one, "--rounds", str(rounds))
    cells = [
        [
            row["target"],
            show_seconds(median(row["eager"])),
            show_seconds(median(row["program"])),
            f"{row['time_ratio']:.3f}",
            "ok" if row["ok"] else f"over {executions.LIMIT}",
        ]
        for row in rows
        if "failure" not in row
    ]
    titles = ["target", "eager", "program", "ratio", ""]
    finish([Part("rows", rows, [Table("srrrl", cells, titles, ("bold", "", "", "", ""))])], as_json, markdown)


@app.command()
@answering
def guards(
    modules: Annotated[
        list[str] | None, typer.Argument(help="Numbers of modules instead of 10 and 500.", show_default=False)
    ] = None,
    as_json: Json = False,
    markdown: Markdown = False,
) -> None:
    """Show what it costs to compare the world before each step with what a program assumes."""

    def one(number: str) -> Row:
        if not number.isdecimal() or int(number) < 3:
            raise UsageError(f"{number} is no number of modules.", hint="give 3 or more, such as 10 or 500.")
        cost = guard_costs.cost_of_guards(int(number))
        return {**asdict(cost), "ok": cost.seconds <= guard_costs.limit(int(number))}

    rows = rows_of("guards", modules or [str(number) for number in guard_costs.LIMITS], one)
    cells = [
        [
            row["target"],
            f"{row['tensors']:,}",
            f"{row['watched']:,}",
            show_seconds(row["seconds"]),
            show_seconds(row["step_seconds"]),
            "yes" if row["ok"] else "no",
        ]
        for row in rows
        if "failure" not in row
    ]
    titles = ("modules", "tensors", "watched", "guards", "a step", "within its limit")
    table = Table("srrrrl", cells, titles, ("bold", "", "", "", "", ""))
    finish([Part("rows", rows, [table], lines=("", guard_costs.COUNTED))], as_json, markdown)


@app.command()
@answering
def capture(
    targets: Annotated[
        list[str] | None,
        typer.Argument(help="Targets to run instead of resnets of up to 1000 layers.", show_default=False),
    ] = None,
    as_json: Json = False,
    markdown: Markdown = False,
) -> None:
    """Show what captures cost in time and heap."""

    def one(target: str) -> Row:
        cost = captures.cost_of_capture(*build(target))
        heavy = target == captures.TARGETS[0] and cost.heap > captures.LIMIT_BYTES
        ok = cost.seconds_an_op <= captures.LIMIT_SECONDS and not heavy
        return {**asdict(cost), "seconds_an_op": cost.seconds_an_op, "ok": ok}

    rows = rows_of("capture", targets or captures.TARGETS, one)
    cells = [
        [
            row["target"],
            f"{row['ops']:,}",
            show_seconds(row["seconds"]),
            f"{row['seconds_an_op'] * 1e3:.2f} ms",
            show_bytes(row["heap"]),
            "ok" if row["ok"] else "over",
        ]
        for row in rows
        if "failure" not in row
    ]
    titles = ["target", "ops", "capture", "an op", "heap", ""]
    table = Table("srrrrl", cells, titles, ("bold", "", "", "", "", ""))
    finish([Part("rows", rows, [table], lines=("", guard_costs.COUNTED))], as_json, markdown)


def rows_of(
    bench: str, targets: Sequence[str], one: Callable[[str], Row], *options: str, key: str = "rows"
) -> list[Row]:
    """A row for each target: a single one is run here, several in processes of their own."""
    if len(targets) == 1:
        with working(f"{bench} {targets[0]}"):
            return [{"target": targets[0], **one(targets[0])}]
    rows = []
    with counting(f"bench {bench}") as progress:
        for done, target in enumerate(targets):
            progress(done, len(targets))
            rows.append(elsewhere(bench, target, *options, key=key))
    return rows


def elsewhere(bench: str, target: str, *options: str, key: str) -> Row:
    """The row of one target from another process; if that fails, why."""
    command = [sys.executable, "-m", "lowtide.cli", "bench", bench, target, "--json", *options]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    try:
        rows: list[Row] = json.loads(ended.stdout)[key]
        return rows[0]
    except (ValueError, KeyError, IndexError):
        talked = ended.stderr.strip().splitlines() or [f"the process ended with code {ended.returncode}"]
        told = [line for line in talked if line.startswith("error:")] or talked[-1:]
        return {"target": target, "failure": told[0].removeprefix("error: "), "ok": False}


@dataclass(frozen=True)
class Part:
    """Rows of one kind, as data and as tables."""

    key: str  # in JSON
    rows: list[Row]
    tables: Sequence[Table]
    title: str = ""
    lines: Sequence[str] = ()  # below the tables
    ok: bool = True  # whether the rows together are what they must be


def finish(parts: Sequence[Part], as_json: bool, markdown: bool) -> None:
    """Print the rows, with what they were made on; a row that is not ok is a failure of the command."""
    command = shlex.join(["lowtide", *sys.argv[1:]])
    made_on = {"date": date.today().isoformat(), "machine": CPU.model(), "command": command}
    if as_json:
        show_json({**made_on, **{part.key: part.rows for part in parts}})
    else:
        for number, part in enumerate(parts):
            _show(part, markdown, first=number == 0)
        show_text(f"\n{made_on['date']}, {made_on['machine']}, `{command}`")
    if not all(part.ok and all(row["ok"] for row in part.rows) for part in parts):
        raise typer.Exit(1)


def _show(part: Part, markdown: bool, *, first: bool) -> None:
    if part.title:
        show_text(("" if first else "\n") + part.title + ("\n" if markdown else ""))
    for number, table in enumerate(part.tables):
        if number:
            show_text("")
        show_text(table.markdown()) if markdown else show(table)
    for line in part.lines:
        show_text(line)
    for row in part.rows:
        if "failure" in row:
            show_text(f"{row['target']} failed: {row['failure']}")
