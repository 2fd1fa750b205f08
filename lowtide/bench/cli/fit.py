"""`lowtide bench fit`: what a budget costs in time, and what torch's own ways to need less memory reach, raced."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from time import monotonic
from typing import Annotated, Any

import typer
from rich.console import Console

from lowtide.bench import fit as fits
from lowtide.bench.cli.verbs import Markdown, Part, Row, finish
from lowtide.bench.peers import PEERS, Contestant, peers
from lowtide.bench.race import Retired, Say
from lowtide.cli.plan import TimeLimit
from lowtide.cli.profile import Json
from lowtide.cli.talk import answering, talk
from lowtide.device import CPU
from lowtide.errors import FileError, UsageError
from lowtide.files import load, save, shaped
from lowtide.files.shapes import fields_of, flag, many, mapping, record, row, text, word
from lowtide.models import SMALL, catalog
from lowtide.plan import TIME_LIMIT
from lowtide.report import Table, show_bytes, show_seconds

LEAST = "least"
AGAINST = f"all, none, or some of {', '.join(PEERS)}; or one alone: inductor 1."
KIND = "races"  # of the file that keeps what was raced
BETTER = {"time": "in time at the same peak", "peak": "in peak at the same time"}  # a peer's point


@answering
def fit(
    targets: Annotated[
        list[str] | None, typer.Argument(help="Targets to race instead of every built-in model.", show_default=False)
    ] = None,
    small: Annotated[bool, typer.Option("--small", help="Tiny sizes instead of the defaults.")] = False,
    rounds: Annotated[int, typer.Option(min=1, help="Timed turns of each contestant.")] = fits.ROUNDS,
    budgets: Annotated[
        str, typer.Option(metavar="<list>", help="Percent of the step's own part, or least.")
    ] = ",".join(f"{percent:g}" if percent != fits.LEAST else LEAST for percent in fits.BUDGETS),
    against: Annotated[
        str,
        typer.Option(
            "--peers", metavar="<list>", help=f"all, none, or some of {', '.join(PEERS)}; inductor 1 is one alone."
        ),
    ] = "all",
    duel: Annotated[
        bool,
        typer.Option("--duel/--no-duel", help="Race lowtide at the peak of each peer that no budget has beaten."),
    ] = True,
    keep: Annotated[
        Path | None,
        typer.Option(
            "--keep",
            metavar="<file>",
            help="Keep each target's races here; those that are kept already are not run again.",
            show_default=False,
        ),
    ] = None,
    time_limit: TimeLimit = TIME_LIMIT,
    as_json: Json = False,
    markdown: Markdown = False,
) -> None:
    """Race lowtide within budgets against eager PyTorch and its peers."""
    percents = _percents(budgets)
    chosen = peers(_words(against))
    names = targets or [SMALL[entry.name] if small else entry.name for entry in catalog()]
    asked = {"budgets": percents, "peers": [peer.name for peer in chosen], "rounds": rounds, "duel": duel}
    kept = _Kept(keep, {**asked, "time_limit": time_limit, "machine": CPU.model()})
    surveys: list[Row] = []
    console = talk()
    with _saying(console) as say:
        for target in names:
            if target in kept.races:
                console.print(f"{target}: kept in {keep}", markup=False, soft_wrap=True)
                continue
            begun = monotonic()
            try:
                found = fits.race_target(
                    target,
                    budgets=percents,
                    peers=chosen,
                    rounds=rounds,
                    time_limit=time_limit,
                    duel=duel,
                    say=_about(target, say),
                )
            except Retired as error:
                surveys.append({"target": target, "failure": error.message, "ok": False})
                continue
            kept.add(target, found)
            seconds = show_seconds(monotonic() - begun)
            reached = ", ".join(f"{cell.contestant} {_glance(asdict(cell))}" for cell in found.cells)
            console.print(f"{target}: raced in {seconds}: {reached}", markup=False, soft_wrap=True)
    parts = [
        _cells(kept.rows(names, "rows"), percents, chosen),
        _surveys([*kept.rows(names, "targets"), *surveys]),
        _verdicts(kept.rows(names, "peers"), kept.rows(names, "targets")),
    ]
    finish(parts if chosen else parts[:2], as_json, markdown)


RACES = record(
    {
        "asked": mapping(lambda data: data),
        "races": mapping(
            record(
                {
                    "targets": many(
                        fields_of(fits.Survey, better_peers=many(row(text, many(word(tuple(BETTER))))), ok=flag)
                    ),
                    "rows": many(fields_of(fits.Cell, ok=flag)),
                    "peers": many(fields_of(fits.Verdict, ok=flag, faster=flag, smaller=flag)),
                }
            )
        ),
    }
)


class _Kept:
    """The races of each target, in a file too where one is named: hours of them survive an interrupt."""

    def __init__(self, path: Path | None, asked: dict[str, Any]) -> None:
        self._path, self._asked = path, asked
        self.races: dict[str, dict[str, list[Row]]] = {}
        if path is None:
            return
        if not path.exists():
            self._save()  # fails now if it can't be written, not after the first race
            return
        held = shaped(path, load(path, KIND), RACES, kind="races", hint="keep them in another file.")
        if differs := [name for name in asked if held["asked"].get(name) != asked[name]]:
            name = differs[0]
            raise FileError(
                f"{path} keeps races with {name} {str(held['asked'].get(name))[:60]}, not {asked[name]}.",
                hint="race as before, or keep these in another file.",
            )
        self.races = held["races"]

    def add(self, target: str, found: fits.Fit) -> None:
        better = [[peer, list(words)] for peer, words in found.better_peers.items()]
        self.races[target] = {
            "targets": [{**asdict(found.survey), "better_peers": better, "ok": True}],
            "rows": [{**asdict(cell), "ok": cell.ok} for cell in found.cells],
            "peers": [
                {**asdict(one), "faster": one.faster, "smaller": one.smaller, "ok": one.ok} for one in found.verdicts
            ],
        }
        self._save()

    def _save(self) -> None:
        if self._path is not None:
            save(self._path, KIND, {"asked": self._asked, "races": self.races}, force=True)

    def rows(self, targets: Sequence[str], key: str) -> list[Row]:
        return [row for target in targets for row in self.races.get(target, {}).get(key, [])]


def _percents(text: str) -> list[float]:
    try:
        found = [fits.LEAST if word == LEAST else float(word.removesuffix("%")) for word in text.split(",")]
    except ValueError:
        found = []
    if not found or min(found) < 0 or text.split(",").count(LEAST) < found.count(fits.LEAST):
        raise UsageError(f"{text!r} is no list of budgets.", hint=f"write percentages: 50,30,{LEAST}.")
    return list(dict.fromkeys(found))


def _words(text: str) -> Sequence[str]:
    return {"all": PEERS, "none": ()}.get(text, text.split(","))


@contextmanager
def _saying(console: Console) -> Iterator[Say]:
    """A line in the terminal that says what is going on."""
    if not console.is_terminal:
        yield lambda _: None
        return
    with console.status("bench fit") as status:
        yield lambda what: status.update(f"{what}...")


def _about(target: str, say: Say) -> Say:
    return lambda what: say(f"bench fit {target}: {what}")


def _cells(rows: list[Row], percents: Sequence[float], chosen: Sequence[Contestant]) -> Part:
    """Everything at a glance, a line for each target; then a line for each contestant."""
    targets = list(dict.fromkeys(row["target"] for row in rows))
    lowtide = [LEAST if percent == fits.LEAST else f"{percent:g}%" for percent in percents]
    columns = [*(f"lowtide {name}" for name in lowtide), *(peer.name for peer in chosen)]
    found = {(row["target"], row["contestant"]): row for row in rows}
    glance = [
        [
            target,
            _seconds(found.get((target, "eager"))),
            *(_glance(found.get((target, name))) for name in columns),
        ]
        for target in targets
    ]
    titles = ["target", "eager", *lowtide, *(peer.name for peer in chosen)]
    cells = [
        [
            row["target"] if row["contestant"] == "eager" else "",
            row["contestant"],
            _bytes(row["budget"]),
            _bytes(row["predicted_peak"]),
            _bytes(row["metered_peak"]),
            "-" if row["own"] is None else f"{row['own']:.1%}",
            "-" if row["time_ratio"] is None else f"{row['time_ratio']:.3f}",
            f"{min(row['ratios']):.3f}..{max(row['ratios']):.3f}" if row["ratios"] else "-",
            "-" if row["equal"] is None else "yes" if row["equal"] else "no",
            _word(row),
        ]
        for row in rows
    ]
    detailed = ["target", "contestant", "budget", "predicted", "metered", "own part", "time", "by round", "equal", ""]
    tables = [
        Table("s" + "r" * (len(titles) - 1), glance, titles, ("bold", *[""] * (len(titles) - 1))),
        Table("slrrrrrrll", cells, detailed, ("bold", "", "", "", "bold", "", "bold", "", "", "")),
    ]
    lines = ["own part: what a step adds to the bytes between steps; equal: all that five steps change, bit for bit"]
    if chosen:
        lines.append("malloc: eager with a heap that keeps what it frees; checkpoint: around each block, by hand;")
        lines.append("aot_eager, inductor: torch.compile with this activation_memory_budget")
    return Part("rows", rows, tables, "Own part of the metered peak @ time of a step, both of eager's", lines)


def _seconds(row: Row | None) -> str:
    return "-" if row is None or row["seconds"] is None else show_seconds(row["seconds"])


def _glance(row: Row | None) -> str:
    """A cell in a few characters: `.63 @ 1.23`."""
    if row is None or row["time_ratio"] is None or row["own"] is None:
        return "-"
    return f"{row['own']:.2f} @ {row['time_ratio']:.2f}"


def _word(row: Row) -> str:
    """The last column of a cell."""
    if row["infeasible"]:
        return "nothing fits"
    return ", ".join(row["missed"]) or row["reason"] or ("ok" if row["way"] == "lowtide" else "")


def _bytes(nbytes: int | None) -> str:
    return "-" if nbytes is None else show_bytes(nbytes)


def _surveys(rows: list[Row]) -> Part:
    """What the budgets are parts of."""
    cells = [
        [
            row["target"],
            f"{row['ops']:,}",
            show_bytes(row["persistent"]),
            show_bytes(row["eager_peak"]),
            show_bytes(row["least"]),
            show_seconds(row["capture_seconds"]),
            show_seconds(row["measure_seconds"]),
            show_seconds(row["least_seconds"]),
        ]
        for row in rows
        if "failure" not in row
    ]
    titles = [
        "target",
        "ops",
        "persistent",
        "eager's peak",
        "least budget",
        "captured in",
        "measured in",
        "least found in",
    ]
    return Part("targets", rows, [Table("s" + "r" * 7, cells, titles, ("bold", *[""] * 7))], "What is predicted")


def _verdicts(rows: list[Row], targets: list[Row]) -> Part:
    """Lowtide against each peer."""
    cells = [
        [
            row["target"],
            row["peer"],
            f"{row['peer_own']:.3f} @ {row['peer_ratio']:.3f}",
            "-" if row["quickest_ratio"] is None else f"{row['quickest_ratio']:.3f}",
            row["quickest"] or "-",
            "-" if row["smallest_own"] is None else f"{row['smallest_own']:.3f}",
            row["smallest"] or "-",
            _judgement(row),
        ]
        for row in rows
    ]
    titles = ["target", "peer", "its peak @ time", "time at its peak", "by", "peak at its time", "by", ""]
    table = Table("slrrlrll", cells, titles, ("bold", "", "", "bold", "", "bold", "", ""))
    lines = ["", *(f"{row['target']}: {_better(row['better_peers'])}" for row in targets)]
    return Part("peers", rows, [table], "At a peer's peak lowtide is faster, and at its time smaller", lines)


def _better(peers: Sequence[tuple[str, Sequence[str]]]) -> str:
    """Which peers have a point that is better than any of lowtide's."""
    found = [f"{peer} is better {' and '.join(BETTER[what] for what in each)}" for peer, each in peers]
    return "; ".join(found) or "no peer's point is better in time at the same peak or in peak at the same time"


def _judgement(row: Row) -> str:
    words = [word for word, good in (("not faster", row["faster"]), ("not smaller", row["smaller"])) if not good]
    return ", ".join(words) or "ok"
