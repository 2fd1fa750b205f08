"""Graph -> Graph: passes over a step before it is planned, exact ones and others; PASSES fixes their order.

EXACT are always taken. Those that need another place, and those that change the rounding, or more, are off unless they
are allowed by name or by tier.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import takewhile

from lowtide.errors import ProgramError, UsageError
from lowtide.graph import Graph, Place
from lowtide.resized import Resized
from lowtide.rewrite import activations, statistics
from lowtide.rewrite.attention import attention
from lowtide.rewrite.blocked import blocked
from lowtide.rewrite.chunked_loss import chunked_loss
from lowtide.rewrite.chunked_loss import counts as counts_of_chunks
from lowtide.rewrite.chunks import counts, cut, longest
from lowtide.rewrite.input8 import input8
from lowtide.rewrite.joined_norms import joined
from lowtide.rewrite.joined_updates import joined_updates
from lowtide.rewrite.merge import merged
from lowtide.rewrite.microbatch import counts as counts_of_parts
from lowtide.rewrite.microbatch import microbatch
from lowtide.rewrite.narrow import narrow
from lowtide.rewrite.offload import leaving_bytes, may_wait, moved_out
from lowtide.rewrite.offload import setting as place_and_bytes
from lowtide.rewrite.sizes import sizes_only
from lowtide.rewrite.sparse import DENSITIES, sparse
from lowtide.rewrite.split import large_ops, shares
from lowtide.rewrite.state8 import state8
from lowtide.rewrite.updates import fused
from lowtide.rewrite.weights16 import weights16
from lowtide.rewrites import Change, Exactness, Rewrite, Setting

__all__ = [
    "EXACT",
    "PASSES",
    "TRIED",
    "Pass",
    "Rewritten",
    "Trail",
    "apply",
    "chunks",
    "cut",
    "leaving_bytes",
    "longest",
    "named",
    "offload",
    "seen_after",
    "with_narrow",
]


@dataclass(frozen=True)
class Pass:
    """A technique that rewrites a graph: one file of this room, and one line of PASSES."""

    name: str
    exactness: Exactness
    run: Callable[..., Graph]  # given the graph and the setting; returns the graph as it is where nothing is to do
    rungs: Callable[..., Iterable[Setting]] = lambda graph: (None,)  # settings to try, the mildest first
    resizes: bool = False  # both are given the step at other sizes, too
    alike: bool = False  # the step at other sizes goes through it, too
    alone: bool = False  # it leaves nothing for others to split
    instead_of: str = ""  # a milder pass that this one takes the place of
    tried: bool = (
        False  # bitwise where a trial here says so: taken without leave if it has torch's bits, and is quicker
    )

    def settings(self, graph: Graph, resized: Resized | None) -> tuple[Setting, ...]:
        """What may be tried on a captured graph; nothing where the step can't be captured at other sizes."""
        if self.resizes:
            return () if resized is None else tuple(self.rungs(graph, resized))
        return tuple(self.rungs(graph))

    def by(self, setting: Setting = None) -> Rewrite:
        """What the pass is called in plans and reports."""
        return Rewrite(self.name, setting, self.exactness, tried=self.tried)


PASSES = (  # in the order in which they run: what takes ops apart comes before what offers others beside them
    Pass("batch-statistics", "lossy", statistics.grouped, statistics.sizes, alike=True),
    Pass("merge", "bitwise", lambda graph, _: merged(graph)),
    Pass("chunks", "rounding", cut, counts),
    Pass("microbatch", "rounding", microbatch, counts_of_parts, resizes=True, alone=True),
    Pass("chunked-loss", "rounding", chunked_loss, counts_of_chunks, resizes=True),
    Pass("split", "rounding", large_ops, shares, resizes=True),
    Pass("input8", "lossy", input8),
    Pass("sparse", "lossy", sparse, lambda graph: DENSITIES),
    Pass("weights16", "lossy", weights16),
    Pass("state8", "lossy", state8),
    Pass("updates", "bitwise", lambda graph, _: fused(graph)),  # of what is lossy already
    Pass("activations16", "lossy", activations.packed16, activations.settings),
    Pass("activations8", "lossy", activations.packed8, activations.settings, instead_of="activations16"),
    Pass("activations4", "lossy", activations.packed4, activations.settings, instead_of="activations8"),
    Pass("blocked", "bitwise", blocked, tried=True),
    Pass("joined-norms", "bitwise", joined, tried=True),  # of those in blocks
    Pass("attention", "bitwise", attention, tried=True),
    Pass("joined-updates", "bitwise", joined_updates, tried=True),
    Pass("sizes", "bitwise", lambda graph, _: sizes_only(graph)),
    Pass("narrow", "bitwise", lambda graph, _: narrow(graph)),
    Pass("offload", "bitwise", may_wait),
    Pass("homes", "bitwise", moved_out),
)
EXACT = tuple(one.by() for one in PASSES if one.name in ("merge", "updates", "sizes", "narrow"))  # what is always done
TRIED = tuple(one for one in PASSES if one.tried)  # their setting names ops that stay torch's, with a plus between them


@dataclass(frozen=True)
class Rewritten:
    """A graph, and what was done to it."""

    graph: Graph
    changes: tuple[Change, ...]  # of the rewrites that changed something, in their order

    @property
    def rewrites(self) -> tuple[Rewrite, ...]:
        """The rewrites that changed something."""
        return tuple(change.rewrite for change in self.changes)


