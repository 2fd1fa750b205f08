"""Thousands of damaged files of every format: each loads as something sound, or is refused in words."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
from graphs import make_case, with_channels, with_homes
from mutants import mutants, spoiled

from lowtide.check import check
from lowtide.costs import Costs
from lowtide.data.datasets import find
from lowtide.data.store import look, opened
from lowtide.errors import FileError, LowtideError
from lowtide.graph import Alternative, Graph
from lowtide.program import Plan, Program

CASE = make_case(5, 20)
PLAN = Plan(CASE.program, 10_000, 9_000, 1.5, 1.0, 1.25, 8_000, 0.5)
RICH = with_channels(Random(1), with_homes(Random(1), CASE.graph))
RICH = replace(RICH, alternatives=tuple(Alternative(value, value, "disk") for value in range(2)))
FEW, MANY = 2_000, 100_000


@pytest.fixture(autouse=True)
def quick_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands of small files need not reach the disk."""
    monkeypatch.setattr(os, "fsync", lambda file: None)


def graph(path: Path) -> None:
    loaded = Graph.load(path)
    assert loaded.fault is None
    assert len(loaded.fingerprint) == 64
    str(loaded).encode()


def costs(path: Path) -> None:
    str(Costs.load(path, CASE.graph)).encode()


def program(path: Path) -> None:
    loaded = Program.load(path, CASE.graph)
    loaded.show(CASE.graph).encode()
    check(CASE.graph, CASE.costs, loaded)


def plan(path: Path) -> None:
    loaded = Plan.load(path, CASE.graph)
    assert loaded.overhead == loaded.overhead
    check(CASE.graph, CASE.costs, loaded.program, budget=loaded.budget)


def about(path: Path) -> None:
    found = look(find("fashion-small"))
    if found is None:
        raise FileError("not here")
    assert {"classes", "mean", "deviation"} <= found.about.keys()


FORMATS: dict[str, tuple[Callable[[Path], Any], Callable[[Path], None]]] = {
    "graph": (CASE.graph.save, graph),
    "rich graph": (RICH.save, graph),
    "costs": (CASE.costs.save, costs),
    "program": (CASE.program.save, program),
    "plan": (PLAN.save, plan),
}


def hold(read: Callable[[Path], None], path: Path, seed: int, count: int) -> Counter[str]:
    """Read each mutant; what is raised is one of ours, and soon enough."""
    whole = path.read_bytes()
    read(path)
    ends: Counter[str] = Counter()
    for content in mutants(whole, seed, count):
        path.write_bytes(content)
        try:
            read(path)
            ends["sound"] += 1
        except LowtideError as error:
            str(error).encode()
            ends[type(error).__name__] += 1
    return ends


lengths = pytest.mark.parametrize(
    ("count", "seed"),
    [pytest.param(FEW, 1, id="few"), pytest.param(MANY, 2, id="many", marks=pytest.mark.long)],
)


@lengths
@pytest.mark.parametrize("kind", FORMATS)
def test_a_file_is_sound_or_refused(tmp_path: Path, kind: str, count: int, seed: int) -> None:
    save, read = FORMATS[kind]
    save(tmp_path / "file")
    ends = hold(read, tmp_path / "file", seed, count)
    assert ends.total() == count
    assert ends["FileError"] > count / 2
    assert ends["sound"] > count / 100, "some mutants must get through, or the decoders are not reached"


@lengths
def test_a_dataset_is_sound_or_not_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int, seed: int) -> None:
    monkeypatch.setenv("LOWTIDE_CACHE", str(tmp_path))
    folder = opened(find("fashion-small")).folder
    assert hold(about, folder / "about.json", seed, count).total() == count


@lengths
@pytest.mark.filterwarnings("ignore:Reading")  # numpy takes some for files of Python 2
def test_an_array_is_mapped_or_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int, seed: int) -> None:
    """The header is what is changed; the bytes behind it are numbers like any other."""
    monkeypatch.setenv("LOWTIDE_CACHE", str(tmp_path))
    stored = opened(find("fashion-small"))
    path = stored.folder / "train_labels.npy"
    whole = path.read_bytes()
    random = Random(seed)
    for _ in range(count):
        path.write_bytes(spoiled(random, whole[:128]) + whole[128:])
        with contextlib.suppress(FileError):
            stored.array("train_labels")
