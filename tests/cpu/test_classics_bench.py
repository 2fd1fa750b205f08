"""`lowtide bench classics`: tiny variants of every claim, and what the command makes of what they find."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from racing import Here
from typer.testing import CliRunner

from lowtide.bench.classics import CLAIMS, Figure, Found, apart, chain, loops, resnet
from lowtide.bench.classics.drawing import draw
from lowtide.bench.classics.duel import duel, eager_memory
from lowtide.bench.classics.residual import by_parts
from lowtide.bench.cli import classics as bench_classics
from lowtide.capture import capture
from lowtide.cli import app
from lowtide.costs import declared
from lowtide.errors import LowtideError
from lowtide.models import build
from lowtide.plan.classics import chen
from lowtide.plan.classics.chain import Forward
from lowtide.plan.problem import problem

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Threads that wait for each other are slow where others compute, too."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Contestants need no process of their own; nor do points of a chain, but for the first."""
    apart = chain.planned_apart

    def planned(length: int, theirs: str, time_limit: float) -> chain.Point | None:
        if (length, theirs) == (10, next(iter(chain.WAYS))):
            return apart(length, theirs, time_limit)
        return chain.Chain(length).by_lowtide(theirs, time_limit)

    monkeypatch.setattr("lowtide.bench.race.Racer", Here)
    monkeypatch.setattr(chain, "planned_apart", planned)


def figures(found: Found) -> dict[str, Figure]:
    return {figure.what: figure for figure in found.figures}


# -------------------------------------------------------------------------------------------------------- the claims


@pytest.mark.usefixtures("in_this_process")
@pytest.mark.parametrize("name", CLAIMS)
def test_a_tiny_variant_keeps_its_bars(name: str) -> None:
    found = CLAIMS[name].run(True)
    missed = [f"{figure.what}: {figure.shown}, not {figure.bar}" for figure in found.figures if not figure.ok]
    assert not missed, "\n".join(missed)
    assert sum(bool(figure.bar) for figure in found.figures) >= 1
    json.dumps(found.data, allow_nan=False)


@pytest.mark.parametrize(
    ("figure", "shown", "bar", "ok"),
    [
        (Figure("x", 2_950_000_000, "bytes", most=3e9), "2.95 GB", "at most 3 GB", True),
        (Figure("x", 3_000_000_001, "bytes", most=3e9), "3 GB", "at most 3 GB", False),
        (Figure("x", 1234e9, "bytes"), "1,234 GB", "", True),
        (Figure("x", 3.99, "times", least=4.0), "3.99 times", "at least 4.00 times", False),
        (Figure("x", 1.12, "time", most=1.12), "1.120", "at most 1.120", True),
        (Figure("x", -1e-17, "overhead", most=0.0), "+0.0%", "at most +0.0%", True),
        (Figure("x", 1950, "count", most=1949, least=1949), "1,950", "at most 1,949, at least 1,949", False),
        (Figure("x", 0.0, "yes", least=1.0), "no", "yes", False),
        (Figure("x", 0.0, "yes"), "no", "", True),
        (Figure("x", 3e-7, "share", most=1e-4), "3e-07", "at most 0.0001", True),
    ],
)
def test_a_figure_is_held_to_its_bar(figure: Figure, shown: str, bar: str, ok: bool) -> None:
    assert (figure.shown, figure.bar, figure.ok) == (shown, bar, ok)


