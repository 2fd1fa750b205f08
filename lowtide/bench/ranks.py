"""Does a step of several ranks within a budget take as long as plain DDP's or FSDP2's? By turns, in one run.

`python -m lowtide.bench.ranks TARGET RANK RANKS FOLDER ROUNDS TIME_LIMIT PLAIN BUDGET...` is one rank; rank 0 prints
what it found.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, Literal

import torch
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from lowtide.allocator import meter
from lowtide.cli.target import build
from lowtide.errors import LowtideError
from lowtide.fit import fit

TARGETS = ("gpt:layers=4,context=64", "resnet:depth=18,size=32")
BUDGETS = ("100%", "50%")
RANKS, ROUNDS, WARM_UPS, TIME_LIMIT = 2, 7, 2, 2.0
Plain = Literal["DDP", "FSDP2"]  # what ranks train by without lowtide
PATIENCE = 1800  # seconds for all that the ranks do


@dataclass(frozen=True)
class Raced:
    """One way to take the steps."""

    way: str  # "DDP", "FSDP2", or the budget
    seconds: float  # of a step, by the median of all rounds
    peak: int | None  # bytes that a step holds, metered
    budget: int | None  # bytes
    same: bool  # whether all parameters and buffers of this rank are the plain ones after all steps


def race(
    target: str,
    *,
    plain: Plain = "DDP",
    ranks: int = RANKS,
    rounds: int = ROUNDS,
    time_limit: float = TIME_LIMIT,
    budgets: Sequence[str],
) -> list[Raced]:
    """Run a target on so many ranks of this machine, plain and within each budget, in turn."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        words = [str(ranks), folder, str(rounds), str(time_limit), plain, *budgets]
        command = [sys.executable, "-m", "lowtide.bench.ranks", target]
        running = [
            subprocess.Popen([*command, str(rank), *words], env=environment, stdout=subprocess.PIPE, text=True)
            for rank in range(ranks)
        ]
        try:
            said = [one.communicate(timeout=PATIENCE)[0] for one in running]
        finally:
            for one in running:
                one.kill()
                one.wait()
    if any(one.returncode for one in running):
        raise LowtideError(f"the ranks of {target} did not come to an end: {[one.returncode for one in running]}.")
    return [Raced(**row) for row in json.loads(said[0])]


class _Way:
    """A model of its own, and how its steps are taken."""

    def __init__(self, target: str, plain: Plain, budget: str | None, time_limit: float) -> None:
        step, model, self.optimizer, self.example = build(target)
        self.model = DistributedDataParallel(model) if plain == "DDP" else _sharded(model, self.optimizer)
        self.seconds: list[float] = []
        self.peak: int | None = None
        self.fitted = None
        self.take: Callable[..., Any] = lambda *batch: step(self.model, self.optimizer, *batch)
        if budget is not None:
            self.fitted = fit(
                step, self.model, self.optimizer, example=self.example, budget=budget, time_limit=time_limit
            )
            self.take = self.fitted

    def step(self, *, timed: bool) -> None:
        """One step, from the moment at which all ranks are there."""
        torch.manual_seed(0)
        distributed.barrier()
        begun = perf_counter()
        self.take(*self.example)
        if timed:
            self.seconds.append(perf_counter() - begun)

    def weigh(self) -> None:
        """One step more, in the meter."""
        if self.fitted is not None:
            self.step(timed=False)
            self.peak = self.fitted.peak
            return
        held = sum(_here(one).nbytes for one in (*_lasting(self.model), *_state(self.optimizer)))
        with meter() as metered:
            self.step(timed=False)
            self.peak = held + metered.peak


def _sharded(model: nn.Module, optimizer: torch.optim.Optimizer) -> nn.Module:
    """The model with its layers and itself given to fully_shard, and the optimizer for what they have become."""
    before = [*model.parameters()]
    for layers in [one for one in model.modules() if isinstance(one, nn.ModuleList)]:
        for layer in layers:
            fully_shard(layer)
    fully_shard(model)
    now = dict(zip(map(id, before), model.parameters(), strict=True))
    for group in optimizer.param_groups:
        group["params"] = [now[id(one)] for one in group["params"]]
    return model


def _lasting(model: nn.Module) -> list[torch.Tensor]:
    return [*model.parameters(), *model.buffers()]


def _here(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank has of it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _state(optimizer: Any) -> list[torch.Tensor]:
    return [item for one in optimizer.state.values() for item in one.values() if isinstance(item, torch.Tensor)]


def _rank(target: str, rounds: int, time_limit: float, plain: Plain, budgets: Sequence[str]) -> list[Raced]:
    """What one rank does."""
    ways: dict[str, _Way] = {plain: _Way(target, plain, None, time_limit)}
    ways |= {one: _Way(target, plain, one, time_limit) for one in budgets}
    for timed in (*[False] * WARM_UPS, *[True] * rounds):
        for way in ways.values():
            way.step(timed=timed)
    for way in ways.values():
        way.weigh()
    expected = [_here(one) for one in _lasting(ways[plain].model)]
    return [
        Raced(
            name,
            median(way.seconds),
            way.peak,
            None if way.fitted is None else way.fitted.plan.budget,
            all(map(torch.equal, expected, map(_here, _lasting(way.model)))),
        )
        for name, way in ways.items()
    ]


def main(
    target: str, rank: str, ranks: str, folder: str, rounds: str, time_limit: str, plain: Plain, *budgets: str
) -> None:
    """One rank, of as many."""
    torch.set_num_threads(1)
    store = (Path(folder) / "store").as_uri()
    distributed.init_process_group("gloo", init_method=store, rank=int(rank), world_size=int(ranks))
    found = _rank(target, int(rounds), float(time_limit), plain, budgets)
    if rank == "0":
        print(json.dumps([asdict(one) for one in found]))
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])  # type: ignore[arg-type]
