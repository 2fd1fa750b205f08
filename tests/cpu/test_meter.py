"""The memory meter against known blocks, torch's own profiler, threads, forks and foreign allocators."""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import os
import shlex
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from probes import probed
from torch import Tensor, nn
from torch.nn import functional

import lowtide
from lowtide import allocator, files, native
from lowtide.allocator import build
from lowtide.allocator.arena import POOL
from lowtide.errors import LowtideError, UsageError
from lowtide.execute import arrangement

ROOT = Path(__file__).parents[2]
DEADLINE = 300  # seconds; nothing here needs more than a few, on a machine that is not busy


@pytest.fixture(autouse=True)
def nothing_left_installed() -> Iterator[None]:
    if allocator.installed():
        gc.collect()
        POOL.empty()  # of arenas that steps of other tests left
    assert not allocator.installed()
    yield
    POOL.empty()
    assert not allocator.installed()


def block(nbytes: int) -> Tensor:
    return torch.empty(nbytes, dtype=torch.uint8)


# What a meter shows


def test_known_blocks_give_known_numbers() -> None:
    with allocator.meter() as meter:
        assert allocator.installed()
        first = block(1000)
        second = block(3001)
        assert (meter.current, meter.peak, meter.allocations) == (4001, 4001, 2)
        del first
        third = block(500)
        assert (meter.current, meter.peak, meter.allocations) == (3501, 4001, 3)
        del second, third
        assert (meter.current, meter.peak, meter.allocations) == (0, 4001, 3)
    assert (meter.current, meter.peak, meter.allocations) == (0, 4001, 3)


def test_the_temporaries_of_an_op_are_in_the_peak() -> None:
    left, right = torch.randn(64, 32), torch.randn(64, 32)
    with allocator.meter() as meter:
        result = (left * right).sum()
    assert meter.peak == 64 * 32 * 4 + result.nbytes
    assert meter.current == result.nbytes


def test_empty_tensors_hold_nothing() -> None:
    with allocator.meter() as meter:
        tensors = [torch.empty(0), torch.empty(3, 0, 5), torch.zeros(0)]
        grown = torch.empty(0).resize_(10)
        assert meter.current == grown.nbytes == 40
    assert (meter.allocations, len(tensors)) == (1, 3)


def test_blocks_from_before_are_unknown() -> None:
    before = block(10_000)
    with allocator.meter() as meter:
        del before
        kept = block(10)
        assert (meter.current, meter.peak) == (10, 10)
    del kept


def test_nested_meters_count_for_themselves() -> None:
    with allocator.meter() as outer:
        first = block(1000)
        with allocator.meter() as inner:
            second = block(200)
            assert (outer.current, inner.current) == (1200, 200)
            del first
            assert (outer.current, inner.current) == (200, -800)
            assert (outer.peak, inner.peak) == (1200, 200)
            del second
            assert (outer.current, inner.current) == (0, -1000)
        third = block(5000)
        assert (outer.peak, inner.peak) == (5000, 200)
        assert (outer.allocations, inner.allocations) == (3, 1)
        assert inner.current == -1000
    del third


def test_meters_may_overlap_without_being_nested() -> None:
    first, second = allocator.meter(), allocator.meter()
    one = first.__enter__()
    two = second.__enter__()
    tensor = block(70)
    first.__exit__(None, None, None)
    assert allocator.installed()
    del tensor
    second.__exit__(None, None, None)
    assert (one.current, two.current) == (70, 0)


def test_reset_starts_the_peak_at_the_current_level() -> None:
    with allocator.meter() as meter:
        kept = block(100)
        block(900)
        assert meter.peak == 1000
        meter.reset()
        assert (meter.current, meter.peak) == (100, 100)
        block(50)
        assert meter.peak == 150
        with allocator.meter() as inner:
            del kept
            inner.reset()
            block(30)
            assert (inner.current, inner.peak) == (-100, -70)
    with pytest.raises(UsageError, match="stopped"):
        meter.reset()


def test_tensors_outlive_the_meter() -> None:
    with allocator.meter():
        kept = block(4096).fill_(7)
        resized = torch.empty(10)
    resized.resize_(100_000).fill_(1)
    assert int(kept.sum()) == 7 * 4096
    with allocator.meter() as later:
        del kept
        assert later.current == -4096
        del resized
        assert later.current == -4096 - 400_000
    assert later.peak == 0


