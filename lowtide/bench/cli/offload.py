"""`lowtide bench offload`: copies against recomputation, value by value and model by model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated

import typer

from lowtide.bench import joint
from lowtide.bench import offload as offloads
from lowtide.bench.cli.plan import percents_of
from lowtide.bench.cli.verbs import Markdown, Part, Row, finish, rows_of
from lowtide.cli.plan import TimeLimit
from lowtide.cli.profile import Json
from lowtide.cli.talk import answering, counting, telling
from lowtide.errors import UsageError
from lowtide.models import SMALL, catalog
from lowtide.plan import TIME_LIMIT
from lowtide.report import Table, show_bytes, show_seconds

PLACES = f"Where values go: {offloads.DISK}, or {', '.join(offloads.RATES)}, which stand in for other disks."


@answering
def offload(
    targets: Annotated[
        list[str] | None,
        typer.Argument(help="Models to plan instead of single values.", show_default=False),
    ] = None,
    models: Annotated[bool, typer.Option("--models", help="Plan every built-in model, with estimated costs.")] = False,
    small: Annotated[bool, typer.Option("--small", help="With --models, tiny sizes instead of the defaults.")] = False,
    run: Annotated[bool, typer.Option("--run", help="Run the plans of the models that are named, or of four.")] = False,
    rounds: Annotated[int, typer.Option(min=1, help="Timed steps of each, taken by turns.")] = 7,
    budgets: Annotated[str, typer.Option(metavar="<list>", help="Percent of the step's own part.")] = "50,30",
    places: Annotated[str, typer.Option(metavar="<list>", help=PLACES, show_default="as many as it takes")] = "",
    time_limit: TimeLimit = TIME_LIMIT,
    as_json: Json = False,
    markdown: Markdown = False,
) -> None:
    """Time copies to a disk against recomputation, and what the planner chose."""
    percents = percents_of(budgets)
    if run or models or targets:
        everything = [SMALL[entry.name] if small else entry.name for entry in catalog()]
        chosen = targets or (joint.EXECUTED if run else everything)
        place, *others = _names(places) or [offloads.DISK]
        if others:
            raise UsageError("models are planned for one place at a time.", hint=f'say --places "{place}".')
        finish([_models(chosen, percents, time_limit, rounds if run else 0, place)], as_json, markdown)
    else:
        finish([_values(_names(places))], as_json, markdown)


# ------------------------------------------------------------------------------------------------------------- values


def _names(places: str) -> list[str]:
    known = (offloads.DISK, *offloads.RATES)
    found = [name.strip() for name in places.split(",") if name.strip()]
    if strange := [name for name in found if name not in known]:
        raise UsageError(f"there is no place {strange[0]!r}.", hint=f"choose among {', '.join(known)}.")
    return found


def _values(places: Sequence[str]) -> Part:
    """Cases on these places; on this disk and, where one way hardly ever wins there, on those of other speeds."""
    found: list[offloads.Outcome] = []
    for name in places or (offloads.DISK,):
        found += _on(name, offloads.SIZES if name == offloads.DISK else offloads.FEWER)
    if not places and min(_wins(found, offloads.tolerance(found)).values()) < offloads.WINS:
        for name in offloads.RATES:
            found += _on(name, offloads.FEWER)
    tolerance = offloads.tolerance(found)
    rows: list[Row] = [
        {
            "target": f"{one.kind}, {one.nbytes / 1e6:.0f} MB, {one.place}",
            **asdict(one),
            "chosen": one.chosen,
            "cheaper": one.cheaper,
            "tie": one.tie(tolerance),
            "right": one.right("joint", tolerance),
            "ok": not one.strayed,  # right or wrong, all of them together are judged
        }
        for one in found
    ]
    cells = [
        [
            row["kind"],
            row["place"],
            f"{row['values']} x {row['nbytes'] / 1e6:.0f} MB",
            show_seconds(row["recompute_seconds"]),
            show_seconds(row["load_seconds"]),
            *(show_seconds(row["measured"][way]) for way in ("recompute", "offload", "joint")),
            row["chosen"],
            "tie" if row["tie"] else "right" if row["right"] else "wrong",
        ]
        for row in rows
    ]
    titles = ["", "place", "values", "recompute", "load", "step: recompute", "offload", "joint", "chosen", ""]
    table = Table("llrrrrrrll", cells, titles, ("bold", *[""] * 9))
    lines, ok = _judged(found, tolerance)
    return Part("values", rows, [table], "One value each, and steps with it, measured", lines, ok)


def _on(name: str, sizes: Sequence[int]) -> list[offloads.Outcome]:
    found: list[offloads.Outcome] = []
    with counting(f"bench offload, {name}", patience=0.0) as progress:
        place = offloads.Place.named(name)
        chosen = offloads.cases(place.lanes, sizes)
        progress(0, len(chosen))
        for one in offloads.outcomes(chosen, place):
            found.append(one)
            progress(len(found), len(chosen))
    return found


def _wins(found: Sequence[offloads.Outcome], tolerance: float) -> dict[str, int]:
    ways = ("recompute", "offload")
    return {way: sum(one.cheaper == way and not one.tie(tolerance) for one in found) for way in ways}


def _judged(found: Sequence[offloads.Outcome], tolerance: float) -> tuple[list[str], bool]:
    """What the cases say together."""
    decided = [one for one in found if not one.tie(tolerance)]

    def score(way: str, among: Sequence[offloads.Outcome]) -> float:
        return sum(one.right(way, tolerance) for one in among) / max(1, len(among))

    wins = _wins(found, tolerance)
    chosen = Counter(one.chosen for one in found)
    won = ", ".join(f"{way} in {count}" for way, count in wins.items())
    pairs = sum(one.apart is not None for one in found)
    losses = (one.measured["joint"] / min(one.measured["recompute"], one.measured["offload"]) - 1 for one in found)
    loss = max(losses, default=0.0)
    lines = [
        f"the choice was the cheaper one in {score('joint', found):.1%} of {len(found)} cases, and in "
        f"{score('joint', decided):.1%} of the {len(decided)} in which the ways differ by over {tolerance:.1%} of the "
        f"step; bar {offloads.RIGHT:.0%}",
        f"{tolerance:.1%}: what two runners of the same program differ by, in {offloads.PART:.0%} of {pairs} pairs",
        f"before any step had corrected prices: {score('first', found):.1%} and {score('first', decided):.1%}",
        f"cheaper: {won}; at least {offloads.WINS} each",
        "always the same: "
        + ", ".join(f"{way} would be right in {score(way, found):.1%} and {score(way, decided):.1%}" for way in wins),
        "chosen: " + ", ".join(f"{way} in {count}" for way, count in sorted(chosen.items())),
        f"the joint plan took at most {loss:+.1%} more than the cheaper way",
        f"over the budget, or allocated otherwise than planned: {sum(one.strayed for one in found)}",
    ]
    ok = min(score("joint", found), score("joint", decided)) >= offloads.RIGHT and min(wins.values()) >= offloads.WINS
    return lines, ok and tolerance <= offloads.NOISE


# ------------------------------------------------------------------------------------------------------------- models


def _models(targets: Sequence[str], percents: Sequence[float], time_limit: float, rounds: int, place: str) -> Part:
    """The plans of each target, and their steps where they are to run."""

    def one(target: str) -> Row:
        with telling(f"bench offload {target}") as say:
            found = joint.compare(
                target,
                percents=percents,
                rounds=rounds,
                time_limit=time_limit,
                costs="measured" if rounds else "roofline",
                place=place,
                say=say,
            )
        cells = [{**asdict(cell), "gain": cell.gain, "missed": list(cell.missed)} for cell in found]
        return {"cells": cells, "ok": not any(cell.missed for cell in found)}

    options = ["--budgets", ",".join(f"{percent:g}" for percent in percents), "--time-limit", str(time_limit)]
    options += ["--run", "--rounds", str(rounds)] if rounds else ["--models"]
    options += [] if place == offloads.DISK else ["--places", place]
    rows = rows_of("offload", targets, one, *options, key="models")
    cells = [
        [row["target"] if number == 0 else "", *_cell(cell)]
        for row in rows
        if "failure" not in row
        for number, cell in enumerate(row["cells"])
    ]
    titles = ["target", "budget", "", "base", "recompute", "offload", "joint", "gain", "measured", "", "", "gain", ""]
    table = Table("srrrrrrrrrrrl", cells, titles, ("bold", *[""] * 12))
    lines = ["seconds of a step: predicted, then measured, with recomputation only, with copies only, and with both"]
    return Part("models", rows, [table], lines=lines)


def _cell(cell: Row) -> list[str]:
    def seconds(kind: str) -> list[str]:
        return [show_seconds(cell[kind][way]) if way in cell[kind] else "-" for way in joint.WAYS]

    gain = _gain(cell["predicted"])
    return [
        f"{cell['percent']:g}%",
        show_bytes(cell["budget"]),
        show_seconds(cell["base"]),
        *seconds("predicted"),
        gain,
        *seconds("measured"),
        _gain(cell["measured"]),
        ", ".join(cell["missed"]) or "ok",
    ]


def _gain(seconds: dict[str, float]) -> str:
    alone = [seconds[way] for way in ("recompute", "offload") if way in seconds]
    return f"{1 - seconds['joint'] / min(alone):+.1%}" if alone and "joint" in seconds else "-"
