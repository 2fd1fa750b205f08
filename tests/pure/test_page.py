"""Pages: tracks against a second count, documents against their nouns, and HTML that fetches nothing."""

from __future__ import annotations

import base64
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from pages import HOSTILE, document, hostile, long_chain, planned

from lowtide import report
from lowtide.costs import Costs, Lane, declared
from lowtide.errors import FileError
from lowtide.graph import Alternative, Graph, Input, Op, Output, Read, Value
from lowtide.plan import as_eager
from lowtide.program import Copy, Free, Program, Run, Wait
from lowtide.report.page.fates import fate_tree, fates, second_tree, spent
from lowtide.report.page.html import POLICY, render
from lowtide.report.page.track import Track, track
from lowtide.simulate import simulate, spans

STEPS = [("mlp-small", 0.8), ("gpt-small", 0.5), ("unet-small", 0.6)]


def tracks(name: str, part: float) -> list[tuple[Graph, Costs, Track]]:
    graph, costs, found = planned(name, part)
    programs = (("eager", as_eager(graph)), ("plan", found.program))
    return [(graph, costs, track(word, graph, costs, program)) for word, program in programs]


@pytest.mark.parametrize(("name", "part"), STEPS)
def test_boxes_add_up_to_what_the_simulator_counts(name: str, part: float) -> None:
    for graph, costs, found in tracks(name, part):
        simulated = simulate(graph, costs, found.program)
        for point, number in enumerate(found.points):
            boxes = sum(box.nbytes for box in found.boxes if box.first <= point < box.last)
            saved = found.categories.get("saved generator states", (0,) * len(found.points))[point]
            assert boxes + saved == simulated.live[number] == found.live[point]
        assert max(found.live) == found.live[found.at] == max(simulated.live)
        assert [sum(row) for row in zip(*found.categories.values(), strict=True)] == list(found.live)


@pytest.mark.parametrize(("name", "part"), STEPS)
def test_boxes_of_the_arena_never_overlap(name: str, part: float) -> None:
    *_, found = tracks(name, part)[1]
    inside = [box for box in found.boxes if box.offset >= 0]
    assert inside
    for number, one in enumerate(inside):
        assert one.offset + one.nbytes <= found.arena
        for other in inside[:number]:
            together = one.first < other.last and other.first < one.last
            assert not together or one.offset + one.nbytes <= other.offset or other.offset + other.nbytes <= one.offset


def test_phases_follow_each_other_and_fill_the_step() -> None:
    for graph, costs, found in tracks("gpt-small", 0.5):
        assert [phase for phase, _, _ in found.phases][:2] == ["forward", "backward"]
        assert found.phases[0][1] == 0.0
        assert found.phases[-1][2] == found.seconds == simulate(graph, costs, found.program).seconds
        assert all(one[2] == other[1] for one, other in zip(found.phases, found.phases[1:], strict=False))


def moved_step() -> tuple[Graph, Costs, Program]:
    """Four values of 100 bytes that a backward reads: one kept, one made again, one sent away, one stored narrow."""
    values = [Value("x", 100, "batch", 0)]
    values += [Value(name, 100, "activation", n + 1) for n, name in enumerate(("kept", "again", "away", "wide"))]
    values += [Value("narrow", 25, "activation", 5), Value("gradient", 4, "activation gradient", 6)]
    ops = [Op(f"op{n}", f"made.{n}", (Read(0),), outputs=(n + 1,), module=f"layer{n}") for n in range(4)]
    ops.append(Op("back", "made.back", tuple(Read(n) for n in range(1, 5)), outputs=(6,), phase="backward"))
    ops.append(Op("pack", "made.pack", (Read(4),), outputs=(5,), optional=True, module="layer3"))
    ops.append(Op("unpack", "made.unpack", (Read(5),), outputs=(4,), optional=True, phase="backward"))
    graph = Graph(
        tuple(ops),
        tuple(values),
        (Input(0, (0,)),),
        (Output(6, "result", ()),),
        alternatives=(Alternative(4, 5, store=5, restore=(6,)), Alternative(3, 3, place="disk")),
    )
    costs = replace(declared(graph), lanes=(Lane("disk", "out", 0.0, 100.0), Lane("disk", "in", 0.5, 50.0)))
    program = Program(
        graph.fingerprint,
        (
            *(Run(0), Run(1), Free(2), Run(2), Copy(3, "disk"), Run(3), Run(5), Free(4), Wait(3, "disk"), Free(3)),
            *(Copy(3, "device"), Run(6), Run(1, again=True), Wait(3, "device"), Run(4), Free(1), Free(2), Free(3)),
            *(Free(4), Free(5), Free(3, "disk")),
        ),
    )
    return graph, costs, program


def test_each_value_has_its_fate() -> None:
    graph, costs, program = moved_step()
    assert fates(graph, costs, program) == {1: "kept", 2: "recomputed", 3: "offloaded", 4: "kept narrow"}
    rows = {branch.path: dict(branch.categories) for branch in fate_tree(graph, costs, program)}
    assert rows == {
        "layer0": {"kept": 100},
        "layer1": {"recomputed": 100},
        "layer2": {"offloaded": 100},
        "layer3": {"kept narrow": 100},
    }


