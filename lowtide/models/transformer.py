"""What the attention models share: Vaswani et al. 2017 (arXiv 1706.03762)."""

import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lowtide.errors import UsageError

AttentionKind = Literal["sdpa", "plain"]


def choose_heads(width: int, heads: int | None) -> int:
    """Return the heads asked for, or one for each 64 of the width as nearly as they divide it."""
    divisors = [count for count in range(1, width + 1) if width % count == 0]
    if heads is None:
        return max(count for count in divisors if count <= max(1, width // 64))
    if heads not in divisors:
        nearest = min(divisors, key=lambda count: abs(count - heads))
        raise UsageError(
            f"width={width} can't be divided among heads={heads}",
            hint=f"use heads={nearest}, or a width that is a multiple of {heads}",
        )
    return heads


def split_heads(sequence: Tensor, heads: int) -> Tensor:
    """Turn (batch, length, width) into (batch, heads, length, width of a head)."""
    return sequence.view(*sequence.shape[:-1], heads, -1).transpose(1, 2)


def join_heads(sequence: Tensor) -> Tensor:
    """Turn (batch, heads, length, width of a head) into (batch, length, width)."""
    return sequence.transpose(1, 2).flatten(2)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    dropout: float,
    kind: AttentionKind = "sdpa",
    causal: bool = False,
    mask: Tensor | None = None,
) -> Tensor:
    """Average the values by how well their keys match each query, where the mask is true."""
    if kind == "sdpa":
        return F.scaled_dot_product_attention(query, key, value, mask, dropout_p=dropout, is_causal=causal)
    scores = query @ key.transpose(-2, -1) / math.sqrt(query.size(-1))
    if causal:
        earlier = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~earlier, -math.inf)
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf)
    return F.dropout(scores.softmax(dim=-1), dropout) @ value


class Attention(nn.Module):
    """Attention of one sequence to another, or to itself, with a projection for each of its roles."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.output = nn.Linear(width, width)

    def forward(self, sequence: Tensor, memory: Tensor, mask: Tensor) -> Tensor:
        mixed = attend(
            split_heads(self.query(sequence), self.heads),
            split_heads(self.key(memory), self.heads),
            split_heads(self.value(memory), self.heads),
            dropout=self.dropout if self.training else 0.0,
            mask=mask,
        )
        output: Tensor = self.output(join_heads(mixed))
        return output


def initialise(module: nn.Module) -> None:
    """Draw the weights of linear and embedding layers as GPT and BERT do; for use with Module.apply."""
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
