"""A loop of one's own, with accumulation, clipping and evaluation: one line attaches a plan to the model.

Run it: python examples/own_loop.py --budget 50%    (without a budget it trains as torch does; the losses are the same)
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import lowtide


def train(budget: str | None = None, **options: Any) -> list[float]:
    """The losses of 8 batches."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.1)) for _ in range(8)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if budget is not None:
        lowtide.attach(model, budget, optimizer, **options)  # the one line
    losses = []
    for number in range(8):
        x = torch.randn(256, 64)
        loss = F.mse_loss(model(x), x.roll(1, dims=1))
        loss.backward()
        if number % 2 == 1:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    model.eval()
    with torch.no_grad():
        losses.append(F.mse_loss(model(x), x.roll(1, dims=1)).item())
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--budget", help='"2GiB", "50%%" or "least"')
    print(train(parser.parse_args().budget))