def test_a_duel_meters_both_and_tells_them_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    target = chain.chain(16, 10**5)
    found = duel(target, lambda eager: eager.before + eager.own // 2, rounds=0, time_limit=0.3)
    assert found.equal
    assert found.time_ratio == 0.0
    monkeypatch.setattr("lowtide.bench.race.Racer", Here)
    assert found.eager == eager_memory(target)
    assert found.eager.before == 3 * 10**5  # the parameter, its momentum and the batch
    assert 16 * 10**5 <= found.eager.own <= 19 * 10**5  # all nodes, and what is at the ends of the chain
    assert found.budget == found.eager.before + found.eager.own // 2
    assert 0 < found.lowtide.own <= found.eager.own // 2
    assert found.less >= 2
    with pytest.raises(LowtideError, match="no plan found"):
        duel(target, lambda eager: eager.before + 1, rounds=0, time_limit=0.0, apart=True)


def test_a_step_that_shares_nothing_has_every_node_and_gradient() -> None:
    graph = capture(*build(chain.chain(12, 10**4))).graph
    nodes, rest = divmod(resnet.unshared(graph, declared(graph)), 10**4)
    assert nodes == 1 + 12 + 11  # the sum, the nodes, and their gradients but the last, which is the parameter's
    assert rest < 100  # the loss and its gradient


@pytest.mark.parametrize("length", [16, 100])
def test_schedules_of_chen_are_replayed_as_written(length: int) -> None:
    graph = capture(*build(chain.chain(length, 10**4))).graph
    costs = declared(graph)
    arrays = problem(graph, costs)
    root = round(length**0.5)
    for schedule, forwards, slots in (
        (chen.square_root(length), 2 * length - root, 2 * root),
        (chen.recursive(length, 1), None, 2 * length.bit_length()),
    ):
        sequence = chain.replay(graph, arrays, schedule)
        runs = sum(graph.ops[op].target == "aten.tanh.default" for op in sequence)
        assert runs == sum(isinstance(action, Forward) for action in schedule)
        assert forwards in (None, runs)
        assert arrays.peak(sequence) - arrays.persistent <= (slots + 3) * 10**4
    assert runs > 2 * length


def test_a_plan_that_takes_too_long_is_a_missed_bar() -> None:
    theirs = "sqrt (Chen)"
    assert chain.planned_apart(10, theirs, 0.1, patience=0.01) is None
    other = chain.Chain(10).by_chen(theirs)
    (figure,) = chain._held(other, None)
    assert not figure.ok
    assert figure.what == "10 nodes, in the time of sqrt: planned within 600 s"
    slower = dataclasses.replace(other, overhead=other.overhead + 0.01)
    assert [one.ok for one in chain._held(other, slower)] == [True, False, True]
    larger = dataclasses.replace(other, own=other.own + 1)
    assert [one.ok for one in chain._held(other, larger)] == [False, True, True]


@pytest.mark.usefixtures("in_this_process")
def test_small_batches_give_the_gradients_of_the_whole() -> None:
    target = "deep-rnn:layers=3,width=8,length=4,batch=16"
    whole, parts = by_parts(target, 16, rounds=1), by_parts(target, 2, rounds=1)
    assert whole.off == 0.0
    assert 0.0 < parts.off < 1e-5
    assert parts.memory.before == whole.memory.before
    assert parts.memory.own - parts.gradients < (whole.memory.own - whole.gradients) / 4
    logits = 4 * 16 * 4 * 29  # bytes that the model's own step holds during its backward, too
    assert whole.memory.own == eager_memory(target).own - logits


def test_a_plain_loop_is_counted_metered_and_compared() -> None:
    given = loops.setting(layers=2, width=8, batch=4, length=10)
    (taken, again), ratios = loops.race(given, [given.plain, given.plain], rounds=1)
    assert taken.forwards == again.forwards == 10
    assert ratios[0] == 1.0
    assert loops.same(taken.results, again.results)
    assert len(taken.results) == 1 + 2 * 2 + 2 * 4 + 1
    assert taken.own > 2 * 10 * 4 * 4 * (4 * 8)  # the gates of each layer at each time step
    changed = [*again.results[:-1], again.results[-1] + 1e-6]
    assert not loops.same(taken.results, changed)
    assert not loops.same(taken.results, again.results[1:])
    sparse = loops.setting(layers=1, width=8, batch=4, length=10**9, real=False)
    assert sparse.inputs.untyped_storage().nbytes() == 4 * 4 * 8


# ------------------------------------------------------------------------------------------------------- the drawing


def test_a_drawing_has_each_line_where_its_numbers_are() -> None:
    text = draw(
        "a < b",
        [10, 100, 1000],
        {"flat": [5, 5, 5], "steep & long": [1, 10, 100], "none": [None] * 3, "gap": [4, None, 4]},
        x="nodes",
        y="MB",
    )
    root = ElementTree.fromstring(text)
    words = [element.text for element in root.iter(f"{SVG}text")]
    assert {"a < b", "flat", "steep & long", "nodes", "MB", "10", "1,000"} <= set(words)
    thick = [element for element in root.iter(f"{SVG}polyline") if element.get("stroke-width") == "2"]
    lines = [[tuple(map(float, point.split(","))) for point in line.get("points", "").split()] for line in thick]
    flat, gap, steep = sorted(lines, key=lambda line: line[0][1])
    assert (len(flat), len(gap), len(steep)) == (3, 2, 3)
    assert "none" not in words
    assert flat[0][1] == flat[1][1] == flat[2][1]
    assert steep[0][1] - steep[1][1] == pytest.approx(steep[1][1] - steep[2][1], abs=0.2)
    assert steep[2][1] < flat[2][1] < steep[0][1]  # upwards is less
    assert flat[1][0] - flat[0][0] == pytest.approx(flat[2][0] - flat[1][0], abs=0.2)


# ------------------------------------------------------------------------------------------------------- command line


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["bench", "classics", *arguments], env={"COLUMNS": "200"})


