"""Offload to the disk at its limits: long runs, a small disk, a process that is killed, and how little is enough."""

from __future__ import annotations

import dataclasses
import gc
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from twins import assert_same, everything

import lowtide
from lowtide import models
from lowtide.bench import beyond, limited
from lowtide.bench.offload import SIDE, Case, built
from lowtide.costs import Lane
from lowtide.errors import PlaceError
from lowtide.measure import roofline
from lowtide.peaks import resident
from lowtide.plan import least, plan
from lowtide.rewrite import EXACT, apply, leaving_bytes, offload
from lowtide.rewrites import exactness

TARGET = "gpt:layers=4,width=256,heads=4,context=64,vocabulary=4096,batch=2,optimizer=adam"
BEYOND = "gpt:layers=4,width=512,heads=4,context=32,vocabulary=4096,batch=2,optimizer=adam"  # more than the slack
GROWTH = 8 * 2**20  # bytes: what the heap of a long run may have more in the end
STAGING = 2**21
LANES = (Lane("disk", "out", 6e-5, 3.4e9, 0.38), Lane("disk", "in", 1e-4, 1.3e9, 0.17))

KILLED = """
import sys
import torch
import lowtide
from lowtide import models
from lowtide.device import disk

step, model, optimizer, example = models.build(sys.argv[1])
budget = sum(p.nbytes for p in model.parameters()) * 3 // 2 + 8 * 10**6
train = lowtide.fit(step, model, optimizer, example=example, budget=budget, costs="roofline", time_limit=0.3,
                    offload="disk", offload_dir=sys.argv[2])
train(*example)
copy = disk._PIECEWISE["out", True], disk._PIECEWISE["out", False]

def stopping(of):
    def write(job, file, start):
        print("in a step", flush=True)
        of(job, file, start)
        sys.stdin.read()
    return write

disk._PIECEWISE["out", True], disk._PIECEWISE["out", False] = map(stopping, copy)
train(*example)
"""


def fitted(folder: Path | None = None, **options: Any) -> tuple[Any, Any, Any, Any, tuple[Any, ...]]:
    """A gpt whose budget is half of its parameters and Adam state, and a little for what its ops make."""
    step, model, optimizer, example = models.build(TARGET)
    budget = sum(parameter.nbytes for parameter in model.parameters()) * 3 // 2 + 8 * 10**6
    train = lowtide.fit(
        step,
        model,
        optimizer,
        example=example,
        budget=budget,
        costs="roofline",
        time_limit=0.3,
        offload="disk",
        offload_dir=folder,
        **options,
    )
    return train, step, model, optimizer, example


