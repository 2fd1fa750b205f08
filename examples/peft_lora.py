"""LoRA by peft within a budget: the model with its adapters is attached. It needs transformers and peft.

Run it: python examples/peft_lora.py --budget 50%    (without a budget: as ever, with the same losses)
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

import lowtide


def train(budget: str | None = None, **options: Any) -> list[float]:
    """The losses of 4 steps."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, vocab_size=64,
    )  # fmt: skip
    adapters = LoraConfig(r=4, lora_dropout=0.1, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    model = get_peft_model(LlamaForCausalLM(config), adapters)
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=1e-2)
    if budget is not None:
        lowtide.attach(model, budget, optimizer, **options)  # the one line
    losses = []
    model.train()
    for number in range(4):
        tokens = (torch.arange(4 * 16).reshape(4, 16) * (number + 1)) % 64
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--budget", help='"2GiB", "50%%" or "least"')
    print(train(parser.parse_args().budget))
