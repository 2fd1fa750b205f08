"""`lowtide bench ranks`: steps of several processes within a budget against plain DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated, Any

import typer

from lowtide.bench import ranks as racing
from lowtide.bench.cli.verbs import NOTHING, Markdown, Part, Row, finish, rows_of
from lowtide.cli.profile import Json
from lowtide.cli.talk import answering
from lowtide.report import Table, show_bytes, show_seconds


@answering
def ranks(
    targets: Annotated[
        list[str] | None, typer.Argument(help="Targets to run instead of a gpt and a resnet.", show_default=False)
    ] = None,
    count: Annotated[int, typer.Option(min=1, help="Processes, all on this machine.")] = racing.RANKS,
    rounds: Annotated[int, typer.Option(min=1, help="Timed steps of each.")] = racing.ROUNDS,
    time_limit: Annotated[
        float, typer.Option(min=0, metavar="<seconds>", help="Seconds of search for each budget.")
    ] = racing.TIME_LIMIT,
    sharded: Annotated[bool, typer.Option("--sharded", help="Against fully_shard (FSDP2) instead of DDP.")] = False,
    as_json: Json = False,
    markdown: Markdown = False,
) -> None:
    """Compare steps of several processes at 100% and 50% with plain DistributedDataParallel: time, bytes and bits."""
    base: racing.Plain = "FSDP2" if sharded else "DDP"

    def one(target: str) -> Row:
        found = racing.race(
            target, plain=base, ranks=count, rounds=rounds, time_limit=time_limit, budgets=racing.BUDGETS
        )
        plain = found[0].seconds
        ways = [{**asdict(item), "times": item.seconds / plain} for item in found]
        within = all(item.budget is None or item.peak is None or item.peak <= item.budget for item in found)
        return {"ranks": count, "ways": ways, "ok": within and all(item.same for item in found)}

    options = ["--count", str(count), "--rounds", str(rounds), "--time-limit", str(time_limit)]
    options += ["--sharded"] if sharded else []
    rows = rows_of("ranks", targets or list(racing.TARGETS), one, *options)
    finish([Part("rows", rows, _tables([row for row in rows if "failure" not in row]))], as_json, markdown)


def _tables(rows: Sequence[dict[str, Any]]) -> list[Table]:
    lines = [
        [
            row["target"],
            way["way"],
            show_seconds(way["seconds"]),
            f"{way['times']:.2f}",
            NOTHING if way["peak"] is None else show_bytes(way["peak"]),
            NOTHING if way["budget"] is None else show_bytes(way["budget"]),
            "yes" if way["same"] else "no",
        ]
        for row in rows
        for way in row["ways"]
    ]
    heads = ["target", "steps by", "a step", "of plain", "peak of a rank", "budget", "equal to plain"]
    return [Table("slrrrrl", lines, heads, ("bold", "", "", "", "", "", ""))]