def test_copies_run_beside_ops_and_waits_are_seen() -> None:
    graph, costs, program = moved_step()
    times = list(spans(graph, costs, program))
    sent, fetched = (times[number] for number, item in enumerate(program.instructions) if isinstance(item, Copy))
    assert (sent.begin, sent.end, sent.engine) == (3.0, 4.0, "disk out")
    # It is sent while ops 3 and pack run, so nothing waits for it; it takes 0.5 s and 100 bytes at 50 a second back.
    assert (fetched.begin, fetched.end, fetched.engine) == (5.0, 7.5, "disk in")
    found = track("plan", graph, costs, program)
    assert found.seconds == 8.5  # unpack and the second run of op1 end at 7, then the wait, then the backward
    waits = {branch.path: dict(branch.categories) for branch in second_tree(graph, costs, found)}
    assert waits["(top level)"]["waiting for copies"] == 500_000_000
    assert waits["layer1"] == {"forward": 1_000_000_000, "recomputed": 1_000_000_000}
    assert {one.target: (one.count, one.again) for one in spent(graph, found)}["made.1"] == (2, 1)


def test_a_document_says_what_its_nouns_say() -> None:
    graph, costs, found = planned("gpt-small", 0.5)
    data = json.loads(json.dumps(document(graph, costs, found, points=4), allow_nan=False))
    numbers = data["numbers"]
    assert (numbers["predicted_peak"], numbers["budget"]) == (found.peak, found.budget)
    assert numbers["predicted_seconds"] == pytest.approx(found.seconds)
    assert numbers["eager_peak"] == simulate(graph, costs, as_eager(graph)).peak
    assert [row["budget"] for row in data["frontier"]["rows"]] == sorted(
        row["budget"] for row in data["frontier"]["rows"]
    )
    (step,) = data["steps"]
    eager, plan = step["tracks"]
    assert (eager["name"], plan["name"]) == ("eager", "plan")
    assert max(plan["points"]["bytes"]) == plan["points"]["bytes"][plan["at"]]
    for one in (eager, plan):
        total = [0] * len(one["points"]["bytes"])
        for column in one["categories"].values():
            ends = [*column["at"][1:], len(total)]
            for first, last, nbytes in zip(column["at"], ends, column["bytes"], strict=True):
                for point in range(first, last):
                    total[point] += nbytes
        assert total == one["points"]["bytes"]
    runs = sum(kind in ("run", "again") for kind in plan["points"]["kind"])
    assert runs == sum(isinstance(item, Run) for item in found.program.instructions)
    needed = sum(branch["bytes"] for branch in data["fates"])
    assert needed == sum(costs.nbytes[value] for value in fates(graph, costs, found.program))


def test_a_page_fetches_nothing_and_escapes_everything(tmp_path: Path) -> None:
    data = document(*hostile(), target=HOSTILE)
    path = tmp_path / "page.html"
    report.write_page(path, data, kind="report", title=HOSTILE)
    text = path.read_text(encoding="utf-8")
    assert HOSTILE not in text
    assert "&lt;/script&gt;" in text  # the title
    assert f'content="{POLICY}"' in text
    assert set(re.findall(r"https?://[^\s\"'`)]+", text)) == {"http://www.w3.org/2000/svg"}  # a name, not an address
    text = re.sub(r"<title>.*</title>", "", text)
    assert not re.search(r"<(link|img|iframe)\b|\bsrc=|@import|url\(|\.innerHTML|insertAdjacentHTML|\beval\(", text)
    assert report.document_of(path) == json.loads(json.dumps(data))


def test_a_page_is_never_written_over_or_half(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    path.write_text("mine")
    with pytest.raises(FileError, match="exists already"):
        report.write_page(path, {}, kind="pebble", title="")
    assert path.read_text() == "mine"
    with pytest.raises(FileError, match="no folder"):
        report.write_page(tmp_path / "none" / "page.html", {}, kind="pebble", title="")
    report.write_page(path, {"made_by": "x"}, kind="pebble", title="", force=True)
    assert report.document_of(path) == {"made_by": "x"}


@pytest.mark.parametrize(
    "content", [b"", b"{", b'<script id="document" type="application/octet-stream">AAAA</script>', b"\xff\xfe"]
)
def test_a_damaged_page_is_an_answer(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "page.html"
    path.write_bytes(content)
    with pytest.raises(FileError) as error:
        report.document_of(path)
    assert error.value.hint


def test_the_page_of_a_long_step_stays_small() -> None:
    graph, costs, found = long_chain(1500)
    text = render(document(graph, costs, found), kind="report", title="long")
    packed = re.search(r'octet-stream">([A-Za-z0-9+/=]+)<', text)
    assert packed is not None
    assert len(base64.b64decode(packed[1])) < 100 * len(graph.ops)


def test_advice_is_ranked_by_what_it_saves() -> None:
    small = report.Advice("less", "x", seconds=1.0, peak=900, saved_seconds=0.0, saved_bytes=100)
    quick = report.Advice("quicker", "y", seconds=0.8, peak=1000, saved_seconds=0.2, saved_bytes=0)
    assert report.show_advice(quick) == "quicker: 20.0% quicker"
    assert report.show_advice(small) == "less: 100 B less"
