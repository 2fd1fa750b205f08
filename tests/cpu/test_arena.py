"""The arena: allocations go where the tape says or are counted; threads, forks and failures disturb nothing."""

from __future__ import annotations

import copy
import gc
import multiprocessing
import os
import signal
import sys
import threading
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from probes import acting, classify, probed
from torch import Tensor, nn
from twins import assert_same, everything, same

import lowtide
from lowtide import allocator, models
from lowtide.allocator.arena import POOL, Arena, ArenaError, Pool, Tape, stepping
from lowtide.execute.lessons import LESSONS

DEADLINE = 60  # seconds; nothing here needs more than a few


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """No test leaves our allocator in place, or an arena behind."""
    yield
    if POOL.reserved():
        gc.collect()
    assert POOL.reserved() == 0
    assert not allocator.installed()


def block(nbytes: int) -> Tensor:
    return torch.empty(nbytes, dtype=torch.uint8)


PLENTY = "1MiB"  # where something is to go outside the arena without being too much


def fitted(recipe: Callable[[], Any], budget: int | str = "60%", costs: Any = "roofline") -> tuple[lowtide.Fitted, Any]:
    """A fitted step, and what it was made of."""
    step, model, optimizer, example = recipe()
    train = lowtide.fit(step, model, optimizer, example=example, budget=budget, time_limit=0.2, costs=costs)
    return train, (model, optimizer, example)


class Twins:
    """A fitted step and the same step in eager PyTorch, which must stay equal."""

    def __init__(self, recipe: Callable[[], Any] = probed, budget: int | str = "60%", costs: Any = "roofline") -> None:
        self.step, self.model, self.optimizer, self.example = recipe()
        self.train, (self.mirror, self.mirrored_optimizer, _) = fitted(recipe, budget, costs)
        self.state = torch.Generator().manual_seed(5).get_state()

    def both(self, *batch: Any) -> Tensor:
        """One step of both, compared in everything; returns the loss."""
        batch = batch or self.example
        torch.set_rng_state(self.state)
        expected = self.step(self.model, self.optimizer, *batch)
        after = torch.get_rng_state()
        torch.set_rng_state(self.state)
        found: Tensor = self.train(*batch)
        assert torch.equal(after, torch.get_rng_state())
        assert same(expected.detach(), found)
        self.compare()
        self.state = after
        return found

    def reload(self) -> None:
        """Put the fitted one where eager is."""
        self.mirror.load_state_dict(self.model.state_dict())
        self.mirrored_optimizer.load_state_dict(copy.deepcopy(self.optimizer.state_dict()))

    def compare(self) -> None:
        assert_same(everything(self.model, self.optimizer), everything(self.mirror, self.mirrored_optimizer))


def undrawn() -> Any:
    """A step without dropout, for threads: they share one generator, whose lock a forked child may inherit for good."""
    step, model, optimizer, example = probed()
    model[2] = nn.Identity()
    return step, model, optimizer, example


def run_threads(*works: Callable[[], None]) -> None:
    failures: list[BaseException] = []

    def guarded(work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE)
    assert failures == []
    assert not any(thread.is_alive() for thread in threads)


def in_child(work: Callable[[], None]) -> int:
    """The exit code of a forked child that does this, -1 where it hangs."""

    def guarded() -> None:
        try:
            work()
        except BaseException:
            os._exit(1)
        os._exit(0)

    child = multiprocessing.get_context("fork").Process(target=guarded)
    child.start()
    child.join(20)
    if child.exitcode is None:
        child.kill()
        child.join()
        return -1
    return child.exitcode


# Places


def test_allocations_go_where_the_tape_says() -> None:
    arena, cursor = Arena(10_000), array("q", [0])
    tape = Tape([0, 2, 3], [100, 200, 300], [64, 256, 1024])
    with stepping(cursor, tape, arena) as step:
        first, second = block(100), block(200)
        cursor[0] = 1
        third = block(300)
        outside = threading.Thread(target=lambda: block(100))  # another thread has no part in this
        outside.start()
        outside.join()
    start = first.data_ptr() - 64
    assert [tensor.data_ptr() - start for tensor in (first, second, third)] == [64, 256, 1024]
    assert (step.placed, step.mismatches, step.outside) == (3, 0, 0)
    assert arena.blocks == 3
    del first, second, third
    assert arena.blocks == 0