def test_an_exception_uninstalls() -> None:
    with pytest.raises(ZeroDivisionError), allocator.meter() as outer, allocator.meter():
        kept = block(10)
        raise ZeroDivisionError
    assert not allocator.installed()
    assert (outer.peak, kept.nbytes) == (10, 10)


def test_a_block_that_nobody_has_is_not_counted() -> None:
    with allocator.meter() as meter:
        with pytest.raises(RuntimeError, match="can't allocate memory"):
            block(1 << 60)
        assert (meter.current, meter.peak, meter.allocations) == (0, 0, 0)


def test_too_many_meters() -> None:
    running = [allocator.meter() for _ in range(64)]
    for meter in running:
        meter.__enter__()
    with pytest.raises(UsageError, match="64 meters"), allocator.meter():
        pass
    for meter in running:
        meter.__exit__(None, None, None)
    with allocator.meter() as again:
        block(5)
    assert again.peak == 5


# What a recording shows


def test_events_in_order() -> None:
    with allocator.meter():
        before = block(17)
        with allocator.record() as recording:
            first = block(100)
            second = block(200)
            del first, before
            del second
        block(300)
    assert recording.events == [
        ("alloc", 0, 100),
        ("alloc", 1, 200),
        ("free", 0, 100),
        ("free", -1, 17),
        ("free", 1, 200),
    ]


def test_a_recording_and_a_meter_agree() -> None:
    with allocator.meter() as meter, allocator.record() as recording:
        functional.conv2d(torch.randn(2, 3, 16, 16), torch.randn(8, 3, 3, 3)).relu().softmax(0)
    level = peak = 0
    for event in recording.events:
        level += event.nbytes if event.kind == "alloc" else -event.nbytes
        peak = max(peak, level)
    assert (level, peak) == (meter.current, meter.peak)
    assert peak > 0
    assert sum(event.kind == "alloc" for event in recording.events) == meter.allocations


def test_one_recording_at_a_time() -> None:
    with allocator.record():
        with pytest.raises(UsageError, match="only one"), allocator.record():
            pass
        assert allocator.installed()
    with allocator.record() as recording:
        block(1)
    assert len(recording.events) == 2


def test_a_full_recording_says_so() -> None:
    full = pytest.raises(LowtideError, match="2 events came after the 4")
    with full, allocator.record(limit=4) as recording:
        for _ in range(3):
            block(8)
    assert [event.kind for event in recording.events] == ["alloc", "free"] * 2


def test_an_exception_ends_the_recording() -> None:
    with pytest.raises(ZeroDivisionError), allocator.record(limit=1) as recording:
        block(8)
        raise ZeroDivisionError
    assert recording.events == [("alloc", 0, 8)]


# Real steps


