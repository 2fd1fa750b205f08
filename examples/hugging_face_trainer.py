"""Hugging Face's Trainer within a budget: one callback. It needs transformers[torch].

Run it: python examples/hugging_face_trainer.py --budget 50%    (without a budget: as ever, with the same losses)
"""

from __future__ import annotations

import argparse
import tempfile
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

import lowtide


class Text(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Tokens that count on from a number."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, place: int) -> dict[str, torch.Tensor]:
        tokens = (torch.arange(16) * (place + 1)) % 64
        return {"input_ids": tokens, "labels": tokens}


def train(budget: str | None = None, **options: Any) -> list[float]:
    """The losses of 4 steps."""
    set_seed(0)
    model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=64, n_positions=16))
    callbacks = [] if budget is None else [lowtide.TrainerCallback(budget, **options)]  # the one line
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, max_steps=4, per_device_train_batch_size=4, use_cpu=True, logging_steps=1, report_to=[],
            save_strategy="no", disable_tqdm=True,
        )  # fmt: skip
        trainer = Trainer(model, arguments, train_dataset=Text(), callbacks=callbacks)
        trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--budget", help='"2GiB", "50%%" or "least"')
    print(train(parser.parse_args().budget))