def test_what_does_not_follow_the_tape_is_outside_and_counted() -> None:
    arena, cursor = Arena(10_000), array("q", [0])
    tape = Tape([0, 3, 4, 5], [100, 200, 300, 400, 500], [0, -1, 1024, 2048, 4096])
    with stepping(cursor, tape, arena) as step:
        tensors = [block(100), block(200), block(301), block(300)]  # the third is another one, so the rest may be too
        cursor[0] = 1
        tensors += [block(400), block(400)]  # one more than there should be
        cursor[0] = 2
        tensors += [block(500)]
    start = tensors[0].data_ptr()
    inside = [0 <= tensor.data_ptr() - start < arena.nbytes for tensor in tensors]
    assert inside == [True, False, False, False, True, False, True]
    assert (step.placed, step.mismatches) == (3, 3)
    assert step.outside == 200 + 301 + 300 + 400


def test_a_place_that_is_still_taken_is_left_alone() -> None:
    arena, cursor = Arena(4096), array("q", [0])
    tape = Tape([0, 1, 2, 3], [512, 1024, 256], [1024, 512, 2048])
    with stepping(cursor, tape, arena):
        held = block(512).fill_(7)
    with stepping(cursor, tape, arena) as step:
        cursor[0] = 1
        other = block(1024).fill_(1)  # its places are 512 to 1536
        cursor[0] = 2
        last = block(256).fill_(2)
    assert int(held.sum()) == 7 * 512
    assert (step.placed, step.mismatches, step.outside) == (1, 1, 1024 - 512), "less what the holder has of the arena"
    assert last.data_ptr() - held.data_ptr() == 1024
    del other


def test_an_arena_lives_as_long_as_a_tensor_in_it() -> None:
    with allocator.meter() as meter:
        arena = Arena(100_000)
        assert meter.current == 0, "pages come by being used"
        with stepping(array("q", [0]), Tape([0, 1], [5000], [4096]), arena):
            kept = block(5000).fill_(3)
        assert meter.current == arena.held == 5000
        address = f"{kept.data_ptr() - 4096:x}-"
        assert address in Path("/proc/self/maps").read_text()
        arena.close()
        assert int(kept.sum()) == 3 * 5000
        kept.resize_(6000)  # it moves out
        assert int(kept[:5000].sum()) == 3 * 5000
        assert address not in Path("/proc/self/maps").read_text()
        assert meter.current == 6000


def test_an_arena_that_nobody_has() -> None:
    with pytest.raises(ArenaError, match=r"1,152,921,504,606,846,976 bytes for the arena.*\nhint: "):
        Arena(1 << 60)


def test_steps_may_be_nested() -> None:
    outer, inner, cursor = Arena(4096), Arena(4096), array("q", [0])
    with stepping(cursor, Tape([0, 2], [64, 64], [0, 128]), outer) as first:
        one = block(64)
        with stepping(cursor, Tape([0, 1], [64], [0]), inner) as second:
            two = block(64)
            del one
        three = block(64)
        assert allocator.installed()
    assert (first.placed, second.placed, first.mismatches, second.mismatches) == (2, 1, 0, 0)
    assert (outer.blocks, inner.blocks) == (1, 1)
    del two, three


def test_a_step_that_learns_writes_down_what_it_did() -> None:
    before, cursor = block(10), array("q", [3])
    with stepping(cursor) as step:
        first = block(100_000)
        cursor[0] = 5
        second = block(8)
        del first, before
    events = [(event.instruction, event.freed, event.nbytes) for event in step.events]
    assert events == [(3, 0, 100_000), (5, 0, 8), (5, 1, 100_000)]
    assert step.events[0].block == step.events[2].block != step.events[1].block
    assert (step.outside, step.placed, step.mismatches) == (100_008, 0, 0)
    del second


