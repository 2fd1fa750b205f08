"""Two documents compared: what moved between them, and why."""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from lowtide.errors import FileError
from lowtide.report.bytes import show_bytes, show_seconds
from lowtide.report.modules import Branch, Weight, fold, fold_paths, pattern
from lowtide.report.profile import TOP
from lowtide.report.show import TIMES
from lowtide.report.table import Table

KIND, VERSION = "diff", 1
BRACES = re.compile(r"\{([^{}]*)\}")
ROWS = 12  # of a table in the terminal
FIGURES = {  # of a document, under the names of `lowtide report`; those of bytes, then those of seconds and shares
    "eager_peak": "eager's peak",
    "predicted_peak": "plan's peak",
    "persistent": "persistent",
    "budget": "budget",
    "predicted_seconds": "time of a step",
    "eager_seconds": "time of eager",
    "overhead": "overhead",
    "bound": "bound",
}
SECONDS, SHARES = ("predicted_seconds", "eager_seconds"), ("overhead", "bound")


@dataclass(frozen=True)
class Side:
    """What can be compared of one document."""

    name: str
    figures: Mapping[str, float | None]
    categories: Mapping[str, int]  # bytes at the peak
    peak_at: str
    modules: Mapping[str, int]  # module -> bytes at the peak
    fates: Mapping[str, Mapping[str, int]]  # module -> fate -> bytes
    nanoseconds: Mapping[str, int]  # module -> of one step
    facts: Mapping[str, str]  # what it was made from


def side(name: str, document: Any) -> Side:
    """What can be compared of the JSON of `report`, `plan` or `profile`."""
    try:
        return _report(name, document) if document.get("lowtide") == "report" else _command(name, document)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise FileError(
            f"{name} is no document of lowtide: {type(error).__name__} {error}.",
            hint="make it with lowtide report, plan or profile, and --json or --out.",
        ) from error


def _report(name: str, document: Mapping[str, Any]) -> Side:
    heading, peak = document["heading"], document["peaks"]["plan"]
    rewrites = [f"{one['name']} {one['setting'] or ''}".strip() for one in document["summary"]["rewrites"]]
    facts = {
        **_target(heading["target"]),
        "optimizer": heading["optimizer"],
        "costs": heading["costs"],
        "budget": heading["asked"] or "none",
        "rewrites": ", ".join(sorted(rewrites)) or "none",
        "ops": f"{document['numbers']['ops']:,}",
    }
    return Side(
        name=name,
        figures={key: document["numbers"].get(key) for key in FIGURES},
        categories=peak["categories"],
        peak_at=_place(peak["peak_at"]),
        modules={path: sum(parts.values()) for path, parts in _unfolded(peak["modules"]).items()},
        fates=_unfolded(document["fates"]),
        nanoseconds={
            path: sum(parts.values()) for path, parts in _unfolded(document["seconds"]["plan"]["nanoseconds"]).items()
        },
        facts=facts,
    )


def _command(name: str, document: Mapping[str, Any]) -> Side:
    """The JSON of `lowtide plan` or `lowtide profile`, which has less in it."""
    figures: dict[str, float | None] = dict.fromkeys(FIGURES)
    figures |= {key: document[key] for key in ("predicted_peak", "persistent", "budget", "overhead", "bound")}
    figures["eager_peak"] = document.get("eager_peak", document.get("eager_predicted_peak"))
    base = document.get("seconds_without_recomputation", document.get("seconds"))
    figures["predicted_seconds"] = None if base is None else base * (1 + (document["overhead"] or 0.0))
    fates: dict[str, dict[str, int]] = {}
    for row in document.get("kept", ()):
        fate = "kept narrow" if row["narrow"] else "kept"
        _share(fates, row["module"], fate, row["wide_bytes"])
    for row in document.get("recomputed", ()):
        _share(fates, row["module"], "recomputed", row["bytes"])
    modules = {path: sum(parts.values()) for path, parts in _unfolded(document.get("modules", ())).items()}
    costs = document["costs"]
    facts = {**_target(document["target"]), "optimizer": document["optimizer"], "ops": f"{document['ops']:,}"}
    facts |= {"costs": f"{costs['origin']} on {costs['machine']}"}
    peak_at = document.get("peak_at")
    return Side(
        name,
        figures,
        document.get("categories", {}),
        "" if peak_at is None else _place(peak_at),
        modules,
        fates,
        {},
        facts,
    )


def _share(fates: dict[str, dict[str, int]], path: str, fate: str, nbytes: int) -> None:
    paths = list(_paths(path))
    for one in paths:
        row = fates.setdefault(one, {})
        row[fate] = row.get(fate, 0) + nbytes // len(paths)


