"""`lowtide models`: the built-in training steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from textwrap import wrap
from typing import Annotated, Any

import torch
import typer
from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from lowtide import models as built_in
from lowtide.capture import capture
from lowtide.cli.profile import Json
from lowtide.cli.talk import answering, counting, show, show_json
from lowtide.measure import roofline
from lowtide.models import Entry, Option
from lowtide.models.catalog import OPTIMIZER_OPTIONS
from lowtide.plan import keep_everything
from lowtide.report import show_bytes
from lowtide.simulate import simulate


@dataclass(frozen=True)
class Listed:
    """A built-in model, the size of its parameters and its peak."""

    entry: Entry
    parameters: int
    peak: int | None  # bytes, estimated; None: not asked for


@answering
def models(
    quick: Annotated[bool, typer.Option("--quick", help="Leave out the peaks, for which each is captured.")] = False,
    as_json: Json = False,
) -> None:
    """List the built-in models with their parameters and peak."""
    entries = built_in.catalog()
    listed = []
    with counting("capturing the models") as progress:
        for done, entry in enumerate(entries):
            progress(done, len(entries))
            listed.append(_listed(entry, quick=quick))
    if as_json:
        show_json({"models": [_as_json(item) for item in listed]})
    else:
        show(Listing(listed))


def _listed(entry: Entry, *, quick: bool) -> Listed:
    if quick:
        with torch.device("meta"):
            return Listed(entry, _count(built_in.build(entry.name)[1]), None)
    made = built_in.build(entry.name)
    graph = capture(*made).graph
    return Listed(entry, _count(made[1]), simulate(graph, roofline(graph), keep_everything(graph)).peak)


def _count(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def _as_json(item: Listed) -> dict[str, Any]:
    options = {
        name: {"default": option.default, "type": str(option.type), "meaning": option.meaning}
        for name, option in item.entry.options.items()
    }
    return {
        "name": item.entry.name,
        "summary": item.entry.summary,
        "parameters": item.parameters,
        "predicted_peak": item.peak,
        "options": options,
    }


@dataclass(frozen=True)
class Listing:
    """The list as a person reads it."""

    listed: list[Listed]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        names = [item.entry.name for item in self.listed]
        counts = [f"{item.parameters:,}" for item in self.listed]
        peaks = ["-" if item.peak is None else show_bytes(item.peak) for item in self.listed]
        form = f"{{:{_width('model', names)}}}  {{:>{_width('parameters', counts)}}}  {{:>{_width('peak', peaks)}}}  "
        head = form.format("model", "parameters", "peak")
        yield Text(f"{head}what it is, and its options", style="dim")
        width = min(options.max_width, 120)
        for name, count, peak, item in zip(names, counts, peaks, self.listed, strict=True):
            own = {key: option for key, option in item.entry.options.items() if key not in OPTIMIZER_OPTIONS}
            lines = wrap(item.entry.summary, width - len(head)) + wrap(_options(own), width - len(head))
            yield _block(form.format(name, count, peak), lines)
        yield _block(form.format("all", "", ""), [_options(OPTIMIZER_OPTIONS)])
        note = "peak: of one step at the default size, estimated without temporaries inside ops"
        yield Text(f"\n{note}", style="dim")


def _width(title: str, cells: list[str]) -> int:
    return max(len(title), *map(len, cells))


def _options(options: Mapping[str, Option]) -> str:
    return ", ".join(key if option.default is None else f"{key}={option.text}" for key, option in options.items())


def _block(head: str, lines: list[str]) -> Text:
    """Some lines beside a head."""
    block = Text(head, style="bold", no_wrap=True, overflow="ignore")
    return block.append(f"\n{' ' * len(head)}".join(lines), style="not bold")