# Several steps, several threads


def convolutional() -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        layers = [nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8)]
        model = nn.Sequential(*layers, nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, 5))
        example = (torch.randn(4, 3, 24, 24), torch.randint(5, (4,)))
    return classify, model, torch.optim.SGD(model.parameters(), lr=0.1), example


def test_convolutions_run_in_the_arena() -> None:
    """oneDNN asks for its memory by raw pointers, which it frees through whichever allocator is there."""
    twins = Twins(convolutional, PLENTY, "measured")
    for _ in range(4):
        twins.both()
        twins.model.eval()(twins.example[0])  # outside the step, by turns
        twins.model.train()
    assert twins.train.mismatches == 0
    assert POOL.reserved() == twins.train.arena_bytes > 0


def test_two_fitted_steps_by_turns_share_one_arena() -> None:
    small, large = Twins(), Twins(lambda: probed(width=64))
    assert small.train.arena_bytes < large.train.arena_bytes
    for _ in range(2):
        small.both()
        large.both()
    for _ in range(3):
        small.both()
        assert POOL.reserved() == large.train.arena_bytes
        large.both()
        assert POOL.reserved() == large.train.arena_bytes
    with allocator.meter() as meter:
        held = large.train.arena_bytes
        del large
        gc.collect()
        assert POOL.reserved() == 0, "nobody needs an arena of this size any more"
        assert meter.current <= -held
        small.both()
        assert POOL.reserved() == small.train.arena_bytes
    assert small.train.mismatches == 0


def test_a_step_that_learns_holds_no_arena_beside_what_it_allocates() -> None:
    first, second = Twins(), Twins()
    first.both()
    first.both()
    assert POOL.reserved() > 0
    held: list[int] = []
    with acting(middle=lambda _: held.append(POOL.reserved())):
        second.train(*second.example)
    assert held == [0] * len(held) != []


def test_threads_that_allocate_all_the_time_disturb_nothing() -> None:
    twins, stop = Twins(), threading.Event()
    laps = [0, 0]

    def churn(number: int) -> None:
        kept: list[Tensor] = []
        while not stop.is_set():
            fill = laps[number] % 251
            kept.append(torch.full((64 * (1 + laps[number] % 97),), fill, dtype=torch.uint8))
            if len(kept) > 40:
                oldest = kept.pop(laps[number] % 40)
                assert int(oldest.min()) == int(oldest.max())
            laps[number] += 1
        assert all(int(tensor.min()) == int(tensor.max()) for tensor in kept)

    def train() -> None:
        try:
            for _ in range(40):
                twins.both()
        finally:
            stop.set()

    run_threads(train, lambda: churn(0), lambda: churn(1))
    assert min(laps) > 100
    assert twins.train.mismatches == 0


def test_two_threads_each_with_its_own_step() -> None:
    results: dict[int, list[Tensor]] = {}

    def work(number: int) -> None:
        torch.manual_seed(0)
        results[number] = [twins[number](*examples[number]) for _ in range(30)]

    made = [fitted(undrawn) for _ in range(2)]
    twins, examples = [train for train, _ in made], [parts[2] for _, parts in made]
    run_threads(lambda: work(0), lambda: work(1))
    step, model, optimizer, example = undrawn()
    expected = [step(model, optimizer, *example).detach() for _ in range(30)]
    for number in range(2):
        assert all(map(same, expected, results[number]))
        assert twins[number].mismatches == 0
    assert 0 < POOL.reserved() <= 2 * twins[0].arena_bytes


