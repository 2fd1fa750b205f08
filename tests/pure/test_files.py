"""Every noun survives its file, and a file that is not what it should be says so."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from graphs import Case, cases, make_case
from hypothesis import given, settings
from hypothesis import strategies as st

from lowtide import files
from lowtide.costs import Costs, declared
from lowtide.errors import FileError
from lowtide.graph import Graph, Input, Op, Read
from lowtide.program import Program, Run

CASE = make_case(6, 20)
OTHER = make_case(6, 21)
MADE_UP = "aten.made_up.default"
LOADERS: dict[str, Callable[[Path], Any]] = {
    "graph": Graph.load,
    "costs": lambda path: Costs.load(path, CASE.graph),
    "program": lambda path: Program.load(path, CASE.graph),
}
SAVERS: dict[str, Callable[..., None]] = {
    "graph": CASE.graph.save,
    "costs": CASE.costs.save,
    "program": CASE.program.save,
}
kinds = pytest.mark.parametrize("kind", ["graph", "costs", "program"])


@pytest.fixture(autouse=True, scope="module")
def quick_disk() -> Iterator[None]:
    """Thousands of small files need not reach the disk."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda file: None)
        yield


@given(cases())
@settings(max_examples=150, derandomize=True, deadline=None, database=None)
def test_round_trip(tmp_path_factory: pytest.TempPathFactory, case: Case) -> None:
    folder = tmp_path_factory.mktemp("files")
    case.graph.save(folder / "graph")
    case.costs.save(folder / "costs")
    case.program.save(folder / "program")
    graph = Graph.load(folder / "graph")
    assert graph == case.graph
    assert graph.notes == case.graph.notes
    assert graph.fingerprint == case.graph.fingerprint
    assert Costs.load(folder / "costs", graph) == case.costs
    assert Program.load(folder / "program", graph) == case.program
    assert sorted(path.name for path in folder.iterdir()) == ["costs", "graph", "program"]


numbers = st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.complex_numbers(allow_nan=False)
arguments = st.recursive(
    st.none() | st.booleans() | numbers | st.text(), lambda inner: st.lists(inner, max_size=3).map(tuple), max_leaves=6
)


@given(st.lists(arguments, max_size=4).map(tuple), st.from_regex(r"[a-z_]{1,5}x", fullmatch=True))
@settings(max_examples=200, derandomize=True, deadline=None, database=None)
def test_any_argument_survives(tmp_path_factory: pytest.TempPathFactory, args: tuple[Any, ...], key: str) -> None:
    op = Op("op", MADE_UP, (*args, (Read(0), None)), ((key, args),), outputs=(1,))
    values = tuple(dataclasses.replace(value, eager_end=-1) for value in CASE.graph.values)
    graph = dataclasses.replace(CASE.graph, ops=(op,), values=values, outputs=(), inputs=CASE.graph.inputs[:1])
    path = tmp_path_factory.mktemp("files") / "graph"
    graph.save(path)
    loaded = Graph.load(path)
    assert loaded == graph
    assert repr(loaded.ops[0].args) == repr(graph.ops[0].args)  # 1, 1.0 and True are equal, but not the same argument
    assert loaded.fingerprint == graph.fingerprint


