"""Rewrites: the order is that of the list, a broken graph is caught at the pass that made it, plans say what ran."""

from __future__ import annotations

import dataclasses
import importlib
from pathlib import Path
from typing import Any

import pytest
from graphs import make_case
from test_digests import stored
from test_narrow import _pooling

from lowtide import files, rewrite
from lowtide.check import check
from lowtide.costs import declared
from lowtide.errors import ProgramError, UsageError
from lowtide.graph import Graph, Read
from lowtide.plan import keep_everything, plan
from lowtide.program import Plan
from lowtide.rewrite.editor import Editor
from lowtide.rewrites import Rewrite, exactness


def test_passes_run_in_the_order_of_the_list_however_they_are_named() -> None:
    graph = _pooling()
    forward, backward = rewrite.apply(graph, rewrite.EXACT), rewrite.apply(graph, rewrite.EXACT[::-1])
    assert forward == backward
    assert [one.name for one in forward.rewrites] == ["sizes", "narrow"]
    assert exactness(forward.rewrites) == "bitwise"


def test_each_pass_says_what_it_changed() -> None:
    sizes, narrow = rewrite.apply(_pooling(), rewrite.EXACT).changes
    graph, after = _pooling(), rewrite.with_narrow(_pooling())
    assert (sizes.ops_added, sizes.ops_removed, sizes.ops_offered, sizes.values_added) == (0, 0, 0, 0)
    assert str(sizes) == "sizes (bitwise): ops changed in their places"
    assert narrow.ops_offered == len(after.ops) - len(graph.ops) > 0
    assert narrow.values_added == len(after.values) - len(graph.values) > 0


def test_what_changes_nothing_was_not_applied() -> None:
    graph = make_case(4, 7).graph
    assert rewrite.apply(graph, (rewrite.chunks(2),)) == rewrite.Rewritten(graph, ())


def test_an_unknown_name_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(UsageError, match=r"no rewrite shrink") as caught:
        rewrite.apply(_pooling(), (Rewrite("shrink"),))
    assert "sizes, narrow" in caught.value.hint


def test_a_graph_that_cannot_run_is_caught_after_the_pass_that_made_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def lose(graph: Graph, _: object) -> Graph:
        op = dataclasses.replace(graph.ops[-1], args=(Read(len(graph.values)),))
        return dataclasses.replace(graph, ops=(*graph.ops[:-1], op))

    monkeypatch.setattr(rewrite, "PASSES", (*rewrite.PASSES, rewrite.Pass("lose", "lossy", lose)))
    with pytest.raises(ProgramError, match=r"lose made a graph that cannot be run"):
        rewrite.apply(_pooling(), (Rewrite("sizes"), Rewrite("lose")))


def test_together_they_keep_what_the_worst_keeps() -> None:
    assert exactness(()) == "bitwise"
    assert exactness((Rewrite("a"), Rewrite("b", 2, "lossy"), Rewrite("c", None, "rounding"))) == "lossy"


def test_a_plan_s_file_says_what_was_rewritten_and_one_from_before_says_nothing(tmp_path: Path) -> None:
    rewritten = rewrite.apply(_pooling(), rewrite.EXACT)
    found = plan(rewritten.graph, declared(rewritten.graph))
    chunks = Rewrite("chunks", 8, "rounding")
    found = dataclasses.replace(found, rewrites=(chunks, *rewritten.rewrites))
    found.save(tmp_path / "plan")
    assert Plan.load(tmp_path / "plan", rewritten.graph) == found
    data: Any = files.load(tmp_path / "plan", "program")
    del data["promise"]["rewrites"]
    files.save(tmp_path / "old", "program", data)
    assert Plan.load(tmp_path / "old", rewritten.graph).rewrites == ()


def test_an_editor_that_does_nothing_gives_the_graph_back() -> None:
    for seed in range(20):
        graph = make_case(6, seed).graph
        assert Editor(graph).grown() == graph
        if not graph.alternatives and len(graph.ordinary) == len(graph.ops):
            again = Editor(graph).reordered()
            check(again, declared(again), keep_everything(again))
            assert [op.name for op in again.ops] == [op.name for op in graph.ops]


def test_a_change_says_what_may_wait_and_what_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.import_module("lowtide.rewrite.offload"), "SMALLEST", 1)
    graph, _ = stored("gpt-small")
    state, parameters = rewrite.leaving_bytes(graph)
    waiting, moved = rewrite.apply(graph, rewrite.offload("disk", homes=state + parameters)).changes
    after = rewrite.apply(graph, rewrite.offload("disk")).graph
    rows = len(after.alternatives) - len(graph.alternatives)
    assert str(waiting) == f"offload disk (bitwise): {rows:,} values may wait elsewhere"
    assert moved.nbytes_moved == state + parameters > 0
    assert str(moved).endswith(f": {state + parameters:,} bytes live elsewhere")
