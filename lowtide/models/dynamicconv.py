"""Translation by predicted convolutions: Wu et al. 2019, Pay Less Attention (arXiv 1901.10430).

The defaults are the paper's for IWSLT'14 German to English, with the vocabularies that fairseq makes of it.
"""

import math
from collections.abc import Iterable
from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lowtide.errors import UsageError
from lowtide.models.examples import check_vocabulary, generator
from lowtide.models.options import Count, Probability
from lowtide.models.steps import Recipe, translate
from lowtide.models.transformer import Attention, choose_heads, join_heads, split_heads

PADDING = 0  # the token that fills up the shorter sentences of a batch
KERNELS = (3, 7, 15, 31)  # of the first layers; all that follow have the last


def dynamicconv(
    *,
    encoder: Annotated[Count, "encoder layers"] = 7,
    decoder: Annotated[Count, "decoder layers"] = 6,
    width: Annotated[Count, "numbers that stand for one token"] = 512,
    inner: Annotated[Count, "units inside the feed-forward layers"] = 1024,
    heads: Annotated[Count, "attention heads, and groups of channels that share a kernel"] = 4,
    source_vocabulary: Annotated[Count, "different tokens in the source language, padding among them"] = 8848,
    target_vocabulary: Annotated[Count, "different tokens in the target language, padding among them"] = 6632,
    source_length: Annotated[Count, "tokens in the longest source sentence"] = 32,
    target_length: Annotated[Count, "tokens in the longest target sentence"] = 32,
    dropout: Annotated[Probability, "share of the outputs of layers that is dropped"] = 0.3,
    weight_dropout: Annotated[Probability, "share of kernels and of attention that is dropped"] = 0.1,
    batch: Annotated[Count, "sentence pairs in a batch"] = 16,
) -> Recipe:
    """DynamicConv translation model: a convolution predicted from each token stands in for self-attention."""
    if width % 2:
        raise UsageError(f"width={width} is odd, but positions take pairs", hint=f"use width={width + 1}")
    shape = (width, inner, choose_heads(width, heads))
    rates = (dropout, weight_dropout)
    model = Translator(
        Embedding(source_vocabulary, width, dropout),
        Embedding(target_vocabulary, width, dropout),
        (EncoderLayer(*shape, kernel(layer), *rates) for layer in range(encoder)),
        (DecoderLayer(*shape, kernel(layer), *rates) for layer in range(decoder)),
    )
    numbers = generator()
    source = sentences(batch, source_length, source_vocabulary, numbers)
    target = sentences(batch, target_length + 1, target_vocabulary, numbers)
    return Recipe(translate, model, (source, target))


def kernel(layer: int) -> int:
    """Return how many tokens the convolution of this layer sees."""
    return KERNELS[min(layer, len(KERNELS) - 1)]


