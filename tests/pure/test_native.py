"""From C++ to a loaded library: where there is no compiler, and where the cache can't be written."""

from __future__ import annotations

import ctypes
import os
import tempfile
from pathlib import Path

import pytest

from lowtide import native

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
    assert list(temporary.iterdir()) == []
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
    assert not cache.exists()