def test_a_fitted_step_inside_another() -> None:
    outer, inner = Twins(budget=PLENTY), Twins(lambda: models.build(models.SMALL["mlp"]))
    losses: list[Tensor] = []

    def step_inside(_: Tensor) -> None:
        with torch.enable_grad():  # torch runs the forward of an op of the user's own without gradients
            losses.append(inner.train(*inner.example))

    for _ in range(4):
        with acting(middle=step_inside):
            outer.both()  # twice for each: once in eager's step, once in the planned one
    expected = [inner.step(inner.model, inner.optimizer, *inner.example).detach() for _ in losses]
    assert len(losses) >= 8
    assert all(map(same, expected, losses))
    inner.compare()
    assert inner.train.mismatches == 0
    assert POOL.reserved() >= outer.train.arena_bytes


# Fork


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_child_steps_for_itself() -> None:
    twins = Twins()
    for _ in range(2):
        twins.both()
    assert POOL.reserved() > 0

    def work() -> None:
        torch.set_num_threads(1)
        assert POOL.reserved() == 0
        for _ in range(3):
            twins.both()
        assert POOL.reserved() > 0

    assert in_child(work) == 0
    for _ in range(3):
        twins.both()
    assert twins.train.mismatches == 0


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_children_are_forked_while_another_thread_steps() -> None:
    twins, here = Twins(undrawn), Twins(undrawn)
    here.both()
    stop = threading.Event()

    def train() -> None:
        while not stop.is_set():
            twins.train(*twins.example)

    def fork() -> None:
        def work() -> None:
            torch.set_num_threads(1)
            for _ in range(2):
                here.train(*here.example)
            POOL.empty()  # a block that comes may let the arena give pages back
            with allocator.meter() as meter:
                block(1000)
            assert meter.peak == 1000

        try:
            codes = [in_child(work) for _ in range(10)]
            assert codes == [0] * 10
        finally:
            stop.set()

    run_threads(train, fork)


