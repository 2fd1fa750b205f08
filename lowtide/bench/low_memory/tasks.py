"""What is trained: a model on real data, and what its results on held-out data are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lowtide.data import source
from lowtide.data.datasets import find
from lowtide.data.store import opened
from lowtide.data.tokens import BEGIN, END, UNKNOWN
from lowtide.errors import LowtideError

Scores = dict[str, float]


@dataclass(frozen=True)
class Task:
    """A model, its data, and how it is judged."""

    name: str
    kind: str  # images or pairs
    target: str
    dataset: str
    lr: float
    score: str  # accuracy or BLEU, in points
    judge: Callable[[nn.Module, Task, str, tuple[Any, ...], int], Scores]


def classified(model: nn.Module, task: Task, target: str, example: tuple[Any, ...], items: int) -> Scores:
    """Accuracy in points, and the loss, on held-out images."""
    batches = source(task.dataset, target, example, held_out=True)
    right, loss, count = 0, 0.0, 0
    while count < items:
        images, labels = batches(count // batches.size)
        logits = model(images)
        right += int((logits.argmax(1) == labels).sum())
        loss += float(F.cross_entropy(logits, labels, reduction="sum"))
        count += len(labels)
    return {"score": 100 * right / count, "loss": loss / count, "items": count}


def translated(model: nn.Module, task: Task, target: str, example: tuple[Any, ...], items: int) -> Scores:
    """BLEU of translations, each next word the likeliest, and the loss of the words that were to be found."""
    batches = source(task.dataset, target, example, held_out=True)
    words = _words(opened(find(task.dataset)).folder / "english.txt")
    found: list[str] = []
    given: list[str] = []
    loss, tokens = 0.0, 0
    while len(found) < items:
        sentences, answers = batches(len(found) // batches.size)
        logits, labels = model(sentences, answers[:, :-1]), answers[:, 1:].flatten()
        loss += float(F.cross_entropy(logits.flatten(0, 1), labels, ignore_index=UNKNOWN, reduction="sum"))
        tokens += int((labels != UNKNOWN).sum())
        found += [_text(row, words) for row in _greedy(model, sentences, answers.size(1) - 1)]
        given += [_text(row, words) for row in answers[:, 1:].tolist()]
    return {"score": _bleu(found, given), "loss": loss / tokens, "items": len(found)}


def _greedy(model: nn.Module, sentences: Tensor, length: int) -> list[list[int]]:
    prefix = torch.full((len(sentences), 1), BEGIN)
    for _ in range(length):
        following = model(sentences, prefix)[:, -1].argmax(-1, keepdim=True)
        prefix = torch.cat([prefix, following], dim=1)
    return prefix[:, 1:].tolist()


def _bleu(found: list[str], given: list[str]) -> float:
    try:
        import sacrebleu
    except ImportError as error:
        raise LowtideError("BLEU is counted by sacrebleu.", hint="install it: pip install 'lowtide[bench]'.") from error
    return float(sacrebleu.corpus_bleu(found, [given], tokenize="none", force=True).score)


def _words(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines()


def _text(tokens: list[int], words: list[str]) -> str:
    """A sentence up to its end; words beyond the vocabulary are one and the same."""
    ended = tokens[: tokens.index(END)] if END in tokens else tokens
    return " ".join("<unk>" if token <= END else words[token - END - 1] for token in ended)


TASKS = (
    Task("wrn-28-2", "images", "wrn-28-2:batch=100", "cifar10", 0.1, "accuracy", classified),
    Task("dynamicconv", "pairs", "dynamicconv:batch=125,optimizer=adam", "german-english", 5e-4, "BLEU", translated),
)
