"""`lowtide doctor`: what this machine has and lacks."""

from __future__ import annotations

import typer
from rich.console import Console
from rich.text import Text

from lowtide.cli.profile import Json
from lowtide.cli.talk import answering, show, show_json, telling
from lowtide.doctor import Finding, examine, healthy, to_json

MARKS = {"good": ("ok", "green"), "worse": ("worse", "yellow"), "missing": ("missing", "bold red")}


@answering
def doctor(as_json: Json = False) -> None:
    """Say what this machine has and lacks.

    Compiler, versions, limits, cache, what the processor can really do, the disk; and what that means. Exits with 1
    where lowtide can't work.
    """
    with telling("looking around") as tell:
        found = list(examine(tell))
    if as_json:
        show_json(to_json(found))
    else:
        for finding in found:
            Console(highlight=False).print(show_finding(finding), soft_wrap=True)
        worse = [finding.name for finding in found if finding.verdict != "good"]
        end = "all is well." if not worse else f"look at: {', '.join(worse)}."
        show(Text(f"\n{'lowtide works here' if healthy(found) else 'lowtide does not work here'}; {end}", style="bold"))
    if not healthy(found):
        raise typer.Exit(1)


def show_finding(finding: Finding) -> Text:
    """A finding in one to three lines."""
    mark, style = MARKS[finding.verdict]
    line = Text().append(f"{mark:<8}", style=style)
    line.append(f"{finding.name:<22}", style="bold").append(finding.found)
    for words, start in ((finding.means, ""), (finding.hint, "hint: ")):
        if words:
            line.append(f"\n{'':<30}{start}{words}", style="dim")
    return line
