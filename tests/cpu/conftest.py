"""What all tests that train share: the compiled libraries, and one process in which ops are measured."""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Before torch: on machines that announce AMX and lack it, products of bfloat16 would end the process.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

import pytest
import torch

from lowtide import allocator, ending, files
from lowtide.allocator.arena import POOL
from lowtide.kernels import own
from lowtide.watch import quick, tensors

measuring = importlib.import_module("lowtide.measure")  # the room; lowtide.measure is its function
PLANNER = ("exact", "layout", "problem")


@pytest.fixture(scope="session", autouse=True)
def libraries() -> None:
    """Load them before a test names an empty cache folder, in which each would be compiled again."""
    allocator.available()
    own._library()
    quick._library()
    tensors.library()
    ending._undisturbed()
    for name in PLANNER:
        importlib.import_module(f"lowtide.plan.{name}").library()


@pytest.fixture(autouse=True)
def undisturbed(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a slow machine commands say in lines what takes long; tests that look at what is said are not about that."""
    monkeypatch.setattr("lowtide.progress.SILENCE", 1e6)


@pytest.fixture(autouse=True)
def unlocked() -> Iterator[None]:
    """What a trace raises between the body of a `with` and its end, where no signal can, leaves a lock taken."""
    yield
    while POOL._lock._is_owned():  # type: ignore[attr-defined]
        POOL._lock.release()


@pytest.fixture(scope="session")
def stocked(libraries: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache folder with the compiled libraries, and with what this session measures; none of it is older."""
    folder = tmp_path_factory.mktemp("stocked")
    for file in files.cache_folder().iterdir():
        if file.is_file() and not file.name.startswith("costs-"):
            shutil.copy2(file, folder)
    return folder


@pytest.fixture(scope="session", autouse=True)
def one_measuring_process(libraries: None) -> Iterator[None]:
    """Measure the ops of all tests in one process: to start one takes seconds."""
    start, answer, end = measuring._start, measuring._answer, measuring._end
    usual = os.environ.get("LOWTIDE_CACHE")
    idle: dict[int, subprocess.Popen[str]] = {}  # by their threads
    ended: set[int] = set()

    def start_or_take() -> subprocess.Popen[str]:
        if (process := idle.pop(torch.get_num_threads(), None)) is not None:
            return process
        with pytest.MonkeyPatch.context() as patch:
            patch.delenv("LOWTIDE_CACHE", raising=False)
            if usual is not None:
                patch.setenv("LOWTIDE_CACHE", usual)
            return start()

    def watched_answer(process: subprocess.Popen[str], cut: dict[str, Any]) -> dict[str, Any] | None:
        found = answer(process, cut)
        if found is None:
            ended.add(process.pid)
        return found

    def end_or_keep(process: subprocess.Popen[str]) -> int:
        threads = int(process.args[-1])
        if process.pid in ended or process.poll() is not None or threads in idle:
            return end(process)
        idle[threads] = process
        return 0

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measuring, "_start", start_or_take)
        patch.setattr(measuring, "_answer", watched_answer)
        patch.setattr(measuring, "_end", end_or_keep)
        yield
    for process in idle.values():
        end(process)
