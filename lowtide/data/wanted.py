"""A target and its example -> the kind of batch that its step takes, and how many labels or tokens there may be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from lowtide.data.datasets import KNOWN, Content, Dataset
from lowtide.errors import UsageError

Kind = Literal[
    "labelled images",
    "labelled rows",
    "segmented images",
    "next tokens",
    "copied tokens",
    "gapped tokens",
    "sentence pairs",
]

KINDS: Mapping[Content, tuple[Kind, ...]] = {
    "images": ("labelled images", "labelled rows", "segmented images"),
    "text": ("next tokens", "copied tokens", "gapped tokens"),
    "pairs": ("sentence pairs",),
}
# The built-in models: the batch of each, and the options that limit what may be in it, with their defaults.
BUILT_IN: Mapping[str, tuple[Kind, Mapping[str, int]]] = {
    "mlp": ("labelled rows", {"classes": 10}),
    "resnet": ("labelled images", {"classes": 1000}),
    "wrn-28-2": ("labelled images", {"classes": 10}),
    "densenet121": ("labelled images", {"classes": 1000}),
    "unet": ("segmented images", {"classes": 2}),
    "gpt": ("next tokens", {"vocabulary": 8192}),
    "bert": ("gapped tokens", {"vocabulary": 30522}),
    "lstm": ("next tokens", {"vocabulary": 8192}),
    "gru": ("next tokens", {"vocabulary": 8192}),
    "dynamicconv": ("sentence pairs", {"source_vocabulary": 8848, "target_vocabulary": 6632}),
    "hf-gpt2": ("copied tokens", {"vocabulary": 50257}),
    "hf-bert": ("gapped tokens", {"vocabulary": 30522}),
}
TAKEN: Mapping[Content, str] = {  # what is taken of steps that are not built in
    "images": "images go into (float [batch, 1 or 3, height, width], int64 [batch] or [batch, height, width]), "
    "or rows of numbers into (float [batch, features], int64 [batch]).",
    "text": "text goes into int64 [batch, length]: tokens; or tokens and next tokens; or tokens, mask and labels.",
    "pairs": "sentence pairs go into (int64 [batch, length], int64 [batch, length]).",
}
WITHOUT = ("tanh-chain", "lstm-cell", "deep-rnn")  # built-in models that are made to be measured, not to learn
NO_LABEL = -100  # marks a token that is not to be guessed


@dataclass(frozen=True)
class Wanted:
    """The batch that a step takes."""

    kind: Kind
    limits: Mapping[str, int]  # option -> how many labels or tokens there are; none where nobody knows


def models_for(content: Content) -> tuple[str, ...]:
    """The built-in models that can be trained on such data."""
    return tuple(name for name, (kind, _) in BUILT_IN.items() if kind in KINDS[content])


def wanted(dataset: Dataset, target: str, leaves: Sequence[Any]) -> Wanted:
    """Find out what batch a target takes, or say why it can't be made of this dataset."""
    name, _, options = target.partition(":")
    if name in WITHOUT:
        raise UsageError(f"{name} has no use for real data: its batch is plain numbers", hint=suitable())
    inferred = _infer(dataset.content, leaves)
    if name not in BUILT_IN:
        if inferred is None:
            raise _refusal(dataset, target, leaves)
        return Wanted(inferred, _limits(inferred, leaves))
    kind, defaults = BUILT_IN[name]
    if kind not in KINDS[dataset.content] or inferred is None:
        raise UsageError(f"{dataset.name} does not suit {name}, which takes {kind}", hint=suitable())
    given = dict(option.split("=", 1) for option in options.split(",") if "=" in option)
    return Wanted(kind, {option: int(given.get(option, default)) for option, default in defaults.items()})


def suitable() -> str:
    """Say which datasets suit which models."""
    parts = []
    for content in KINDS:
        names = [dataset.name for dataset in KNOWN if dataset.content == content]
        verb = "suits" if len(names) == 1 else "suit"
        parts.append(f"{', '.join(names)} {verb} {', '.join(models_for(content))}")
    return "; ".join(parts) + "."


def _infer(content: Content, leaves: Sequence[Any]) -> Kind | None:
    """The kind of batch that tensors like these can be, if any can be made of this content."""
    if not all(isinstance(leaf, Tensor) and leaf.dim() > 0 for leaf in leaves):
        return None
    if len({leaf.size(0) for leaf in leaves}) != 1:
        return None
    ranks = [(leaf.is_floating_point(), leaf.dim()) for leaf in leaves]
    shapes = {leaf.shape for leaf in leaves}
    whole = _all_whole(leaves[:1]) and _all_whole(leaves[-1:])
    if content == "images":
        return _infer_images(leaves, ranks)
    if content == "pairs":
        return "sentence pairs" if ranks == [(False, 2), (False, 2)] and whole else None
    if not whole or len(shapes) != 1 or leaves[0].dim() != 2 or len(leaves) > 3:
        return None
    if len(leaves) == 2:
        return "next tokens"
    return "gapped tokens" if bool((leaves[-1] == NO_LABEL).any()) else "copied tokens"


def _infer_images(leaves: Sequence[Tensor], ranks: Sequence[tuple[bool, int]]) -> Kind | None:
    if not _all_whole(leaves[1:]):
        return None
    if ranks == [(True, 2), (False, 1)]:
        return "labelled rows"
    if len(leaves) != 2 or ranks[0] != (True, 4) or leaves[0].size(1) not in (1, 3):
        return None
    if leaves[1].dim() == 1:
        return "labelled images"
    return "segmented images" if leaves[1].shape[1:] == leaves[0].shape[2:] else None


def _all_whole(leaves: Sequence[Tensor]) -> bool:
    return all(leaf.dtype in (torch.int64, torch.int32, torch.int16, torch.uint8) for leaf in leaves)


def _limits(kind: Kind, leaves: Sequence[Tensor]) -> dict[str, int]:
    """Read the vocabulary off the largest token of the example, which the model surely takes."""
    if kind in KINDS["images"]:
        return {}
    if kind == "sentence pairs":
        return {
            option: int(leaf.max()) + 1
            for option, leaf in zip(("source_vocabulary", "target_vocabulary"), leaves, strict=True)
        }
    return {"vocabulary": max(int(leaves[0].max()), int(leaves[-1].max())) + 1}


def _refusal(dataset: Dataset, target: str, leaves: Sequence[Any]) -> UsageError:
    shown = ", ".join(
        f"{str(leaf.dtype).removeprefix('torch.')} {list(leaf.shape)}" if isinstance(leaf, Tensor) else repr(leaf)
        for leaf in leaves
    )
    return UsageError(
        f"the batch of {target} is ({shown}), and none like that can be made of {dataset.name}",
        hint=TAKEN[dataset.content],
    )