def test_one_claim_by_its_command() -> None:
    result = run("sharing", "--small", "--json")
    assert result.exit_code == 0, result.output
    (row,) = json.loads(result.stdout)["rows"]
    assert row["target"] == "sharing"
    assert row["command"] == "lowtide bench classics sharing"
    assert row["ok"]
    assert not row["missed"]
    assert row["seconds"] > 0
    first = row["figures"][0]
    assert first["found"] >= first["least"] == 2.6
    assert first["published"] == "2 to 3 times (Chen)"
    assert result.stderr.startswith("sharing: ok, ")


GOOD = Figure("memory", 6e9, "bytes", "7 GB", most=7e9)
BAD = Figure("time", 1.31, "time", "a third more", most=1.30)
LINES = {"lengths": [10, 100], "series": {"ours": [10**6, 2 * 10**6]}}


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Claims that are decided already: sharing is met, tanh is missed, resnet50 fails, and one has lines to draw."""
    found: dict[str, dict[str, Any]] = {
        "sharing": {"figures": [vars(GOOD)], "data": {}},
        "tanh": {"figures": [vars(GOOD), vars(BAD)], "data": {}},
        "tanh-lengths": {"figures": [vars(GOOD)], "data": LINES},
        "resnet50": {"failure": "no memory"},
    }
    monkeypatch.setattr(bench_classics, "apart", lambda name, small: found[name])


@pytest.mark.usefixtures("made_up")
def test_a_missed_bar_and_a_failure_are_shown_and_are_the_exit_code() -> None:
    good = run("sharing")
    assert good.exit_code == 0, good.output
    assert "missed" not in good.output
    for flag in ((), ("--markdown",)):
        result = run("sharing", "tanh", "resnet50", *flag)
        assert result.exit_code == 1
        lines = [" ".join(line.replace("|", " ").split()) for line in result.stdout.splitlines()]
        assert "sharing memory 7 GB 6 GB at most 7 GB ok" in lines
        assert "time a third more 1.310 at most 1.300 missed" in lines
        assert any(line.startswith("tanh missed") and line.endswith("lowtide bench classics tanh") for line in lines)
        assert "resnet50 failed: no memory" in lines
        talked = [line.partition(",")[0] for line in result.stderr.splitlines()]
        assert talked == ["sharing: ok", "tanh: missed: time", "resnet50: failed: no memory"]
    rows = json.loads(run("tanh", "resnet50", "--json").stdout)["rows"]
    assert [row["ok"] for row in rows] == [False, False]
    assert rows[0]["missed"] == ["time"]
    assert rows[1]["failure"] == "no memory"


@pytest.mark.usefixtures("made_up")
def test_a_drawing_replaces_no_file_unasked(tmp_path: Path) -> None:
    file = tmp_path / "lengths.svg"
    assert run("sharing", "--plot", str(file)).exit_code == 2
    assert not file.exists()
    assert run("tanh-lengths", "--plot", str(file)).exit_code == 0
    assert ElementTree.fromstring(file.read_text()).tag == f"{SVG}svg"
    file.write_text("mine")
    assert run("tanh-lengths", "--plot", str(file)).exit_code == 1
    assert file.read_text() == "mine"
    assert run("tanh-lengths", "--plot", str(file), "--force").exit_code == 0
    assert file.read_text().startswith("<svg")


def test_the_list_names_every_claim_and_a_wrong_name_is_refused() -> None:
    listed = run("--list")
    assert listed.exit_code == 0
    assert [line.split()[0] for line in listed.stdout.splitlines()] == list(CLAIMS)
    (claim,) = json.loads(run("--list", "--json", "tanh").stdout)["claims"]
    assert claim["command"] == "lowtide bench classics tanh"
    wrong = run("resnet51")
    assert wrong.exit_code == 2
    assert "there is no claim 'resnet51'" in wrong.stderr
    assert "resnet50" in wrong.stderr


def test_a_process_that_fails_says_why() -> None:
    assert apart("no-such-claim") == {"failure": "KeyError: 'no-such-claim'"}


def test_a_scan_is_timed_against_the_plain_loop() -> None:
    ended = CliRunner().invoke(app, ["bench", "scan", "8", "--part", "30", "--length", "40", "--rounds", "2", "--json"])
    assert ended.exit_code == 0, ended.output
    (row,) = json.loads(ended.stdout)["rows"]
    assert row["equal"]
    assert len(row["ratios"]) == 2
    assert 40 < row["forwards"] <= 80  # each time step once, and again for its backward where it was not kept
    assert row["own"] < row["plain_own"]
