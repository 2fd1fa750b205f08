"""Batches of tokens, one for each word or mark: the frequent ones have numbers, 0 stands for all others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lowtide.data.batches import Batches
from lowtide.data.store import Stored
from lowtide.data.wanted import NO_LABEL, Kind
from lowtide.errors import UsageError

UNKNOWN = 0  # also a gap to be filled, and the padding behind a sentence
BEGIN, END = 1, 2  # of a sentence; its words have the numbers from 3 on
GAPS = 0.15  # share of tokens to be guessed, as for BERT


def text_batches(stored: Stored, part: str, kind: Kind, leaves: Sequence[Tensor], limits: Mapping[str, int]) -> Batches:
    """Make batches of the pieces of a text, each as long as the first leaf is wide."""
    text = stored.array(part)
    vocabulary = _checked(limits["vocabulary"], least=2)
    length = leaves[0].size(1)
    more = 1 if kind == "next tokens" else 0
    items = (len(text) - more) // length
    if items < 1:
        raise UsageError(
            f"{stored.dataset.name} has {len(text):,} words there, fewer than the {length:,} of a sequence"
        )

    def make(numbers: NDArray[np.int64], chance: torch.Generator) -> list[Tensor]:
        pieces = text[numbers[:, None] * length + np.arange(length + more)]
        tokens = torch.from_numpy(_known(pieces, vocabulary))
        if kind == "next tokens":
            return [tokens[:, :-1], tokens[:, 1:]]
        if kind == "gapped tokens":
            return _gapped(tokens, chance)
        return [tokens, torch.ones_like(tokens), tokens][: len(leaves)]

    share = _share(_known(text, vocabulary))
    words = f"{len(text):,} words in sequences of {length:,}; a vocabulary of {vocabulary:,} knows {share} of them"
    return Batches(items, make, words)


def pair_batches(stored: Stored, part: str, leaves: Sequence[Tensor], limits: Mapping[str, int]) -> Batches:
    """Make batches of the sentence pairs that fit into the leaves, German first."""
    vocabularies = [_checked(limits[f"{side}_vocabulary"], least=4) for side in ("source", "target")]
    german = _Sentences(stored, part, "german", vocabularies[0])
    english = _Sentences(stored, part, "english", vocabularies[1])
    room = leaves[0].size(1) - 1, leaves[1].size(1) - 2  # words, beside the marks of begin and end
    fitting = np.flatnonzero((german.lengths <= room[0]) & (english.lengths <= room[1]))
    if not len(fitting):
        raise UsageError(
            f"no pair of {stored.dataset.name} has at most {room[0]} German and {room[1]} English words",
            hint="use longer sequences: source_length=32, target_length=32.",
        )

    def make(numbers: NDArray[np.int64], chance: torch.Generator) -> list[Tensor]:
        chosen = fitting[numbers]
        sources = [[*german.words(number), END] for number in chosen]
        targets = [[BEGIN, *english.words(number), END] for number in chosen]
        return [_padded(sources, leaves[0].size(1)), _padded(targets, leaves[1].size(1))]

    words = (
        f"{len(fitting):,} of {len(german.lengths):,} sentence pairs, those that fit; vocabularies of "
        f"{vocabularies[0]:,} and {vocabularies[1]:,} know {german.share()} and {english.share()} of the words"
    )
    return Batches(len(fitting), make, words)


class _Sentences:
    """The sentences of one language."""

    def __init__(self, stored: Stored, part: str, language: str, vocabulary: int) -> None:
        self.text = stored.array(f"{part}_{language}")
        self.starts = stored.array(f"{part}_{language}_starts")
        self.lengths = np.diff(self.starts)
        self.vocabulary = vocabulary

    def words(self, number: int) -> list[int]:
        """The tokens of one sentence."""
        start, end = self.starts[number : number + 2]
        return _known(self.text[start:end], self.vocabulary, first=END + 1).tolist()  # type: ignore[no-any-return]

    def share(self) -> str:
        return _share(_known(self.text, self.vocabulary, first=END + 1))


def _known(ranks: NDArray[np.int32], vocabulary: int, first: int = 1) -> NDArray[np.int64]:
    """Turn ranks, from 1 for the most frequent word, into tokens from `first` on; what is beyond is unknown."""
    tokens = ranks.astype(np.int64) + (first - 1)
    return np.where((ranks > 0) & (tokens < vocabulary), tokens, UNKNOWN)


def _gapped(tokens: Tensor, chance: torch.Generator) -> list[Tensor]:
    """Hide some tokens of each sequence; the mask says that nothing is padding."""
    count = max(1, round(GAPS * tokens.size(1)))
    places = torch.rand(tokens.shape, generator=chance).topk(count, dim=1).indices
    gaps = torch.zeros_like(tokens, dtype=torch.bool).scatter_(1, places, True)
    return [tokens.masked_fill(gaps, UNKNOWN), torch.ones_like(tokens), tokens.masked_fill(~gaps, NO_LABEL)]


def _padded(sentences: Sequence[Sequence[int]], length: int) -> Tensor:
    rows = [[*sentence, *[UNKNOWN] * (length - len(sentence))] for sentence in sentences]
    return torch.tensor(rows)


def _share(tokens: NDArray[Any]) -> str:
    return f"{np.count_nonzero(tokens) / len(tokens):.0%}"


def _checked(vocabulary: int, least: int) -> int:
    if vocabulary < least:
        raise UsageError(
            f"a vocabulary of {vocabulary} has room for no word",
            hint=f"use {least} or more; where it is read off the example, that must have the largest token in it.",
        )
    return vocabulary