class Rows(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """Rows that depend on their number only."""

    def __len__(self) -> int:
        return 96

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        made = torch.Generator().manual_seed(number)
        return torch.randn(16, generator=made), torch.randint(5, (), generator=made)


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_workers_of_a_loader_feed_the_step() -> None:
    twins = Twins()
    twins.both()
    twins.both()
    for _ in range(2):  # the workers are forked between steps, and again
        loader = torch.utils.data.DataLoader(Rows(), batch_size=32, num_workers=2, multiprocessing_context="fork")
        batches = 0
        for x, y in loader:
            twins.both(x, y)
            batches += 1
        assert batches == 3
    assert twins.train.mismatches == 0
    assert len(twins.train._fits) == 1


# Tensors that outlive the step, and allocations that vary


@pytest.mark.parametrize("first", [0, 3], ids=["from the first step", "later"])
@pytest.mark.parametrize("where", ["middle", "middle_backward"])
def test_an_op_that_keeps_what_it_was_given(first: int, where: str) -> None:
    twins = Twins(budget=PLENTY)
    kept: list[tuple[Tensor, Tensor]] = []
    steps = 0

    def keep(x: Tensor) -> None:
        if steps >= first:
            kept.append((x.detach(), x.detach().clone()))

    for _ in range(8):
        with acting(**{where: keep}):
            twins.both()
        steps += 1
        for tensor, contents in kept:
            assert same(tensor, contents)
    assert kept
    if first:
        assert twins.train.mismatches > 0, "a place was not free that should have been"
    else:
        assert twins.train.mismatches == 0, "it was learned that these stay"


def test_an_op_that_keeps_what_it_made() -> None:
    twins = Twins(budget=PLENTY)
    kept: list[Tensor] = []
    for _ in range(6):
        with acting(middle=lambda x: kept.append(torch.full_like(x, len(kept)))):
            twins.both()
        assert [(int(tensor.min()), int(tensor.max())) for tensor in kept] == [(n, n) for n in range(len(kept))]


def test_allocations_whose_sizes_vary_are_counted() -> None:
    twins = Twins(budget=PLENTY)
    sizes = iter([10, 10, 2000, 30, 5000, 70, 8000, 90, 100, 10])
    with acting(middle=lambda x: torch.empty(next(sizes, 1)).fill_(1.0).sum()):
        for _ in range(10):
            twins.both()
    assert twins.train.mismatches > 0
    runner = twins.train._fits[0].runner
    assert runner.lessons.left == 0, "it has learned again, and then let it be"
    before = twins.train.mismatches
    with acting(middle=lambda x: torch.empty(12345).fill_(1.0).sum()):
        twins.both()
    assert twins.train.mismatches > before
    assert LESSONS > 1
    assert "mismatches" in twins.train.report()


# Failures


def assert_usable(twins: Twins) -> None:
    """After a failure: nothing of ours is left, and the step works as before."""
    assert POOL.reserved() in (0, twins.train.arena_bytes)
    POOL.empty()
    assert not allocator.installed()
    for _ in range(2):
        twins.both()


def boom(_: Tensor) -> None:
    raise ValueError("boom")


@pytest.mark.parametrize("warm", [0, 1, 3], ids=["while it learns", "in the first step of the arena", "in the arena"])
def test_a_failure_in_the_forward_changes_nothing(warm: int) -> None:
    twins = Twins(budget=PLENTY)
    for _ in range(warm):
        twins.both()
    before = {key: item.clone() for key, item in everything(twins.mirror, None).items() if item is not None}
    torch.set_rng_state(twins.state)
    with pytest.raises(lowtide.StepError) as caught, acting(middle=boom):
        twins.train(*twins.example)
    error = caught.value
    assert "ValueError: boom. No parameter and no optimizer state was changed." in str(error)
    assert "probe_0" in str(error)
    assert error.hint == "the step can be repeated."
    assert (error.parameters, error.buffers) == ((), ())
    assert isinstance(error.__cause__, ValueError)
    assert torch.equal(torch.get_rng_state(), twins.state), "the generator was put back"
    now = everything(twins.mirror, None)
    assert_same(before, {key: now[key] for key in before})
    if warm:
        twins.compare()
    assert_usable(twins)


def test_a_failure_after_early_updates_names_them() -> None:
    twins = Twins(budget=PLENTY)
    twins.both()
    before = {name: parameter.detach().clone() for name, parameter in twins.mirror.named_parameters()}
    with pytest.raises(lowtide.StepError) as caught, acting(middle_backward=boom):
        twins.train(*twins.example)
    error = caught.value
    assert f"ValueError: boom. {len(error.parameters)} of 8 parameters were updated already." in str(error)
    changed = [name for name, parameter in twins.mirror.named_parameters() if not torch.equal(parameter, before[name])]
    assert changed
    assert set(changed) <= set(error.parameters) < set(before)
    assert "load the last checkpoint" in str(error.hint)
    twins.reload()
    assert_usable(twins)


def test_the_error_holds_no_memory_of_the_step() -> None:
    twins = Twins()
    for _ in range(3):
        twins.both()
    with pytest.raises(lowtide.StepError) as caught, acting(middle=boom):
        twins.train(*twins.example)
    (arena,) = POOL._idle
    assert arena.blocks == 1, "only what is in the frame of the op itself"
    for _ in range(3):
        twins.both()  # a warning would be an error: what the caller holds is not held by the step
    assert caught.value.__cause__ is not None


@pytest.fixture
def heard() -> Iterator[None]:
    """Let this process hear an interruption: who runs in the background is deaf to it."""
    usual = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, usual)


@pytest.mark.parametrize("where", ["middle", "middle_backward"])
def test_an_interruption_keeps_its_type(heard: None, where: str) -> None:
    def interrupt(_: Tensor) -> None:
        signal.raise_signal(signal.SIGINT)

    twins = Twins(budget=PLENTY)
    twins.both()
    with pytest.raises(KeyboardInterrupt) as caught, acting(**{where: interrupt}):
        twins.train(*twins.example)
    (note,) = caught.value.__notes__
    assert note.startswith("the step was interrupted at probe_")
    assert ("can be repeated" if where == "middle" else "parameters were updated already") in note
    twins.reload()
    assert_usable(twins)


