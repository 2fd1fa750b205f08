"""`lowtide bench lengths`: a Trainer on batches of ever other lengths."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from lowtide.bench import lengths as runs
from lowtide.bench.cli.verbs import Markdown, Part, Row, finish
from lowtide.cli.plan import TimeLimit
from lowtide.cli.profile import Json
from lowtide.cli.talk import answering, telling
from lowtide.plan import TIME_LIMIT
from lowtide.report import Table, show_bytes, show_seconds


@answering
def lengths(
    budget: Annotated[str, typer.Option(metavar="<bytes>", help="Of every step, the optimizer's state too.")] = "600MB",
    layers: Annotated[int, typer.Option(min=1, help="Of the GPT-2.")] = runs.LAYERS,
    width: Annotated[int, typer.Option(min=4, help="Of the GPT-2.")] = runs.WIDTH,
    batches: Annotated[
        int | None, typer.Option(min=2, help="How many; a whole epoch if left out.", show_default=False)
    ] = None,
    time_limit: TimeLimit = TIME_LIMIT,
    as_json: Json = False,
    markdown: Markdown = False,
) -> None:
    """Train a GPT-2 with Hugging Face's Trainer on text padded to the longest, and count searches and lost seconds."""
    with telling("bench lengths") as say:
        found = runs.run(budget=budget, layers=layers, width=width, batches=batches, time_limit=time_limit, tell=say)
    row: Row = {"target": f"gpt2 {layers} x {width}", **asdict(found), "ok": found.ok}
    cells = [
        [
            row["target"],
            str(found.batches),
            str(found.lengths),
            str(found.searches),
            show_seconds(found.searching),
            show_seconds(found.lost),
            show_seconds(found.usual),
            show_bytes(found.budget),
            show_bytes(found.peak),
            "equal" if found.equal else "differ",
            show_seconds(found.seconds),
            show_seconds(found.eager_seconds),
        ]
    ]
    titles = [
        "model",
        "batches",
        "lengths",
        "searches",
        "in all",
        "lost at most",
        "usually",
        "budget",
        "metered",
        "bits",
    ]
    table = Table("srrrrrrrrlrr", cells, [*titles, "epoch", "eager's"], ("bold", *[""] * 11))
    padding = ", ".join(f"{count} with {to}" for to, count in found.padded)
    lines = [
        f"pad_to_multiple_of would leave fewer lengths of {found.lengths}: {padding}. It is yours to choose: other "
        "sizes are other draws of dropout."
    ]
    finish([Part("rows", [row], [table], lines=lines)], as_json, markdown)
