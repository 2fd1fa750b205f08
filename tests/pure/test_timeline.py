"""Steps over time in others' formats: each held to what its reader demands."""

from __future__ import annotations

import itertools
import json
import pickle
import pickletools
from collections import defaultdict
from typing import Any

import pytest
from pages import planned
from test_page import moved_step

from lowtide import report
from lowtide.graph import Graph
from lowtide.plan import as_eager
from lowtide.report.page.track import Track
from lowtide.report.timeline import ARENA, HEAP

# The opcodes that the unpickler of pytorch.org/memory_viz knows, of protocols 2 to 4.
KNOWN = {"APPEND", "APPENDS", "BINFLOAT", "BINGET", "BININT", "BININT1", "BININT2", "BINPUT", "BINUNICODE", "DICT"} | {
    *("EMPTY_DICT", "EMPTY_LIST", "EMPTY_TUPLE", "FRAME", "LIST", "LONG1", "LONG_BINGET", "LONG_BINPUT", "MARK"),
    *("MEMOIZE", "NEWFALSE", "NEWTRUE", "NONE", "PROTO", "SETITEM", "SETITEMS", "SHORT_BINUNICODE", "STOP", "TUPLE"),
    *("TUPLE1", "TUPLE2", "TUPLE3"),
}


def both() -> list[tuple[Graph, Track]]:
    graph, costs, found = planned("gpt-small", 0.5)
    programs = (("eager", as_eager(graph)), ("plan", found.program))
    return [(graph, report.track(name, graph, costs, program)) for name, program in programs]


def test_a_trace_has_the_events_of_the_format() -> None:
    steps = both()
    trace = json.loads(json.dumps(report.trace_events(steps), allow_nan=False))
    assert set(trace) == {"traceEvents", "displayTimeUnit"}
    spans: defaultdict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    counters: defaultdict[int, list[dict[str, int]]] = defaultdict(list)
    for event in trace["traceEvents"]:
        assert isinstance(event["pid"], int)
        match event["ph"]:
            case "X":
                assert event["dur"] >= 0 <= event["ts"]
                assert isinstance(event["name"], str)
                assert isinstance(event["args"], dict)
                spans[event["pid"], event["tid"]].append((event["ts"], event["dur"]))
            case "C":
                counters[event["pid"]].append(event["args"])
            case "M":
                assert event["name"] in ("process_name", "process_sort_index", "thread_name")
            case other:
                pytest.fail(f"an event of kind {other}")
    for rows in spans.values():  # spans of one thread must nest; ours follow each other
        rows.sort()
        assert all(begin + length <= after + 0.002 for (begin, length), (after, _) in itertools.pairwise(rows))
    for process, (_, track) in enumerate(steps, 1):
        assert max(sum(row.values()) for row in counters[process]) == max(track.live)


def test_engines_have_threads_of_their_own() -> None:
    graph, costs, program = moved_step()
    trace = report.trace_events([(graph, report.track("plan", graph, costs, program))])
    names = {event["tid"]: event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "thread_name"}
    assert list(names.values()) == ["compute", "disk out", "disk in", "phases"]
    copies = {event["name"]: names[event["tid"]] for event in trace["traceEvents"] if event.get("cat") == "copy"}
    assert copies == {"send away": "disk out", "fetch away": "disk in"}


def test_a_snapshot_holds_what_memory_viz_reads() -> None:
    for graph, track in both():
        data = report.snapshot(graph, track)
        found = [(code.name, arg) for code, arg, _ in pickletools.genops(data)]
        assert {name for name, _ in found} <= KNOWN
        assert all(-(2**53) < arg < 2**53 for _, arg in found if isinstance(arg, int))  # numbers of a browser
        snapshot = pickle.loads(data)
        replay(snapshot, track)


def replay(snapshot: dict[str, Any], track: Track) -> None:
    """Allocate and free as the trace says: never over each other, and in the end what the segments say is there."""
    (trace,) = snapshot["device_traces"]
    held: dict[int, int] = {}
    most = 0
    asked: set[int] = set()
    for event in trace:
        match event["action"]:
            case "alloc":
                begin, end = event["addr"], event["addr"] + event["size"]
                assert all(end <= other or other + size <= begin for other, size in held.items())
                held[begin] = event["size"]
                most = max(most, sum(held.values()))
            case "free_requested":
                asked.add(event["addr"])
            case "free_completed":
                asked.remove(event["addr"])
                assert held.pop(event["addr"]) == event["size"]
        assert all(set(frame) == {"filename", "line", "name"} for frame in event["frames"])
        assert 0 <= event["category"] < len(snapshot["categories"])
    saved = max(track.categories.get("saved generator states", (0,)))
    assert max(track.live) - saved <= most <= max(track.live)
    left = {}
    for segment in snapshot["segments"]:
        assert segment["address"] in (ARENA, HEAP)
        assert sum(block["size"] for block in segment["blocks"]) == segment["total_size"]
        left |= {one["address"]: one["size"] for one in segment["blocks"] if one["state"] == "active_allocated"}
    assert left == held
