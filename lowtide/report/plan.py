"""What a plan does to a step: what it recomputes, what it keeps for the backward and how, at what price."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from textwrap import fill
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.text import Text

from lowtide.costs import Costs
from lowtide.graph import Graph, Phase
from lowtide.lifetimes import lifetimes
from lowtide.program import Plan, Program, Run
from lowtide.report.bytes import bar, show_bytes, show_seconds, show_share
from lowtide.report.forgotten import Forgotten, forgotten, show_forgotten
from lowtide.report.modules import fold_paths, pattern
from lowtide.report.offloaded import Offloaded, offloaded, show_offloaded
from lowtide.report.profile import TOP
from lowtide.report.show import TIMES, WIDEST, Heading
from lowtide.report.table import Table
from lowtide.rewrites import KEEPS, Rewrite, exactness

Where = tuple[str, str, Phase]  # module, target and phase of ops that are alike
Layer = tuple[str, tuple[tuple[str, tuple[int, ...]], ...]]  # pattern of the path, targets with the shapes made
ROWS = 15  # of a table; what is left is counted in a last one


@dataclass(frozen=True)
class Recomputed:
    """Repeated runs of one kind of op, in one module or in several that are alike."""

    module: str
    target: str
    phase: Phase
    count: int  # runs
    seconds: float  # of these runs
    nbytes: int  # regained: of values that first runs still read, and that therefore would have to be kept


@dataclass(frozen=True)
class Kept:
    """Values that the forward made and the backward finds, from one kind of op, as they were made or narrow."""

    module: str
    target: str
    count: int
    nbytes: int
    narrow: str | None  # dtype in which they are kept; None: as they were made
    wide_nbytes: int  # of the values as they were made


@dataclass(frozen=True)
class Summary:
    """A plan in numbers."""

    budget: int | None  # bytes
    persistent: int  # bytes of the inputs that persist between steps, on the device
    peak: int  # bytes, predicted
    arena: int  # bytes of the block that holds what the step makes; 0: there is none
    eager_peak: int  # bytes, predicted
    least_feasible: int | None  # bytes, the least peak of any plan that was found; None: not looked for
    least_bound: int  # bytes: no program has a lower peak
    base_seconds: float  # of the step without recomputation
    overhead: float  # added seconds as a fraction of these
    bound: float  # the least overhead that any program within the budget can have
    planning_seconds: float
    ops: int
    runs: int
    recomputed: tuple[Recomputed, ...]  # most seconds first
    kept: tuple[Kept, ...]  # most bytes first
    forgotten: tuple[Forgotten, ...]  # most bytes first
    packing_seconds: float  # of runs that make narrow values and use them, less those that they stand in for
    in_place: int  # results that take the bytes of an argument, where eager allocates
    in_place_nbytes: int
    offloaded: tuple[Offloaded, ...] = ()  # what is in each other place
    rewrites: tuple[Rewrite, ...] = ()  # that changed the captured step before it was planned

    @property
    def seconds(self) -> float:
        """The seconds of a step, predicted."""
        return self.base_seconds * (1 + self.overhead)

    @property
    def gap(self) -> float:
        """How far the overhead may be from the least possible, as the same fraction."""
        return self.overhead - self.bound

    @property
    def outside(self) -> int:
        """Bytes of the peak that are not in the arena: what persists, and what leaves the step."""
        return self.peak - self.arena

    def to_json(self) -> dict[str, Any]:
        """All of it as plain data."""
        return {
            "budget": self.budget,
            "persistent": self.persistent,
            "predicted_peak": self.peak,
            "arena": self.arena,
            "outside": self.outside,
            "eager_peak": self.eager_peak,
            "least_feasible": self.least_feasible,
            "least_bound": self.least_bound,
            "overhead": self.overhead,
            "bound": self.bound,
            "gap": self.gap,
            "seconds_without_recomputation": self.base_seconds,
            "planning_seconds": self.planning_seconds,
            "ops": self.ops,
            "runs": self.runs,
            "recomputed": [_row(item) for item in self.recomputed],
            "kept": [_row(item) for item in self.kept],
            "forgotten": [_row(item) for item in self.forgotten],
            "packing_seconds": self.packing_seconds,
            "in_place": {"count": self.in_place, "bytes": self.in_place_nbytes},
            "offloaded": [asdict(item) for item in self.offloaded],
            "rewrites": [asdict(rewrite) for rewrite in self.rewrites],
        }


def _row(item: Recomputed | Kept | Forgotten) -> dict[str, Any]:
    return {key.replace("nbytes", "bytes"): amount for key, amount in asdict(item).items()}


def summarize(graph: Graph, costs: Costs, plan: Plan, *, eager_peak: int, least_feasible: int | None = None) -> Summary:
    """Read off a plan what it does."""
    runs = [item for item in plan.program.instructions if isinstance(item, Run)]
    places = [made for run in runs for made, read in run.over if (made, read) not in graph.ops[run.op].updates]
    return Summary(
        budget=plan.budget,
        persistent=costs.persistent(graph) - costs.elsewhere(graph),
        peak=plan.peak,
        arena=plan.program.arena,
        eager_peak=eager_peak,
        least_feasible=least_feasible,
        least_bound=plan.least_bound,
        base_seconds=plan.base_seconds,
        overhead=plan.overhead,
        bound=plan.bound,
        planning_seconds=plan.planning_seconds,
        ops=len(graph.ordinary),
        runs=len(runs),
        recomputed=_recomputed(graph, costs, runs),
        kept=_kept(graph, costs, plan.program),
        forgotten=forgotten(graph, costs),
        packing_seconds=_storing(graph, costs, runs),
        in_place=len(places),
        in_place_nbytes=sum(costs.nbytes[made] for made in places),
        offloaded=offloaded(graph, costs, plan.program),
        rewrites=plan.rewrites,
    )


def _recomputed(graph: Graph, costs: Costs, runs: Sequence[Run]) -> tuple[Recomputed, ...]:
    """The repeated runs; what is alike together, most seconds first."""
    first = {run.op: number for number, run in enumerate(runs) if not run.again}
    found = []
    repeated = ((run.op, number) for number, run in enumerate(runs) if run.again and not graph.ops[run.op].optional)
    for where, members in _alike(graph, repeated):
        needed = {
            value
            for op, number in members
            for value in graph.makes_of(op, again=True)
            if any(first.get(reader, -1) > number for reader in graph.readers[value])
        }
        seconds = sum(costs.seconds[op] for op, _ in members)
        found.append(Recomputed(*where, len(members), seconds, sum(costs.nbytes[value] for value in needed)))
    return tuple(sorted(found, key=lambda item: (-item.seconds, item.module, item.target)))


def _storing(graph: Graph, costs: Costs, runs: Sequence[Run]) -> float:
    """The seconds of all runs of optional ops, less those of ordinary ones that never run because of them."""
    ran = {run.op for run in runs}
    optional = [run.op for run in runs if graph.ops[run.op].optional]
    spared = {graph.maker[made] for op in optional for made in graph.makes[op]} - ran
    return sum(costs.seconds[op] for op in optional) - sum(costs.seconds[op] for op in spared)


def _kept(graph: Graph, costs: Costs, program: Program) -> tuple[Kept, ...]:
    """What the forward made and the first op of the backward finds; what is alike together, most bytes first."""
    stands_for = {row.keeper: row.value for row in graph.alternatives if row.store >= 0}
    made: dict[bool, list[tuple[int, int]]] = {False: [], True: []}  # instead of another or not -> that one's maker
    for value in _at_backward_start(graph, costs, program):
        op = graph.maker[value]
        if graph.ops[op].phase == "forward" and graph.values[value].storage not in graph.lasting_storages:
            made[value in stands_for].append((graph.maker[stands_for.get(value, value)], value))
    found = [
        Kept(
            module,
            target,
            len(members),
            sum(costs.nbytes[value] for _, value in members),
            graph.values[members[0][1]].dtype if narrow else None,
            sum(costs.nbytes[stands_for.get(value, value)] for _, value in members),
        )
        for narrow, pairs in made.items()
        for (module, target, _), members in _alike(graph, pairs)
    ]
    return tuple(sorted(found, key=lambda item: (-item.nbytes, item.module, item.target)))


def _at_backward_start(graph: Graph, costs: Costs, program: Program) -> list[int]:
    """The values of ops that are on the device when the first op of the backward begins."""
    runs = [(number, item.op) for number, item in enumerate(program.instructions) if isinstance(item, Run)]
    place = graph.forward_ends(op for _, op in runs)
    if place == len(runs):
        return []
    present = lifetimes(graph, program, costs.nbytes, costs.arena_temporaries).at(runs[place][0] - 1)
    return sorted(value for value in present if graph.maker[value] >= 0)


def _alike(graph: Graph, pairs: Iterable[tuple[int, int]]) -> list[tuple[Where, list[tuple[int, int]]]]:
    """Pairs of an op and something else, by the module of the op, identical ones as one, its target and its phase."""
    layers = _layers(graph)
    groups: dict[tuple[Layer, str, Phase], list[tuple[int, int]]] = {}
    for pair in pairs:
        op = graph.ops[pair[0]]
        groups.setdefault((layers[op.module], op.target, op.phase), []).append(pair)
    return [
        ((fold_paths([graph.ops[op].module for op, _ in members]), target, phase), members)
        for (_, target, phase), members in groups.items()
    ]


def _layers(graph: Graph) -> dict[str, Layer]:
    """For each module what identical ones have in common: the pattern of their path, and the forward that they run."""
    forwards: dict[str, list[tuple[str, tuple[int, ...]]]] = {op.module: [] for op in graph.ops}
    for op in graph.ops:
        if op.phase == "forward":
            forwards[op.module] += [(op.target, graph.values[made].shape) for made in op.makes]
    return {module: (pattern(module), tuple(calls)) for module, calls in forwards.items()}


@dataclass(frozen=True)
class PlanReport:
    """A plan with its heading and the notes; `Console.print` shows it."""

    heading: Heading
    asked: str  # the budget as it was written
    summary: Summary
    notes: Sequence[str] = ()
    method: str = ""  # how it was planned, where that was not by lowtide's own search

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width, summary = min(options.max_width, WIDEST), self.summary
        yield Text(self.heading.target, style="bold")
        yield Text(f"{self.heading.optimizer} · {summary.ops:,} ops · {_planned(summary, self.method)}")
        yield Text(self.heading.costs, style="dim")
        yield Text("\nPlan", style="bold")
        yield _promise(summary, self.asked)
        yield from _show_recomputed(summary, width)
        yield from _show_kept(summary, width)
        yield from show_forgotten(summary.forgotten)
        if self.notes:
            yield Text("\nNotes", style="bold")
            yield from (Text(fill(note, width, initial_indent="  ", subsequent_indent="    ")) for note in self.notes)


def _planned(summary: Summary, method: str) -> str:
    return f"planned{f' by {method}' if method else ''} in {show_seconds(summary.planning_seconds)}"


def _promise(summary: Summary, asked: str) -> Table:
    """What the plan promises, against the budget, eager and the bound."""
    part = f"what persists + {asked.strip()} of what eager adds" if "%" in asked else ""
    own = (
        f"{show_bytes(summary.persistent)} persists + {show_bytes(summary.peak - summary.persistent)} is the step's own"
    )
    overhead = summary.overhead * summary.base_seconds
    rows = [
        ("predicted peak", show_bytes(summary.peak), own),
        *_arena(summary),
        ("eager, predicted", show_bytes(summary.eager_peak), _beside(summary)),
        *_least(summary),
        ("overhead", show_overhead(summary.overhead), _more(overhead, summary.base_seconds)),
        ("bound", show_overhead(summary.bound), "no plan within the budget can have less"),
        ("gap", f"{abs(100 * summary.gap):.2f} points", "the most that a better plan could save"),
    ]
    if summary.budget is not None:
        rows.insert(0, ("budget", show_bytes(summary.budget), part))
    if summary.in_place:
        results = f"{summary.in_place:,} results take the bytes of an argument"
        rows.append(("in place", show_bytes(summary.in_place_nbytes), results))
    rows += show_offloaded(summary.offloaded)
    if summary.rewrites:
        names = ", ".join(map(show_rewrite, summary.rewrites))
        rows.append(("rewritten", names, KEEPS[exactness(summary.rewrites)]))
    narrow = [item for item in summary.kept if item.narrow]
    if narrow:
        wide = show_bytes(sum(item.wide_nbytes for item in narrow))
        text = f"{_many(sum(item.count for item in narrow), 'value')} in place of {wide}"
        taking = f", for {show_seconds(summary.packing_seconds)}" if summary.packing_seconds > 0 else ""
        rows.append(("kept narrow", show_bytes(sum(item.nbytes for item in narrow)), text + taking))
    return Table("lrw", rows, (), ("", "bold", ""), 2)


def _arena(summary: Summary) -> list[tuple[str, str, str]]:
    """The block of memory that the step runs in, where it has one."""
    if not summary.arena:
        return []
    return [("arena", show_bytes(summary.arena), f"one block; {show_bytes(summary.outside)} are outside it")]


def _least(summary: Summary) -> list[tuple[str, str, str]]:
    """The smallest budget that can be planned, where it was looked for."""
    if summary.least_feasible is None:
        return []
    proven = f"no plan can do with less than {show_bytes(summary.least_bound)}"
    return [("least feasible", show_bytes(summary.least_feasible), proven)]


def show_rewrite(rewrite: Rewrite) -> str:
    """A rewrite with what a person wants to know of its setting, and the error that was measured."""
    name = rewrite.name if rewrite.exactness == "bitwise" and isinstance(rewrite.setting, str) else str(rewrite)
    return name if rewrite.error is None else f"{name} (error {rewrite.error:.1e})"


def show_overhead(fraction: float) -> str:
    """Extra time in percent of the step without recomputation: `9.62%`."""
    return f"{abs(100 * fraction):.2f}%"


def _more(overhead: float, base: float) -> str:
    return f"{show_seconds(max(overhead, 0.0))} more than the {show_seconds(base)} of all ops"


def _beside(summary: Summary) -> str:
    if not summary.eager_peak:
        return ""
    saved = summary.eager_peak - summary.peak
    share = show_share(abs(saved), summary.eager_peak)
    return f"the plan needs {share} {'less' if saved >= 0 else 'more'}"


def _show_recomputed(summary: Summary, width: int) -> Iterator[RenderableType]:
    found = summary.recomputed
    if not found:
        why = "what there is no room for is elsewhere" if summary.offloaded else "the budget has room without"
        yield Text(f"\nRecomputed: nothing, {why}", style="bold")
        return
    runs, seconds = sum(item.count for item in found), sum(item.seconds for item in found)
    yield Text(f"\nRecomputed: {_many(runs, 'run')}, {show_seconds(seconds)}", style="bold")
    room = _room(width)
    rows = [
        [
            item.module or TOP,
            _target(item.target) + ("" if item.phase == "forward" else f", {item.phase}"),
            f"{TIMES}{item.count:,}",
            show_seconds(item.seconds),
            show_bytes(item.nbytes) if item.nbytes else "-",
            bar(item.seconds, found[0].seconds, room),
        ]
        for item in found[:ROWS]
    ]
    rest = found[ROWS:]
    if rest:
        count, nbytes = sum(item.count for item in rest), sum(item.nbytes for item in rest)
        seconds = sum(item.seconds for item in rest)
        more = [f"and {len(rest)} more", "", f"{TIMES}{count:,}", show_seconds(seconds)]
        rows.append([*more, show_bytes(nbytes) if nbytes else "-", ""])
    titles = ("module", "op", "", "time", "regained", "")
    yield Table("ssrrrl", rows, titles, ("", "", "", "bold", "", "cyan"), 2)
    yield Text("  regained: what need not be kept; - where an op only leads to others", style="dim")


def _show_kept(summary: Summary, width: int) -> Iterator[RenderableType]:
    found = summary.kept
    whole, values = sum(item.nbytes for item in found), sum(item.count for item in found)
    if not values:
        return
    yield Text(f"\nKept for the backward: {_many(values, 'value')}, {show_bytes(whole)}", style="bold")
    room = _room(width)
    rows = [
        [
            item.module or TOP,
            _target(item.target) + (f", as {item.narrow}" if item.narrow else ""),
            f"{TIMES}{item.count:,}",
            show_bytes(item.nbytes),
            show_share(item.nbytes, whole),
            bar(item.nbytes, found[0].nbytes, room),
        ]
        for item in found[:ROWS]
    ]
    rest = found[ROWS:]
    if rest:
        count, nbytes = sum(item.count for item in rest), sum(item.nbytes for item in rest)
        more = [f"and {len(rest)} more", "", f"{TIMES}{count:,}", show_bytes(nbytes), show_share(nbytes, whole)]
        rows.append([*more, ""])
    titles = ("module", "made by", "", "all", "", "")
    yield Table("ssrrrl", rows, titles, ("", "", "", "bold", "", "cyan"), 2)


def _many(count: int, word: str) -> str:
    return f"{count:,} {word}{'' if count == 1 else 's'}"


def _room(width: int) -> int:
    """Characters for the bars."""
    return max(min(width - 84, 24), 0)


def _target(target: str) -> str:
    return target.removesuffix(".default")
