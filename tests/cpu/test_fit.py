"""A fitted step is used as the step was: schedules, checkpoints, evaluation, new shapes; and its budget is held."""

from __future__ import annotations

import copy
import gc
import importlib
import io
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from probes import acting, probed
from test_arena import Twins, convolutional
from torch import Tensor
from twins import same

import lowtide
from lowtide import allocator, device, models
from lowtide.allocator.arena import POOL, ArenaError
from lowtide.bench import limited
from lowtide.capture import optimizer as optimizers
from lowtide.costs import Costs
from lowtide.errors import BudgetError, LowtideError, LowtideWarning, UsageError
from lowtide.execute import arrangement
from lowtide.peaks import resident
from lowtide.plan import least
from lowtide.rewrite import with_narrow

budgets = importlib.import_module("lowtide.budget")
making, pressure = (importlib.import_module(f"lowtide.fit.{name}") for name in ("make", "pressure"))
ROOT = Path(__file__).parents[2]


def batch(size: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(seed)
    return torch.randn(size, 16, generator=made), torch.randint(5, (size,), generator=made)


# Used as before


def test_schedulers_and_learning_rates() -> None:
    twins = Twins()
    schedules = [
        torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.2, total_steps=8)  # it moves the momentum as well
        for optimizer in (twins.optimizer, twins.mirrored_optimizer)
    ]
    for number in range(6):
        twins.both(*batch(32, number))
        for schedule in schedules:
            schedule.step()
    for optimizer in (twins.optimizer, twins.mirrored_optimizer):
        optimizer.param_groups[0]["lr"] = 0.003
    twins.both()
    assert len(twins.train._fits) == 1
    assert twins.train.mismatches == 0


def test_checkpoints_go_on_as_if_nothing_had_been() -> None:
    twins = Twins(lambda: probed(momentum=0.5))
    for number in range(3):
        twins.both(*batch(32, number))
    file = io.BytesIO()
    state = {"model": twins.mirror.state_dict(), "optimizer": twins.mirrored_optimizer.state_dict()}
    torch.save(state, file)
    for number in range(3, 5):
        twins.both(*batch(32, number))
    for number in range(3):  # back in the same process, with the same fitted step
        file.seek(0)
        loaded = torch.load(file)
        twins.mirror.load_state_dict(loaded["model"])
        twins.mirrored_optimizer.load_state_dict(loaded["optimizer"])
        twins.model.load_state_dict(loaded["model"])
        twins.optimizer.load_state_dict(copy.deepcopy(loaded["optimizer"]))
        twins.compare()
        twins.both(*batch(32, number))
    fresh = Twins(lambda: probed(momentum=0.5))  # and in another one
    file.seek(0)
    loaded = torch.load(file)
    fresh.mirror.load_state_dict(loaded["model"])
    fresh.mirrored_optimizer.load_state_dict(loaded["optimizer"])
    fresh.model.load_state_dict(loaded["model"])
    fresh.optimizer.load_state_dict(copy.deepcopy(loaded["optimizer"]))
    for number in range(3, 6):
        fresh.both(*batch(32, number))
    assert len(twins.train._fits) == len(fresh.train._fits) == 1


def test_evaluation_between_steps() -> None:
    twins = Twins()
    for number in range(5):
        twins.both(*batch(32, number))
        answers = []
        for model in (twins.model, twins.mirror):
            model.eval()
            with torch.no_grad():
                answers.append(model(batch(50, 99)[0]))
            model.train()
        assert same(*answers)
    assert len(twins.train._fits) == 1


def test_a_batch_may_be_a_part_of_the_data() -> None:
    rows, labels = batch(320)
    twins = Twins()
    for number in range(10):
        part = slice(32 * number, 32 * number + 32)
        twins.both(rows[part], labels[part])
    assert twins.train.peak is not None
    assert twins.train.peak <= twins.train.plan.budget  # type: ignore[operator]


# New shapes


