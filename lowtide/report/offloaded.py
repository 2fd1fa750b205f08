"""What a plan has in other places: values that wait there for a while, and state and parameters that live there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lowtide.costs import Costs
from lowtide.graph import Graph, Kind, Place
from lowtide.program import Copy, Free, Program
from lowtide.report.bytes import show_bytes

Row = tuple[str, str, str]


@dataclass(frozen=True)
class Offloaded:
    """What is in one place, and what is copied there and back."""

    place: Place
    values: int  # that wait there for a while
    waiting: int  # bytes of them, at most at one time
    out: int  # bytes that are copied there in a step
    back: int  # bytes that are copied from there in a step
    state: int  # bytes of optimizer state that live there between steps
    parameters: int  # bytes of parameters that do
    staging: int  # bytes of the device that the copies go through, part of the peak

    @property
    def living(self) -> int:
        """Bytes of all that lives there."""
        return self.state + self.parameters


def offloaded(graph: Graph, costs: Costs, program: Program) -> tuple[Offloaded, ...]:
    """What a program has in each other place that it uses, the places in the order of their first use."""
    used = [item.home for item in graph.inputs if item.home != "device"]
    used += [item.to for item in program.instructions if isinstance(item, Copy) and item.to != "device"]
    return tuple(_in(place, graph, costs, program) for place in dict.fromkeys(used))


def _in(place: Place, graph: Graph, costs: Costs, program: Program) -> Offloaded:
    nbytes = costs.nbytes
    there = {item.value for item in graph.inputs if item.home == place}  # now
    seen: set[int] = set()  # values that wait
    out = back = waiting = most = 0
    for item in program.instructions:
        match item:
            case Copy(value, to) if to == place:
                there.add(value)
                out += nbytes[value]
                if graph.home[value] != place:
                    seen.add(value)
                    waiting += nbytes[value]
                    most = max(most, waiting)
            case Copy(value, "device") if value in there:
                back += nbytes[value]
            case Free(value, where) if where == place and value in there:
                there.remove(value)
                waiting -= nbytes[value] if graph.home[value] != place else 0
            case _:
                pass

    def living(kind: Kind) -> int:
        mine = [item.value for item in graph.inputs if item.home == place and graph.values[item.value].kind == kind]
        return sum(nbytes[value] for value in mine)

    staging = costs.staging if program.copies else 0
    return Offloaded(place, len(seen), most, out, back, living("state"), living("parameter"), staging)


def show_offloaded(found: Sequence[Offloaded]) -> list[Row]:
    """What is elsewhere, as rows of a table: a title, bytes, and words."""
    rows: list[Row] = []
    for item in found:
        if item.values:
            many = f"{item.values:,} value{'' if item.values == 1 else 's'}"
            rows.append((f"waits on the {item.place}", show_bytes(item.waiting), f"at most, of {many}"))
        if item.living:
            parts = [(item.state, "optimizer state"), (item.parameters, "parameters")]
            words = ", ".join(f"{show_bytes(nbytes)} {name}" for nbytes, name in parts if nbytes)
            rows.append((f"lives on the {item.place}", show_bytes(item.living), words))
        rows.append((f"goes to the {item.place}", show_bytes(item.out), f"a step; {show_bytes(item.back)} come back"))
    if found and found[0].staging:
        rows.append(("staging", show_bytes(found[0].staging), "of the peak: copies go through it"))
    return rows
