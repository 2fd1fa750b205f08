"""Pages, traces, differences and the doctor on real steps: what they say is what was planned and run."""

from __future__ import annotations

import io
import json
import pickle
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.cuda import _memory_viz as viewer
from typer.testing import CliRunner

import lowtide
from lowtide import choice, doctor, progress, report
from lowtide.cli import app, talk
from lowtide.errors import FileError
from lowtide.models import SMALL, build
from lowtide.page import Looks
from lowtide.page.advice import Situation, advise
from lowtide.plan import plan

GPT, MLP = SMALL["gpt"], SMALL["mlp"]
ROOFLINE = ("--costs", "roofline", "--time-limit", "0.3")


def run(*arguments: str) -> Any:
    done = CliRunner().invoke(app, list(arguments))
    assert done.exit_code == 0, done.output
    return done


def test_the_page_of_a_fitted_step_has_its_metered_peak(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)

    def step(model: nn.Module, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    batch = (torch.randn(64, 32), torch.randint(0, 4, (64,)))
    train = lowtide.fit(step, net, optimizer, example=batch, budget="80%", time_limit=0.3, costs="roofline")
    for _ in range(6):
        train(*batch)
    path = tmp_path / "report.html"
    text = train.report(html=path, looks=Looks(points=3, time_limit=0.1, classics=False))
    assert text == train.report()
    found = report.document_of(path)
    assert found["numbers"]["predicted_peak"] == train.plan.peak
    assert found["numbers"]["metered_peak"] == train.peak
    assert found["numbers"]["budget"] == train.plan.budget
    assert found["heading"]["target"] == "Sequential"
    assert len(found["frontier"]["rows"]) >= 2
    with pytest.raises(FileError, match="exists already"):
        train.report(html=path)
    # The step leaves its gradients behind, so to clear them at its end is one of the changes that are planned.
    whats = [one["what"] for one in found["advice"]]
    assert "clear gradients at the end of the step" in whats
    again = found["advice"][whats.index("clear gradients at the end of the step")]

    def clearing(model: nn.Module, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    optimizer.zero_grad()
    other = lowtide.fit(clearing, net, optimizer, example=batch, budget=train.plan.budget, time_limit=0.3)
    assert again["peak"] == other.plan.peak
    assert again["saved_bytes"] == train.plan.peak - other.plan.peak


def test_report_runs_and_meters_what_it_shows(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    done = run(
        "report", MLP, "--budget", "80%", "--time-limit", "0.3", "--points", "0", "--no-advice", "--out", str(path)
    )
    data = report.document_of(path)
    numbers = data["numbers"]
    assert numbers["metered_peak"] == pytest.approx(numbers["predicted_peak"], rel=0.005)
    assert numbers["eager_metered_peak"] == pytest.approx(numbers["eager_peak"], rel=0.005)
    assert numbers["metered_seconds"] > 0 < numbers["eager_metered_seconds"]
    assert report.show_bytes(numbers["predicted_peak"]) in done.stdout
    assert data["frontier"] is None
    assert data["advice"] == []


def test_report_as_json_is_the_document_of_the_page(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    done = run("report", GPT, "--budget", "70%", *ROOFLINE, "--points", "3", "--json", "--out", str(path))
    data = json.loads(done.stdout)
    assert data == report.document_of(path)
    assert data["lowtide"] == "report"
    assert any("roofline" in note for note in data["notes"])
    assert all(one["peak"] > 0 for one in data["advice"])


def test_advice_is_what_the_planner_finds() -> None:
    captured = lowtide.capture(*_parts())
    graph = captured.graph
    costs = lowtide.roofline(graph)
    from lowtide.choice import choose

    def search(one: Any, priced: Any, eager_peak: int, part: float) -> Any:
        return plan(one, priced, None)

    chosen = choose(graph, lowtide.roofline, search)
    assert costs.graph == graph.fingerprint
    assert (
        advise(Situation(graph, chosen, lowtide.roofline, None), None) == []
    )  # nothing to recompute, nothing to clear


def _parts() -> Any:
    from lowtide.cli.target import build

    return build(MLP)


def test_a_timeline_opens_in_torchs_own_viewer(tmp_path: Path) -> None:
    trace, snapshot = tmp_path / "trace.json", tmp_path / "plan.pickle"
    run("timeline", GPT, "--budget", "70%", *ROOFLINE, "--out", str(trace), "--snapshot", str(snapshot))
    events = json.loads(trace.read_text())["traceEvents"]
    assert {event["args"]["name"] for event in events if event["name"] == "process_name"} == {"eager", "plan"}
    data = pickle.loads(snapshot.read_bytes())
    shown = viewer.segsum(data)
    assert f"segments: {len(data['segments'])}" in shown
    lines = viewer.trace(data)
    assert lines.count("free completed") == sum(e["action"] == "free_completed" for e in data["device_traces"][0])


def test_targets_files_and_saved_plans_are_compared(tmp_path: Path) -> None:
    page, plan_file = tmp_path / "a.html", tmp_path / "b.plan"
    run("report", GPT, "--budget", "60%", *ROOFLINE, "--points", "0", "--no-advice", "--out", str(page))
    run("plan", GPT, "--budget", "90%", *ROOFLINE, "--out", str(plan_file))
    data = json.loads(run("diff", str(page), f"{GPT}@{plan_file}", *ROOFLINE, "--json").stdout)
    assert data["figures"]["budget"][0] < data["figures"]["budget"][1]
    assert data["moved"]
    listed = tmp_path / "p.json"
    listed.write_text(run("profile", GPT, "--costs", "roofline", "--json").stdout)
    shown = run("diff", str(listed), str(page)).stdout
    assert "plan's peak" in shown


def test_a_child_that_dies_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor.probe("pass") is None
    assert doctor.probe("import os; os.kill(os.getpid(), 4)") == "Illegal instruction"
    assert doctor.probe("raise ValueError('no')") == "ValueError: no"
    monkeypatch.setattr(doctor, "PROBES", {"bf16 matrix products": "import os; os.abort()"})
    monkeypatch.setattr(doctor, "_lanes", lambda: (_ for _ in ()).throw(OSError("no disk")))
    data = json.loads(run("doctor", "--json").stdout)
    found = {one["name"]: one for one in data["findings"]}
    assert data["healthy"] is True
    assert found["bf16 matrix products"]["verdict"] == "worse"
    assert "ONEDNN_MAX_CPU_ISA" in found["bf16 matrix products"]["hint"]
    assert found["torch"]["found"] == torch.__version__
    assert found["disk"]["verdict"] == "worse"
    assert all(one["means"] for one in data["findings"] if one["verdict"] != "good")


def test_what_is_made_in_parts_is_split_on_the_page() -> None:
    target = "gpt:layers=1,width=32,context=32,vocabulary=512,batch=4,dropout=0"
    arguments = ("report", target, *ROOFLINE, "--points", "0", "--no-advice", "--json", "--budget")
    whole = json.loads(run(*arguments, "60%").stdout)["fates"]
    in_parts = json.loads(run(*arguments, "25%", "--allow", "rounding").stdout)["fates"]
    logits = 4 * 32 * 512 * 4  # bytes: positions, words of the vocabulary, a float
    assert not any(one["categories"].get("split") for one in whole)
    assert sum(one["bytes"] for one in whole) > logits
    assert sum(one["categories"].get("split", 0) for one in in_parts) >= logits


def test_what_takes_long_is_said_in_a_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    _be_talkative(monkeypatch)
    heard = io.StringIO()
    monkeypatch.setattr(sys, "stderr", heard)
    with talk.counting("measuring ops") as counted:
        counted(3, 12)
        _until(heard, "measuring ops: 3 of 12\n")
    with talk.working("capturing"):
        _until(heard, "capturing...\n")
    with talk.telling("looking") as tell:
        tell("at the disk")
        _until(heard, "looking: at the disk\n")
    assert heard.getvalue().count(" s\n") == 3  # what each took, at its end


def test_a_fit_that_takes_long_says_so_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    _be_talkative(monkeypatch)
    heard, told = io.StringIO(), list[str]()
    monkeypatch.setattr(sys, "stderr", heard)

    def slowly(*args: Any, **kwargs: Any) -> Any:
        if not told:
            _until(heard, "lowtide: fitting the step: captured ")
        return choice.choose(*args, **kwargs)

    monkeypatch.setattr(sys.modules["lowtide.fit.make"], "choose", slowly)
    step, model, optimizer, example = build(MLP)
    for tell in (None, told.append):
        lowtide.fit(step, model, optimizer, example=example, costs="roofline", time_limit=0, tell=tell)
        if tell is None:
            assert re.search(r"lowtide: fitting the step: \d+\.\d s\n\Z", heard.getvalue())
            heard.truncate(0)
            told.append("asked to be told")
    assert not heard.getvalue()
    assert any(line.startswith("captured ") for line in told)


def _be_talkative(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "SILENCE", 0.05)
    monkeypatch.setattr(progress, "APART", 0.05)


def _until(heard: io.StringIO, line: str) -> None:
    for _ in range(2000):
        if line in heard.getvalue():
            return
        progress.Event().wait(0.01)
    pytest.fail(f"{line!r} was not said: {heard.getvalue()!r}")


def test_models_are_completed() -> None:
    from lowtide.cli.profile import complete_target

    assert complete_target("res") == ["resnet"]
    done = CliRunner().invoke(
        app,
        [],
        env={"_LOWTIDE_COMPLETE": "complete_bash", "COMP_WORDS": "lowtide pl", "COMP_CWORD": "1"},
        prog_name="lowtide",
    )
    assert done.stdout.split() == ["plan"]