class Network(nn.Module):
    """Convolutions, normalisation, a recurrent layer and a linear one: what oneDNN has kernels for."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU())
        self.down = nn.Conv2d(16, 8, 3, stride=2)
        self.recurrent = nn.LSTM(8 * 7, 24, num_layers=2, batch_first=True)
        self.head = nn.Linear(24, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.down(self.features(x)).relu().permute(0, 2, 1, 3).flatten(2)
        return torch.as_tensor(self.head(self.recurrent(x)[0].mean(1)))


def training(*, grads_persist: bool) -> tuple[nn.Module, Callable[[], None]]:
    torch.manual_seed(0)
    model = Network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    x, y = torch.randn(4, 3, 16, 16), torch.randint(10, (4,))

    def step() -> None:
        optimizer.zero_grad()
        functional.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if not grads_persist:
            optimizer.zero_grad()

    step()
    step()
    return model, step


def test_metered_and_unmetered_steps_take_turns() -> None:
    _, step = training(grads_persist=False)
    peaks = set()
    for number in range(8):
        step()
        with allocator.meter() as meter:
            step()
            assert meter.current == 0
            if number % 3 == 0:
                step()
                assert meter.current == 0
        peaks.add(meter.peak)
    assert len(peaks) == 1
    assert min(peaks) > 0


def test_gradients_that_stay_are_all_that_is_left() -> None:
    model, step = training(grads_persist=True)
    gradients = sum(parameter.nbytes for parameter in model.parameters())
    for _ in range(3):
        step()
        with allocator.meter() as outer:
            for _ in range(3):
                step()
                assert outer.current == gradients  # the unknown ones of the unmetered step were freed
        with allocator.meter() as inner:
            step()
            assert inner.current == 0  # replaced what the step before left


def test_metering_changes_no_number() -> None:
    plain, step = training(grads_persist=False)
    metered, metered_step = training(grads_persist=False)
    for _ in range(3):
        step()
        with allocator.meter():
            metered_step()
    for one, other in zip(plain.parameters(), metered.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.filterwarnings("ignore")  # the profiler's own
def test_the_profiler_of_torch_saw_the_same() -> None:
    _, step = training(grads_persist=False)
    activities = [torch.profiler.ProfilerActivity.CPU]
    with (
        torch.profiler.profile(activities=activities, profile_memory=True) as profile,
        allocator.meter() as meter,
    ):
        step()
    results = profile.profiler.kineto_results
    sizes = [event.nbytes() for event in results.events() if event.name() == "[memory]"]
    level = peak = 0
    for nbytes in sizes:
        level += nbytes
        peak = max(peak, level)
    assert (meter.current, meter.peak) == (level, peak)
    assert meter.allocations == sum(nbytes > 0 for nbytes in sizes) > 50


# Threads and processes


def run_threads(work: Callable[[int], None], count: int) -> None:
    failures: list[BaseException] = []

    def guarded(number: int) -> None:
        try:
            work(number)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE)
    assert failures == []
    assert not any(thread.is_alive() for thread in threads)


def test_threads_allocate_at_once() -> None:
    count, rounds = 4, 1500
    barrier = threading.Barrier(count, timeout=DEADLINE)
    held: list[int] = []

    def work(number: int) -> None:
        for lap in range(rounds):
            one = block(1000 + number + lap % 7)
            two = block(64)
            del one, two
        kept = block(1 << 20)
        barrier.wait()
        if number == 0:
            held.append(meter.current)
        barrier.wait()
        del kept

    with allocator.meter() as meter, allocator.record() as recording:
        run_threads(work, count)
        assert meter.current == 0
    assert held == [count << 20]
    assert count << 20 <= meter.peak <= (count << 20) + count * 1100
    assert meter.allocations == count * (2 * rounds + 1)
    born = [event.block for event in recording.events if event.kind == "alloc"]
    assert born == list(range(meter.allocations))
    assert len(recording.events) == 2 * len(born)


def test_an_address_goes_from_thread_to_thread() -> None:
    def work(_: int) -> None:
        for _ in range(2000):
            block(40 << 20)  # so large that it is mapped, and any thread may get its address next

    with allocator.meter() as meter:
        run_threads(work, 4)
        assert meter.current == 0


def test_meters_start_and_stop_in_every_thread() -> None:
    kept = []

    def work(number: int) -> None:
        for _ in range(300):
            with allocator.meter() as meter:
                kept.append(block(100 + number))
                assert meter.current >= 100 + number

    run_threads(work, 4)


def allocate_in_child() -> None:
    with allocator.meter() as meter:
        block(1000)
    os._exit(0 if meter.peak == 1000 else 1)


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_forked_child_does_not_hang() -> None:
    stop = threading.Event()

    def churn(_: int) -> None:
        chunks = torch.randn(3000).chunk(1000)
        while not stop.is_set():
            torch._foreach_add(chunks, 1.0)  # a thousand allocations without Python's lock

    fork = multiprocessing.get_context("fork")
    with allocator.meter():
        threads = [threading.Thread(target=churn, args=(0,)) for _ in range(2)]
        for thread in threads:
            thread.start()
        codes = []
        for _ in range(30):
            child = fork.Process(target=allocate_in_child)
            child.start()
            child.join(10)
            if child.exitcode is None:
                child.kill()
                child.join()
            codes.append(child.exitcode)
            if child.exitcode != 0:
                break
        stop.set()
        for thread in threads:
            thread.join(DEADLINE)
    assert set(codes) == {0}


# Foreign allocators and raw pointers

FOREIGN = """
#include <c10/core/CPUAllocator.h>
c10::Allocator* below = nullptr;
int64_t alive = 0;
void release(void* p) { --alive; below->raw_deallocate(p); }
struct Forwarder final : c10::Allocator {
  c10::DataPtr allocate(size_t n) override {
    void* p = below->raw_allocate(n);
    ++alive;
    return {p, p, &release, c10::DeviceType::CPU};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t n) const override { default_copy_data(to, from, n); }
} forwarder;
extern "C" {
void* raw_allocate(size_t n) { return c10::GetCPUAllocator()->raw_allocate(n); }
void raw_deallocate(void* p) { c10::GetCPUAllocator()->raw_deallocate(p); }
void push(int priority) {
  below = c10::GetCPUAllocator();
  c10::SetCPUAllocator(&forwarder, priority);
}
void pop(int priority) { c10::SetCPUAllocator(below, priority); }
int64_t count_alive() { return alive; }
void put_default(int priority) { c10::SetCPUAllocator(c10::GetDefaultCPUAllocator(), priority); }
}
"""


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """Somebody else's allocator, and raw allocation as oneDNN does it."""
    folder = tmp_path_factory.mktemp("foreign")
    (folder / "foreign.cpp").write_text(FOREIGN)
    torch_folder = Path(torch.__file__).parent
    command = [
        *shlex.split(os.environ.get("CXX", "g++")),
        "-std=c++20",
        "-shared",
        "-fPIC",
        "-o",
        str(folder / "foreign.so"),
    ]
    command += [f"-isystem{torch_folder / 'include'}", str(folder / "foreign.cpp")]
    command += [f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"]
    subprocess.run([*command, f"-L{torch_folder / 'lib'}", "-lc10"], check=True, timeout=DEADLINE)
    library = ctypes.CDLL(str(folder / "foreign.so"))
    library.raw_allocate.argtypes, library.raw_allocate.restype = [ctypes.c_size_t], ctypes.c_void_p
    library.raw_deallocate.argtypes, library.raw_deallocate.restype = [ctypes.c_void_p], None
    return library


def test_raw_blocks_cross_the_border_both_ways(foreign: ctypes.CDLL) -> None:
    outside = [foreign.raw_allocate(100 + number) for number in range(50)]
    with allocator.meter() as meter:
        for pointer in outside:
            foreign.raw_deallocate(pointer)
        assert meter.current == 0
        inside = [foreign.raw_allocate(100 + number) for number in range(50)]
        foreign.raw_deallocate(foreign.raw_allocate(0))
        total = sum(range(100, 150))
        assert (meter.current, meter.peak, meter.allocations) == (total, total, 50)
    for pointer in inside:
        foreign.raw_deallocate(pointer)


def test_an_address_that_comes_back_is_counted_once(foreign: ctypes.CDLL) -> None:
    with allocator.meter():
        first = {foreign.raw_allocate(3000) for _ in range(20)}
    for pointer in first:
        foreign.raw_deallocate(pointer)
    with allocator.meter() as meter:
        second = {foreign.raw_allocate(2999) for _ in range(20)}
        assert first & second
        assert (meter.current, meter.peak) == (20 * 2999, 20 * 2999)
        for pointer in second:
            foreign.raw_deallocate(pointer)
        assert meter.current == 0


@pytest.mark.parametrize("priority", [0, 5])
def test_a_foreign_allocator_below(foreign: ctypes.CDLL, priority: int) -> None:
    foreign.push(priority)
    try:
        outside = foreign.raw_allocate(30)
        with allocator.meter() as meter:
            kept = block(100)
            assert foreign.count_alive() == 2
            foreign.raw_deallocate(outside)
            assert foreign.count_alive() == 1
        assert meter.current == 100
        assert not allocator.installed()
    finally:
        foreign.pop(priority)
    with allocator.meter() as meter:
        del kept
        block(10)
    assert (meter.current, meter.peak) == (-100, 0)
    assert foreign.count_alive() == 0


def test_a_foreign_allocator_above(foreign: ctypes.CDLL) -> None:
    try:
        with allocator.meter() as meter:
            foreign.push(7)
            kept = block(100)
        assert meter.current == 100
        with pytest.raises(allocator.AllocatorUnavailable, match="another library"), allocator.meter():
            pass
        foreign.pop(7)
        assert allocator.installed()  # put back by the other one, after the last meter had gone
        with allocator.meter() as meter:
            del kept
        assert meter.current == -100
        assert not allocator.installed()
        with allocator.meter():
            foreign.put_default(7)
        with allocator.meter() as meter:
            block(10)
        assert meter.peak == 10
    finally:
        foreign.put_default(255)


def test_a_step_under_a_foreign_allocator_runs_without_an_arena(foreign: ctypes.CDLL) -> None:
    step, model, optimizer, example = probed()
    train = lowtide.fit(*probed()[:3], example=example, budget="60%", time_limit=0.2, costs="roofline")

    def both() -> None:
        state = torch.get_rng_state()
        expected = step(model, optimizer, *example)
        torch.set_rng_state(state)
        assert torch.equal(expected, train(*example))

    arrangement._without_arena.cache_clear()
    try:
        with allocator.meter():
            foreign.push(255)
        with pytest.warns(lowtide.LowtideWarning, match=r"without an arena.*another library"):
            both()
        both()  # and not again: a warning is an error here
        assert train.peak is None
        foreign.pop(255)
        for _ in range(3):
            both()
        assert train.peak is not None
        assert train.mismatches == 0
        with allocator.meter():
            pass
    finally:
        foreign.put_default(255)


# Building

SCRIPT = """
import sys, torch
from lowtide import allocator
assert not allocator.installed()
try:
    with allocator.meter() as meter:
        kept = torch.empty(1000, dtype=torch.uint8)
except allocator.AllocatorUnavailable as error:
    assert not allocator.available()
    print(error)
    sys.exit(3)
assert allocator.available() and meter.peak == 1000
"""


def start(cache: Path, **environment: str) -> subprocess.Popen[str]:
    inherited = {name: value for name, value in os.environ.items() if name != "CXX"}
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    variables = {**inherited, "PYTHONPATH": paths, "LOWTIDE_CACHE": str(cache), **environment}
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-c", SCRIPT],
        env=variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, str]:
    output, errors = process.communicate(timeout=DEADLINE)
    assert errors == ""
    return process.returncode, output