def _place(at: Mapping[str, Any]) -> str:
    module = f" of {at['module']}" if at["module"] else ""
    return f"{str(at['target']).removesuffix('.default')}{module}, {at['phase']}"


def _target(target: str) -> dict[str, str]:
    """A target by its options, so that one of them can differ."""
    name, _, options = target.partition(":")
    if name.endswith(".py"):
        return {"target": target}
    pairs = (option.partition("=") for option in options.split(",") if option)
    return {"target": name, **{f"option {key}": value for key, _, value in pairs}}


def _unfolded(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, int]]:
    """A folded tree as what each single module has itself, by category."""
    found: dict[str, dict[str, int]] = {}

    def visit(row: Mapping[str, Any]) -> None:
        own = dict(row["categories"])
        for part in row["parts"]:
            visit(part)
            for category, amount in part["categories"].items():
                own[category] -= amount
        paths = list(_paths(row["module"]))
        for path in paths:
            mine = found.setdefault(path, {})
            for category, amount in own.items():
                if amount:
                    mine[category] = mine.get(category, 0) + amount // len(paths)

    for row in rows:
        visit(row)
    return {path: parts for path, parts in found.items() if parts}


def _paths(path: str) -> Iterator[str]:
    """The modules that a folded path stands for: `a.{0..2}` is a.0, a.1 and a.2."""
    if path == TOP:
        path = ""
    pieces = BRACES.split(path)
    choices = [list(_names(piece)) if number % 2 else [piece] for number, piece in enumerate(pieces)]
    yield from map("".join, itertools.product(*choices))


def _names(text: str) -> Iterator[str]:
    for name in text.split(","):
        first, dots, last = name.partition("..")
        if dots and first.isdecimal() and last.isdecimal():
            yield from map(str, range(int(first), int(last) + 1))
        else:
            yield name


@dataclass(frozen=True)
class Moved:
    """Bytes of modules that have another fate, or are more or fewer."""

    module: str
    count: int  # of modules that are alike
    before: Mapping[str, int]  # fate -> bytes of all of them
    after: Mapping[str, int]
    why: str

    @property
    def nbytes(self) -> int:
        """How much moved: what became more of a fate, or less, whichever is larger."""
        names = {*self.before, *self.after}
        changes = [self.after.get(name, 0) - self.before.get(name, 0) for name in names]
        return max(sum(max(0, one) for one in changes), sum(max(0, -one) for one in changes))


@dataclass(frozen=True)
class Diff:
    """Two sides, and what differs; `Console.print` shows it."""

    before: Side
    after: Side
    causes: Sequence[str]
    moved: Sequence[Moved]
    version: str = ""  # of lowtide

    def to_json(self) -> dict[str, Any]:
        """All of it as plain data."""
        return {
            "lowtide": KIND,
            "version": VERSION,
            "made_by": f"lowtide {self.version}".strip(),
            "names": [self.before.name, self.after.name],
            "causes": list(self.causes),
            "figures": {key: [self.before.figures[key], self.after.figures[key]] for key in FIGURES},
            "figure_names": FIGURES,
            "peak_at": [self.before.peak_at, self.after.peak_at],
            "categories": {
                name: [self.before.categories.get(name, 0), self.after.categories.get(name, 0)]
                for name in dict.fromkeys((*self.before.categories, *self.after.categories))
            },
            "modules": [branch.to_json() for branch in _tree(self.before.modules, self.after.modules)],
            "nanoseconds": [branch.to_json() for branch in _tree(self.before.nanoseconds, self.after.nanoseconds)],
            "moved": [{**asdict(one), "bytes": one.nbytes} for one in self.moved],
        }

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text(f"A  {self.before.name}", style="bold")
        yield Text(f"B  {self.after.name}", style="bold")
        yield Text("\nWhy", style="bold")
        for cause in self.causes or ("nothing that they were made from differs",):
            yield Text(f"  {cause}")
        yield Text("\nIn numbers", style="bold")
        rows = [_row(key, self.before.figures[key], self.after.figures[key]) for key in FIGURES]
        yield Table("lrrr", [row for row in rows if row], ("", "A", "B", "change"), ("", "", "bold", ""), 2)
        names = dict.fromkeys((*self.before.categories, *self.after.categories))
        pairs = [(name, self.before.categories.get(name, 0), self.after.categories.get(name, 0)) for name in names]
        if any(one or other for _, one, other in pairs):
            yield Text("\nAt the peak, by category", style="bold")
            shown = [_bytes_row(*pair) for pair in pairs if pair[1] or pair[2]]
            yield Table("lrrr", shown, ("", "A", "B", "change"), ("", "", "bold", ""), 2)
            yield Text(f"  A: {self.before.peak_at}\n  B: {self.after.peak_at}", style="dim")
        yield Text("\nWhat moved" if self.moved else "\nNothing moved", style="bold")
        for one in self.moved[:ROWS]:
            count = f" {TIMES}{one.count}" if one.count > 1 else ""
            yield Text(f"  {one.module or TOP}{count}: {show_move(one)}")
            if one.why:
                yield Text(f"    {one.why}", style="dim")
        if len(self.moved) > ROWS:
            yield Text(f"  and {len(self.moved) - ROWS} more", style="dim")


