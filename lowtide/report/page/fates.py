"""What became of each value that the backward needs, and of each second, by module."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from lowtide.costs import Costs
from lowtide.graph import Graph
from lowtide.lifetimes import lifetimes
from lowtide.program import Copy, Program, Run
from lowtide.report.modules import Branch, Weight, fold
from lowtide.report.page.track import Track
from lowtide.report.profile import TOP
from lowtide.rewrites import is_for_a_part

KEPT, NARROW, AGAIN, AWAY, SPLIT, GONE = "kept", "kept narrow", "recomputed", "offloaded", "split", "not needed"
FATES = (KEPT, NARROW, AGAIN, AWAY, SPLIT, GONE)
FIRST, WAITING = ("forward", "backward", "update"), "waiting for copies"
NANOSECONDS = 1e9  # in a second: modules are folded by whole numbers


def fates(graph: Graph, costs: Costs, program: Program) -> dict[int, str]:
    """For each value that the forward makes and a later phase reads, how a program comes to have it then.

    What is made in parts is split, unless a part of it is made again or waits elsewhere: it never exists as a whole.
    """
    runs = [(number, item.op) for number, item in enumerate(program.instructions) if isinstance(item, Run)]
    place = graph.forward_ends(op for _, op in runs)
    present: set[int] = set()
    if place < len(runs):
        found = lifetimes(graph, program, costs.nbytes, costs.arena_temporaries)
        present = set(found.at(runs[place][0] - 1))
    narrow = {row.value for row in graph.alternatives if row.store >= 0 and row.keeper in present}
    away = {item.value for item in program.instructions if isinstance(item, Copy) and item.to != "device"}
    later = {value for _, op in runs[place:] for value in graph.makes[op]}
    runs_again = {item.op for item in program.instructions if isinstance(item, Run) and item.again}

    def fate(value: int) -> str:
        ways = [(value in away, AWAY), (value in present, KEPT), (value in narrow, NARROW), (value in later, AGAIN)]
        maker = graph.maker[value]
        if is_for_a_part(graph.ops[maker].name):
            ways[1:] = [(maker in runs_again, AGAIN), (True, SPLIT)]
        return next((name for true, name in ways if true), GONE)

    return {value: fate(value) for value in _needed(graph)}


def _needed(graph: Graph) -> Iterator[int]:
    """The values that the forward makes and a later phase reads; what the caller holds anyway aside."""
    for value, maker in enumerate(graph.maker):
        if not 0 <= maker < len(graph.ordinary) or graph.ops[maker].phase != "forward":
            continue
        if graph.values[value].storage in graph.lasting_storages:
            continue
        if any(graph.ops[reader].phase != "forward" for reader in graph.readers[value]):
            yield value


def fate_tree(graph: Graph, costs: Costs, program: Program) -> tuple[Branch, ...]:
    """The bytes of these values by fate and module, identical modules as one."""
    found = fates(graph, costs, program)
    return fold(
        ((graph.ops[graph.maker[value]].module, fate, costs.nbytes[value]) for value, fate in found.items()), top=TOP
    )


@dataclass(frozen=True)
class Spent:
    """The seconds of one kind of op in one program."""

    target: str
    count: int  # runs
    again: int  # of these, repeated ones
    seconds: float  # of all of them


def spent(graph: Graph, track: Track) -> tuple[Spent, ...]:
    """The seconds of each kind of op, most first."""
    runs, again = Counter[str](), Counter[str]()
    seconds: defaultdict[str, float] = defaultdict(float)
    for _, item, span in track.instructions():
        if isinstance(item, Run):
            target = graph.ops[item.op].target
            runs[target] += 1
            again[target] += item.again
            seconds[target] += span.end - span.begin
    found = (Spent(target, runs[target], again[target], seconds[target]) for target in runs)
    return tuple(sorted(found, key=lambda one: (-one.seconds, one.target)))


def second_tree(graph: Graph, costs: Costs, track: Track) -> tuple[Branch, ...]:
    """The nanoseconds of a program by phase and module, repeated runs and waits by themselves."""
    return fold(_seconds(graph, costs, track), top=TOP)


def _seconds(graph: Graph, costs: Costs, track: Track) -> Iterator[Weight]:
    for _, item, span in track.instructions():
        if isinstance(item, Run):
            op = graph.ops[item.op]
            # The prices of ops, not their spans: layers that are alike must not differ by the rounding of a sum.
            yield op.module, AGAIN if item.again else op.phase, round(costs.seconds[item.op] * NANOSECONDS)
        elif not isinstance(item, Copy):
            yield "", WAITING, round((span.end - span.begin) * NANOSECONDS)
