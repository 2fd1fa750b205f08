"""A step over time in formats that others' tools open: Chrome's trace events, and PyTorch's memory snapshots."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from lowtide.graph import Graph
from lowtide.program import Copy, Run, Wait
from lowtide.report.page.track import NAMES, NO_VALUE, OUTSIDE, Box, Track
from lowtide.report.profile import CATEGORIES, TEMPORARIES
from lowtide.simulate import COMPUTE

MICROSECONDS = 1e6  # in a second
ARENA = 0x7F00_0000_0000  # an address like those of real memory; numbers beyond 2**53 are not exact in a browser
HEAP = 0x7E00_0000_0000
PAGE = 512  # bytes: allocations are rounded up to this, as PyTorch's own are
PROTOCOL = 4  # of pickle: the newest that memory_viz reads


def trace_events(steps: Iterable[tuple[Graph, Track]]) -> dict[str, Any]:
    """The programs as a Chrome trace: a process each, engines as its threads, and the bytes as counters."""
    events: list[dict[str, Any]] = []
    for process, (graph, track) in enumerate(steps, 1):
        events += _names(process, track)
        events += _runs(process, graph, track)
        events += _counters(process, track)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _engines(track: Track) -> list[str]:
    return list(dict.fromkeys([COMPUTE, *(span.engine for span in track.spans)]))


def _names(process: int, track: Track) -> Iterator[dict[str, Any]]:
    named = {"name": "process_name", "ph": "M", "pid": process, "args": {"name": track.name}}
    yield named
    yield {"name": "process_sort_index", "ph": "M", "pid": process, "args": {"sort_index": process}}
    for thread, engine in enumerate((*_engines(track), "phases")):
        yield {"name": "thread_name", "ph": "M", "pid": process, "tid": thread, "args": {"name": engine}}
    phases = len(_engines(track))
    for phase, begin, end in track.phases:
        yield _span(phase, "phase", process, phases, begin, end, {})


def _span(
    name: str, category: str, process: int, thread: int, begin: float, end: float, more: dict[str, Any]
) -> dict[str, Any]:
    times = {"ts": round(begin * MICROSECONDS, 3), "dur": round((end - begin) * MICROSECONDS, 3)}
    return {"name": name, "cat": category, "ph": "X", "pid": process, "tid": thread, **times, "args": more}


def _runs(process: int, graph: Graph, track: Track) -> Iterator[dict[str, Any]]:
    threads = {engine: thread for thread, engine in enumerate(_engines(track))}
    for point, item, span in track.instructions():
        name, category, more = _what(graph, item)
        more["bytes in use"] = track.live[point]
        yield _span(name, category, process, threads[span.engine], span.begin, span.end, more)


def _what(graph: Graph, item: object) -> tuple[str, str, dict[str, Any]]:
    """What an instruction is called, of which kind it is, and what else there is to say."""
    match item:
        case Run(number, again=again):
            op = graph.ops[number]
            more: dict[str, Any] = {"op": op.name, "module": op.module, "source": op.source}
            return op.target.removesuffix(".default"), "made again" if again else op.phase, more
        case Copy(value, to):
            words = "fetch" if to == "device" else "send"
            return f"{words} {graph.values[value].name}", "copy", {"value": graph.values[value].name, "to": to}
        case Wait(value, place):
            return f"wait for {graph.values[value].name}", "wait", {"place": place}
        case _:
            raise AssertionError(item)


def _counters(process: int, track: Track) -> Iterator[dict[str, Any]]:
    """The bytes of each category where one changes; a counter of several parts is stacked."""
    before: dict[str, int] | None = None
    now = 0.0
    for point, (_, _, span) in enumerate(track.instructions()):
        found = {name: column[point] for name, column in track.categories.items()}
        if found != before:
            counter = {"name": "memory", "ph": "C", "pid": process, "ts": round(now * MICROSECONDS, 3)}
            yield {**counter, "args": found}
            before = found
        if span.engine == COMPUTE:
            now = span.end


# ------------------------------------------------------------------------------------------------- PyTorch's snapshots


@dataclass(frozen=True)
class _Allocation:
    """Bytes that a program takes at a point and gives back at another."""

    address: int
    nbytes: int
    first: int  # point
    last: int  # point; the number of all points: it is there at the end
    category: int
    frames: list[dict[str, Any]]


def snapshot(graph: Graph, track: Track) -> bytes:
    """A program's allocations as `torch.cuda.memory` dumps them, for pytorch.org/memory_viz.

    One segment is the arena, another the heap around it. What is there before the step is allocated first.
    """
    found = list(_allocations(graph, track))
    end = len(track.points)
    heap = max((one.address + one.nbytes - HEAP for one in found if one.address < ARENA), default=0)
    segments = [
        _segment(start, size, [one for one in found if one.last == end and start <= one.address < start + size])
        for start, size in ((HEAP, heap), (ARENA, track.arena))
        if size
    ]
    data = {
        "segments": segments,
        "device_traces": [list(_events(found, track))],
        "categories": list(NAMES),
        "allocator_settings": {},
        "external_annotations": [],
    }
    return pickle.dumps(data, protocol=PROTOCOL)


def _allocations(graph: Graph, track: Track) -> Iterator[_Allocation]:
    """The boxes of a track, those on the same bytes as one; outside the arena each gets an address of its own."""
    free = HEAP
    for boxes in _chains(track.boxes):
        first, last = boxes[0], boxes[-1]
        if first.offset == OUTSIDE:
            address, free = free, free + -(-first.nbytes // PAGE) * PAGE
        else:
            address = ARENA + first.offset
        kind = TEMPORARIES if first.value == NO_VALUE else CATEGORIES[graph.values[first.value].kind]
        category = NAMES.index(kind)
        yield _Allocation(address, first.nbytes, first.first, last.last, category, _frames(graph, first))


def _chains(boxes: Iterable[Box]) -> Iterator[list[Box]]:
    """Boxes that follow each other in place, together."""
    chain: list[Box] = []
    for box in boxes:
        if not box.nbytes:
            continue
        if chain and not box.over:
            yield chain
            chain = []
        chain.append(box)
    if chain:
        yield chain


def _frames(graph: Graph, box: Box) -> list[dict[str, Any]]:
    """Where bytes come from, the innermost first, as a stack trace shows it."""
    name = "temporaries" if box.value == NO_VALUE else graph.values[box.value].name
    if box.op < 0:
        return [{"filename": "there before the step", "line": 0, "name": name}]
    op = graph.ops[box.op]
    file, _, line = op.source.rpartition(":")
    rows = [{"filename": op.target, "line": 0, "name": name}, {"filename": op.module, "line": 0, "name": op.phase}]
    return [*rows, {"filename": file or op.source, "line": int(line) if line.isdecimal() else 0, "name": op.name}]


def _events(found: Sequence[_Allocation], track: Track) -> Iterator[dict[str, Any]]:
    """Each allocation and each end of one, in order; at one point what ends comes before what begins."""
    end = len(track.points)
    marks = [(one.first, 1, number) for number, one in enumerate(found)]
    marks += [(one.last, 0, number) for number, one in enumerate(found) if one.last < end]
    for point, begins, number in sorted(marks):
        one = found[number]
        event = {
            "addr": one.address,
            "size": one.nbytes,
            "stream": 0,
            "time_us": round(track.spans[point].begin * MICROSECONDS),
            "frames": one.frames,
            "category": one.category,
        }
        for action in ("alloc",) if begins else ("free_requested", "free_completed"):
            yield {"action": action, **event}


def _segment(start: int, size: int, left: Sequence[_Allocation]) -> dict[str, Any]:
    """A stretch of memory, with what is still in it when the step has ended."""
    blocks: list[dict[str, Any]] = []
    at = start

    def gap(until: int) -> None:
        if until > at:
            blocks.append({"address": at, "size": until - at, "requested_size": 0, "state": "inactive", "frames": []})

    for one in sorted(left, key=lambda one: one.address):
        gap(one.address)
        state = {"size": one.nbytes, "requested_size": one.nbytes, "state": "active_allocated"}
        blocks.append({"address": one.address, **state, "frames": one.frames})
        at = one.address + one.nbytes
    gap(start + size)
    held = sum(one.nbytes for one in left)
    sizes = {"total_size": size, "allocated_size": held, "active_size": held, "requested_size": held}
    kind = {"device": 0, "stream": 0, "segment_type": "large", "segment_pool_id": (0, 0), "is_expandable": False}
    return {"address": start, **sizes, **kind, "frames": [], "blocks": blocks}
