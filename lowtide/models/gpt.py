"""Decoder-only transformer in the manner of GPT-2 (Radford et al. 2019)."""

from collections.abc import Iterable
from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lowtide.models.examples import next_tokens
from lowtide.models.options import Count, Probability
from lowtide.models.steps import Recipe, classify_each
from lowtide.models.transformer import (
    AttentionKind,
    attend,
    choose_heads,
    initialise,
    join_heads,
    split_heads,
)


def gpt(
    *,
    layers: Annotated[Count, "transformer blocks"] = 12,
    width: Annotated[Count, "numbers that stand for one token"] = 384,
    heads: Annotated[Count | None, "attention heads; left out, one for each 64 of width"] = None,
    context: Annotated[Count, "tokens in a sequence"] = 512,
    vocabulary: Annotated[Count, "different tokens"] = 8192,
    dropout: Annotated[Probability, "share of activations and of attention that is dropped"] = 0.1,
    attention: Annotated[AttentionKind, "torch's own attention, or matmul, softmax and matmul"] = "sdpa",
    batch: Annotated[Count, "sequences in a batch"] = 4,
) -> Recipe:
    """GPT language model, pre-norm, with learnt positions and a head tied to the embedding."""
    count = choose_heads(width, heads)
    blocks = [Block(width, count, dropout, attention) for _ in range(layers)]
    model = GPT(blocks, width, context, vocabulary, dropout).apply(initialise)
    return Recipe(classify_each, model, next_tokens(batch, context, vocabulary))


class GPT(nn.Module):
    """Embedding, blocks and a head that shares the embedding's weight."""

    def __init__(self, blocks: Iterable[nn.Module], width: int, context: int, vocabulary: int, dropout: float) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.Sequential(*blocks)
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.size(1), device=tokens.device)
        hidden = self.dropout(self.tokens(tokens) + self.positions(places))
        return F.linear(self.norm(self.blocks(hidden)), self.tokens.weight)


class Block(nn.Module):
    """Causal attention and a feed-forward layer, each normalised before and added to its input."""

    def __init__(self, width: int, heads: int, dropout: float, kind: AttentionKind) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = CausalAttention(width, heads, dropout, kind)
        self.feed_forward = nn.Sequential(
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.GELU(),
            nn.Linear(4 * width, width),
            nn.Dropout(dropout),
        )

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.attention(self.attention_norm(hidden))
        output: Tensor = hidden + self.feed_forward(hidden)
        return output


class CausalAttention(nn.Module):
    """Attention of each token to itself and those before it, with one projection for query, key and value."""

    def __init__(self, width: int, heads: int, dropout: float, kind: AttentionKind) -> None:
        super().__init__()
        self.heads = heads
        self.kind: AttentionKind = kind
        self.projection = nn.Linear(width, 3 * width)
        self.output = nn.Linear(width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        parts = self.projection(hidden).chunk(3, dim=-1)
        query, key, value = (split_heads(part, self.heads) for part in parts)
        rate = self.dropout.p if self.training else 0.0
        mixed = attend(query, key, value, dropout=rate, kind=self.kind, causal=True)
        output: Tensor = self.dropout(self.output(join_heads(mixed)))
        return output
