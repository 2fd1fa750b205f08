"""Several processes with DistributedDataParallel: one line gives each rank its step within a budget.

Run it: torchrun --nproc-per-node 2 examples/several_ranks.py --budget 75%
(without a budget it trains as torch does; the losses are the same)
"""

from __future__ import annotations

import argparse
import os
import tempfile
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

import lowtide


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
    """One step, as without lowtide."""
    optimizer.zero_grad()
    loss = F.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    return loss.detach()


def train(budget: str | None = None, **options: Any) -> list[float]:
    """The losses of this rank over 6 batches; without torchrun it is the only one."""
    if "RANK" in os.environ:
        distributed.init_process_group("gloo")
    else:
        store = distributed.FileStore(tempfile.mkdtemp() + "/store", 1)
        distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.1)) for _ in range(8)]
    model = DistributedDataParallel(nn.Sequential(*layers))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(1 + distributed.get_rank())  # every rank has batches of its own
    batches = [(x, x.roll(1, dims=1)) for x in torch.randn(6, 256, 64)]
    train_step: Any = lambda *batch: step(model, optimizer, *batch)  # noqa: E731
    if budget is not None:
        train_step = lowtide.fit(step, model, optimizer, example=batches[0], budget=budget, **options)  # the one line
    losses = [train_step(*batch).item() for batch in batches]
    distributed.destroy_process_group()
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--budget", help='"2GiB", "50%%" or "least"')
    print(train(parser.parse_args().budget))