def open_files() -> list[tuple[str, int]]:
    """The nameless files of this process, with their lengths."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        path = f"/proc/self/fd/{name}"
        try:
            if os.readlink(path).endswith("(deleted)"):
                found.append((os.readlink(path), os.stat(path).st_size))
        except OSError:
            continue
    return found


def test_two_hundred_steps_hold_no_more_and_are_eagers() -> None:
    train, step, model, optimizer, example = fitted()
    _, mirror, mirrored, _ = models.build(TARGET)
    torch.manual_seed(1)
    for _ in range(20):
        train(*example)
    gc.collect()
    before, files, peak = resident.now(), sorted(open_files()), train.peak
    for _ in range(180):
        train(*example)
    gc.collect()
    after = resident.now()
    assert sorted(open_files()) == files
    assert files
    assert train.peak == peak
    assert peak is not None
    assert peak <= train.plan.budget
    assert train.mismatches == 0
    assert before is not None
    assert after is not None
    assert after - before <= GROWTH
    torch.manual_seed(1)
    for _ in range(200):
        step(mirror, mirrored, *example)
    assert_same(everything(mirror, mirrored), everything(model, optimizer))


def test_nothing_is_lost_where_state_elsewhere_is_enough() -> None:
    train, step, model, optimizer, example = fitted(allow="lossy")
    assert exactness(train.plan.rewrites) == "bitwise"
    _, mirror, mirrored, _ = models.build(TARGET)
    torch.manual_seed(1)
    for _ in range(2):
        train(*example)
    torch.manual_seed(1)
    for _ in range(2):
        step(mirror, mirrored, *example)
    assert_same(everything(mirror, mirrored), everything(model, optimizer))


def test_a_process_killed_in_the_middle_of_a_step_leaves_no_file(tmp_path: Path) -> None:
    free = os.statvfs(tmp_path).f_bfree
    command = [sys.executable, "-c", KILLED, TARGET, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "in a step\n"
        os.kill(process.pid, signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
    assert os.listdir(tmp_path) == []
    assert free - os.statvfs(tmp_path).f_bfree < 10**9  # others write there, too


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system with less than 60 MB that is no memory."""
    image, folder = tmp_path / "image", tmp_path / "disk"
    with image.open("wb") as file:
        file.truncate(60 * 2**20)
    folder.mkdir()
    try:
        subprocess.run(["mkfs.ext4", "-q", "-F", str(image)], check=True, capture_output=True)
        subprocess.run(["mount", "-o", "loop", str(image), str(folder)], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no file system can be mounted here: {error}")
    try:
        yield folder
    finally:
        gc.collect()
        subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_small_disk_is_a_clear_error_and_the_model_is_unharmed(small_disk: Path) -> None:
    filled = small_disk / "filled"
    with filled.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, 30 * 10**6)
    train, step, model, optimizer, example = fitted(small_disk, offload_budget="1GiB")
    before = {name: item.clone() for name, item in model.state_dict().items()}
    with pytest.raises(PlaceError, match=r"No space left on device; [\d,]+ bytes are free") as caught:
        train(*example)
    assert "choose another folder" in str(caught.value.hint)
    assert all(torch.equal(item, before[name]) for name, item in model.state_dict().items())
    assert sorted(os.listdir(small_disk)) == ["filled", "lost+found"]
    filled.unlink()
    _, mirror, mirrored, _ = models.build(TARGET)
    torch.manual_seed(1)
    step(mirror, mirrored, *example)
    torch.manual_seed(1)
    train(*example)  # there is room now
    assert_same(everything(mirror, mirrored), everything(model, optimizer))


def test_what_fits_a_small_disk_is_what_goes_there(small_disk: Path) -> None:
    train, step, model, optimizer, example = fitted(small_disk)
    torch.manual_seed(1)
    train(*example)
    _, mirror, mirrored, _ = models.build(TARGET)
    torch.manual_seed(1)
    step(mirror, mirrored, *example)
    assert_same(everything(mirror, mirrored), everything(model, optimizer))


@pytest.mark.parametrize("target", ["bert", pytest.param("hf-gpt2", marks=pytest.mark.long)])
def test_half_of_what_stays_is_enough(target: str) -> None:
    captured = lowtide.capture(*models.build(target))
    homes = sum(leaving_bytes(captured.graph))
    graph = apply(captured.graph, (*EXACT, *offload("disk", homes=homes))).graph
    costs = dataclasses.replace(roofline(graph), lanes=LANES, staging=STAGING)
    found = least(graph, costs)
    print(f"\n{target}: {costs.persistent(graph):,} bytes persist, {found.peak:,} are enough")
    assert found.peak <= costs.persistent(graph) / 2


def test_a_plan_with_copies_that_fits_has_an_arena() -> None:
    case = Case("elementwise", 4, 1)
    step, model, example, largest = built(case)
    captured = lowtide.capture(step, model, None, example)
    graph = apply(captured.graph, (*EXACT, *offload("disk"))).graph
    costs = dataclasses.replace(roofline(graph), lanes=LANES, staging=STAGING)
    budget = costs.persistent(graph) + largest + STAGING + case.nbytes // 4 + 2 * SIDE * SIDE * 4
    found = plan(graph, costs, budget, method="offload", time_limit=0.1)
    assert found.program.arena > 0


@pytest.mark.long
def test_half_of_what_persists_is_enough_where_the_system_gives_no_more() -> None:
    if not limited.enforced():
        pytest.skip("this system does not hold processes to a limit on their data")
    found = beyond.beyond(BEYOND, steps=3, time_limit=0.5)
    print(found)
    assert found.budget == found.persistent // 2
    assert found.fitted == 3 > found.eager, found.fitted_end
    assert found.equal
    assert 0 < found.resident <= found.budget + found.slack
    assert found.ok
