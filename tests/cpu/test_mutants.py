"""Damaged checkpoints, races and cost books by the thousand: each is refused in words, or harmless."""

from __future__ import annotations

import contextlib
import copy
import io
import os
import zipfile
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from mutants import JUNK, mutants, spoiled

from lowtide.bench.cli import fit as bench_fit
from lowtide.bench.fit import Cell, Survey, Verdict
from lowtide.cli import checkpoint
from lowtide.errors import FileError, LowtideError
from lowtide.files import save
from lowtide.measure.book import ANSWER, Book

FEW, MANY = 2_000, 100_000
lengths = pytest.mark.parametrize(
    ("count", "seed"),
    [pytest.param(FEW, 1, id="few"), pytest.param(MANY, 2, id="many", marks=pytest.mark.long)],
)


@pytest.fixture(autouse=True)
def quick_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands of small files need not reach the disk."""
    monkeypatch.setattr(os, "fsync", lambda file: None)


def run() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A model with a buffer that its state_dict leaves out, after a step."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    model[0].register_buffer("extra", torch.ones(2), persistent=False)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(5, 3)).square().sum().backward()
    optimizer.step()
    return model, optimizer


def packed(payload: Any) -> bytes:
    file = io.BytesIO()
    torch.save(payload, file)
    return file.getvalue()


def rezipped(whole: bytes, random: Random) -> bytes:
    """The archive with one of its members changed, and the checksums right."""
    made = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(whole)) as old, zipfile.ZipFile(made, "w") as new:
        names = old.namelist()
        chosen = next(name for name in names if name.endswith("data.pkl")) if random.random() < 0.8 else None
        chosen = chosen or random.choice(names)
        for name in names:
            content = old.read(name)
            new.writestr(name, spoiled(random, content) if name == chosen else content)
    return made.getvalue()


def replaced(payload: dict[str, Any], random: Random) -> dict[str, Any]:
    """The payload with a field, or something in one, changed for junk."""
    changed = copy.deepcopy(payload)
    key = random.choice(list(changed))
    inner = changed[key]
    junk = random.choice((*JUNK, torch.ones(3), torch.zeros(10, dtype=torch.uint8), {"weight": torch.ones(2)}))
    if isinstance(inner, dict) and inner and random.random() < 0.8:
        inner[random.choice((*inner, "x", "0.weight", "forward"))] = junk
    elif isinstance(inner, list) and inner and random.random() < 0.5:
        inner[0] = junk
    else:
        changed[key] = junk
    return changed


@lengths
@pytest.mark.filterwarnings("ignore")  # torch's own, about sizes
def test_a_checkpoint_is_taken_up_or_refused(tmp_path: Path, count: int, seed: int) -> None:
    path, random = tmp_path / "checkpoint", Random(seed)
    model, optimizer = run()
    checkpoint.take("mlp", None, 3, [1.5, None], model, optimizer).write(path)
    whole = path.read_bytes()
    payload = torch.load(path, weights_only=True)
    ends: Counter[str] = Counter()
    for _ in range(count):
        kind = random.random()
        if kind < 0.3:
            path.write_bytes(spoiled(random, whole))
        elif kind < 0.65:
            path.write_bytes(rezipped(whole, random))
        else:
            path.write_bytes(packed(replaced(payload, random)))
        try:
            found = checkpoint.read(path)
            found.check(path, target="mlp", data=None, seed=None, steps=10)
            found.restore(model, optimizer)
            ends["sound"] += 1
        except LowtideError as error:
            ends[type(error).__name__] += 1
    assert set(ends) == {"sound", "UsageError"}


def races() -> dict[str, Any]:
    """What `bench fit --keep` keeps of a target."""
    survey = Survey("mlp", 3, 100, 200, 150, 0.1, 0.2, 0.3)
    cells = [Cell("mlp", "eager", "eager", seconds=1.0, own=1.0, time_ratio=1.0, ratios=(1.0, 1.0))]
    cells.append(Cell("mlp", "lowtide 50%", "lowtide", percent=50.0, budget=10, own=0.5, time_ratio=1.1, equal=True))
    verdict = Verdict("mlp", "checkpoint", 0.5, 1.2, "lowtide 50%", 1.1, None, None)
    return {
        "targets": [{**asdict(survey), "better_peers": [["checkpoint", ["time"]]], "ok": True}],
        "rows": [{**asdict(cell), "ok": cell.ok} for cell in cells],
        "peers": [{**asdict(verdict), "faster": True, "smaller": False, "ok": False}],
    }


@lengths
def test_kept_races_are_shown_or_refused(tmp_path: Path, count: int, seed: int) -> None:
    path, asked = tmp_path / "races", {"budgets": [50.0], "rounds": 3}
    save(path, bench_fit.KIND, {"asked": asked, "races": {"mlp": races()}})
    shown = 0
    for content in mutants(path.read_bytes(), seed, count):
        path.write_bytes(content)
        with contextlib.suppress(FileError):
            kept = bench_fit._Kept(path, asked)
            bench_fit._cells(kept.rows(["mlp"], "rows"), [50.0], [])
            bench_fit._surveys(kept.rows(["mlp"], "targets"))
            bench_fit._verdicts(kept.rows(["mlp"], "peers"), kept.rows(["mlp"], "targets"))
            shown += 1
    assert shown > count / 100


@lengths
def test_a_book_of_costs_gives_what_was_written_or_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int, seed: int
) -> None:
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
    given = {f"{number:064x}": {**answer, "arena_temporaries": number} for number in range(5)}
    book = Book([])
    book.add(given)
    whole, random = book.path.read_bytes(), Random(seed)
    for content in mutants(b"{}\n" + whole, seed, count):
        book.path.write_bytes(content.partition(b"\n")[2] if random.random() < 0.5 else spoiled(random, whole))
        book.path.chmod(0o600)
        found = Book([]).answers
        assert found.items() <= given.items()
        assert all(ANSWER(one) for one in found.values())
