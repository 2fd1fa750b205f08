"""Encoder-only transformer of Devlin et al. 2018 (arXiv 1810.04805), without its sentence pairs."""

from collections.abc import Iterable
from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lowtide.models.examples import gapped_tokens
from lowtide.models.options import Count, Probability
from lowtide.models.steps import Recipe, fill_gaps
from lowtide.models.transformer import Attention, choose_heads, initialise


def bert(
    *,
    layers: Annotated[Count, "transformer blocks"] = 12,
    width: Annotated[Count, "numbers that stand for one token"] = 768,
    heads: Annotated[Count | None, "attention heads; left out, one for each 64 of width"] = None,
    context: Annotated[Count, "tokens in a sequence"] = 128,
    vocabulary: Annotated[Count, "different tokens"] = 30522,
    dropout: Annotated[Probability, "share of activations and of attention that is dropped"] = 0.1,
    batch: Annotated[Count, "sequences in a batch"] = 4,
) -> Recipe:
    """BERT masked-language model, post-norm, whose batch is a dictionary with an attention mask."""
    count = choose_heads(width, heads)
    blocks = [Block(width, count, dropout) for _ in range(layers)]
    model = BERT(blocks, width, context, vocabulary, dropout).apply(initialise)
    tokens, mask, labels = gapped_tokens(batch, context, vocabulary)
    return Recipe(fill_gaps, model, ({"tokens": tokens, "mask": mask, "labels": labels},))


class BERT(nn.Module):
    """Embedding, blocks and a head that shares the embedding's weight."""

    def __init__(self, blocks: Iterable[nn.Module], width: int, context: int, vocabulary: int, dropout: float) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        self.norm = nn.Sequential(nn.LayerNorm(width), nn.Dropout(dropout))
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width))
        self.bias = nn.Parameter(torch.zeros(vocabulary))

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        places = torch.arange(tokens.size(1), device=tokens.device)
        hidden = self.norm(self.tokens(tokens) + self.positions(places))
        visible = mask[:, None, None, :].bool()
        for block in self.blocks:
            hidden = block(hidden, visible)
        return F.linear(self.head(hidden), self.tokens.weight, self.bias)


class Block(nn.Module):
    """Attention and a feed-forward layer, each added to its input and normalised after."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.attention = Attention(width, heads, dropout)
        self.attention_norm = nn.LayerNorm(width)
        self.feed_forward = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.feed_forward_norm = nn.LayerNorm(width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden: Tensor, visible: Tensor) -> Tensor:
        hidden = self.attention_norm(hidden + self.dropout(self.attention(hidden, hidden, visible)))
        output: Tensor = self.feed_forward_norm(hidden + self.dropout(self.feed_forward(hidden)))
        return output
