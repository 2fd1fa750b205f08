"""`lowtide bench`: every number that we publish, made by one command."""

from __future__ import annotations

from lowtide.bench.cli import (
    batch,
    classics,
    fit,
    lengths,
    limited,
    low_memory,
    models,
    offload,
    pace,
    plan,
    ranks,
    scan,
    trust,
)
from lowtide.bench.cli.verbs import app
from lowtide.cli import app as commands

app.command()(classics.classics)
app.command()(batch.batch)
app.command()(plan.plan)
app.command()(fit.fit)
app.command()(pace.pace)
app.command()(offload.offload)
app.command()(limited.limited)
app.command()(limited.steady)
app.command()(limited.soak)
app.command(name="low-memory")(low_memory.low_memory)
app.command()(lengths.lengths)
app.command()(models.models)
app.command()(ranks.ranks)
app.command()(scan.scan)
app.command()(trust.trust)
commands.add_typer(app, name="bench", rich_help_panel=None)
