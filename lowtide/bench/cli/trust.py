"""`lowtide bench trust`: random edits of programs between their steps, and what becomes of each."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated

import typer

from lowtide.bench.cli.verbs import Markdown, Part, Row, finish
from lowtide.bench.trust import campaign as campaigns
from lowtide.bench.trust.campaign import Campaign
from lowtide.bench.trust.life import Outcome
from lowtide.bench.trust.order import Order
from lowtide.bench.trust.twins import DOORS
from lowtide.cli.profile import Json
from lowtide.cli.talk import answering, counting
from lowtide.errors import UsageError
from lowtide.report import Table

KINDS = (
    *("attribute", "batch", "buffer", "closure", "container", "generator", "global", "hook", "mode", "module"),
    *("net", "object", "optimizer", "option", "parameter"),
)
SHOWN = 60  # of what ended wrong
REASONS = 12  # of refusals that are shown


@answering
def trust(
    edits: Annotated[int, typer.Option(min=1, help="How many edits.")] = 2000,
    seed: Annotated[int, typer.Option(min=0, help="What all that is random follows from.")] = 0,
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="<name>", help="Only this kind, program, door or program/door.", show_default=False),
    ] = None,
    life: Annotated[
        int | None, typer.Option(min=0, help="Begin with this life of a program.", show_default=False)
    ] = None,
    edit: Annotated[
        list[str] | None,
        typer.Option(metavar="<edit>", help="Make these edits, as a report names them.", show_default=False),
    ] = None,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Programs at a time; one on each core if left out.", show_default=False)
    ] = None,
    as_json: Json = False,
    markdown: Markdown = False,
) -> None:
    """Edit programs at random between their steps, and compare each step with eager's."""
    wanted = _orders(seed, only or (), life, tuple(edit or ()))
    with counting("edits") as progress:
        found = campaigns.run(wanted, edits, jobs or os.cpu_count() or 1, progress)
    finish(
        [_kinds(found), _refused(found), _summary(found), _wrong(found), *([_each(found)] if edit else [])],
        as_json,
        markdown,
    )


def _orders(seed: int, only: Sequence[str], life: int | None, texts: tuple[str, ...]) -> list[Order]:
    """The programs that are asked for."""
    pairs, kind = campaigns.pairs(), None
    for words in only:
        for word in words.split("/"):
            if word in KINDS:
                kind = word
            elif any(word in pair for pair in pairs):
                pairs = [pair for pair in pairs if word in pair]
            else:
                known = ", ".join([*KINDS, *campaigns.WEIGHTS, *DOORS])
                raise UsageError(f"there is no kind, program or door {word!r} to choose.", hint=f"there are {known}.")
    found = campaigns.orders(seed, pairs, kind)
    if (texts or life is not None) and len(found) > 1:
        raise UsageError("a life is one of a single program.", hint="add --only PROGRAM/DOOR.")
    if life is not None:
        found = [replace(order, first=life) for order in found]
    return [replace(order, texts=texts, edits=len(texts)) for order in found]


def _kinds(found: Campaign) -> Part:
    """How the edits of each kind ended."""
    counts = found.table()
    rows: list[Row] = [
        {"target": kind, **{verdict: count[verdict] for verdict in campaigns.VERDICTS}, "ok": True}
        for kind, count in counts.items()
    ]
    cells = [[row["target"], *(str(row[verdict] or "") for verdict in campaigns.VERDICTS)] for row in rows]
    total = [str(sum(row[verdict] for row in rows)) for verdict in campaigns.VERDICTS]
    titles = ["kind", *campaigns.VERDICTS]
    table = Table("srrrrrr", [*cells, ["all", *total]], titles, ("bold", *[""] * 6))
    return Part("kinds", rows, [table])


def _refused(found: Campaign) -> Part:
    """Why edits were refused, the most frequent reason first, with one edit of each."""
    reasons: dict[str, list[Outcome]] = {}
    for one in found.edits:
        if one.verdict == "refused":
            place, colon, rest = one.detail.partition(".py:")
            reason = f"{place.partition(' ')[0]} {rest.partition(' ')[2]}" if colon else one.detail
            reasons.setdefault(f"{one.halfway} {reason[:60]}", []).append(one)
    rows: list[Row] = []
    for ones in sorted(reasons.values(), key=len, reverse=True):
        first = min(ones, key=lambda one: len(one.before))
        row: Row = {"target": f"{first.program}/{first.door}", "times": len(ones), "halfway": first.halfway, "ok": True}
        rows.append({**row, "detail": first.detail, "again": campaigns.command(first)})
    lines = [
        f"refused x{row['times']}{', half-way' if row['halfway'] else ''}: {row['detail']}\n    {row['again']}"
        for row in rows[:REASONS]
    ]
    return Part("refused", rows, [], "Why edits were refused" if rows else "", lines)


def _summary(found: Campaign) -> Part:
    """What it comes to."""
    programs = len({(one.program, one.door) for one in found.edits})
    halfway = sum(one.halfway for one in found.edits if one.verdict == "refused")
    closed = list(dict.fromkeys(f"{one.program} is not let in by {one.door}: {one.detail}" for one in found.closed))
    row: Row = {"edits": len(found.edits), "programs": programs, "wrong": len(found.wrong), "share": found.share}
    row |= {"halfway": halfway, "closed": closed, "failures": found.failures, "target": "all", "ok": found.ok}
    lines = [
        f"{row['edits']:,} edits of {programs} programs at their doors: {row['wrong']} silently different or crashed.",
        f"of the edited values with which eager goes on {found.share:.1%} end equal to it; {campaigns.FAIR:.0%} must.",
        f"{halfway} refused steps had changed something.",
        *closed,
        *found.failures,
    ]
    return Part("summary", [row], [], lines=lines)


def _wrong(found: Campaign) -> Part:
    """What must not be, one of each sort, and how to see it again."""
    sorts: dict[tuple[str, ...], list[Outcome]] = {}
    for one in found.wrong:
        place = one.where if one.where.partition(".")[0] not in ("model", "net") else one.where.rpartition(".")[2]
        sorts.setdefault((one.verdict, one.kind, one.door, place, one.how), []).append(one)
    rows: list[Row] = []
    for (verdict, kind, door, _, how), ones in sorts.items():
        first = min(ones, key=lambda one: len(one.before))
        what = {"target": f"{first.program}/{door}", "verdict": verdict, "kind": kind, "where": first.where, "how": how}
        rows.append(
            {**what, "times": len(ones), "detail": first.detail, "again": campaigns.command(first), "ok": False}
        )
    lines = [
        f"{row['verdict']} x{row['times']}: {row['target']}: {row['kind']} {row['where']} {row['how']}: {row['detail']}"
        f"\n    {row['again']}"
        for row in rows[:SHOWN]
    ]
    if len(rows) > SHOWN:
        lines.append(f"and {len(rows) - SHOWN} more sorts; --json has all.")
    return Part("wrong", rows, [], "What must not be" if rows else "", lines)


def _each(found: Campaign) -> Part:
    """Each edit that was asked for."""
    rows = [{**one.as_json(), "target": one.program, "ok": True} for one in found.outcomes]
    cells = [[one.verdict, f"{one.kind} {one.where} {one.how}", one.detail] for one in found.outcomes]
    return Part("edits", rows, [Table("lll", cells, ["verdict", "edit", ""])], "Edit by edit")