def chunks(count: int) -> Rewrite:
    """Recurrent layers cut in time into so many calls."""
    return _named("chunks").by(count)


def offload(place: Place, *, most: int | None = None, homes: int = 0) -> tuple[Rewrite, ...]:
    """Values may wait in a place, `most` bytes of them; state and parameters of `homes` bytes live there."""
    rows = _named("offload").by(place_and_bytes(place, most))
    return (rows, _named("homes").by(place_and_bytes(place, homes))) if homes else (rows,)


def named(name: str) -> Pass | None:
    """The pass of this name."""
    return next((one for one in PASSES if one.name == name), None)


def _named(name: str) -> Pass:
    return next(one for one in PASSES if one.name == name)


@dataclass
class Trail:
    """The graphs that the passes went through that were last run: others that begin alike go on from there."""

    graph: Graph | None = None  # where it begins
    resized: Resized | None = None
    steps: list[tuple[Rewrite, Graph, tuple[Change, ...], Resized | None]] = field(default_factory=list)

    def resume(self, graph: Graph, resized: Resized | None, rewrites: list[Rewrite]) -> int:
        """How many of these passes were run already; what came after them is forgotten."""
        same = graph is self.graph and resized is self.resized
        alike = takewhile(lambda pair: pair[0][0] == pair[1], zip(self.steps, rewrites, strict=False))
        self.steps = self.steps[: sum(1 for _ in alike)] if same else []
        self.graph, self.resized = graph, resized
        return len(self.steps)


def apply(
    graph: Graph, rewrites: Iterable[Rewrite], resized: Resized | None = None, trail: Trail | None = None
) -> Rewritten:
    """The graph after these passes, in the order of PASSES, whatever order they are named in; checked after each."""
    wanted = {rewrite.name: rewrite for rewrite in rewrites}
    if unknown := sorted(wanted.keys() - {one.name for one in PASSES}):
        names = ", ".join(one.name for one in PASSES)
        raise UsageError(f"there is no rewrite {', '.join(unknown)}.", hint=f"there are {names}.")
    passes = [one for one in PASSES if one.name in wanted]
    trail = Trail() if trail is None else trail
    done = trail.resume(graph, resized, [wanted[one.name] for one in passes])
    changes: tuple[Change, ...] = ()
    if done:
        _, graph, changes, resized = trail.steps[-1]
    for one in passes[done:]:
        if one.resizes and resized is None:
            raise UsageError(
                f"{one.name} needs the step at other sizes, which nobody can capture of a graph alone.",
                hint="give the step itself, with an example.",
            )
        setting = wanted[one.name].setting
        before, graph = graph, one.run(graph, setting, resized) if one.resizes else one.run(graph, setting)
        if graph != before:
            if graph.fault is not None:
                raise ProgramError("bad rewrite", f"{one.name} made a graph that cannot be run: {graph.fault}")
            changes = (*changes, _change(one.by(setting), before, graph))
            if one.alike and resized is not None:
                resized = _resized(one, setting, resized)
        trail.steps.append((wanted[one.name], graph, changes, resized))
    return Rewritten(graph, changes)


def seen_after(graph: Graph, rewrites: Iterable[Rewrite], resized: Resized | None) -> tuple[Graph, Resized | None]:
    """The captured step, and itself at other sizes, after those of these passes that change both."""
    for rewrite in rewrites:
        one = _named(rewrite.name)
        if one.alike:
            graph = one.run(graph, rewrite.setting)
            resized = None if resized is None else _resized(one, rewrite.setting, resized)
    return graph, resized


def _resized(one: Pass, setting: Setting, resized: Resized) -> Resized:
    """The step at other sizes after a pass; what was found out about it without the pass is of another step."""
    key = f"after {one.by(setting)}"
    if key not in resized.known:
        at = cache(lambda size: one.run(resized.at(size), setting))
        along = cache(lambda: tuple(_resized(one, setting, other) for other in resized.along()))
        resized.known[key] = replace(resized, graph=one.run(resized.graph, setting), at=at, along=along, known={})
    found = resized.known[key]
    assert isinstance(found, Resized)
    return found


def with_narrow(graph: Graph) -> Graph:
    """The graph after all passes that keep every bit."""
    return apply(graph, EXACT).graph


def _change(rewrite: Rewrite, before: Graph, after: Graph) -> Change:
    old, new = ({op.name for op in graph.ops if not op.optional} for graph in (before, after))
    offered = len(after.ops) - len(after.ordinary) - (len(before.ops) - len(before.ordinary))
    had, has = (Counter((value.name, value.nbytes, value.storage) for value in g.values) for g in (before, after))
    return Change(
        rewrite,
        ops_added=len(new - old),
        ops_removed=len(old - new),
        ops_offered=offered,
        values_added=(has - had).total(),
        values_removed=(had - has).total(),
        waiting=_waiting(after) - _waiting(before),
        nbytes_moved=_elsewhere(after) - _elsewhere(before),
    )


def _waiting(graph: Graph) -> int:
    return sum(row.place != "device" for row in graph.alternatives)


def _elsewhere(graph: Graph) -> int:
    return sum(graph.values[item.value].nbytes for item in graph.inputs if item.home != "device")