def test_new_shapes_are_planned_within_the_same_budget() -> None:
    told: list[str] = []
    step, model, optimizer, example = probed()
    train = lowtide.fit(
        *probed()[:3], example=example, budget="70%", time_limit=0.2, costs="roofline", tell=told.append
    )
    budget = train.plan.budget
    assert any(line.startswith("captured") for line in told)
    for number, size in enumerate((32, 24, 32, 8, 24, 36, 8, 32)):
        told.clear()
        state = torch.get_rng_state()
        expected = step(model, optimizer, *batch(size, number))
        torch.set_rng_state(state)
        assert same(expected.detach(), train(*batch(size, number)))
        new = [line for line in told if "captured anew, within the same budget" in line]
        assert bool(new) == (number in (1, 3, 5))
        assert train.plan.budget == budget
    assert train.peak is not None
    assert budget is not None
    assert train.peak <= budget
    assert len(train._fits) == 4
    assert "4  of batches, each with a plan of its own" in train.report()
    with pytest.raises(BudgetError):
        train(*batch(2000))
    assert len(train._fits) == 4
    train(*batch(24))


def test_a_plan_is_for_its_own_shape_and_its_budget_for_all() -> None:
    example = batch(32)
    step, model, optimizer, _ = probed()
    planned = lowtide.fit(step, model, optimizer, example=example, budget="70%", time_limit=0.2, costs="roofline").plan
    train = lowtide.fit(*probed()[:3], example=example, plan=planned, time_limit=0.2, costs="roofline")
    assert train.plan is planned
    train(*example)
    train(*batch(20))
    assert train.plan.budget == planned.budget
    assert len(train._fits) == 2
    with pytest.raises(UsageError, match="its own budget"):
        lowtide.fit(*probed()[:3], example=example, plan=planned, budget="1GiB")


# Budgets


def test_without_a_budget_it_is_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    step, model, optimizer, example = probed()
    tight = replace(device.CPU, free_bytes=lambda: 40_000)
    monkeypatch.setitem(device.DEVICES, "cpu", tight)
    train = lowtide.fit(step, model, optimizer, example=example, time_limit=0.2, costs="roofline")
    persistent = train.costs.persistent(train.captured.graph)
    assert train.plan.budget == persistent + 36_000
    for _ in range(3):
        train(*example)
    assert train.peak is not None
    assert train.peak <= persistent + 36_000
    monkeypatch.undo()
    roomy = lowtide.fit(step, model, optimizer, example=example, time_limit=0.2, costs="roofline")
    assert roomy.plan.budget is not None
    assert 10_000_000 < roomy.plan.budget < os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert roomy.plan.overhead == 0


DATA = "Limit                     Soft Limit  Hard Limit  Units\nMax data size             {}  unlimited  bytes\n"
METERED = {"meminfo": "MemAvailable: 9000 kB\n"}


@pytest.mark.parametrize(
    ("files", "free"),
    [
        ({}, None),
        ({"meminfo": "MemTotal: 900 kB\nMemAvailable:  500 kB\n"}, 500 * 1024),
        ({"memory.max": "max\n", "memory.current": "70\n", "meminfo": "MemAvailable: 5 kB\n"}, 5 * 1024),
        ({"memory.max": "3000\n", "memory.current": "1000\n"}, 2000),
        ({"memory.max": "3000", "memory.current": "2900", "memory.stat": "anon 5\ninactive_file 700\nfile 800\n"}, 800),
        ({"memory.max": "3000", "memory.current": "3100"}, 0),
        ({"memory/memory.limit_in_bytes": "9000", "memory/memory.usage_in_bytes": "4000"}, 5000),
        (
            {
                "memory/memory.limit_in_bytes": "9000",
                "memory/memory.usage_in_bytes": "8000",
                "memory/memory.stat": "inactive_file 10\ntotal_inactive_file 4000\n",
            },
            5000,
        ),
        ({"process/limits": DATA.format("unlimited"), "process/status": "VmData:\t9 kB\n", **METERED}, 9000 * 1024),
        ({"process/limits": DATA.format(4096), "process/status": "VmData:\t3 kB\n", **METERED}, 1024),
        ({"process/limits": DATA.format(4096), "process/status": "VmData:\t5 kB\n", **METERED}, 0),
        (
            {
                "process/limits": DATA.format(9_000_000) + "Max address space         8192    8192    bytes\n",
                "process/status": "VmSize:\t6 kB\nVmData:\t5 kB\n",
                **METERED,
            },
            2048,
        ),
    ],
)
def test_what_is_free(files: dict[str, str], free: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budgets, "MACHINE", tmp_path / "meminfo")
    monkeypatch.setattr(budgets, "PROCESS", tmp_path / "process")
    monkeypatch.setattr(budgets, "GROUPS", tmp_path)
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert budgets.free_memory() == (machine if free is None else free)