@kinds
def test_never_overwrites_unasked(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "file"
    path.write_text("precious", encoding="utf-8")
    with pytest.raises(FileError, match="exists already") as caught:
        SAVERS[kind](path)
    assert "force" in str(caught.value)
    assert path.read_text(encoding="utf-8") == "precious"
    SAVERS[kind](path, force=True)
    LOADERS[kind](path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


@kinds
def test_makes_the_folder(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "new" / "folder" / "file"
    SAVERS[kind](path)
    LOADERS[kind](path)


@kinds
def test_a_place_that_can_not_be_written(tmp_path: Path, kind: str) -> None:
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(FileError, match=r"cannot write .*file/inside"):
        SAVERS[kind](tmp_path / "file" / "inside")
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_a_failed_write_leaves_nothing_behind(tmp_path: Path) -> None:
    path = tmp_path / "file"
    CASE.graph.save(path)
    before = path.read_bytes()
    with pytest.raises(UnicodeEncodeError):
        files.write_atomically(path, "half of it \ud800")
    assert path.read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


@kinds
def test_truncated(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "file"
    SAVERS[kind](path)
    whole = path.read_bytes()
    for length in sorted({0, 1, 20, *range(0, len(whole) - 1, 1 + len(whole) // 40), len(whole) - 2}):
        path.write_bytes(whole[:length])
        with pytest.raises(FileError, match=r"is damaged|is not a lowtide file"):
            LOADERS[kind](path)


@kinds
def test_garbled(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "file"
    SAVERS[kind](path)
    whole = path.read_bytes()
    for position in range(0, len(whole) - 1, 1 + len(whole) // 200):
        for byte in (b"0", b"x", b"\xff", b"\n"):
            if whole[position : position + 1] != byte:
                path.write_bytes(whole[:position] + byte + whole[position + 1 :])
                _loads_the_same_or_says_why(path, kind)


def _loads_the_same_or_says_why(path: Path, kind: str) -> None:
    """White space may change without harm; anything else is a FileError that names the file."""
    try:
        loaded = LOADERS[kind](path)
    except FileError as error:
        loaded = error
    assert str(path) in str(loaded) if isinstance(loaded, FileError) else loaded == getattr(CASE, kind)


@kinds
@pytest.mark.parametrize(
    "text", ["", "\n", "{}", "[]\n[]", "null\nnull", '"lowtide"\n1', "import torch\n", "PK\x03\x04"]
)
def test_foreign(tmp_path: Path, kind: str, text: str) -> None:
    path = tmp_path / "file"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(FileError, match="is not a lowtide file"):
        LOADERS[kind](path)


@kinds
def test_binary_missing_or_folder(tmp_path: Path, kind: str) -> None:
    (tmp_path / "binary").write_bytes(b"\x80\x02\xff\x00")
    (tmp_path / "folder").mkdir()
    for name in ("binary", "missing", "folder"):
        with pytest.raises(FileError, match="cannot read") as caught:
            LOADERS[kind](tmp_path / name)
        assert name in str(caught.value)


@kinds
@pytest.mark.parametrize("saved", ["graph", "costs", "program"])
def test_another_kind(tmp_path: Path, kind: str, saved: str) -> None:
    if saved == kind:
        return
    SAVERS[saved](tmp_path / "file")
    with pytest.raises(FileError, match=f"holds a {saved}, not a {kind}"):
        LOADERS[kind](tmp_path / "file")


@kinds
def test_another_version(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "file"
    SAVERS[kind](path)
    path.write_text(path.read_text(encoding="utf-8").replace('"version": 1', '"version": 99', 1), encoding="utf-8")
    with pytest.raises(FileError, match=r"has version 99; this lowtide reads version 1"):
        LOADERS[kind](path)


def test_another_graph(tmp_path: Path) -> None:
    OTHER.costs.save(tmp_path / "costs")
    OTHER.program.save(tmp_path / "program")
    for kind in ("costs", "program"):
        with pytest.raises(FileError, match=OTHER.graph.fingerprint[:12]) as caught:
            LOADERS[kind](tmp_path / kind)
        assert CASE.graph.fingerprint[:12] in str(caught.value)
        assert "hint: " in str(caught.value)


def test_costs_of_another_number_of_ops(tmp_path: Path) -> None:
    for field in ("seconds", "arena_temporaries", "nbytes", "in_place"):
        short = dataclasses.replace(CASE.costs, **{field: getattr(CASE.costs, field)[1:]})
        short.save(tmp_path / "costs", force=True)
        with pytest.raises(FileError, match="the graph has 6"):
            Costs.load(tmp_path / "costs", CASE.graph)


def _payload(kind: str, tmp_path: Path) -> Any:
    SAVERS[kind](tmp_path / "whole")
    return json.loads((tmp_path / "whole").read_text(encoding="utf-8").split("\n")[1])


@kinds
def test_a_right_checksum_does_not_make_a_right_noun(tmp_path: Path, kind: str) -> None:
    """Each field in turn is left out or replaced, and the checksum is made to match."""
    payload = _payload(kind, tmp_path)
    junk: list[Any] = [{}, None, "junk", 1.5, [None], [[]], [{"read": [0, 0]}], [-1]]
    for key in payload:
        for item in junk:
            for data in ({k: v for k, v in payload.items() if k != key}, {**payload, key: item}):
                files.save(tmp_path / "file", kind, data, force=True)
                with contextlib.suppress(FileError):  # some junk is valid; nothing else may be raised
                    LOADERS[kind](tmp_path / "file")
    for item in junk[:4]:
        files.save(tmp_path / "file", kind, item, force=True)
        with pytest.raises(FileError, match=f"holds no valid {kind}"):
            LOADERS[kind](tmp_path / "file")


def test_dangling_references_in_a_graph(tmp_path: Path) -> None:
    graph = CASE.graph
    last = len(graph.values)
    read = Op("op", MADE_UP, (Read(last),))
    view = Op("op", MADE_UP, (Read(graph.inputs[0].value, 99),))
    twice = Op("op", MADE_UP, outputs=(graph.inputs[0].value,))
    nowhere = Op("op", MADE_UP, outputs=(last,))
    for op, words in ((read, "reads %"), (view, "view 99"), (twice, "exists already"), (nowhere, "no entry")):
        dataclasses.replace(graph, ops=(*graph.ops, op)).save(tmp_path / "graph", force=True)
        with pytest.raises(FileError, match=words):
            Graph.load(tmp_path / "graph")
    dataclasses.replace(graph, inputs=(Input(last, ()),)).save(tmp_path / "graph", force=True)
    with pytest.raises(FileError, match="inputs"):
        Graph.load(tmp_path / "graph")
    dataclasses.replace(graph, ops=()).save(tmp_path / "graph", force=True)
    with pytest.raises(FileError, match="never made"):
        Graph.load(tmp_path / "graph")


def test_the_fingerprint_is_of_the_arithmetic() -> None:
    graph = CASE.graph
    moved = tuple(dataclasses.replace(op, source="elsewhere.py:1") for op in graph.ops)
    assert dataclasses.replace(graph, ops=moved, notes=("other",)).fingerprint == graph.fingerprint
    for changed in (
        dataclasses.replace(graph, ops=(*graph.ops[:-1], dataclasses.replace(graph.ops[-1], target="other"))),
        dataclasses.replace(graph, device="cuda"),
        dataclasses.replace(graph, outputs=graph.outputs[:-1]),
    ):
        assert changed.fingerprint != graph.fingerprint


@given(cases())
@settings(max_examples=100, derandomize=True, deadline=None, database=None)
def test_a_graph_and_a_program_can_be_read(case: Case) -> None:
    graph, program = case.graph, case.program
    lines = str(graph).split("\n")
    assert lines[0] == f"graph of {len(graph.ops)} ops and {len(graph.values)} values"
    assert len(lines) == 4 + len(graph.inputs) + len(graph.ops) + len(graph.outputs)
    for index, op in enumerate(graph.ops):
        line = lines[3 + len(graph.inputs) + index]
        assert line.startswith(f"  {op.name}: ")
        assert {op.target in line, op.source in line} == {True}
        assert all(f"%{value}" in line for value in op.reads + op.makes)
    shown = program.show(graph).split("\n") if program.instructions else []
    assert len(shown) == len(program.instructions)
    for number, row in enumerate(program.instructions):
        around = program.show(graph, around=number).split("\n")
        assert 1 <= len(around) <= 7
        assert [line for line in around if line.startswith(">")] == [">" + shown[number][1:]]
        if isinstance(row, Run):
            assert (" again " in shown[number]) == row.again
        else:
            assert graph.values[row.value].name in shown[number]


def test_how_a_program_looks() -> None:
    graph = dataclasses.replace(CASE.graph, ops=CASE.graph.ops[:1])
    first = Run(0, (64, -1), ((1, 0),), again=True)
    text = Program(graph.fingerprint, (first,)).show(graph)
    assert text == f"  0 run again {graph.show_op(0)} at 64, outside, %1 over %0"


def test_costs_at_their_word() -> None:
    costs = declared(CASE.graph)
    assert costs.nbytes == tuple(value.nbytes for value in CASE.graph.values)
    assert str(costs).startswith(f"costs of graph {CASE.graph.fingerprint[:12]}, roofline on unit: 6 ops, 6 s")