def test_two_processes_build_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "deep" / "cache"
    processes = [start(cache), start(cache)]
    assert [finish(process) for process in processes] == [(0, ""), (0, "")]
    (library,) = cache.iterdir()
    made = library.stat().st_mtime_ns
    monkeypatch.setenv("LOWTIDE_CACHE", str(cache))
    monkeypatch.delenv("CXX", raising=False)  # as they had none
    build._library()
    assert [path.stat().st_mtime_ns for path in cache.iterdir()] == [made]


def test_no_compiler(tmp_path: Path) -> None:
    code, output = finish(start(tmp_path, CXX="/nonexistent"))
    assert code == 3
    assert "$CXX names none: /nonexistent" in output
    assert "hint: install a C++20 compiler" in output
    assert list(tmp_path.iterdir()) == []


def test_a_compiler_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOWTIDE_CACHE", str(tmp_path))
    monkeypatch.setenv("CXX", "g++ -include nowhere.h")
    with pytest.raises(native.NativeUnavailable, match=r"did not compile.*\n.*nowhere.h") as caught:
        build._library()
    assert caught.value.hint == native.INSTALL
    assert list(tmp_path.iterdir()) == []


def test_a_torch_without_its_headers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "TORCH", tmp_path)
    monkeypatch.setattr(build, "_outcome", None)
    with pytest.raises(allocator.AllocatorUnavailable, match=r"has no C\+\+ headers here") as caught:
        build.load()
    assert "install torch from its wheels" in str(caught.value)


def test_a_cache_that_cannot_be_written(tmp_path: Path) -> None:
    cache, temporary = tmp_path / "cache", tmp_path / "temporary"
    cache.write_text("a file where the folder should be, which stops root as well")
    temporary.mkdir()
    assert finish(start(cache, TMPDIR=str(temporary))) == (0, "")
    (private,) = temporary.iterdir()
    assert len(list(private.iterdir())) == 1


def test_a_damaged_library_is_built_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOWTIDE_CACHE", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)  # as the other process has none
    assert finish(start(tmp_path)) == (0, "")
    (made,) = tmp_path.iterdir()
    name = made.name
    made.write_text("no library")
    build._library()
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert (tmp_path / name).stat().st_size > 10_000


def test_the_cache_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOWTIDE_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert files.cache_folder() == Path.home() / ".cache" / "lowtide"
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert files.cache_folder() == Path("/x/lowtide")
    monkeypatch.setenv("LOWTIDE_CACHE", "/y")
    assert files.cache_folder() == Path("/y")