def test_the_report_says_what_was_promised_and_measured() -> None:
    twins = Twins()
    before = twins.train.report()
    assert "no step has run in the arena yet" in before
    for _ in range(3):
        twins.both()
    lines = dict(line.split("  ", 1) for line in twins.train.report().splitlines())
    assert set(lines) == {
        "budget",
        "predicted peak",
        "metered peak",
        "arena",
        "eager, predicted",
        "predicted step",
        "measured step",
        "overhead",
        "runs",
    }
    assert "the prediction is off by" in lines["measured step"]
    assert "the prediction is off by +0.00%" in lines["metered peak"]
    assert twins.train.peak == twins.train.plan.peak


# Above the budget


def test_a_plan_that_needs_more_than_it_promised_is_tightened() -> None:
    twins = Twins(budget="70%")
    budget = twins.train.plan.budget
    assert budget is not None
    with acting(middle=lambda _: torch.empty(7000, dtype=torch.uint8)):  # of which the costs know nothing
        with pytest.warns(LowtideWarning, match=r"more than its budget; it is planned anew"):
            twins.both()
        for _ in range(4):
            twins.both()  # a warning is an error here
    assert twins.train.peak is not None
    assert twins.train.peak <= budget
    assert twins.train.plan.budget == budget
    assert twins.train.plan.peak < budget
    assert twins.train.mismatches == 0


