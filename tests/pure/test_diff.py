"""Two documents compared: folding is undone, nothing moves between equals, and every byte that moves is counted."""

from __future__ import annotations

import io
import json
import random

import pytest
from pages import document, planned
from rich.console import Console

from lowtide import report
from lowtide.errors import FileError
from lowtide.report.diff import _paths, _unfolded
from lowtide.report.modules import fold


def test_folded_names_stand_for_modules() -> None:
    assert list(_paths("a.{0..2,5}.b")) == ["a.0.b", "a.1.b", "a.2.b", "a.5.b"]
    assert list(_paths("{k,q}.{0,1}")) == ["k.0", "k.1", "q.0", "q.1"]
    assert list(_paths("(top level)")) == [""]


@pytest.mark.parametrize("seed", range(20))
def test_unfolding_undoes_folding(seed: int) -> None:
    numbers = random.Random(seed)
    weights = {}
    for _ in range(40):
        path = ".".join(numbers.choice(("a", "b", "0", "1", "2", "10")) for _ in range(numbers.randrange(4)))
        weights[path, numbers.choice(("kept", "recomputed"))] = numbers.randrange(1, 5)
    tree = fold(((path, fate, nbytes) for (path, fate), nbytes in weights.items()), top="(top level)")
    flat = _unfolded([json.loads(json.dumps(branch.to_json())) for branch in tree])
    assert {(path, fate): nbytes for path, row in flat.items() for fate, nbytes in row.items()} == weights


def test_nothing_moves_between_equals() -> None:
    data = document(*planned("gpt-small", 0.5))
    found = report.diff(report.side("one", data), report.side("other", data))
    assert not found.causes
    assert not found.moved
    assert all(one == other for one, other in found.to_json()["figures"].values())


def test_what_moves_is_counted_and_explained() -> None:
    tight, wide = (document(*planned("gpt-small", part), target=f"gpt:part={part}") for part in (0.4, 0.9))
    found = report.diff(report.side("tight", tight), report.side("wide", wide))
    assert "part: 0.4 -> 0.9" in found.causes
    recomputed = sum(branch["categories"].get("recomputed", 0) for branch in tight["fates"])
    later = sum(branch["categories"].get("recomputed", 0) for branch in wide["fates"])
    changes = sum(one.before.get("recomputed", 0) - one.after.get("recomputed", 0) for one in found.moved)
    assert changes == recomputed - later > 0
    assert {one.why for one in found.moved} == {"there is more room for it"}
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(found)
    shown = console.export_text()
    assert "recomputed" in shown
    assert "plan's peak" in shown


@pytest.mark.parametrize("data", [{}, [], 3, {"lowtide": "report"}, {"lowtide": "pebble", "target": "x"}])
def test_what_is_no_document_is_an_answer(data: object) -> None:
    with pytest.raises(FileError):
        report.side("it", data)
