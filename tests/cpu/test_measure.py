"""Costs: each op measured alone, the peak predicted from them, and in place only what gives the same bits."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import itertools
import json
import math
import mmap
import os
import subprocess
import sys
import time
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from test_capture import plain, recipe
from torch import nn

import lowtide
from lowtide import models
from lowtide.device import CPU, Device
from lowtide.execute.timings import PATIENCE, STEPS, Timings
from lowtide.graph import Graph
from lowtide.measure import bench_call
from lowtide.measure.book import Book, kept_open
from lowtide.peaks.predict import predict
from lowtide.program import Run

around = importlib.import_module("lowtide.measure.surroundings")
measuring = importlib.import_module("lowtide.measure")  # the room; lowtide.measure is its function


@pytest.fixture(autouse=True)
def _own_cache(stocked: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOWTIDE_CACHE", str(stocked))


def metered(function: Any, example: tuple[Any, ...]) -> int:
    """The bytes that a warmed-up call holds at its peak, beyond those that were there."""
    for _ in range(2):
        function(*example)
    with lowtide.meter() as meter:
        function(*example)
    return meter.peak


@pytest.mark.parametrize("name", models.SMALL)
def test_the_predicted_peak_is_the_metered_one(name: str) -> None:
    step, model, optimizer, example = models.build(models.SMALL[name])
    captured = lowtide.capture(step, model, optimizer, example)
    costs = lowtide.measure(captured.graph)
    assert not costs.notes
    persistent = sum(costs.nbytes[item.value] for item in captured.graph.inputs)
    program = lowtide.keep_everything(captured.graph)
    predicted = lowtide.simulate(captured.graph, costs, program).peak
    assert predicted == lowtide.check(captured.graph, costs, program)
    found = persistent + metered(lowtide.execute(captured, program), example)
    assert found == pytest.approx(predicted, rel=0.005)
    as_eager = lowtide.simulate(captured.graph, costs, lowtide.as_eager(captured.graph)).peak
    eager = persistent + metered(lambda *batch: step(model, optimizer, *batch), example)
    assert eager == pytest.approx(as_eager, rel=0.005)


class Scaled(nn.Module):
    """Its backward adds up gradients where it needs most."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleList(nn.Linear(64, 256) for _ in range(3))
        self.outer = nn.ModuleList(nn.Linear(256, 64) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for inner, outer in zip(self.inner, self.outer, strict=True):
            hidden = torch.nn.functional.gelu(inner(x)) * 1.0
            hidden[:, :64] *= 2.0
            x = x + outer(hidden)
        return x


def test_autograd_adds_up_gradients_on_top_of_one_of_them() -> None:
    def step(model: nn.Module, _: None, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(x).square().mean()
        loss.backward()
        model.zero_grad()
        return loss.detach()

    found = predict(step, Scaled(), None, (torch.randn(256, 64),))
    assert found.ok, found


def pairs_of(step: Any, make: Any = None) -> dict[str, bool]:
    """For each op of the step's forward, whether its result may sit on an argument."""
    graph = lowtide.capture(*recipe(step, make, optimizer=None, example=lambda: (torch.randn(6, 6),))()).graph
    costs = lowtide.measure(graph)
    return {op.name: bool(pairs) for op, pairs in zip(graph.ops, costs.in_place, strict=True)}


def test_in_place_is_certified_by_its_bits() -> None:
    def step(model: nn.Module, optimizer: None, x: torch.Tensor) -> torch.Tensor:
        x = x * 2
        x = x.relu()
        x = torch.nn.functional.gelu(x)
        x = x @ x
        x = x + x.t()
        x = x.softmax(1)
        x = x.cumsum(0)
        return x.sum()

    may = pairs_of(step, nn.Identity)
    assert may["mul_0"]
    assert may["relu_0"]
    assert may["gelu_0"]
    assert may["_softmax_0"]
    assert not may["mm_0"]
    assert not may["add_0"]
    assert not may["sum_0"]


def test_local_peaks_and_real_bytes() -> None:
    graph = lowtide.capture(*models.build(models.SMALL["lstm"])).graph
    costs = lowtide.measure(graph)
    layers = [index for index, op in enumerate(graph.ops) if op.target == "aten.mkldnn_rnn_layer.default"]
    workspaces = [graph.ops[index].outputs[3] for index in layers]
    assert layers
    for value in workspaces:
        assert value is not None
        assert graph.values[value].nbytes == 0, "torch declares no bytes for the workspace"
        assert costs.nbytes[value] > 1000
    assert any(costs.arena_temporaries)


def test_the_room_of_a_call_is_one_piece_beside_its_results() -> None:
    def call() -> torch.Tensor:
        first, second = torch.empty(1000, dtype=torch.uint8), torch.empty(500, dtype=torch.uint8)
        del first
        result = torch.empty(1024, dtype=torch.uint8)  # where the first one was
        return result.fill_(second.numel() % 7)

    room, returned = bench_call._room(CPU, call)
    assert (room.arena_temporaries, room.heap_temporaries, returned.nbytes) == (500, 1524 - 1024, 1024)
    assert room.apart_temporaries == 1024 + 500  # nothing where the result is
    assert room.nbytes == [1000, 500, 1024]
    assert room.offset == [512, 0, 512]
    assert room.arena >= 512 + 1024

    def fragments() -> None:
        large = torch.empty(640, dtype=torch.uint8)
        small = torch.empty(64, dtype=torch.uint8)
        del large
        larger = torch.empty(700, dtype=torch.uint8)
        del small, larger

    room, _ = bench_call._room(CPU, fragments)
    assert (room.arena_temporaries, room.heap_temporaries) == (704 + 64, 764), (
        "here and there in the heap, but in one piece of the arena"
    )


def test_the_code_that_a_library_compiles_is_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    pages = 3 * mmap.PAGESIZE
    before = bench_call._code()
    with mmap.mmap(-1, pages, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC):
        assert bench_call._code() == before + pages
    with mmap.mmap(-1, pages, flags=mmap.MAP_PRIVATE):
        assert bench_call._code() == before, "what can't be run is no code"

    def compiling(specimens: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        for specimen in specimens:
            room = {"arena_temporaries": 0, "apart_temporaries": 0, "heap_temporaries": 0}
            yield {"seconds": 1.0, "disturbed": False, **room, "in_place": [], "code": 10} | {
                "outputs": [None] * len(specimen["outputs"])
            }

    monkeypatch.setattr(measuring, "_ask", compiling)
    graph = lowtide.capture(*models.build("mlp:depth=6")).graph
    costs = lowtide.measure(graph, cache=False)
    assert 0 < costs.code < 10 * len(graph.ordinary), "the same op twice has the same code"
    assert costs.code % 10 == 0


def test_answers_are_kept_and_read_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LOWTIDE_CACHE", str(tmp_path))
    graph = lowtide.capture(*models.build(models.SMALL["mlp"])).graph
    asked: list[tuple[int, int]] = []
    first = lowtide.measure(graph, progress=lambda done, total: asked.append((done, total)))
    assert asked
    assert asked[-1][0] == asked[-1][1]
    count = len(asked)
    assert lowtide.measure(graph, progress=lambda done, total: asked.append((done, total))) == first
    assert len(asked) == count, "nothing was measured a second time"
    (book,) = tmp_path.glob("costs-*")
    book.write_text("damaged")
    assert lowtide.measure(graph).graph == first.graph
    assert json.loads(book.read_text())


def test_one_flipped_digit_of_an_answer_is_not_believed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LOWTIDE_CACHE", str(tmp_path))
    answer = {
        "seconds": 0.25,
        "disturbed": False,
        "arena_temporaries": 64,
        "apart_temporaries": 64,
        "heap_temporaries": 64,
        "outputs": [128, None],
        "in_place": [[0, 1]],
        "code": 0,
    }
    given = {"a1": answer, "b2": {**answer, "in_place": []}}
    book = Book(["here"])
    book.add(given)
    assert Book(["here"]).answers == given
    assert Book(["elsewhere"]).answers == {}
    whole = book.path.read_text()
    digits = [place for place, letter in enumerate(whole) if letter.isdigit()]
    assert len(digits) > 50
    for place in digits:
        book.path.write_text(whole[:place] + str((int(whole[place]) + 1) % 10) + whole[place + 1 :])
        found = Book(["here"]).answers
        assert len(found) == 1
        assert found.items() <= given.items()
    for junk in ("NaN", "[]", '{"a1": 1}', "[" * 100_000, '{"a1": {"answer": {}, "sha256": ""}}', whole[:-5], "\udcff"):
        book.path.write_text(junk, errors="surrogateescape")
        assert Book(["here"]).answers == {}


def test_answers_that_others_may_have_written_are_not_believed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LOWTIDE_CACHE", str(tmp_path))
    room = {"arena_temporaries": 0, "apart_temporaries": 0, "heap_temporaries": 0}
    answer = {"seconds": 1.0, "disturbed": False, **room, "outputs": [], "in_place": [], "code": 0}
    book = Book([])
    book.add({"a": answer})
    book.path.chmod(0o620)
    assert Book([]).answers == {}
    book.path.chmod(0o600)
    assert Book([]).answers == {"a": answer}
    book.path.rename(tmp_path / "elsewhere")
    book.path.symlink_to(tmp_path / "elsewhere")
    assert Book([]).answers == {}


def test_the_book_is_of_one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    named: list[list[Any]] = []
    monkeypatch.setattr(measuring, "Book", lambda depends: named.append(depends) or Book(["no"]))
    graph = lowtide.capture(*models.build(models.SMALL["mlp"])).graph
    for device in ("cpu", "meta"):
        empty = dataclasses.replace(graph, device=device, ops=(), outputs=())
        lowtide.measure(empty)
    assert named[0] != named[1]
    assert "cpu" in named[0]


def test_a_call_that_fails_is_contained() -> None:
    graph = lowtide.capture(*models.build(models.SMALL["mlp"])).graph
    good = measuring.specimen(graph, 0)
    answers = list(measuring._ask([good, {**good, "target": "lowtide.no.such"}, good]))
    assert "no op lowtide.no.such" in answers[1]["error"]
    assert answers[0]["outputs"] == answers[2]["outputs"]


def test_a_process_that_dies_of_a_call_is_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = lowtide.capture(*models.build(models.SMALL["mlp"])).graph
    good = measuring.specimen(graph, 0)
    ask, killed = measuring._answer, []

    def answer(process: Any, cut: dict[str, Any]) -> Any:
        if "deadly" in cut:
            process.kill()
            process.wait()
            killed.append(process.pid)
        return ask(process, cut)

    monkeypatch.setattr(measuring, "_answer", answer)
    answers = list(measuring._ask([good, {**good, "deadly": True}, good]))
    assert killed
    assert answers[1] == {"error": "the process ended with code -9"}
    assert answers[0]["outputs"] == answers[2]["outputs"]


def test_the_process_that_measures_is_the_first_to_go_where_memory_is_short() -> None:
    process = measuring._start()
    try:
        place = Path(f"/proc/{process.pid}/oom_score_adj")
        if not place.exists():
            pytest.skip("this system ranks no processes")
        assert int(place.read_text(encoding="ascii")) == 1000
    finally:
        measuring._end(process)


def test_where_there_is_no_memory_to_measure_it_is_given_up_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []

    def start() -> Any:
        command = [sys.executable, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"]
        started.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
        started[-1].wait()
        return started[-1]

    def end(process: Any) -> int:
        for pipe in (process.stdin, process.stdout):
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
        return int(process.returncode)

    monkeypatch.setattr(measuring, "_start", start)
    monkeypatch.setattr(measuring, "_end", end)
    graph = lowtide.capture(*models.build(models.SMALL["mlp"])).graph
    costs = lowtide.measure(graph, cache=False)
    assert len(started) == 2
    assert all("no memory for the process that measures" in note for note in costs.notes)
    assert all(seconds > 0 for seconds in costs.seconds)


@pytest.mark.parametrize("calls", [(0.004, 0.9, 0.9, 0.004, 0.9, 0.004), (0.9, 0.9, 0.8, 0.9, 0.9)])
def test_calls_beside_which_others_ran_do_not_count(calls: tuple[float, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    graph = lowtide.capture(*models.build(models.SMALL["mlp"])).graph
    call = bench_call.Call(measuring.specimen(graph, 0))
    now, delay, coming = 0.0, 0.0, iter(calls)
    cold = True

    def run() -> None:
        nonlocal now, delay, cold
        seconds = next(coming, calls[-1]) if cold else 0.001
        now += seconds
        delay += seconds if seconds > 0.1 else 0.0
        cold = not cold

    monkeypatch.setattr(call, "run", run)
    monkeypatch.setattr(bench_call, "_chill", lambda *_: 0.0)
    monkeypatch.setattr(bench_call, "PATIENCE", 4.0)
    call.device = dataclasses.replace(call.device, clock=lambda: now, delay=lambda: delay)
    assert bench_call._seconds(call, None) == (pytest.approx(min(calls)), min(calls) < 0.1)


def test_a_price_of_a_busy_moment_is_asked_again_on_a_calm_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOWTIDE_CACHE", str(tmp_path))
    graph = lowtide.capture(*models.build(models.SMALL["mlp"])).graph
    plain = {"arena_temporaries": 0, "apart_temporaries": 0, "heap_temporaries": 0, "in_place": [], "code": 0}
    asked: list[int] = []
    busy, calm = True, False

    def answer(cuts: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        asked.append(len(cuts))
        for cut in cuts:
            outputs = [item and item[3] for item in cut["outputs"]]
            yield {**plain, "seconds": 9.0 if busy else 1.0, "disturbed": busy, "outputs": outputs}

    monkeypatch.setattr(measuring, "_ask", answer)
    monkeypatch.setattr(measuring, "_is_calm", lambda *_: calm)
    assert max(lowtide.measure(graph).seconds) == 9.0
    assert max(lowtide.measure(graph).seconds) == 9.0  # it is as busy as it was
    busy, calm = False, True
    assert max(lowtide.measure(graph).seconds) == 1.0
    assert max(lowtide.measure(graph).seconds) == 1.0
    assert asked == [asked[0], 0, asked[0], 0]


def test_a_price_that_stays_disturbed_is_asked_again_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOWTIDE_CACHE", str(tmp_path))
    graph = lowtide.capture(*models.build(models.SMALL["mlp"])).graph
    plain = {"arena_temporaries": 0, "apart_temporaries": 0, "heap_temporaries": 0, "in_place": [], "code": 0}
    asked: list[int] = []

    def answer(cuts: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        asked.append(len(cuts))
        for cut in cuts:
            outputs = [item and item[3] for item in cut["outputs"]]
            yield {**plain, "seconds": 1.0, "disturbed": True, "outputs": outputs}

    monkeypatch.setattr(measuring, "_ask", answer)
    monkeypatch.setattr(measuring, "_is_calm", lambda *_: True)
    for _ in range(3):
        lowtide.measure(graph)
    assert asked == [asked[0], asked[0], 0]


def test_what_ran_once_at_a_glance_is_measured_before_it_is_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOWTIDE_CACHE", str(tmp_path))
    graph = lowtide.capture(*models.build(models.SMALL["mlp"])).graph
    asked: list[list[bool]] = []
    answers = measuring._ask

    def answer(cuts: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        asked.append([cut.get("hurried", False) for cut in cuts])
        yield from answers(cuts)

    monkeypatch.setattr(measuring, "_ask", answer)
    glance, again = (lowtide.measure(graph, hurried=True) for _ in range(2))
    full = lowtide.measure(graph)
    assert again == glance
    assert glance.nbytes == full.nbytes
    assert glance.arena_temporaries == full.arena_temporaries
    assert lowtide.measure(graph, hurried=True) == full
    first, *others = asked
    assert all(first)
    assert others == [[], [False] * len(first), []]


def test_an_open_book_is_read_once_until_someone_writes_to_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LOWTIDE_CACHE", str(tmp_path))
    room = {"arena_temporaries": 0, "apart_temporaries": 0, "heap_temporaries": 0}
    answer = {"seconds": 1.0, "disturbed": False, **room, "outputs": [], "in_place": [], "code": 0}
    Book([]).add({"a": answer})
    read: list[Path] = []
    once = Book._read
    monkeypatch.setattr(Book, "_read", lambda book: read.append(book.path) or once(book))
    with kept_open():
        assert Book([]).answers == Book([]).answers == {"a": answer}
        assert len(read) == 1
        Book([]).add({"b": answer})
        read.clear()
        assert Book([]).answers == Book([]).answers == {"a": answer, "b": answer}
        assert len(read) == 1
    assert Book([]).answers == Book([]).answers
    assert len(read) == 3


@pytest.mark.parametrize("name", ["mlp", "gpt", "resnet"])
def test_a_step_that_was_measured_before_is_captured_and_searched_for_once(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOWTIDE_CACHE", str(tmp_path))
    counted: Counter[str] = Counter()
    making, planning = importlib.import_module("lowtide.fit.make"), importlib.import_module("lowtide.plan.planning")

    def count(owner: Any, what: str) -> None:
        once = getattr(owner, what)
        monkeypatch.setattr(owner, what, lambda *a, **k: (counted.update([what]), once(*a, **k))[1])

    def ask(cuts: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        counted["ops"] += len(cuts)
        for cut in cuts:
            outputs = [item and item[3] for item in cut["outputs"]]
            room = {"arena_temporaries": 0, "apart_temporaries": 0, "heap_temporaries": 0}
            yield {"seconds": 1e-4, "disturbed": False, **room, "in_place": [], "code": 0, "outputs": outputs}

    monkeypatch.setattr(measuring, "_ask", ask)
    step, model, optimizer, example = models.build(models.SMALL[name])
    lowtide.fit(step, model, optimizer, example=example, budget="100%")
    for owner, what in ((making, "capture"), (Book, "_read"), (planning.Planning, "within")):
        count(owner, what)
    counted.clear()
    lowtide.fit(step, model, optimizer, example=example, budget="100%")
    assert counted == {"capture": 1, "_read": 1, "within": 1, "ops": 0}


def test_a_device_is_calm_where_its_threads_wait_for_no_core() -> None:
    def sharing(part: float) -> Device:
        now = (number * 0.01 for number in itertools.count())
        last = 0.0

        def clock() -> float:
            nonlocal last
            last = next(now)
            return last

        return dataclasses.replace(CPU, clock=clock, delay=lambda: part * last)

    found = [measuring._is_calm(sharing(part), "cpu") for part in (0.0, 0.01, 0.5)]
    assert found == [True, True, False]


def test_an_op_that_cannot_be_measured_is_estimated_and_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = lowtide.capture(*models.build(models.SMALL["mlp"])).graph

    def broken(specimens: list[Any]) -> Any:
        yield from ({"error": "the process ended with code -11"} for _ in specimens)

    monkeypatch.setattr(measuring, "_ask", broken)
    costs = lowtide.measure(graph, cache=False)
    assert costs.notes
    assert "code -11" in costs.notes[0]
    assert all(seconds > 0 for seconds in costs.seconds)


def test_roofline_counts_products_by_arithmetic_and_the_rest_by_traffic() -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(512, 512, bias=False), nn.Tanh())

    def step(model: nn.Module, optimizer: None, x: torch.Tensor) -> torch.Tensor:
        return model(x).sum()

    graph: Graph = lowtide.capture(*recipe(step, make, None, lambda: (torch.randn(512, 512),))()).graph
    costs = lowtide.roofline(graph, flops=1e9, bandwidth=1e9)
    seconds = {op.target: cost for op, cost in zip(graph.ops, costs.seconds, strict=True)}
    assert seconds["aten.mm.default"] == pytest.approx(2 * 512**3 / 1e9, rel=0.01)
    assert seconds["aten.tanh.default"] == pytest.approx(2 * 512 * 512 * 4 / 1e9, rel=0.01)
    assert costs.origin == "roofline"
    assert any(costs.in_place)


def test_costs_belong_to_their_graph(tmp_path: Path) -> None:
    graph = lowtide.capture(*models.build(models.SMALL["mlp"])).graph
    other = lowtide.capture(*recipe(plain)()).graph
    costs = lowtide.roofline(graph)
    costs.save(tmp_path / "costs")
    assert lowtide.Costs.load(tmp_path / "costs", graph) == costs
    with pytest.raises(lowtide.FileError, match="not of this one"):
        lowtide.Costs.load(tmp_path / "costs", other)


def test_what_steps_see_of_ops_corrects_their_prices(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LOWTIDE_CACHE", str(tmp_path))
    step, model, optimizer, example = models.build(models.SMALL["gpt"])
    train = lowtide.fit(step, model, optimizer, example=example, budget="60%", time_limit=0.1)
    graph, alone = train.captured.graph, train.costs
    assert "measured step" in train.report()
    slow = {op: 3.0 * alone.seconds[op] for op in range(len(graph.ops))}
    measuring.correct(graph, alone, slow)
    corrected = lowtide.measure(graph)
    keys, _ = measuring._specimens(graph)
    for key in {key for key in keys if key is not None}:
        ops = [op for op, other in enumerate(keys) if other == key]
        for op in ops:
            assert corrected.seconds[op] == pytest.approx(3.0 * sum(alone.seconds[op] for op in ops) / len(ops))
    assert lowtide.measure(graph, corrected=False) == alone, "what was measured alone is still known"
    assert dataclasses.replace(corrected, seconds=alone.seconds) == alone, "only prices are corrected"


def test_prices_that_are_right_are_left_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LOWTIDE_CACHE", str(tmp_path))
    graph = lowtide.capture(*models.build(models.SMALL["mlp"])).graph
    costs = lowtide.measure(graph)
    measuring.correct(graph, costs, {op: 1.005 * costs.seconds[op] for op in graph.ordinary})
    assert lowtide.measure(graph) == costs
    measuring.correct(graph, costs, {})
    assert lowtide.measure(graph) == costs


def test_the_first_steps_of_a_fitted_step_time_its_ops(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LOWTIDE_CACHE", str(tmp_path))
    step, model, optimizer, example = models.build(models.SMALL["mlp"])
    told: list[dict[int, float]] = []
    maker = importlib.import_module("lowtide.fit.make")
    monkeypatch.setattr(maker, "correct", lambda graph, costs, seconds: told.append(dict(seconds)))
    monkeypatch.setattr(importlib.import_module("lowtide.device.record"), "WAKING", math.inf)  # calm or not
    train = lowtide.fit(step, model, optimizer, example=example, budget="60%", time_limit=0.1)
    begun = time.perf_counter()
    for _ in range(10):
        train(*example)
    passed = time.perf_counter() - begun
    (seconds,) = told
    assert seconds.keys() == {run.op for run in train.program.instructions if isinstance(run, Run)}
    assert all(0 <= taken < passed for taken in seconds.values())
    assert "the prediction is off by" in train.report().split("measured step")[1].splitlines()[0]


def test_the_clock_of_a_step_is_divided_among_its_ops() -> None:
    graph = lowtide.capture(*models.build(models.SMALL["mlp"])).graph
    program = lowtide.keep_everything(graph)
    now = [0.0]
    timings = Timings(program, dataclasses.replace(CPU, clock=lambda: now[0], delay=lambda: 0.0))
    runs = [number for number, one in enumerate(program.instructions) if isinstance(one, Run)]
    for step in range(STEPS + 1):
        watch = timings.watch(array("q", [0]))
        assert watch is not None
        begun = now[0]
        now[0] += 1.0  # before the first op
        for number in runs:
            watch[0] = number
            now[0] += number + 1.0 + step
        assert timings.ops is None
        timings.note(now[0] - begun, watch)
    assert timings.watch(array("q", [0])) is None
    found = timings.ops
    assert found is not None
    least = [number + 2.0 for number in runs]  # the first step does not count
    total = sum(least) + 1.0
    assert sum(found.values()) == pytest.approx(total)
    first, last = found[program.instructions[runs[0]].op], found[program.instructions[runs[-1]].op]  # type: ignore[union-attr]
    assert last / first == pytest.approx(least[-1] / least[0])
    assert timings.step == pytest.approx(sum(least) + len(runs) + 1.0), "the median of the timed steps"
    timings.note(0.5, None)
    assert timings.step == 0.5


def _steps(timings: Timings, now: list[float], seconds: Sequence[float], waited: list[float]) -> None:
    """Steps that take so long in their only watched instruction, a part of it without a core."""
    for taken in seconds:
        watch = timings.watch(array("q", [0]))
        assert watch is not None
        watch[0] = 0
        now[0] += taken
        waited[0] += max(0.0, taken - 1.0)
        timings.note(taken, watch)


def test_a_step_whose_cores_others_had_teaches_only_where_all_are_such() -> None:
    graph = lowtide.capture(*models.build(models.SMALL["mlp"])).graph
    whole = lowtide.keep_everything(graph)
    program = dataclasses.replace(whole, instructions=whole.instructions[:1])
    now, waited = [0.0], [0.0]
    device = dataclasses.replace(CPU, clock=lambda: now[0], delay=lambda: waited[0])
    timings = Timings(program, device)
    _steps(timings, now, [1.0, 2.0, 2.0, 1.0, 2.0, 1.0, 1.01], waited)  # the first is never counted
    assert timings.watch(array("q", [0])) is None
    assert timings.ops == {0: pytest.approx(1.0)}
    disturbed = Timings(program, device)
    _steps(disturbed, now, [1.0, 2.0, 1.5, *[2.0] * (PATIENCE - 3)], waited)
    assert disturbed.watch(array("q", [0])) is None, "nobody waits for a calm one any longer"
    assert disturbed.ops == {0: pytest.approx(1.5)}
    assert disturbed.step == 2.0


def test_threads_that_share_a_core_wait_for_it() -> None:
    cores = os.sched_getaffinity(0)
    before = CPU.delay()
    os.sched_setaffinity(0, {min(cores)})
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        end = time.process_time() + 0.3
        while time.process_time() < end:
            pass
    finally:
        busy.kill()
        busy.wait()
        os.sched_setaffinity(0, cores)
    assert CPU.delay() - before > 0.05


def test_what_was_touched_long_ago_is_known_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(around, "last_cache", lambda: 2**22)
    target = "mlp:width=512,depth=4,features=512,batch=512"  # values of a mebibyte
    graph = lowtide.capture(*models.build(target)).graph
    found = around.surroundings(graph)
    relu = next(op for op in graph.ordinary if graph.ops[op].target == "aten.relu.default")
    assert found[relu]["since"] == [0], "it was made by the op before"
    assert found[relu]["yours"] == []
    first = next(op for op in graph.ordinary if graph.ops[op].target == "aten.addmm.default")
    assert max(found[first]["since"]) == 2 * 2**22, "the step before is longer than the cache"
    assert len(found[first]["yours"]) == 3, "bias, batch and weight"
    tiny = around.surroundings(lowtide.capture(*models.build(models.SMALL["mlp"])).graph)
    assert {nbytes for one in tiny for nbytes in one["since"]} == {0}, "all of it is in the nearest cache"


def test_arguments_are_put_where_a_step_has_them() -> None:
    graph = lowtide.capture(*models.build("mlp:width=512,depth=2,features=512,batch=512")).graph
    op = next(op for op in graph.ordinary if graph.ops[op].target == "aten.relu.default")
    cut = {**measuring.specimen(graph, op), **around.surroundings(graph)[op]}
    plain, placed = bench_call.Call(cut), bench_call.Call(cut, placed=True)
    assert placed.tensors[0].data_ptr() % mmap.PAGESIZE == 0
    assert plain.tensors[0].shape == placed.tensors[0].shape
    assert torch.equal(placed.run(), placed.tensors[0].relu())
    before = bench_call.Before.of(placed)
    kept = placed.tensors[0].clone()
    before.happen()
    assert torch.equal(placed.tensors[0], kept), "it is touched, not changed"