def test_temporaries_that_nobody_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    step, model, optimizer, example = convolutional()
    graph = with_narrow(lowtide.capture(step, model, optimizer, example).graph)
    costs = lowtide.measure(graph)
    backwards = [op for op in range(len(graph.ops)) if graph.ops[op].target == "aten.convolution_backward.default"]
    assert any(costs.arena_temporaries[op] > 10_000 for op in backwards)

    def understated(graph: lowtide.Graph, **options: Any) -> Costs:
        costs = lowtide.measure(graph, **options)
        none = [0 if op in backwards else nbytes for op, nbytes in enumerate(costs.arena_temporaries)]
        return replace(costs, arena_temporaries=tuple(none), heap_temporaries=tuple(none))

    believed = lowtide.plan(graph, understated(graph))
    needed = lowtide.simulate(graph, costs, lowtide.plan(graph, costs).program).peak
    low = max(believed.peak, least(graph, costs).peak)
    assert low < needed
    monkeypatch.setattr(making, "measure", understated)
    twins = Twins(convolutional, (low + needed) // 2, "measured")
    budget = twins.train.plan.budget
    assert budget is not None
    with pytest.warns(LowtideWarning, match="planned anew"):
        twins.both()
    for _ in range(3):
        twins.both()
    assert twins.train.peak is not None
    assert twins.train.peak <= budget


def test_where_nothing_tighter_fits_training_goes_on() -> None:
    twins = Twins(budget="60%")
    with acting(middle=lambda _: torch.empty(1 << 20)):
        with pytest.warns(LowtideWarning, match=r"more than its budget, and no tighter plan fits: no plan found"):
            twins.both()
        for _ in range(3):
            twins.both()
    assert twins.train.peak is not None
    assert twins.train.peak > 4 << 20


def test_after_a_few_tighter_plans_it_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    twins = Twins(budget="90%")
    monkeypatch.setattr(making, "plan", lambda *_, **__: twins.train.plan)  # a planner that does no better
    with acting(middle=lambda _: torch.empty(20_000)):
        for _ in range(pressure.TIGHTER):
            with pytest.warns(LowtideWarning, match="planned anew"):
                twins.both()
        with pytest.warns(LowtideWarning, match="3 tighter plans did not help, and it stays so"):
            twins.both()
        for _ in range(3):
            twins.both()


# Without a compiler


WITHOUT = """
import sys, warnings, torch
sys.path[:0] = {folders!r}
import lowtide
from probes import probed
from twins import same
from lowtide import allocator
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    step, model, optimizer, example = probed()
    train = lowtide.fit(*probed()[:3], example=example, {how}, time_limit=0.2, costs="roofline")
    for _ in range(3):
        state = torch.get_rng_state()
        expected = step(model, optimizer, *example)
        torch.set_rng_state(state)
        assert same(expected.detach(), train(*example))
assert not allocator.available()
assert train.peak is None and train.arena_bytes == 0 and train.mismatches == 0
assert "metered peak" in train.report()
told = [str(item.message) for item in caught if issubclass(item.category, lowtide.LowtideWarning)]
assert len(told) == 1, told
print(told[0])
"""


@pytest.mark.parametrize("how", ["plan", "budget"])
def test_without_a_compiler(how: str, tmp_path: Path) -> None:
    twins = Twins(budget="70%")
    twins.train.plan.save(tmp_path / "plan")
    options = {"plan": f"plan={str(tmp_path / 'plan')!r}", "budget": f"budget={twins.train.plan.budget}"}
    script = WITHOUT.format(folders=[str(ROOT), str(ROOT / "tests" / "cpu")], how=options[how])
    environment = {**os.environ, "CXX": "/nonexistent", "LOWTIDE_CACHE": str(tmp_path / "cache")}
    ended = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert "$CXX names none" in ended.stdout
    assert "arena" in ended.stdout
    assert "hint: install a C++20 compiler" in ended.stdout


def test_without_an_arena_no_more_is_held_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    planned = Twins(budget="70%").train.plan
    error = allocator.AllocatorUnavailable("there is no compiler.", hint="install one.")
    monkeypatch.setitem(device.DEVICES, "cpu", replace(device.CPU, missing=lambda: error))
    arrangement._without_arena.cache_clear()
    step, model, optimizer, example = probed()
    with pytest.warns(LowtideWarning, match="without an arena, and unmetered: there is no compiler"):
        train = lowtide.fit(step, model, optimizer, example=example, plan=planned, costs="roofline")
    for _ in range(2):
        train(*example)
    with allocator.meter() as meter:
        train(*example)
    assert train.costs.persistent(train.captured.graph) + meter.peak <= planned.peak


def test_where_there_is_no_memory_for_the_arena_it_is_planned_with_less(monkeypatch: pytest.MonkeyPatch) -> None:
    twins = Twins(budget="90%")
    twins.both()
    room, borrow = twins.train.arena_bytes - 1, POOL.borrow
    POOL.empty()

    def cramped(nbytes: int) -> Any:
        if nbytes > room:
            raise ArenaError("there is no memory.")
        return borrow(nbytes)

    monkeypatch.setattr(POOL, "borrow", cramped)
    monkeypatch.setattr(pressure, "CRAMPED", 64)
    with pytest.warns(LowtideWarning, match="there is no memory. It is planned anew, with less"):
        twins.both()
    assert 0 < twins.train.arena_bytes <= room
    twins.both()
    twins.both()
    assert twins.train.mismatches == 0
    assert twins.train.peak <= twins.train.plan.budget


@pytest.mark.parametrize("missing", [1000, pressure.BESIDE])
def test_where_limits_leave_too_little_beside_it_it_is_planned_with_less(
    missing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    twins = Twins(budget="90%")
    arena, code = twins.train.arena_bytes, twins.train.costs.code
    left = arena + pressure.BESIDE + code - missing
    monkeypatch.setattr(arrangement, "allowance", lambda: left)
    monkeypatch.setattr(pressure, "PLANNING", 500)
    monkeypatch.setattr(pressure, "CRAMPED", 64)
    known = missing == 1000
    numbers = (
        f"leave it {left:,} bytes; the step takes {arena:,} of them, and libraries may take {pressure.BESIDE + code:,}"
    )
    how = "It is planned anew, with less" if known else "No plan with less is known: no plan"
    with pytest.warns(LowtideWarning, match=f"{numbers} beside it. {how}"):
        twins.both()
    assert (twins.train.arena_bytes <= arena - missing) == known
    for _ in range(3):
        twins.both()
    assert twins.train.mismatches == 0
    assert twins.train.peak <= twins.train.plan.budget


def test_without_memory_for_the_optimizers_state_none_of_it_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    step, model, optimizer, example = models.build(models.SMALL["mlp"])
    optimizer = torch.optim.Adam(model.parameters())
    train = lowtide.fit(step, model, optimizer, example=example, budget="90%", time_limit=0.5)
    make, calls = optimizers.initial_state, []

    def scarce(*args: Any) -> Any:
        calls.append(args)
        if len(calls) == 3:
            raise RuntimeError("can't allocate memory: you tried to allocate 8 bytes.\nmore lines")
        return make(*args)

    monkeypatch.setattr(optimizers, "initial_state", scarce)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    nbytes = sum(parameter.nbytes for parameter in model.parameters())
    words = rf"the state of Adam for 8 parameters of {nbytes:,} bytes can't be made: .* 8 bytes. Nothing was changed"
    with pytest.raises(LowtideError, match=words):
        train(*example)
    assert not optimizer.state
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    train(*example)
    assert len(optimizer.state) == 8


# Where the system holds it to its budget, and for long


def test_a_limit_in_which_eager_dies() -> None:
    if not limited.enforced():
        pytest.skip("the system does not enforce RLIMIT_DATA")
    target = "resnet:stages=1-1-1-1,width=32,batch=24,size=96,classes=10"
    found = limited.live(target, budget="40%", steps=6, time_limit=0.5)
    assert (found.fitted, found.fitted_end) == (6, "")
    assert found.eager < 6
    assert "memory" in found.eager_end or "primitive" in found.eager_end or "killed" in found.eager_end
    assert found.fitted_resident < found.budget + found.slack
    assert found.ok


def test_a_long_run_holds_no_more_in_the_end() -> None:
    seen: list[int] = []
    found = limited.steady(
        models.SMALL["gpt"], budget="60%", steps=60, time_limit=0.5, progress=lambda done, total: seen.append(done)
    )
    assert found.ok, found
    assert seen == list(range(60))


@pytest.mark.parametrize("change", [{"late": limited.GROWTH + 2}, {"torch_growth": 1}, {"mismatches": 1}, {"peak": 11}])
def test_a_long_run_that_grows_or_strays_is_not_steady(change: dict[str, int]) -> None:
    good = limited.Steady(budget=10, peak=10, steps=30, early=1, late=1, torch_growth=0, mismatches=0)
    assert good.ok
    assert not replace(good, **change).ok


def test_a_long_run_does_not_grow() -> None:
    step, model, optimizer, example = models.build(models.SMALL["gpt"])
    train = lowtide.fit(step, model, optimizer, example=example, budget="40%", time_limit=0.2, costs="roofline")
    for _ in range(10):
        train(*example)
    gc.collect()
    before = resident.now()
    with allocator.meter() as meter:
        for _ in range(100):
            loss = train(*example)
        assert meter.current == loss.nbytes
    after = resident.now()
    assert before is not None
    assert after is not None
    assert after - before < 2 << 20
    assert train.mismatches == 0
    assert train.peak is not None
    assert train.peak <= train.plan.budget  # type: ignore[operator]


def test_making_a_step_leaves_old_objects_alone_and_the_collector_as_it_was() -> None:
    before, seen = gc.get_threshold(), []
    step, model, optimizer, example = models.build(models.SMALL["mlp"])
    asked = {"budget": "100%", "costs": "roofline", "time_limit": 0.0}
    lowtide.fit(step, model, optimizer, example=example, tell=lambda _: seen.append(gc.get_threshold()), **asked)
    assert seen
    assert set(seen) == {(*before[:2], making.NEVER)}
    with pytest.raises(BudgetError):
        lowtide.fit(step, model, optimizer, example=example, costs="roofline", budget=1)
    assert gc.get_threshold() == before