def sentences(batch: int, length: int, vocabulary: int, numbers: torch.Generator) -> Tensor:
    """Make sentences of which every second one ends in an eighth of padding."""
    check_vocabulary(vocabulary)
    tokens = torch.randint(PADDING + 1, vocabulary, (batch, length), generator=numbers)
    tokens[1::2, length - length // 8 :] = PADDING
    return tokens


class Translator(nn.Module):
    """Encoder, decoder and a head that shares the weight of the target embedding."""

    def __init__(
        self,
        source: "Embedding",
        target: "Embedding",
        encoder: Iterable["EncoderLayer"],
        decoder: Iterable["DecoderLayer"],
    ) -> None:
        super().__init__()
        self.source = source
        self.target = target
        self.encoder = nn.ModuleList(encoder)
        self.decoder = nn.ModuleList(decoder)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        padding = (source == PADDING).unsqueeze(-1)
        visible = ~padding[:, None, None, :, 0]
        memory = self.source(source)
        for layer in self.encoder:
            memory = layer(memory, padding)
        hidden = self.target(target)
        for layer in self.decoder:
            hidden = layer(hidden, memory, visible)
        return F.linear(hidden, self.target.tokens.weight)


class Embedding(nn.Module):
    """Learnt vectors of tokens plus fixed sinusoids of positions."""

    def __init__(self, vocabulary: int, width: int, dropout: float) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.dropout = nn.Dropout(dropout)
        nn.init.normal_(self.tokens.weight, std=width**-0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        width = self.tokens.embedding_dim
        positions = sinusoids(tokens.size(1), width, tokens.device)
        output: Tensor = self.dropout(self.tokens(tokens) * math.sqrt(width) + positions)
        return output


def sinusoids(length: int, width: int, device: torch.device) -> Tensor:
    """Compute sines and cosines of each position, at wavelengths from 2 pi to 20000 pi."""
    positions = torch.arange(length, dtype=torch.float32, device=device)
    frequencies = 10000 ** -torch.linspace(0, 1, width // 2, device=device)
    angles = torch.outer(positions, frequencies)
    return torch.cat([angles.sin(), angles.cos()], dim=1)


class EncoderLayer(nn.Module):
    """Convolution over both sides and a feed-forward layer, each added to its input and normalised after."""

    def __init__(self, width: int, inner: int, heads: int, kernel: int, dropout: float, weight_dropout: float) -> None:
        super().__init__()
        self.convolution = DynamicConvolution(width, heads, kernel, weight_dropout, causal=False)
        self.convolution_norm = nn.LayerNorm(width)
        self.feed_forward = feed_forward(width, inner)
        self.feed_forward_norm = nn.LayerNorm(width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden: Tensor, padding: Tensor) -> Tensor:
        hidden = self.convolution_norm(hidden + self.dropout(self.convolution(hidden, padding)))
        output: Tensor = self.feed_forward_norm(hidden + self.dropout(self.feed_forward(hidden)))
        return output


class DecoderLayer(nn.Module):
    """Convolution over the past, attention to the source and a feed-forward layer, each as in the encoder."""

    def __init__(self, width: int, inner: int, heads: int, kernel: int, dropout: float, weight_dropout: float) -> None:
        super().__init__()
        self.convolution = DynamicConvolution(width, heads, kernel, weight_dropout, causal=True)
        self.convolution_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads, weight_dropout)
        self.attention_norm = nn.LayerNorm(width)
        self.feed_forward = feed_forward(width, inner)
        self.feed_forward_norm = nn.LayerNorm(width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden: Tensor, memory: Tensor, visible: Tensor) -> Tensor:
        hidden = self.convolution_norm(hidden + self.dropout(self.convolution(hidden)))
        hidden = self.attention_norm(hidden + self.dropout(self.attention(hidden, memory, visible)))
        output: Tensor = self.feed_forward_norm(hidden + self.dropout(self.feed_forward(hidden)))
        return output


class DynamicConvolution(nn.Module):
    """Gated projection, depthwise convolution with kernels predicted from each token, and projection."""

    def __init__(self, width: int, heads: int, kernel: int, weight_dropout: float, *, causal: bool) -> None:
        super().__init__()
        self.heads = heads
        self.margin = (kernel - 1, 0) if causal else (kernel // 2, kernel // 2)
        self.inputs = nn.Sequential(nn.Linear(width, 2 * width), nn.GLU())
        self.kernels = nn.Linear(width, heads * kernel, bias=False)
        self.weight_dropout = nn.Dropout(weight_dropout)
        self.output = nn.Linear(width, width)

    def forward(self, hidden: Tensor, padding: Tensor | None = None) -> Tensor:
        gated = self.inputs(hidden)
        if padding is not None:
            gated = gated.masked_fill(padding, 0.0)
        kernels = split_heads(self.kernels(gated), self.heads).softmax(dim=-1)
        output: Tensor = self.output(convolve(gated, self.weight_dropout(kernels), self.margin))
        return output


def convolve(sequence: Tensor, kernels: Tensor, margin: tuple[int, int]) -> Tensor:
    """Convolve (batch, length, width) with a kernel for each token and head: (batch, heads, length, kernel).

    Multiplies by a band matrix. It is the kernels with as many zeros after each as there are tokens, read in
    rows that are one shorter, so that each kernel starts one column later than the one above it.
    """
    batch, heads, length, size = kernels.shape
    columns = length + size - 1
    spaced = F.pad(kernels, (0, length)).flatten(-2)
    band = spaced[..., : length * columns].view(batch, heads, length, columns)
    return join_heads(band @ split_heads(F.pad(sequence, (0, 0, *margin)), heads))


def feed_forward(width: int, inner: int) -> nn.Module:
    """Make two linear layers with ReLU between them."""
    return nn.Sequential(nn.Linear(width, inner), nn.ReLU(), nn.Linear(inner, width))
