"""`lowtide bench plan`: what we claim of the planner, as tables; nothing is trained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated

import typer

from lowtide.bench import games
from lowtide.bench import plan as plans
from lowtide.bench.cli.verbs import Markdown, Part, Row, finish, rows_of
from lowtide.cli.plan import TimeLimit
from lowtide.cli.profile import Json
from lowtide.cli.talk import answering, counting
from lowtide.cli.target import build
from lowtide.errors import UsageError
from lowtide.models import SMALL
from lowtide.plan import TIME_LIMIT
from lowtide.report import Table, show_bytes, show_overhead, show_seconds

QUICK = 0.2  # seconds of search for each of forty budgets


@answering
def plan(
    targets: Annotated[
        list[str] | None,
        typer.Argument(help="Targets to plan instead of everything that we publish.", show_default=False),
    ] = None,
    budgets: Annotated[
        str, typer.Option(metavar="<list>", help="Percent of the step's own part without recomputation.")
    ] = ",".join(f"{budget:g}" for budget in plans.BUDGETS),
    time_limit: TimeLimit = TIME_LIMIT,
    narrow: Annotated[bool, typer.Option("--narrow", help="Let plans keep values narrow, as `plan` does.")] = False,
    known: Annotated[bool, typer.Option("--known", help="Only chains and pebble games with known answers.")] = False,
    monotone: Annotated[
        bool, typer.Option("--monotone", help="Only forty budgets of each target, or of each small built-in model.")
    ] = False,
    as_json: Json = False,
    markdown: Markdown = False,
) -> None:
    """Hold plans, with roofline costs, against what we claim of them."""
    percents = percents_of(budgets)
    everything = not (targets or known or monotone)
    parts = []
    if everything or (targets and not known and not monotone):
        parts.append(_graphs(targets or list(plans.TRIALS), percents, time_limit, narrow))
    if everything or known:
        parts += [_chains(time_limit), _games(time_limit)]
    if everything or monotone:
        parts.append(_monotone(targets or list(SMALL.values())))
    finish(parts, as_json, markdown)


def percents_of(text: str) -> list[float]:
    try:
        found = [float(word) for word in text.replace("%", "").split(",")]
    except ValueError:
        found = []
    if not found or min(found) <= 0:
        raise UsageError(f"{text!r} is no list of budgets.", hint="write percentages: 50,30.")
    return found


def _graphs(targets: Sequence[str], budgets: Sequence[float], time_limit: float, narrow: bool) -> Part:
    """The plans of each target, and its least peak."""

    def one(target: str) -> Row:
        trial = plans.TRIALS.get(target)
        found = plans.plan_target(*build(target), trial=trial, budgets=budgets, time_limit=time_limit, narrow=narrow)
        return {**asdict(found), "ok": found.ok}

    options = ["--budgets", ",".join(f"{budget:g}" for budget in budgets), "--time-limit", str(time_limit)]
    rows = rows_of("plan", targets, one, *options, *(["--narrow"] if narrow else []))
    good = [row for row in rows if "failure" not in row]
    cells = [
        [row["target"] if number == 0 else "", *_budget(item)]
        for row in good
        for number, item in enumerate(row["budgets"])
    ]
    titles = ["target", "budget", "found", "bound", "gap", "trial", "arena", "planned", ""]
    least = [
        [
            row["target"],
            f"{row['ops']:,}",
            show_bytes(row["own"]),
            f"{row['least']:.3f}",
            "-" if row["least_trial"] is None else f"{row['least_trial']:g}",
            f"{row['least_bound']:.3f}",
            show_seconds(row["least_seconds"]),
            show_bytes(row["memory"]),
            ", ".join(row["missed"]) or "ok",
        ]
        for row in good
    ]
    least_titles = ["target", "ops", "own part", "least", "trial", "floor", "found in", "memory", ""]
    tables = [
        Table("srrrrrrrl", cells, titles, ("bold", "", "bold", *[""] * 6)),
        Table("srrrrrrrl", least, least_titles, ("bold", "", "", "bold", *[""] * 5)),
    ]
    tried = [row for row in good if row["lower"] is not None]
    lower = sum(row["lower"] for row in tried)
    ok = 2 * lower >= len(tried)
    lines = ["arena: what the device needs for each byte in use; least and floor: parts of the own part"]
    if tried:
        verdict = "ok" if ok else "at least half must be"
        lines.append(f"quicker than the trial at 30% and below: {lower} of {len(tried)} graphs, {verdict}")
    title = "Overhead in percent of the step without recomputation, within parts of its own part of the peak"
    return Part("rows", rows, tables, title, lines, ok)


def _budget(item: Row) -> list[str]:
    """The cells of one budget."""
    head, trial = f"{item['percent']:g}%", "-" if item["trial"] is None else f"{item['trial']:g}"
    verdict = ", ".join(item["missed"]) or "ok"
    if item["overhead"] is None:
        return [head, "-", "-", "-", trial, "-", "-", verdict if item["missed"] else "nothing fits"]
    return [
        head,
        f"{abs(100 * item['overhead']):.2f}",
        f"{abs(100 * item['bound']):.2f}",
        f"{abs(100 * (item['overhead'] - item['bound'])):.2f}",
        trial,
        f"{item['ratio']:.4f}",
        show_seconds(item["seconds"]),
        verdict,
    ]


def _chains(time_limit: float) -> Part:
    """Published integers beside the chain planners' and the general planner's."""
    rows: list[Row] = []
    with counting("planning chains", patience=0.0) as progress:
        progress(0, games.CHAINS)
        for found in games.chains(time_limit=time_limit):
            rows.append({**asdict(found), "ok": found.ok})
            progress(len(rows), games.CHAINS)
    cells = [
        [
            f"{row['steps']:,}",
            str(row["slots"]),
            row["keeps"],
            f"{row['published']:,}",
            f"{row['by_table']:,}",
            "-" if row["by_revolve"] is None else f"{row['by_revolve']:,}",
            "-" if row["planned"] is None else f"{row['planned']:,}",
            "-" if row["planned"] is None else f"{row['planned'] / row['published']:.3f}",
            "-" if row["seconds"] is None else show_seconds(row["seconds"]),
            "ok" if row["ok"] else f"over {games.LIMIT}",
        ]
        for row in rows
    ]
    titles = ["steps", "slots", "of", "published", "gruslys", "revolve", "lowtide", "ratio", "planned", ""]
    table = Table("rrlrrrrrrl", cells, titles, ("bold", "bold", *[""] * 8))
    return Part("chains", rows, [table], "Forwards of chains; lowtide has the bytes of the chain's own schedule")


def _games(time_limit: float) -> Part:
    """Pebble games, and the chain of tanh."""
    rows: list[Row] = [{**asdict(found), "ok": found.ok} for found in games.games(time_limit=time_limit)]
    cells = [
        [
            row["name"],
            f"{'' if row['exactly'] else 'at most '}{row['answer']:g}",
            "-" if row["found"] is None else f"{row['found']:g}",
            "ok" if row["ok"] else "missed",
        ]
        for row in rows
    ]
    table = Table("srrl", cells, ["", "known", "found", ""], ("bold", "", "bold", ""))
    return Part("games", rows, [table], "Known answers")


def _monotone(targets: Sequence[str]) -> Part:
    """Forty budgets of each target."""

    def one(target: str) -> Row:
        found = plans.plan_monotone(*build(target), time_limit=QUICK)
        return {**asdict(found), "ok": found.ok}

    rows = rows_of("plan", targets, one, "--monotone", key="monotone")
    cells = [
        [
            row["target"],
            f"{row['ops']:,}",
            show_bytes(row["least"]),
            show_bytes(row["most"]),
            f"{row['plans']} of {row['budgets']}",
            str(row["slower"]),
            str(row["larger"]),
            show_overhead(row["most_overhead"]),
            show_seconds(row["seconds"]),
            "ok" if row["ok"] else "crossing",
        ]
        for row in rows
        if "failure" not in row
    ]
    titles = ["target", "ops", "from", "to", "plans", "slower", "larger", "overhead", "planned", ""]
    table = Table("srrrrrrrrl", cells, titles, ("bold", *[""] * 9))
    lines = ["slower, larger: plans of larger budgets that are slower, of smaller ones that have a larger peak"]
    return Part("monotone", rows, [table], "Peak and overhead from the least feasible budget to eager's peak", lines)
