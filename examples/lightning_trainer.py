"""Lightning's Trainer within a budget: one callback. It needs lightning.

Run it: python examples/lightning_trainer.py --budget 50%    (without a budget: as ever, with the same losses)
"""

from __future__ import annotations

import argparse
from typing import Any

import lightning
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lowtide


class Turning(lightning.LightningModule):
    """Learns to turn a row by one place."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.1)) for _ in range(6)))
        self.losses: list[float] = []

    def training_step(self, batch: list[Tensor], number: int) -> Tensor:
        """The loss of a batch."""
        (x,) = batch
        loss = F.mse_loss(self.net(x), x.roll(1, dims=1))
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Its optimizer."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def train(budget: str | None = None, **options: Any) -> list[float]:
    """The losses of 6 batches."""
    torch.manual_seed(0)
    module = Turning()
    loader = DataLoader(TensorDataset(torch.randn(384, 64)), batch_size=64)
    callbacks: list[Any] = [] if budget is None else [lowtide.LightningCallback(budget, **options)]  # the one line
    trainer = lightning.Trainer(
        max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, gradient_clip_val=1.0, callbacks=callbacks,
    )  # fmt: skip
    trainer.fit(module, loader)
    return module.losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--budget", help='"2GiB", "50%%" or "least"')
    print(train(parser.parse_args().budget))
