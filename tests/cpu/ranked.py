"""One rank of a test of several: `python ranked.py SCENARIO RANK RANKS FOLDER`; it fails where what is asked is not so.

Every comparison is with plain DistributedDataParallel in the same processes, by torch.equal.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from one_rank import (
    BATCH,
    CLASSES,
    FOLDER,
    RANK,
    RANKS,
    STEPS,
    WIDTH,
    Step,
    assert_same,
    batch,
    plain,
    run,
    state,
    take_part,
)
from one_rank import assert_equal as equal_to
from torch import distributed, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import lowtide
from lowtide.errors import CaptureError, LowtideError, RankError, StepError, UsageError

SMALL = {"bucket_cap_mb": 0.02}  # MiB, so that there are several buckets


class Perceptron(nn.Module):
    """Layers with batch norm and dropout: buffers, draws, and several buckets where they are small."""

    def __init__(self, depth: int = 4) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for _ in range(depth):
            layers += [nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU(), nn.Dropout(0.2)]
        self.layers, self.head = nn.Sequential(*layers), nn.Linear(WIDTH, CLASSES)
        self.side = nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor, side: bool = True) -> torch.Tensor:
        inner = self.layers(x)
        return torch.cat((self.head(inner), self.side(inner)), 1) if side else self.head(inner)


class Pictures(nn.Module):
    """Convolutions, of which one has its weights in another memory format."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.second = nn.Conv2d(16, 16, 3, padding=1).to(memory_format=torch.channels_last)
        self.head = nn.Linear(16 * WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = torch.relu(self.norm(self.first(x.view(-1, 1, 8, 8))))
        return self.head(torch.relu(self.second(inner)).flatten(1))


def made(model: Callable[[], nn.Module] = Perceptron, **options: Any) -> tuple[DistributedDataParallel, Any]:
    """A DDP model and its optimizer, the same at every call; ranks draw from different seeds then."""
    torch.manual_seed(0)
    ddp = DistributedDataParallel(model(), **options)
    optimizer = torch.optim.AdamW(ddp.parameters(), 1e-2)
    torch.manual_seed(100 + RANK)
    return ddp, optimizer


def clipped(model: nn.Module, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def accumulating(model: Any, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    optimizer.zero_grad()
    with model.no_sync():
        F.cross_entropy(model(x[:64]), y[:64]).backward()
    loss = F.cross_entropy(model(x[64:]), y[64:])
    loss.backward()
    optimizer.step()
    return loss.detach()


def keeping(model: nn.Module, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    optimizer.zero_grad(set_to_none=False)
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    return loss.detach()


def without_side(model: nn.Module, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x, side=False), y)
    loss.backward()
    optimizer.step()
    return loss.detach()


def assert_equal(step: Step, budget: str | int, **options: Any) -> lowtide.Fitted:
    """The same steps by plain DDP and within the budget."""
    return equal_to(step, budget, made, **options)


# ------------------------------------------------------------------------------------------------------- the scenarios


def cheap() -> None:
    """Batch norm and dropout, two buckets, half of what the step adds."""
    fitted = assert_equal(plain, "60%", **SMALL)
    graph = fitted.captured.graph
    sums = [op for op in graph.ops if op.target == "lowtide.all_reduce.default"]
    assert len(sums) > 1
    runs = [item.op for item in fitted.program.instructions if isinstance(item, lowtide.Run)]
    assert all(runs.count(graph.ops.index(op)) == 1 for op in sums)
    assert all(op.channels == ("group:0",) for op in sums)
    guard_on_one_rank()


def assert_beside_the_backward(fitted: lowtide.Fitted) -> None:
    """Where there is room, all buckets have begun before anything waits for the first."""
    ops = fitted.captured.graph.ops
    runs = [ops[item.op] for item in fitted.program.instructions if isinstance(item, lowtide.Run)]
    sums = [place for place, op in enumerate(runs) if op.target == "lowtide.all_reduce.default"]
    updates = [place for place, op in enumerate(runs) if "addcdiv" in op.target]
    assert len(sums) > 1
    assert max(sums) < min(updates)


def guard_on_one_rank() -> None:
    """Another shape on one rank alone, then a failure on one rank alone: nobody hangs, nobody drifts."""
    size = 96 if RANK == 1 else BATCH
    ddp, optimizer = made(**SMALL)
    losses = [plain(ddp, optimizer, *batch(9, one)) for one in (BATCH, size, BATCH)]
    ours, our_optimizer = made(**SMALL)
    step = lowtide.fit(plain, ours, our_optimizer, example=batch(0), budget=2**30, costs="roofline", time_limit=0)
    assert_beside_the_backward(step)
    assert_same(losses, [step(*batch(9, one)) for one in (BATCH, size, BATCH)])
    assert_same(state(ddp, optimizer), state(ours, our_optimizer))
    before = [tensor.clone() for tensor in state(ours, our_optimizer)]
    x, y = batch(10)
    with pytest.raises(LowtideError if RANK == 1 else RankError) as raised:
        step(*((x, "no labels") if RANK == 1 else (x, y)))
    assert RANK == 1 or "rank 1 of" in str(raised.value), raised.value
    assert_same(before, state(ours, our_optimizer))
    torch.manual_seed(RANK)
    loss = plain(ddp, optimizer, x, y)
    torch.manual_seed(RANK)
    assert_same([loss], [step(x, y)])
    assert_same(state(ddp, optimizer), state(ours, our_optimizer))


def budgets() -> None:
    """One step at several budgets, and at one for each rank."""
    for budget in ("100%", "60%", "least"):
        assert_equal(plain, budget, **SMALL)
    own_budgets()


def steps() -> None:
    """Steps that clip, accumulate under no_sync, keep their gradients, or were eager before."""
    assert_equal(clipped, "70%", **SMALL)
    assert_equal(accumulating, "80%", **SMALL)
    assert_equal(keeping, "80%", **SMALL)
    outside_no_sync()
    after_eager_steps()
    if RANKS == 2:
        eager_afterwards()


def settings() -> None:
    """What DDP can be told, and weights in another memory format."""
    assert_equal(plain, "90%", model=Pictures, **SMALL)
    assert_equal(plain, "80%", broadcast_buffers=False, **SMALL)
    assert_equal(plain, "80%", gradient_as_bucket_view=True, **SMALL)
    assert_equal(without_side, "80%", find_unused_parameters=True, **SMALL)
    assert_equal(plain, "80%", find_unused_parameters=True, **SMALL)


def outside_no_sync() -> None:
    """no_sync around a fitted step: its gradients stay local until a step outside of it."""

    def gradients(model: nn.Module, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss.detach()

    def trained(model: Any, optimizer: Any, step: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
        losses = []
        for number in range(4):
            with model.no_sync() if number % 2 == 0 else contextlib.nullcontext():
                losses.append(step(*batch(number)))
            if number % 2:
                optimizer.step()
                optimizer.zero_grad()
        return losses

    ddp, optimizer = made()
    losses = trained(ddp, optimizer, lambda *given: gradients(ddp, optimizer, *given))
    ours, our_optimizer = made()
    fitted = lowtide.fit(gradients, ours, our_optimizer, example=batch(0), budget=2**30, costs="roofline")
    assert_same(losses, trained(ours, our_optimizer, fitted))
    assert_same(state(ddp, optimizer), state(ours, our_optimizer))


def after_eager_steps() -> None:
    """A model that has taken steps in plain DDP already, whose buckets are others by then."""
    for eager in (1, 3):
        ddp, optimizer = made(bucket_cap_mb=0.02)
        losses = run(lambda *given: plain(ddp, optimizer, *given))  # noqa: B023
        ours, our_optimizer = made(bucket_cap_mb=0.02)
        first = run(lambda *given: plain(ours, our_optimizer, *given), range(eager))  # noqa: B023
        fitted = lowtide.fit(plain, ours, our_optimizer, example=batch(0), budget=2**30, costs="roofline")
        assert_same(losses, first + run(fitted, range(eager, STEPS)))
        assert_same(state(ddp, optimizer), state(ours, our_optimizer))


def eager_afterwards() -> None:
    """Plain steps between fitted ones, with two ranks, where buckets do not matter. DDP's own are given back."""
    ddp, optimizer = made()
    losses = run(lambda *given: plain(ddp, optimizer, *given))
    with lowtide.meter() as meter:
        ours, our_optimizer = made()
        before = meter.current
        fitted = lowtide.fit(plain, ours, our_optimizer, example=batch(0), budget=2**30, costs="roofline")
        gradients = sum(one.nbytes for one in ours.parameters())
        assert before - meter.current > 0.9 * gradients, (before, meter.current, gradients)
    first = run(fitted, range(2))
    between = run(lambda *given: plain(ours, our_optimizer, *given), range(2, 4))
    assert_same(losses, first + between + run(fitted, range(4, STEPS)))
    assert_same(state(ddp, optimizer), state(ours, our_optimizer))


def own_budgets() -> None:
    """Each rank within a budget of its own."""
    fitted = assert_equal(plain, "100%" if RANK == 0 else "60%", bucket_cap_mb=0.02)
    budgets: list[Any] = [None] * RANKS
    distributed.all_gather_object(budgets, fitted.plan.budget)
    assert budgets[0] > budgets[1]


def refused() -> None:
    """What is not in a captured step is refused in words, on all ranks, and nothing is changed."""

    def expect(kind: type[LowtideError], *words: str, step: Step = plain, **options: Any) -> None:
        given = {key: options.pop(key) for key in ("allow", "verify") if key in options}
        ddp, optimizer = made(**options)
        before = [tensor.clone() for tensor in state(ddp, optimizer)]
        with pytest.raises(kind) as raised:
            lowtide.fit(step, ddp, optimizer, example=batch(0), budget=2**30, costs="roofline", **given)
        assert all(word in str(raised.value) for word in words), raised.value
        assert_same(before, state(ddp, optimizer))

    expect(CaptureError, "no gradient", "find_unused_parameters=True", "'side.weight'", step=without_side)
    expect(CaptureError, "static_graph", static_graph=True)
    expect(UsageError, "allow", allow="rounding")
    expect(UsageError, "beside eager", verify=1)
    ddp, optimizer = made()
    ddp.register_comm_hook(None, lambda _, bucket: distributed.all_reduce(bucket.buffer(), async_op=True).get_future())
    for call, words in (
        (lambda: lowtide.fit(plain, ddp, optimizer, example=batch(0), budget=2**30), "hook"),
        (lambda: lowtide.wrap(made()[0], example=batch(0)[:1], budget=2**30), "lowtide.fit"),
        (lambda: lowtide.attach(made()[0], budget=2**30), "lowtide.fit"),
        (lambda: lowtide.fit(plain, Perceptron(), None, example=batch(0), budget=2**30), "drift apart"),
    ):
        with pytest.raises(LowtideError, match=words):
            call()


def death() -> None:
    """One rank dies between two steps, or in one: the others have one clear error, soon."""
    model, optimizer = made()

    def step(model: nn.Module, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return plain(model, optimizer, x, y)

    fitted = lowtide.fit(step, model, optimizer, example=batch(0), budget=2**30, costs="roofline", time_limit=0)
    fitted(*batch(0))
    if RANK == RANKS - 1:
        os._exit(0)
    begun = time.monotonic()
    with pytest.raises(RankError, match="lost the others") as raised:
        for number in range(3):
            fitted(*batch(number))
    assert "checkpoint" in str(raised.value)
    assert time.monotonic() - begun < 30
    os._exit(0)


def death_in_a_step() -> None:
    """One rank dies while a step runs: the error of the others says that they can't go on alone."""
    model, optimizer = made()
    large = batch(0, 8192)
    fitted = lowtide.fit(plain, model, optimizer, example=large, budget=2**30, costs="roofline", time_limit=0)
    fitted(*large)
    if RANK == RANKS - 1:
        signal.setitimer(signal.ITIMER_REAL, 0.03)  # its signal ends the process
    with pytest.raises(LowtideError, match="lost the others") as raised:
        for _ in range(1000):
            fitted(*large)
    assert "from the last checkpoint" in str(raised.value)
    assert isinstance(raised.value, RankError | StepError)
    os._exit(0)


def resume() -> None:
    """A checkpoint of rank 0 goes on on all ranks, as with plain DDP."""

    def trained(fit: bool) -> list[torch.Tensor]:
        path = FOLDER / f"checkpoint-{fit}.pt"
        model, optimizer = made(bucket_cap_mb=0.02)
        step: Any = lambda *given: plain(model, optimizer, *given)  # noqa: E731
        if fit:
            step = lowtide.fit(plain, model, optimizer, example=batch(0), budget="80%", time_limit=0.5)
        run(step, range(2))
        if RANK == 0:
            torch.save((model.module.state_dict(), optimizer.state_dict()), path)
        distributed.barrier()
        weights, moments = torch.load(path)
        inner = Perceptron()
        inner.load_state_dict(weights)
        model = DistributedDataParallel(inner, bucket_cap_mb=0.02)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        optimizer.load_state_dict(moments)
        torch.manual_seed(7 + RANK)
        step = lambda *given: plain(model, optimizer, *given)  # noqa: E731
        if fit:
            step = lowtide.fit(plain, model, optimizer, example=batch(0), budget="80%", time_limit=0.5)
        return run(step, range(2, 5)) + state(model, optimizer)

    assert_same(trained(False), trained(True))


take_part(globals())
