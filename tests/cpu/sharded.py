"""One rank of a test of fully_shard: `python sharded.py SCENARIO RANK RANKS FOLDER`; it fails where a claim is wrong.

Every comparison is with plain fully_shard in the same processes, by torch.equal of what each rank has.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import lowtide
from lowtide.errors import LowtideError, RankError

STEPS = 5
WIDTH, CLASSES, BATCH, DEPTH = 64, 10, 256, 3
RANK, RANKS = int(sys.argv[2]), int(sys.argv[3])
FOLDER = Path(sys.argv[4])

GATHER, SUM = "lowtide.gather.default", "lowtide.all_reduce.default"

Step = Callable[..., Any]
Make = Callable[..., tuple[nn.Module, Any]]


class Block(nn.Module):
    """Layers with batch norm, dropout and a parameter of one number: it is on the first rank alone."""

    def __init__(self, width: int, checkpointed: bool = False) -> None:
        super().__init__()
        self.linear, self.norm, self.scale = nn.Linear(width, width), nn.BatchNorm1d(width), nn.Parameter(torch.ones(1))
        self.checkpointed = checkpointed

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(torch.relu(self.norm(self.linear(x))), 0.2) * self.scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.inner, x, use_reentrant=False) if self.checkpointed else self.inner(x)


class Tied(nn.Module):
    """The same weights at both ends, an LSTM between, and a parameter that stays as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.last.weight = self.first.weight
        self.middle = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.frozen = nn.Parameter(torch.randn(WIDTH), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner, _ = self.middle(self.first(x).view(-1, 4, WIDTH))
        return self.last(inner.reshape(-1, WIDTH)) * self.frozen


def made(
    *, width: int = WIDTH, kind: Callable[..., Any] = torch.optim.AdamW, inside: bool = False, **options: Any
) -> tuple[nn.Module, Any]:
    """Blocks, each of which is sharded, then the rest; the same at every call. Ranks draw from different seeds then."""
    torch.manual_seed(0)
    blocks = [Block(width, inside) for _ in range(DEPTH)]
    model = nn.Sequential(nn.Linear(WIDTH, width), *blocks, nn.Linear(width, CLASSES))
    for block in blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)
    optimizer = kind(model.parameters(), lr=1e-2)
    torch.manual_seed(100 + RANK)
    return model, optimizer


def tied() -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = Tied()
    fully_shard(model.middle)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), 1e-2, momentum=0.9)
    torch.manual_seed(100 + RANK)
    return model, optimizer


def batch(number: int, size: int = BATCH) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * number + RANK)
    x = torch.randn(size, WIDTH, generator=generator)
    return x, torch.randint(0, CLASSES, (size,), generator=generator)