def test_no_memory_in_the_middle() -> None:
    def ask(_: Tensor) -> None:
        torch.empty(1 << 60, dtype=torch.uint8)

    twins = Twins(budget=PLENTY)
    for _ in range(3):
        with pytest.raises(lowtide.StepError, match="can't allocate memory") as caught, acting(middle=ask):
            twins.train(*twins.example)
        assert caught.value.parameters == ()
        torch.set_rng_state(twins.state)
        twins.both()
    assert_usable(twins)


def test_no_memory_for_the_arena(monkeypatch: pytest.MonkeyPatch) -> None:
    twins = Twins(budget=PLENTY)
    twins.both()
    with monkeypatch.context() as patch:
        patch.setattr(allocator.arena.POOL, "borrow", lambda nbytes: Arena(1 << 60))
        with pytest.warns(lowtide.LowtideWarning, match="the system has no"):
            twins.both()
    twins.both()
    assert_usable(twins)


def test_failures_that_pile_up_gradients_say_so() -> None:
    def build() -> Any:
        _, model, _, example = probed()

        def step(model: Any, optimizer: None, x: Tensor, y: Tensor) -> Tensor:
            loss = torch.nn.functional.cross_entropy(model(x), y)
            loss.backward()
            return loss

        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        return step, model, None, example

    train, (_, _, example) = fitted(build, budget="90%")
    with pytest.raises(lowtide.StepError, match=r"; \d gradients were") as caught, acting(middle_backward=boom):
        train(*example)
    assert "clear the gradients" in str(caught.value.hint)


AROUND = (
    "lowtide.execute.runner",
    "lowtide.execute.call",
    "lowtide.execute.arrangement",
    "lowtide.execute.lessons",
    "lowtide.allocator.arena",
)


def interrupted_at(line: int, run: Callable[[], object]) -> bool:
    """Run, with an interruption at this line, counted from the first, of the code around a step; was it reached?"""
    files = {sys.modules[name].__file__ for name in AROUND}
    lines = 0

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal lines
        if frame.f_code.co_filename not in files or frame.f_code.co_name == "__del__":  # Python goes on after that
            return None
        lines += event == "line"
        if event == "line" and lines == line:
            raise KeyboardInterrupt
        return trace

    old = sys.gettrace()
    sys.settrace(trace)
    try:
        run()
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(old)
    return lines >= line


@pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)  # one in a finalizer is lost, says Python
@pytest.mark.parametrize("learns", [True, False])
def test_an_interruption_at_any_line_of_ours_leaves_nothing_behind(learns: bool) -> None:
    step, model, optimizer, example = probed()
    train, (mirror, mirrored_optimizer, _) = fitted(probed, PLENTY)
    train(*example)
    runner = train._fits[0].runner
    line = 0
    while True:
        line += 1
        if learns:
            runner.lessons.forget()
        elif runner.lessons.tape is None:
            train(*example)
        got_there = interrupted_at(line, lambda: runner(*example))
        POOL.empty()
        if allocator.installed():
            gc.collect()  # an arena is in the frames of the interruption
        assert not allocator.installed()
        if not got_there:
            break
    assert line > 30
    mirror.load_state_dict(model.state_dict())
    for state in mirrored_optimizer.state.values():
        state["momentum_buffer"].zero_()
    torch.manual_seed(0)
    expected = [step(model, optimizer, *example).detach() for _ in range(3)]
    torch.manual_seed(0)
    assert all(map(same, expected, [train(*example) for _ in range(3)]))
    assert train.mismatches == 0


def test_a_step_that_goes_waits_for_nobody() -> None:
    """Garbage is collected in any thread, and whoever has the lock may be waiting for that thread."""

    class User:
        pass

    pool = Pool()
    user = User()
    key = id(user)
    pool.expect(user, 4096)
    done = threading.Event()

    def let_go() -> None:
        pool._forget(key)
        done.set()

    with pool._lock:
        threading.Thread(target=let_go, daemon=True).start()
        assert done.wait(30)
        assert key in pool._needs
    with pool.borrow(64):
        pass
    assert key not in pool._needs
    assert pool.reserved() == 0
