"""A lack of memory at any allocation, and Ctrl-C at any time: eager's bits, or an error that says what changed."""

from __future__ import annotations

import copy
import ctypes
import gc
import inspect
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from faulty import Checkpoint, differing, everything, recipe, step

import lowtide
from lowtide import allocator
from lowtide.allocator.arena import POOL

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
FEW, MANY = 8, 200  # allocations that fail, one after the other
TIMES, MORE_TIMES = 10, 100
SECONDS = 1800


@pytest.fixture(scope="module")
def preload(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("g++")
    if compiler is None or not sys.platform.startswith("linux"):
        pytest.skip("allocations are made to fail with g++ on Linux")
    library = tmp_path_factory.mktemp("faults") / "faults.so"
    source = str(HERE / "faults.cpp")
    subprocess.run([compiler, "-shared", "-fPIC", "-std=c++20", "-O1", source, "-o", str(library), "-ldl"], check=True)
    return library


def fail_each(preload: Path, whose: str, first: int, last: int) -> list[str]:
    """What came of it when each of these allocations failed, in turn."""
    environment = os.environ | {"LD_PRELOAD": str(preload), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "error", str(HERE / "faulty.py"), str(preload), whose, str(first), str(last)]
    found = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False, cwd=HERE
    )
    assert found.returncode == 0, found.stdout + found.stderr[-4000:]
    assert "Exception ignored" not in found.stderr, found.stderr[-4000:]
    return found.stdout.splitlines()


@pytest.mark.parametrize("whose", ["torch", "ours"])
def test_the_first_allocations_fail(preload: Path, whose: str) -> None:
    lines = fail_each(preload, whose, 0, FEW)
    assert len(lines) == 5
    assert all("Error" in line for line in lines), lines


@pytest.mark.long
@pytest.mark.parametrize("whose", ["torch", "ours"])
def test_any_allocation_fails(preload: Path, whose: str) -> None:
    assert len(fail_each(preload, whose, FEW, MANY)) == 5


# Ctrl-C


@pytest.fixture
def alarm() -> Iterator[None]:
    """Let the alarm clock be a Ctrl-C: it comes to the microsecond, and also to processes in the background."""
    usual = signal.signal(signal.SIGALRM, signal.default_int_handler)
    yield
    signal.signal(signal.SIGALRM, usual)


def interrupt_after(seconds: float, run: Callable[[], object]) -> bool:
    """Run, with an interruption after so many seconds; whether it came while it ran."""
    try:
        try:
            signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-6))
            run()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    except KeyboardInterrupt:
        return True
    return False


def doors(door: str) -> tuple[Callable[..., Any], Any, Any, Any]:
    model, optimizer, example = recipe()
    if door == "fit":
        train: Callable[..., Any] = lowtide.fit(
            step, model, optimizer, example=example, budget="3MiB", time_limit=0.2, costs="roofline"
        )
    else:
        net = lowtide.wrap(model, example=example[:1], budget="3MiB", time_limit=0.2)

        def train(*batch: Any) -> Any:
            return step(net, optimizer, *batch)

    return train, model, optimizer, example


def nothing_left() -> bool:
    if allocator.installed():
        gc.collect()
    if all(arena.blocks == 0 for arena in POOL._idle):
        POOL.empty()
    return not allocator.installed()


def interrupt_often(door: str, times: int, seed: int) -> int:
    """Interrupt so many steps at random times, each from one checkpoint; how many heard it."""
    train, model, optimizer, example = doors(door)
    twin, twins_optimizer, _ = recipe()
    torch.manual_seed(1)
    step(twin, twins_optimizer, *example)
    for _ in range(3):
        train(*example)
    start = Checkpoint(twin, twins_optimizer)
    start.model, start.optimizer = model, optimizer
    loss = step(twin, twins_optimizer, *example).detach()
    expected = everything(twin, twins_optimizer)
    start.load()
    began = time.perf_counter()
    train(*example)
    took = time.perf_counter() - began
    chance, came = random.Random(seed), 0
    for when in range(times):
        start.load()
        came += interrupt_after(chance.random() * took, lambda: train(*example))
        assert nothing_left(), when
        assert all(arena.blocks == 0 for arena in POOL._idle), when
        start.load()
        assert torch.equal(train(*example).detach(), loss), when
        assert differing(everything(model, optimizer), expected) == set(), when
    return came


