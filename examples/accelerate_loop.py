"""A loop with Accelerate within a budget: the prepared model is attached. It needs accelerate.

Run it: python examples/accelerate_loop.py --budget 50%    (without a budget: as ever, with the same losses)
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lowtide


def train(budget: str | None = None, **options: Any) -> list[float]:
    """The losses of 6 batches, two for each update."""
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.1)) for _ in range(6)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = DataLoader(TensorDataset(torch.randn(384, 64)), batch_size=64)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    if budget is not None:
        lowtide.attach(model, budget, optimizer, **options)  # the one line
    losses = []
    for (x,) in loader:
        with accelerator.accumulate(model):
            loss = F.mse_loss(model(x), x.roll(1, dims=1))
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--budget", help='"2GiB", "50%%" or "least"')
    print(train(parser.parse_args().budget))
