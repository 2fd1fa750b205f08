"""`lowtide bench batch`: the throughput that is predicted for batch sizes against the real one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated, Any

import typer

from lowtide.batch import Parts
from lowtide.bench import batch as batches
from lowtide.bench.cli.verbs import NOTHING, Markdown, Part, Row, finish, rows_of
from lowtide.budget import read_budget
from lowtide.cli.profile import Json
from lowtide.cli.talk import answering, telling
from lowtide.cli.target import build
from lowtide.report import Table, show_bytes, show_seconds


@answering
def batch(
    targets: Annotated[
        list[str] | None, typer.Argument(help="Targets to run instead of resnet 50, gpt and lstm.", show_default=False)
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option(metavar="<bytes>", help="For all targets instead of the budget of each.", show_default=False),
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Timed steps of each size.")] = batches.ROUNDS,
    time_limit: Annotated[
        float, typer.Option(min=0, metavar="<seconds>", help="Seconds of search for each size.")
    ] = batches.TIME_LIMIT,
    as_json: Json = False,
    markdown: Markdown = False,
) -> None:
    """Compare the throughput that is predicted for batch sizes with the measured one."""

    def one(target: str) -> Row:
        nbytes = read_budget(budget or batches.TARGETS.get(target, batches.BUDGET), persistent=1, eager_peak=1)
        make = lambda count: Parts(*build(target, batch=count))  # noqa: E731
        with telling(f"bench batch {target}") as tell:
            found = batches.compare(make, nbytes, rounds=rounds, time_limit=time_limit, tell=tell)
        wanted = batches.GAINS.get(target) if budget is None else None
        enough = wanted is None or (found.gain is not None and found.gain >= wanted)
        sizes = [{**asdict(item), "error": item.error, "ok": item.ok} for item in found.timed]
        told = {"budget": nbytes, "largest_batch": dict(found.sizes.largest), "knee": found.sizes.knee}
        row: Row = {**told, "gain": found.gain, "least_gain": wanted, "seconds": found.seconds, "sizes": sizes}
        return {**row, "ok": enough and all(item.ok for item in found.timed)}

    options = ["--rounds", str(rounds), "--time-limit", str(time_limit), *(["--budget", budget] if budget else [])]
    rows = rows_of("batch", targets or list(batches.TARGETS), one, *options)
    finish([Part("rows", rows, _tables([row for row in rows if "failure" not in row]))], as_json, markdown)


def _tables(rows: Sequence[dict[str, Any]]) -> list[Table]:
    largest = [
        [
            row["target"],
            show_bytes(row["budget"]),
            *(NOTHING if (size := row["largest_batch"][way]) is None else f"{size:,}" for way in ("eager", "plan")),
            NOTHING if row["gain"] is None else f"{row['gain']:.1f}",
            f"{row['knee']:,}",
            show_seconds(row["seconds"]),
        ]
        for row in rows
    ]
    sizes = [
        [
            row["target"] if number == 0 else "",
            f"{item['batch']:,}",
            f"{item['predicted']:.1f}",
            f"{item['measured']:.1f}",
            f"{item['error']:+.1%}",
            "ok" if item["ok"] else f"over {batches.LIMIT:.0%}",
        ]
        for row in rows
        for number, item in enumerate(row["sizes"])
    ]
    titles = ["target", "budget", "eager's largest", "plan's", "times", "to use", "predicted in"]
    return [
        Table("srrrrrr", largest, titles, ("bold", "", "", "", "", "", "")),
        Table(
            "srrrrl", sizes, ["target", "batch", "predicted", "examples/s", "error", ""], ("bold", "", "", "", "", "")
        ),
    ]