@pytest.mark.parametrize("door", ["fit", "wrap"])
def test_ctrl_c_at_some_times(alarm: None, door: str) -> None:
    assert interrupt_often(door, TIMES, 0) > 0


@pytest.mark.long
@pytest.mark.parametrize("door", ["fit", "wrap"])
def test_ctrl_c_at_many_times(alarm: None, door: str) -> None:
    assert interrupt_often(door, MORE_TIMES, 1) > MORE_TIMES // 4


AROUND = (
    "lowtide.execute.halves",
    "lowtide.execute.call",
    "lowtide.execute.arrangement",
    "lowtide.execute.lessons",
    "lowtide.allocator.arena",
    "lowtide.ending",
)


def interrupted_at(line: int, run: Callable[[], object]) -> tuple[bool, bool]:
    """Run, with an interruption at this line, counted from the first, of the code around a half.

    Whether the line was reached, and whether the interruption was heard.
    """
    files = {sys.modules[name].__file__ for name in AROUND}
    lines, heard = 0, False

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal lines
        if frame.f_code.co_filename not in files:
            return None
        lines += event == "line"
        if event == "line" and lines == line:
            raise KeyboardInterrupt
        return trace

    usual = sys.gettrace()
    sys.settrace(trace)
    try:
        run()
        gc.isenabled()  # a call, after which Python listens
    except KeyboardInterrupt:
        heard = True
    finally:
        sys.settrace(usual)
    return lines >= line, heard


def test_an_interruption_at_any_line_around_a_half_is_heard_and_leaves_nothing_behind() -> None:
    train, model, optimizer, example = doors("wrap")
    for _ in range(3):
        train(*example)
    held = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    line = 0
    reached = True
    while reached:
        line += 1
        reached, heard = interrupted_at(line, lambda: train(*example))
        assert heard == reached, line
        assert nothing_left(), line
    assert line > 60
    model.load_state_dict(held[0])
    optimizer.load_state_dict(held[1])
    train(*example)


def test_an_interruption_at_any_line_is_heard_where_a_forward_has_no_backward() -> None:
    model, _, example = recipe()
    net = lowtide.wrap(model, example=example[:1], budget="3MiB", time_limit=0.2)
    for _ in range(3):
        net(example[0])
    line = 0
    reached = True
    while reached:
        line += 1
        reached, heard = interrupted_at(line, lambda: net(example[0]))
        assert heard == reached, line
        assert nothing_left(), line
        assert all(arena.blocks == 0 for arena in POOL._idle), line
    assert line > 40


class Something:
    """Something that a weak reference can be had of."""


@pytest.mark.parametrize("done", [False, True])
def test_a_ctrl_c_before_a_half_is_gone_is_heard_after_it(done: bool) -> None:
    """C++ frees the half, and no code of Python's runs between the signal and that."""
    train, _, _, example = doors("wrap")
    for _ in range(3):
        train(*example)
    fitted = inspect.getclosurevars(train).nonlocals["net"].fitted
    half = fitted((example[0],), {})
    if done:
        half.go_on([torch.zeros_like(half.outputs[0])])
        assert half.done
    signal_it = ctypes.PyDLL(None).PyErr_SetInterrupt
    signal_it.argtypes, signal_it.restype = [ctypes.py_object], None
    first = Something()
    watch = weakref.ref(first, signal_it)
    both = [half, first]  # freed from the last on
    del half, first
    usual = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            both.clear()
            gc.isenabled()
    finally:
        signal.signal(signal.SIGINT, usual)
    assert watch() is None
    assert nothing_left()