def plain(model: nn.Module, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    return loss.detach()


def twice(model: nn.Module, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    for half in (slice(0, 64), slice(64, None)):
        loss = F.cross_entropy(model(x[half]), y[half])
        loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    return loss.detach()


def run(step: Callable[..., torch.Tensor], steps: range = range(STEPS)) -> list[torch.Tensor]:
    return [step(*batch(number)) for number in steps]


def own(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def state(model: nn.Module, optimizer: Any) -> list[torch.Tensor]:
    """What this rank has of parameters, buffers, gradients and the optimizer's state."""
    found = [*model.state_dict().values()]
    found += [torch.zeros(0) if one.grad is None else one.grad for one in model.parameters()]
    for one in optimizer.state_dict()["state"].values():
        found += [value for value in one.values() if isinstance(value, torch.Tensor)]
    return found


def assert_same(one: list[torch.Tensor], other: list[torch.Tensor]) -> None:
    assert len(one) == len(other)
    for number, (first, second) in enumerate(zip(one, other, strict=True)):
        assert type(first) is type(second), (number, type(first), type(second))
        assert torch.equal(own(first), own(second)), f"tensor {number} of {len(one)} differs, {tuple(first.shape)}"


def assert_equal(step: Step, budget: str | int, make: Make = made, **options: Any) -> lowtide.Fitted:
    """The same steps by plain fully_shard and within the budget: losses, shards, gradients, state; the meter."""
    model, optimizer = make(**options)
    losses = run(lambda *given: step(model, optimizer, *given))
    ours, our_optimizer = make(**options)
    fitted = lowtide.fit(step, ours, our_optimizer, example=batch(0), budget=budget, time_limit=0.5)
    assert_same(losses, run(fitted))
    assert_same(state(model, optimizer), state(ours, our_optimizer))
    assert fitted.peak is not None
    assert fitted.plan.budget is not None
    assert fitted.peak <= fitted.plan.budget, (fitted.peak, fitted.plan.budget)
    return fitted


def targets(fitted: lowtide.Fitted) -> list[str]:
    """What the program runs, in order."""
    ops = fitted.captured.graph.ops
    return [ops[item.op].target for item in fitted.program.instructions if isinstance(item, lowtide.Run)]


# ------------------------------------------------------------------------------------------------------- the scenarios


def cheap() -> None:
    """Blocks of which each rank has half, one number that one of them has, and layers that are gathered again."""
    fitted = assert_equal(plain, "least")
    ran, ops = targets(fitted), [op.target for op in fitted.captured.graph.ops]
    assert ran.count(GATHER) > ops.count(GATHER) > 0, (ran.count(GATHER), ops.count(GATHER))
    assert ran.count(SUM) == ops.count(SUM) > 1
    orders: list[Any] = [None] * RANKS
    distributed.all_gather_object(orders, [one for one in ran if one in (GATHER, SUM)])
    assert all(one == orders[0] for one in orders)


def budgets() -> None:
    """Even and uneven shards at several budgets."""
    for width in (WIDTH, WIDTH + 1):
        for budget in ("100%", "60%", "least"):
            assert_equal(plain, budget, width=width)


def kinds() -> None:
    """Other optimizers, checkpoints, several backwards, gradients that stay; weights that are shared, and an LSTM's."""
    assert_equal(plain, "80%", kind=torch.optim.SGD)
    assert_equal(plain, "80%", kind=torch.optim.RMSprop)
    assert_equal(plain, "90%", inside=True)
    assert_equal(twice, "90%")
    assert_equal(plain, "least", tied)


def seeded(step: Callable[..., torch.Tensor], number: int, size: int = BATCH) -> torch.Tensor:
    """One step whose draws do not depend on what was drawn before it."""
    torch.manual_seed(100 * number + RANK)
    return step(*batch(number, size))


def others() -> None:
    """Batches of another size on all ranks; eager steps before and between; an evaluation; states that are loaded."""
    sizes = (BATCH, 96, BATCH, BATCH, 96, BATCH)
    model, optimizer = made()
    losses = [seeded(lambda *given: plain(model, optimizer, *given), *one) for one in enumerate(sizes)]
    ours, our_optimizer = made()
    eager: Step = lambda *given: plain(ours, our_optimizer, *given)  # noqa: E731
    found = [seeded(eager, 0)]
    fitted = lowtide.fit(plain, ours, our_optimizer, example=batch(0), budget=2**30, costs="roofline", time_limit=0)
    found += [seeded(fitted, 1, 96), seeded(fitted, 2), seeded(eager, 3)]
    weights, moments = ours.state_dict(), our_optimizer.state_dict()
    ours.load_state_dict({name: weight.clone() for name, weight in weights.items()})
    our_optimizer.load_state_dict(moments)
    ours.eval()
    with torch.no_grad():
        ours(batch(0)[0])  # after which the outermost layer is still gathered
    ours.train()
    found += [seeded(fitted, 4, 96), seeded(fitted, 5)]
    assert_same(losses, found)
    assert_same(state(model, optimizer), state(ours, our_optimizer))


def alone() -> None:
    """Another shape on one rank alone: nobody hangs, all are told, and the next step is as if it had not been."""
    model, optimizer = made()
    losses = [seeded(lambda *given: plain(model, optimizer, *given), number) for number in range(3)]
    ours, our_optimizer = made()
    fitted = lowtide.fit(plain, ours, our_optimizer, example=batch(0), budget=2**30, costs="roofline", time_limit=0)
    found = [seeded(fitted, 0)]
    with pytest.raises(LowtideError) as raised:
        fitted(*batch(1, 96 if RANK == 1 else BATCH))
    assert "another shape" in str(raised.value), raised.value
    assert isinstance(raised.value, RankError) or RANK == 1
    assert_same(losses, found + [seeded(fitted, number) for number in range(1, 3)])
    assert_same(state(model, optimizer), state(ours, our_optimizer))


def refused() -> None:
    """What is not in a captured step is refused in words, on all ranks, and nothing is changed."""

    def expect(*words: str, step: Step = plain, given: dict[str, Any] | None = None, **options: Any) -> None:
        model, optimizer = made(**options)
        before = [own(tensor).clone() for tensor in state(model, optimizer)]
        with pytest.raises(LowtideError) as raised:
            lowtide.fit(step, model, optimizer, example=batch(0), budget=2**30, costs="roofline", **(given or {}))
        assert all(word in str(raised.value) for word in words), raised.value
        assert_same(before, [own(tensor) for tensor in state(model, optimizer)])

    def penalised(model: nn.Module, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> None:
        (F.cross_entropy(model(x), y) + model[0].weight.square().sum()).backward()

    def two_forwards(model: nn.Module, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> None:
        (model(x) + model(x)).sum().backward()

    expect("mixed precision", mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    expect("offload policy", offload_policy=CPUOffloadPolicy(pin_memory=False))
    expect("another dimension", shard_placement_fn=lambda parameter: Shard(parameter.ndim - 1))
    expect("mesh", mesh=init_device_mesh("cpu", (1, RANKS), mesh_dim_names=("copies", "shards")))
    expect("Adafactor", "AdamW", kind=torch.optim.Adafactor)
    expect("sharded.py:", "part of it", step=penalised)
    expect("runs twice", step=two_forwards)
    expect("offload", given={"offload": "disk"})
    expect("beside eager", given={"verify": 1})
    expect("allow", given={"allow": "rounding"})
    for call in (lowtide.wrap, lowtide.attach):
        with pytest.raises(LowtideError, match=r"lowtide\.fit"):
            call(made()[0], budget=2**30, **({"example": batch(0)[:1]} if call is lowtide.wrap else {}))
    later()


def later() -> None:
    """What fully_shard is told between two steps is seen."""
    model, optimizer = made()
    fitted = lowtide.fit(plain, model, optimizer, example=batch(0), budget=2**30, costs="roofline", time_limit=0)
    fitted(*batch(0))
    model.set_requires_gradient_sync(False)
    with pytest.raises(LowtideError, match="set_requires_gradient_sync"):
        fitted(*batch(1))
    model.set_requires_gradient_sync(True)
    fitted(*batch(1))


def main() -> None:
    warnings.simplefilter("error", lowtide.LowtideWarning)
    torch.set_num_threads(1)
    store = distributed.FileStore(str(FOLDER / "store"), RANKS)
    distributed.init_process_group("gloo", store=store, rank=RANK, world_size=RANKS, timeout=timedelta(seconds=60))
    globals()[sys.argv[1]]()
    distributed.barrier()
    distributed.destroy_process_group()


main()
