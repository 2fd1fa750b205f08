"""Values in a file: copies beside the computation give eager's bits, fail in words and leave nothing behind."""

from __future__ import annotations

import dataclasses
import errno
import gc
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from graphs import cases, lay_out, make_program
from hypothesis import given, settings
from late import LATE, LateStore, poisoned
from repeats import all_away_and_back, inputs_away_and_back
from twins import assert_exact, everything, same

import lowtide
from lowtide import device, models
from lowtide.bench.throttle import throttled
from lowtide.check import check
from lowtide.costs import declared
from lowtide.device import disk
from lowtide.device.disk import BLOCK, PIECE, STAGING, Disk
from lowtide.device.mounts import file_system, is_memory
from lowtide.errors import PlaceError, ProgramError, StepError, UsageError
from lowtide.execute.places import Places
from lowtide.execute.slots import slots, span
from lowtide.graph import Graph, Place
from lowtide.program import Copy, Free, Program, Wait

NAMES = ["mlp", "resnet", "gpt"]


def placed(graph: Graph, place: Place = "disk") -> Program:
    """Every activation away and back, in an arena."""
    return lay_out(Random(0), graph, declared(graph), all_away_and_back(graph, place))


def runner(name: str = "mlp", place: Place = "disk", **options: Any) -> tuple[Any, Any, tuple[Any, ...]]:
    """A step that sends its activations away, the model and the batch."""
    step, model, optimizer, example = models.build(models.SMALL[name])
    captured = lowtide.capture(step, model, optimizer, example)
    return lowtide.execute(captured, placed(captured.graph, place), **options), (model, optimizer), example