def show_move(one: Moved) -> str:
    """`recomputed 12.00 MiB -> kept 12.00 MiB`."""

    def parts(fates: Mapping[str, int]) -> str:
        return " + ".join(f"{fate} {show_bytes(nbytes)}" for fate, nbytes in fates.items() if nbytes) or "nothing"

    return f"{parts(one.before)} -> {parts(one.after)}"


def _row(key: str, before: float | None, after: float | None) -> tuple[str, str, str, str] | None:
    if before is None and after is None:
        return None
    show = show_seconds if key in SECONDS else _percent if key in SHARES else show_bytes
    change = ""
    if before is not None and after is not None:
        change = f"{100 * (after - before):+.2f} points" if key in SHARES else _change(before, after)
    return FIGURES[key], "-" if before is None else show(before), "-" if after is None else show(after), change


def _percent(share: float) -> str:
    return f"{100 * share:.2f}%"


def _change(before: float, after: float) -> str:
    return "same" if before == after else "new" if not before else f"{100 * (after / before - 1):+.1f}%"


def _bytes_row(name: str, before: int, after: int) -> tuple[str, str, str, str]:
    return name, show_bytes(before) if before else "-", show_bytes(after) if after else "-", _change(before, after)


def diff(before: Side, after: Side, *, version: str = "") -> Diff:
    """What differs between two sides, and why."""
    return Diff(before, after, tuple(_causes(before, after)), tuple(_moved(before, after)), version)


def _causes(before: Side, after: Side) -> Iterator[str]:
    """What they were made from, where that differs."""
    for key in dict.fromkeys((*before.facts, *after.facts)):
        one, other = before.facts.get(key), after.facts.get(key)
        if one != other:
            yield f"{key.removeprefix('option ')}: {one or 'as by default'} -> {other or 'as by default'}"
    sizes = [side.figures["budget"] for side in (before, after)]
    if sizes[0] != sizes[1] and before.facts.get("budget") == after.facts.get("budget"):
        yield "budget: " + " -> ".join("none" if one is None else show_bytes(one) for one in sizes)


def _moved(before: Side, after: Side) -> list[Moved]:
    """The modules whose values the backward finds otherwise, those that are alike as one, most bytes first."""
    groups: defaultdict[tuple[Any, ...], list[str]] = defaultdict(list)
    for path in dict.fromkeys((*before.fates, *after.fates)):
        one, other = before.fates.get(path, {}), after.fates.get(path, {})
        if one != other:
            groups[pattern(path), tuple(sorted(one.items())), tuple(sorted(other.items()))].append(path)
    found = []
    for (_, one, other), paths in groups.items():
        count = len(paths)
        was, now = ({fate: nbytes * count for fate, nbytes in row} for row in (one, other))
        found.append(Moved(fold_paths(paths), count, was, now, _why(dict(one), dict(other), before, after)))
    return sorted(found, key=lambda row: (-row.nbytes, row.module))


def _why(before: Mapping[str, int], after: Mapping[str, int], one: Side, other: Side) -> str:
    """Why the values of a module moved."""
    needed, needs = sum(before.values()), sum(after.values())
    if not needed:
        return "the module is only in B"
    if not needs:
        return "the module is only in A"
    if needed != needs:
        return f"its values take {needs / needed:.2f} times the bytes"
    budgets = [side.figures["budget"] for side in (one, other)]
    if budgets[0] != budgets[1]:
        room = "more" if (budgets[1] or float("inf")) > (budgets[0] or float("inf")) else "less"
        return f"there is {room} room for it"
    return "the same bytes, by another choice of the search"


def _tree(before: Mapping[str, int], after: Mapping[str, int]) -> tuple[Branch, ...]:
    """Both sides by module, in one tree: identical modules as one."""
    weights: list[Weight] = []
    for path in dict.fromkeys((*before, *after)):
        weights += [(path, "A", before.get(path, 0)), (path, "B", after.get(path, 0))]
    return fold((weight for weight in weights if weight[2]), top=TOP)
