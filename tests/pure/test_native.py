"""From C++ to a loaded library: where there is no compiler, and where the cache can't be written."""

from __future__ import annotations

import ctypes
import os
import stat
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

from lowtide import native
from lowtide.errors import LowtideWarning
from lowtide.files import cache as caching

SIGNATURES: native.Signatures = {"twice": ([ctypes.c_int64], ctypes.c_int64)}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "twice.cpp"
    path.write_text('#include <cstdint>\nextern "C" int64_t twice(int64_t number) { return 2 * number; }\n')
    return path


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "cache"
    monkeypatch.setenv("LOWTIDE_CACHE", str(path))
    (tmp_path / "private").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "private"))
    return path


def twice(source: Path) -> int:
    return int(native.library(source, SIGNATURES, what="the test").twice(21))


def test_a_library_is_compiled_once(source: Path, cache: Path) -> None:
    assert twice(source) == 42
    (made,) = cache.iterdir()
    before = made.stat().st_mtime_ns
    assert twice(source) == 42
    assert [path.stat().st_mtime_ns for path in cache.iterdir()] == [before]


@pytest.mark.parametrize("kind", ["a file", "read-only"])
def test_where_the_cache_cannot_be_written_the_library_is_compiled_elsewhere(
    source: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    if kind == "a file":
        cache.write_text("which stops root as well")
    else:
        cache.mkdir(mode=0o555)
        if os.access(cache, os.W_OK):
            pytest.skip("root writes where it likes")
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    assert twice(source) == 42
    (private,) = temporary.iterdir()
    assert stat.S_IMODE(private.stat().st_mode) == 0o700
    (made,) = private.iterdir()
    before = made.stat().st_mtime_ns
    assert twice(source) == 42
    assert [path.stat().st_mtime_ns for path in private.iterdir()] == [before]
    assert cache.is_file() or list(cache.iterdir()) == []


def test_without_a_compiler_the_error_says_what_was_tried(
    source: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(cache))
    with pytest.raises(native.NativeUnavailable, match=r"none of g\+\+, c\+\+, clang\+\+") as caught:
        twice(source)
    assert caught.value.hint == native.INSTALL
    monkeypatch.setenv("CXX", "nowhere -O1")
    with pytest.raises(native.NativeUnavailable, match=r"\$CXX names none: nowhere"):
        twice(source)
    assert list(cache.iterdir()) == []


def test_a_warm_cache_needs_no_compiler(source: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert twice(source) == 42
    monkeypatch.setenv("CXX", "nowhere")
    assert twice(source) == 42
    source.write_text(source.read_text().replace("2 *", "3 *"))
    with pytest.raises(native.NativeUnavailable, match="names none"):
        twice(source)


LOAD = """
import ctypes, os, sys
from pathlib import Path
from lowtide import native
signatures = {"twice": ([ctypes.c_int64], ctypes.c_int64)}
for line in sys.stdin:  # each time a process of its own, which has opened nothing yet
    process = os.fork()
    if not process:
        print(native.library(Path(sys.argv[1]), signatures, what="the test").twice(21), flush=True)
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    if status:
        print(status, flush=True)
"""


def test_a_library_that_is_cut_or_changed_is_never_opened(source: Path, cache: Path) -> None:
    """Cut short, it would end the process with a bus error."""
    with subprocess.Popen(
        [sys.executable, "-c", LOAD, str(source)],
        env={**os.environ, "TMPDIR": tempfile.gettempdir()},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        bufsize=1,
    ) as loader:
        assert loader.stdin is not None
        assert loader.stdout is not None

        def said() -> str:
            print("again", file=loader.stdin, flush=True)
            return loader.stdout.readline()

        assert said() == "42\n"
        (made,) = cache.iterdir()
        whole = made.read_bytes()
        changes = [whole[: len(whole) * part // 5] for part in range(5)]
        changes += [
            whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :] for place in (20, 5000, len(whole) - 1)
        ]
        for content in changes:
            made.write_bytes(content)
            assert said() == "42\n"
            assert [path.read_bytes() for path in cache.iterdir()] == [whole]
        assert loader.communicate(timeout=120) == ("", "")
        assert loader.returncode == 0


def test_a_header_that_changes_makes_another_library(source: Path, cache: Path, tmp_path: Path) -> None:
    (tmp_path / "deeper").mkdir()
    (tmp_path / "factor.hpp").write_text('#pragma once\n#include "deeper/number.hpp"\n')
    (tmp_path / "deeper" / "number.hpp").write_text('#include "../factor.hpp"\n#define FACTOR 2\n')
    source.write_text('#include "factor.hpp"\n' + source.read_text().replace("2 *", "FACTOR *"))
    assert twice(source) == 42
    (tmp_path / "deeper" / "number.hpp").write_text("#define FACTOR 3\n")
    assert twice(source) == 63


@pytest.mark.parametrize("mode", [0o770, 0o702, 0o777])
def test_a_folder_that_others_may_write_to_is_not_believed(
    source: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int
) -> None:
    assert twice(source) == 42
    (planted,) = cache.iterdir()
    cache.chmod(mode)
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    opened: list[str] = []
    real = ctypes.CDLL
    monkeypatch.setattr(ctypes, "CDLL", lambda path: opened.append(path) or real(path))
    with pytest.warns(LowtideWarning, match=rf"others may write to it \(mode {mode:o}\)"):
        assert twice(source) == 42
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # once is enough
        assert twice(source) == 42
    assert str(planted) not in opened
    assert all(path.startswith(str(temporary)) for path in opened)


def test_a_folder_of_another_user_is_not_believed(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.mkdir(mode=0o700)
    mine = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: mine + 1)
    with pytest.warns(LowtideWarning, match=f"it belongs to user {mine}"):
        assert caching.own_folder() != cache


def test_symbolic_links_are_not_followed(
    source: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert twice(source) == 42
    (made,) = cache.iterdir()
    elsewhere = tmp_path / "elsewhere"
    made.rename(elsewhere)
    made.symlink_to(elsewhere)
    assert twice(source) == 42
    assert not made.is_symlink()
    link = tmp_path / "link"
    link.symlink_to(cache)
    monkeypatch.setenv("LOWTIDE_CACHE", str(link))
    with pytest.warns(LowtideWarning, match="it is a symbolic link"):
        assert caching.own_folder() != link


def test_a_file_that_others_may_write_to_is_made_again(source: Path, cache: Path) -> None:
    assert twice(source) == 42
    (made,) = cache.iterdir()
    made.chmod(0o666)
    assert twice(source) == 42
    assert [stat.S_IMODE(path.stat().st_mode) for path in cache.iterdir()] == [0o600]


def test_a_full_disk_is_named(source: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "_run", _says("fatal error: error writing to /tmp/x.s: No space left on device"))
    with pytest.raises(native.NativeUnavailable, match="the disk is full") as caught:
        twice(source)
    assert "free some room" in str(caught.value.hint)
    assert list(cache.iterdir()) == []


def _says(words: str) -> Callable[..., subprocess.CompletedProcess[str]]:
    def run(command: list[str], workshop: Path | None = None) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 0 if workshop is None else 1, "version", words)

    return run


def test_the_oldest_go_when_there_is_too_much(cache: Path) -> None:
    cache.mkdir(mode=0o700)
    for age in range(20):
        for name in (f"old-{age:032x}.so", f"costs-{age:016x}.json"):
            (cache / name).write_bytes(b"x" * 1000)
            os.utime(cache / name, (age, age))
    (cache / ".build-left").mkdir()
    (cache / ".build-left" / "made.so").write_bytes(b"x")
    os.utime(cache / ".build-left", (0, 0))
    (cache / "data").mkdir()
    (cache / "precious.txt").write_text("not ours")
    new = caching.keep(cache, "old-0123456789abcdef-", ".so", b"y" * 1000)
    left = {path.name for path in cache.iterdir()}
    assert {name for name in left if name.startswith("old")} == {new.name, *(f"old-{a:032x}.so" for a in range(13, 20))}
    assert len([name for name in left if name.startswith("costs")]) == caching.BUILDS
    assert {"data", "precious.txt"} <= left
    assert ".build-left" not in left
    caching.trim(cache, spare=new, limit=5000)
    assert sum(path.stat().st_size for path in cache.iterdir() if path.suffix in (".so", ".json")) <= 5000
    assert new.exists()


def test_a_relative_cache_home_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOWTIDE_CACHE", raising=False)
    for value in ("here", ".", ""):
        monkeypatch.setenv("XDG_CACHE_HOME", value)
        assert caching.cache_folder() == Path.home() / ".cache" / "lowtide"
    monkeypatch.setenv("LOWTIDE_CACHE", "here")
    assert caching.cache_folder() == Path.cwd() / "here"


def test_a_new_cache_folder_is_its_users_alone(source: Path, cache: Path) -> None:
    before = os.umask(0)
    try:
        assert twice(source) == 42
    finally:
        os.umask(before)
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700
