"""The n-th write, rename, sync or dlopen fails: what was there stays, what is there is whole, nothing else is left."""

from __future__ import annotations

import _ctypes
import ctypes
import errno
import os
import shlex
import shutil
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from faults import failing, outcome
from graphs import make_case

from lowtide import native
from lowtide.costs import Costs
from lowtide.errors import FileError, LowtideError
from lowtide.graph import Graph
from lowtide.program import Plan

CASES = [make_case(3, seed) for seed in range(4)]
PLANS = [Plan(case.program, None, 9, 1.5, 1.0, 1.25, 8, 0.5) for case in CASES]
SIGNATURES: native.Signatures = {"twice": ([ctypes.c_int64], ctypes.c_int64)}
FEW, MANY = range(1, 9), range(1, 201)
places = pytest.mark.parametrize(
    "nths", [pytest.param(FEW, id="few"), pytest.param(MANY, id="many", marks=pytest.mark.long)]
)


def saves(folder: Path, count: int) -> list[tuple[Path, Callable[[], None], Callable[[], Any]]]:
    """As many saves, again and again over the same files: path, save, and a load that must give what was saved."""
    made: list[tuple[Path, Callable[[], None], Callable[[], Any]]] = []
    for number in range(count):
        case, plan = CASES[number % 4], PLANS[number % 4]
        graph, costs, promise = folder / "graph", folder / f"costs{number % 4}", folder / f"plan{number % 4}"
        made.append((graph, lambda p=graph, c=case: c.graph.save(p, force=True), lambda p=graph: Graph.load(p)))
        made.append(
            (costs, lambda p=costs, c=case: c.costs.save(p, force=True), lambda p=costs, c=case: Costs.load(p, c.graph))
        )
        made.append(
            (promise, lambda p=promise, x=plan: x.save(p, force=True), lambda p=promise, c=case: Plan.load(p, c.graph))
        )
    return made


@places
@pytest.mark.parametrize("name", ["write", "replace", "fsync", "open", "close"])
def test_a_noun_is_saved_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, nths: range
) -> None:
    if name != "fsync":
        monkeypatch.setattr(os, "fsync", lambda file: None)
    for nth in nths:
        folder = tmp_path / str(nth)
        folder.mkdir()
        failed = 0
        with failing(os, name, nth) as count:
            for path, save, load in saves(folder, 1 + nth // 3):
                before = path.read_bytes() if path.exists() else None
                error = outcome(save, FileError)
                if error is not None:
                    failed += 1
                    assert "No space left on device" in str(error)
                    assert "free some room" in str(error)
                    assert (path.read_bytes() if path.exists() else None) in (before, whole(save, path))
                else:
                    load()
        assert count.calls >= nth
        assert failed <= 1
        assert [path.name for path in folder.iterdir() if path.name.startswith(".")] == []


def whole(save: Callable[[], None], path: Path) -> bytes:
    """What the file is after the save, without harm to what is there."""
    kept = path.read_bytes() if path.exists() else None
    save()
    made = path.read_bytes()
    path.unlink() if kept is None else path.write_bytes(kept)
    return made


def test_half_a_write_is_gone_on_with(tmp_path: Path) -> None:
    with failing(os, "write", 1, half=True) as count:
        CASES[0].graph.save(tmp_path / "graph")
    assert count.calls == 2
    assert Graph.load(tmp_path / "graph") == CASES[0].graph


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A compiler that takes no time: it hands out a library that was made before."""
    source = tmp_path / "twice.cpp"
    source.write_text('#include <cstdint>\nextern "C" int64_t twice(int64_t number) { return 2 * number; }\n')
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))  # where nobody has left anything
    monkeypatch.setenv("LOWTIDE_CACHE", str(tmp_path / "first"))
    native.library(source, SIGNATURES, what="the test")
    (made,) = (tmp_path / "first").iterdir()
    script = tmp_path / "quick"
    script.write_text(
        "#!/bin/sh\nwhile [ $# -gt 0 ]; do\n"
        f'if [ "$1" = -o ]; then exec cp {shlex.quote(str(made))} "$2"; fi\nshift\ndone\n'
    )
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    return source


@pytest.fixture
def at_once(compiler: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same compiler, without a process of its own: that of thousands of builds would take minutes."""
    (made,) = (tmp_path / "first").iterdir()

    def run(command: list[str], workshop: Path | None = None) -> subprocess.CompletedProcess[str]:
        if workshop is not None:
            shutil.copyfile(made, command[command.index("-o") + 1])
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(native, "_run", run)


FAULTS: dict[str, tuple[Any, str, int]] = {
    "write": (os, "write", errno.ENOSPC),
    "rename": (os, "replace", errno.EIO),
    "sync": (os, "fsync", errno.EIO),
    "open": (os, "open", errno.ENOSPC),
    "dlopen": (ctypes, "CDLL", errno.ENOEXEC),
    "folder": (os, "mkdir", errno.EACCES),
    "list": (os, "listdir", errno.EIO),
}


def fails_at(nth: int, fault: str, compiler: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Load new libraries until the n-th call has failed, and some more."""
    module, name, code = FAULTS[fault]
    cache = tmp_path / f"cache{nth}"
    monkeypatch.setenv("LOWTIDE_CACHE", str(cache))
    made, more = 0, 2
    with failing(module, name, nth, code=code) as count:
        while more:
            made, more = made + 1, more - (count.calls >= nth)
            for _ in range(2):  # cold, then warm
                error = outcome(lambda d=(f"{nth} {made}",): load(compiler, d), LowtideError)
                assert error is None or str(error)
            assert made < nth + 4, f"{fault} is not what a build does"
    assert all(load(compiler, (f"{nth} {number}",)) == 42 for number in range(max(1, made - 4), made + 1))
    folders = [cache, *(tmp_path / "temporary").iterdir()]
    left = [path for folder in folders for path in folder.iterdir()]
    assert [path.name for path in left if path.name.startswith(".")] == []
    assert {stat.S_IMODE(folder.stat().st_mode) for folder in folders} == {0o700}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_library_is_loaded_or_the_error_says_why(
    compiler: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    for nth in FEW:
        fails_at(nth, fault, compiler, tmp_path, monkeypatch)


@pytest.mark.long
@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("fault", FAULTS)
def test_a_library_of_many_is_loaded_or_the_error_says_why(
    compiler: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    if fault != "sync":
        monkeypatch.setattr(os, "fsync", lambda file: None)
    for nth in MANY:
        fails_at(nth, fault, compiler, tmp_path, monkeypatch)


def load(source: Path, depends: tuple[str, ...]) -> int:
    """What the library says; it is closed again, since a process can map only so many."""
    opened = native.library(source, SIGNATURES, what="the test", depends=depends)
    try:
        return int(opened.twice(21))
    finally:
        _ctypes.dlclose(opened._handle)


def test_two_failures_in_a_row_are_an_error_that_names_them(
    compiler: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def full(*args: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(native.NativeUnavailable, match="the disk is full") as caught:
        load(compiler, ("never",))
    assert "compiler" not in str(caught.value.hint)
    folders = [tmp_path / "first", *(tmp_path / "temporary").iterdir()]
    assert all(not path.name.startswith(".") for folder in folders for path in folder.iterdir())