# ------------------------------------------------------------------------------------------------------------ the bits


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_steps_with_all_activations_in_a_file_are_eagers(
    name: str, direct: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[Disk] = []

    class Noted(Disk):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            opened.append(self)

    if not direct:
        monkeypatch.setattr(disk, "_try_direct", lambda file: False)
    where = dataclasses.replace(device.CPU, stores={"disk": Noted})
    train = assert_exact(lambda: models.build(models.SMALL[name]), steps=3, program=placed, device=where)
    (one,) = opened  # once, not once a step
    assert one.nbytes > 0
    assert one.resident() <= STAGING
    assert train.mismatches == 0
    assert train.staging == STAGING
    graph = train.captured.graph
    assert train.peak == STAGING + check(graph, declared(graph), train.program)


@pytest.mark.parametrize("nbytes", [0, 1, 511, BLOCK, PIECE - 1, PIECE + 1, 3 * PIECE + 5])
@pytest.mark.parametrize("direct", [True, False])
def test_bytes_come_back_from_any_address(nbytes: int, direct: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not direct:
        monkeypatch.setattr(disk, "_try_direct", lambda file: False)
    store = Disk(2 * BLOCK + 4 * PIECE)
    for shift in (0, 1, 64):
        sent = torch.randint(256, (nbytes + shift + 8,), dtype=torch.uint8)
        back = torch.full((nbytes + 16,), 7, dtype=torch.uint8)
        store.write(BLOCK, sent[shift : shift + nbytes]).wait()
        store.read(BLOCK, back[8 : 8 + nbytes]).wait()
        assert torch.equal(back[8 : 8 + nbytes], sent[shift : shift + nbytes])
        assert back[:8].tolist() + back[8 + nbytes :].tolist() == [7] * 16
    store.close()


def test_copies_of_both_directions_run_beside_each_other() -> None:
    store, size = Disk(64 * PIECE), 32 * PIECE
    ahead = torch.randint(256, (size,), dtype=torch.uint8)
    store.write(0, ahead).wait()
    back = torch.zeros(size, dtype=torch.uint8)
    flights = [store.read(0, back), store.write(size, ahead)]
    names = {thread.name for thread in threading.enumerate()}
    assert {"lowtide-copies-out", "lowtide-copies-in"} <= names
    for flight in flights:
        flight.wait()
    assert torch.equal(ahead, back)
    store.close()


@settings(max_examples=40, deadline=None)
@given(cases(8))
def test_slots_that_are_used_at_once_do_not_meet(case: Any) -> None:
    graph, costs = case.graph, case.costs
    program = make_program(Random(0), graph, costs, wild=0.5)
    found = slots(graph, program, costs.nbytes)
    held: dict[tuple[int, str], tuple[int, int]] = {}
    for number, row in enumerate(program.instructions):
        if isinstance(row, Copy) and row.to != "device":
            start = found[row.to].offset[number]
            end = start + max(costs.nbytes[row.value], span(graph.values[row.value]))
            assert start % BLOCK == 0
            assert end <= found[row.to].nbytes
            assert all(end <= a or b <= start for (_, place), (a, b) in held.items() if place == row.to)
            held[row.value, row.to] = start, end
        elif isinstance(row, Free):
            held.pop((row.value, row.place), None)


# ---------------------------------------------------------------------------------------------- a wait that is left out


class Strict(LateStore):
    """Copies happen when they are waited for, and not before."""

    early = 0.0


def test_a_missing_wait_is_refused_and_would_be_seen() -> None:
    strict = dataclasses.replace(LATE, stores={"host": Strict})
    step, model, optimizer, example = models.build(models.SMALL["mlp"])
    captured = lowtide.capture(step, model, optimizer, example)
    captured.prepare()
    graph = captured.graph
    program = placed(graph, "host")
    check(graph, declared(graph), program)
    state = {key: item.clone() for key, item in everything(model, optimizer).items() if torch.is_tensor(item)}
    waits = [number for number, row in enumerate(program.instructions) if isinstance(row, Wait)]
    assert len(waits) > 4

    def after(rows: tuple[Any, ...]) -> dict[str, Any]:
        with torch.no_grad():
            for key, item in everything(model, optimizer).items():
                if torch.is_tensor(item) and key in state:
                    item.copy_(state[key])
        torch.manual_seed(0)
        with poisoned():
            train = lowtide.execute(captured, dataclasses.replace(program, instructions=rows), device=strict)
        train(*example)
        return {k: v.clone() for k, v in everything(model, optimizer).items() if torch.is_tensor(v)}

    right = after(program.instructions)
    for number in waits:
        rows = program.instructions[:number] + program.instructions[number + 1 :]
        with pytest.raises(ProgramError):
            check(graph, declared(graph), dataclasses.replace(program, instructions=rows))
        wrong = after(rows)
        assert any(not same(right[key], wrong[key]) for key in right), program.instructions[number]


# -------------------------------------------------------------------------------------------------- what may go wrong


def test_the_host_is_no_place_on_the_cpu() -> None:
    step, model, optimizer, example = models.build(models.SMALL["mlp"])
    captured = lowtide.capture(step, model, optimizer, example)
    with pytest.raises(UsageError, match="the memory of the host is the device itself") as caught:
        lowtide.execute(captured, inputs_away_and_back(captured.graph, "host"))
    assert '"disk"' in str(caught.value.hint)


def _fail(monkeypatch: pytest.MonkeyPatch, name: str, nth: int, code: int = errno.EIO) -> list[int]:
    """Let the n-th call of a function of os in the copying threads fail."""
    usual, calls = getattr(os, name), [0]

    def call(*args: Any) -> Any:
        if threading.current_thread().name.startswith("lowtide-copies"):
            calls[0] += 1
            if calls[0] == nth:
                raise OSError(code, os.strerror(code))
        return usual(*args)

    monkeypatch.setattr(disk.os, name, call)
    return calls


@pytest.mark.parametrize("name", ["pwrite", "preadv"])
@pytest.mark.parametrize("nth", [1, 4])
def test_an_error_of_the_disk_says_what_it_left(name: str, nth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    train, (model, _), example = runner()
    train(*example)
    before = {key: item.clone() for key, item in model.state_dict().items()}
    with monkeypatch.context() as patch:
        _fail(patch, name, nth)
        with pytest.raises(StepError, match=r"while values were copied: PlaceError: .* bytes could not be") as caught:
            train(*example)
    assert "Input/output error" in str(caught.value)
    assert caught.value.parameters == ()
    assert "No parameter and no optimizer state was changed" in str(caught.value)
    assert all(same(before[key], item) for key, item in model.state_dict().items())
    train(*example)  # the next step is as if nothing had been
    assert any(not same(before[key], item) for key, item in model.state_dict().items())


def test_an_update_before_the_copy_that_failed_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    step, model, optimizer, example = models.build(models.SMALL["mlp"])
    captured = lowtide.capture(step, model, optimizer, example)
    graph = captured.graph
    usual = lowtide.keep_everything(graph).instructions
    updates = [n for n, row in enumerate(usual) if hasattr(row, "op") and graph.effects[row.op]]
    new, _ = graph.effects[usual[updates[0]].op][0]  # type: ignore[union-attr]
    trip = (Copy(new, "disk"), Wait(new, "disk"), Free(new, "disk"))
    rows = (*usual[: updates[0] + 1], *trip, *usual[updates[0] + 1 :])
    train = lowtide.execute(captured, Program(graph.fingerprint, rows))
    _fail(monkeypatch, "pwrite", 1)
    with pytest.raises(StepError) as caught:
        train(*example)
    assert len(caught.value.parameters) >= 1


def _slow_down(monkeypatch: pytest.MonkeyPatch, seconds: float, begun: Callable[[], None] = lambda: None) -> None:
    for name in ("pwrite", "preadv"):
        usual = getattr(os, name)

        def call(*args: Any, usual: Any = usual) -> Any:
            if threading.current_thread().name.startswith("lowtide-copies"):
                begun()
                time.sleep(seconds)
            return usual(*args)

        monkeypatch.setattr(disk.os, name, call)


def test_slow_copies_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    _slow_down(monkeypatch, 0.01)
    assert_exact(lambda: models.build(models.SMALL["mlp"]), steps=2, program=placed)


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_a_step_that_ends_early_waits_for_its_copies(
    error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No thread may still read the bytes of tensors that are gone."""
    _slow_down(monkeypatch, 0.05)
    running: list[int] = []
    usual = disk._write_direct

    def noted(job: Any, file: int, start: int) -> None:
        running.append(1)
        try:
            usual(job, file, start)
        finally:
            running.pop()

    monkeypatch.setitem(disk._PIECEWISE, ("out", True), noted)
    step, model, optimizer, example = models.build(models.SMALL["mlp"])
    captured = lowtide.capture(step, model, optimizer, example)
    train = lowtide.execute(captured, placed(captured.graph))

    def wait(self: Any, value: int, place: str) -> None:
        raise error("now")

    with monkeypatch.context() as patch:
        patch.setattr(Places, "wait", wait)
        with pytest.raises(StepError if error is RuntimeError else KeyboardInterrupt):
            train(*example)
        assert not running
        (places,) = train.away._places
        assert not places.flights
        assert not places.stores["disk"]._flights
    train(*example)


def test_an_interruption_while_it_waits_comes_out_when_no_copy_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    interrupts = iter([signal.SIGINT])
    _slow_down(monkeypatch, 0.3, lambda: [os.kill(os.getpid(), one) for one in interrupts] and None)
    train, _, example = runner()
    usual = signal.signal(signal.SIGINT, signal.default_int_handler)  # who runs in the background is deaf to it
    try:
        with pytest.raises(KeyboardInterrupt):
            train(*example)
    finally:
        signal.signal(signal.SIGINT, usual)
    (places,) = train.away._places
    assert not places.stores["disk"]._flights


def test_a_full_disk_is_an_error_before_the_step(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    train, (model, _), example = runner(folder=tmp_path)
    before = {key: item.clone() for key, item in model.state_dict().items()}
    state = torch.get_rng_state()
    with monkeypatch.context() as patch:
        patch.setattr(disk.os, "posix_fallocate", full)
        with pytest.raises(PlaceError, match=r"No space left on device; [0-9,]+ bytes are free") as caught:
            train(*example)
    assert str(tmp_path) in str(caught.value)
    assert "offload less" in str(caught.value.hint)
    assert all(same(before[key], item) for key, item in model.state_dict().items())
    assert torch.equal(state, torch.get_rng_state())
    train(*example)
    assert os.listdir(tmp_path) == []


# ------------------------------------------------------------------------------------------------------------ the file

MOUNTS = r"""/dev/vda / ext4 rw 0 0
tmpfs /run tmpfs rw 0 0
tmpfs /a\040b tmpfs rw 0 0
/dev/vdb /run/disk xfs rw 0 0
tmpfs /srv tmpfs rw 0 0
/dev/vdc /srv ext4 rw 0 0
"""


@pytest.mark.parametrize(
    ("folder", "kind"),
    [
        ("/home/x", "ext4"),
        ("/run/y", "tmpfs"),
        ("/runner", "ext4"),
        ("/run/disk/z", "xfs"),
        ("/a b/c", "tmpfs"),
        ("/srv", "ext4"),
    ],
)
def test_the_file_system_is_that_of_the_nearest_mount(folder: str, kind: str) -> None:
    assert file_system(Path(folder), MOUNTS) == kind


def test_memory_is_no_disk_unless_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shared = Path("/dev/shm")
    if not is_memory(shared):
        pytest.skip("/dev/shm is on a disk here")
    with pytest.raises(PlaceError, match="is in memory, not on a disk"):
        Disk(BLOCK, shared)
    store = Disk(BLOCK, shared, memory=True)
    sent = torch.arange(100, dtype=torch.uint8)
    store.write(0, sent).wait()
    back = torch.zeros_like(sent)
    store.read(0, back).wait()
    assert torch.equal(sent, back)
    monkeypatch.setattr(disk.tempfile, "gettempdir", lambda: str(shared))
    monkeypatch.setattr(disk, "OTHERS", (str(tmp_path),))
    assert Disk(BLOCK).folder == str(tmp_path)
    with pytest.raises(PlaceError, match="is not a folder"):
        Disk(BLOCK, tmp_path / "nowhere")


@pytest.mark.parametrize("nameless", [True, False])
def test_the_file_has_no_name_and_one_owner(tmp_path: Path, nameless: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not nameless:
        monkeypatch.setattr(disk.os, "O_TMPFILE", os.O_DIRECTORY | os.O_WRONLY)  # which is an error
    store = Disk(5 * BLOCK + 1, tmp_path)
    found = os.fstat(store._file)
    assert os.listdir(tmp_path) == []
    assert (found.st_nlink, found.st_mode & 0o777, found.st_size) == (0, 0o600, 6 * BLOCK)
    assert found.st_blocks * 512 >= 6 * BLOCK  # it is there already
    store.close()


KILLED = """
import os, signal, sys
import torch
sys.path[:0] = {paths!r}
from test_places import runner
train, _, example = runner("mlp", folder=sys.argv[1])
train(*example)
usual = os.pwrite
def die(*args):
    usual(*args)
    os.kill(os.getpid(), signal.SIGKILL)
os.pwrite = die
train(*example)
"""


def test_nothing_is_left_of_a_process_that_is_killed(tmp_path: Path) -> None:
    here = Path(__file__).parent
    code = KILLED.format(paths=[str(here), str(here.parent / "pure")])
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert os.listdir(tmp_path) == []


def test_threads_and_files_go_with_their_step() -> None:
    def held() -> tuple[int, int]:
        copying = sum(thread.name.startswith("lowtide-copies") for thread in threading.enumerate())
        return copying, len(os.listdir("/proc/self/fd"))

    gc.collect()  # what earlier steps left in cycles is not of these, and must not go meanwhile
    before = steady(held)
    train, _, example = runner()
    train(*example)
    assert held()[0] == before[0] + 2
    del train
    assert steady(held) == before


def steady(look: Callable[[], Any]) -> Any:
    """What is seen once it has been the same for a while: threads end when they have come to it."""
    seen, times = look(), 0
    while times < 10:
        time.sleep(0.02)
        seen, times = (seen, times + 1) if look() == seen else (look(), 0)
    return seen


def test_a_child_opens_its_own_file() -> None:
    train, _, example = runner()
    train(*example)
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.write(writing, repr(float(train(*example))).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as answer:
        found = answer.read()
    os.waitpid(child, 0)
    expected = repr(float(train(*example)))
    assert found == expected


@pytest.mark.parametrize("opened", [Disk, throttled(1e9).stores["disk"]], ids=["disk", "throttled"])
def test_nobody_holds_a_tensor_once_its_copy_was_waited_for(opened: Callable[[int, None], Any]) -> None:
    store = opened(2 * BLOCK, None)
    tensor = torch.ones(BLOCK, dtype=torch.uint8)
    out = store.write(0, tensor)
    out.wait()
    back = store.read(0, tensor)
    back.wait()
    known = weakref.ref(tensor)
    del tensor
    assert known() is None, "a step that frees it gets its bytes back"
    store.close()
