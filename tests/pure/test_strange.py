"""Names, numbers and surroundings that nobody expects: each is an answer in words with a next step, or simply works."""

from __future__ import annotations

import ctypes
import errno
import os
import tempfile
from pathlib import Path
from typing import Any, NoReturn

import pytest
from graphs import make_case

from lowtide import files, native
from lowtide.budget import read_budget
from lowtide.errors import FileError, LowtideError, UsageError
from lowtide.files import cache as caching
from lowtide.graph import Graph

GRAPH = make_case(3, 1).graph
LONG = "\N{CJK UNIFIED IDEOGRAPH-6F22}" * 80  # 240 bytes, of the 255 that a name may have


@pytest.fixture(autouse=True)
def quick_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small files need not reach the disk."""
    monkeypatch.setattr(os, "fsync", lambda file: None)


@pytest.mark.parametrize("name", [LONG, "x" * 255, "a\nb", " ", "-", "\udcff\udcfe"])
def test_a_name_that_the_system_takes_is_taken(tmp_path: Path, name: str) -> None:
    GRAPH.save(tmp_path / name)
    assert Graph.load(tmp_path / name) == GRAPH
    assert os.listdir(tmp_path) == [name]


@pytest.mark.parametrize("name", ["a\0b", "x" * 256, "\ud800", "", ".", "..", "/", "folder", "file/below"])
def test_a_name_that_the_system_does_not_take_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("x")
    for refused in (lambda: GRAPH.save(name, force=True), lambda: Graph.load(name)):
        with pytest.raises(FileError) as caught:
            refused()
        assert caught.value.hint
        str(caught.value).encode()
    assert sorted(os.listdir(tmp_path)) == ["file", "folder"]


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_what_is_no_number_is_not_saved(tmp_path: Path, number: float) -> None:
    with pytest.raises(FileError, match="a number in it that is none"):
        files.save(tmp_path / "costs", "costs", {"seconds": number})
    assert os.listdir(tmp_path) == []


CONTENTS = [b"", b"\xff\xfex\0", b"\xef\xbb\xbf{}\n{}", b"\0" * 100, b'{"lowtide":"g\\nh","version":1,"sha256":"x"}\n1']


@pytest.mark.parametrize("content", CONTENTS)
def test_a_file_of_something_else_says_what_to_do(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "graph").write_bytes(content)
    with pytest.raises(FileError) as caught:
        Graph.load(tmp_path / "graph")
    assert caught.value.hint


BUDGETS: list[Any] = ["9" * 400 + "GiB", "9" * 5000, "9" * 400 + "%", "9" * 30 + "%", 10**30, 10**5000, -(10**5000)]


@pytest.mark.parametrize("budget", BUDGETS, ids=range(len(BUDGETS)))
def test_an_endless_budget_is_refused_in_a_line(budget: Any) -> None:
    with pytest.raises(UsageError) as caught:
        read_budget(budget, persistent=100, eager_peak=1000)
    assert len(str(caught.value)) < 300


def test_a_budget_is_taken_to_the_byte() -> None:
    assert read_budget("9007199254740993", persistent=0, eager_peak=0) == 2**53 + 1


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "one.cpp"
    path.write_text('extern "C" int one() { return 1; }\n')
    monkeypatch.setenv("LOWTIDE_CACHE", str(tmp_path / "cache"))
    return path


def one(source: Path) -> int:
    return int(native.library(source, {"one": ([], ctypes.c_int)}, what="the test").one())


@pytest.mark.parametrize("command", ['g++ "', "/", "/bin/true", "/bin/false", "\n'", "/dev/null"])
def test_a_compiler_that_is_none(source: Path, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    monkeypatch.setenv("CXX", command)
    with pytest.raises(native.NativeUnavailable) as caught:
        one(source)
    assert caught.value.hint


def no_room(*_: object, **__: object) -> NoReturn:
    raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found")


def test_no_room_for_temporary_files(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container that can write to its cache folder only."""
    monkeypatch.setattr(tempfile, "gettempdir", no_room)
    assert one(source) == 1
    assert one(source) == 1
    monkeypatch.setenv("LOWTIDE_CACHE", "/proc/nowhere")
    caching._of_this_process.cache_clear()
    with pytest.raises(LowtideError) as caught:
        one(source)
    assert "LOWTIDE_CACHE" in str(caught.value.hint)
