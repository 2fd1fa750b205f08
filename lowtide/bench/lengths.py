"""A Trainer of Hugging Face on text that is padded to the longest of each batch: ever other lengths in one budget."""

from __future__ import annotations

import gzip
import re
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.resources import files
from typing import Any

import torch

from lowtide.errors import UsageError
from lowtide.frameworks import callback
from lowtide.verify.compare import digest

TEXT = "data/packaged/austen/persuasion.txt.gz"
WORDS, POSITIONS, BATCH = 4096, 256, 8
LAYERS, WIDTH, HEADS = 12, 256, 4
MULTIPLES = (8, 16, 32, 64)  # of pad_to_multiple_of
PADDING, UNKNOWN, NO_LABEL = 0, 1, -100


@dataclass(frozen=True)
class Lengths:
    """One epoch with a plan for each length, beside the same epoch without."""

    batches: int
    lengths: int  # different ones
    searches: int
    searching: float  # seconds that lengths took that asked for a search, together
    lost: float  # seconds that another new length took at most, from its batch to its program
    usual: float  # the median of that
    budget: int  # bytes
    peak: int  # bytes, metered: the most of any step
    equal: bool  # whether all losses and weights are those of the epoch without a plan
    seconds: float  # of the epoch
    eager_seconds: float
    padded: tuple[tuple[int, int], ...]  # pad_to_multiple_of, and how many lengths it would leave

    @property
    def ok(self) -> bool:
        """Whether there were few searches, little was lost, and everything was as without a plan."""
        return self.equal and self.peak <= self.budget and self.searches <= 6 and self.lost <= 0.5


def run(
    *, budget: str, layers: int = LAYERS, width: int = WIDTH, batches: int | None = None, **options: Any
) -> Lengths:
    """Train twice, without a plan and with one."""
    paragraphs = _paragraphs()[: None if batches is None else batches * BATCH]
    losses, weights, eager_seconds, _ = _train(paragraphs, layers, width, [])
    planned: Any = callback("TrainerCallback")(budget=budget, **options)
    found, state, seconds, sizes = _train(paragraphs, layers, width, [_looking(planned), planned])
    fitted = planned.fitted  # as it was before the model was let go
    quick = sorted(one.seconds for one in fitted.makings if not one.searches) or [0.0]
    return Lengths(
        batches=len(sizes),
        lengths=len(set(sizes)),
        searches=sum(one.searches for one in fitted.makings),
        searching=sum(one.seconds for one in fitted.makings if one.searches),
        lost=quick[-1],
        usual=quick[len(quick) // 2],
        budget=fitted.plan.budget or 0,
        peak=fitted.peak or 0,
        equal=losses == found and weights == state,
        seconds=seconds,
        eager_seconds=eager_seconds,
        padded=tuple((to, len({-(-size // to) for size in sizes})) for to in MULTIPLES),
    )


def _looking(planned: Any) -> Any:
    """A callback that keeps what ran the model, which the end of a training lets go."""

    class Looking(import_module("transformers").TrainerCallback):  # type: ignore[misc]
        def on_train_end(self, *_: Any, **__: Any) -> None:
            planned.fitted = planned.attached.fitted

    return Looking()


def _train(
    paragraphs: Sequence[Sequence[int]], layers: int, width: int, callbacks: list[Any]
) -> tuple[list[float], bytes, float, list[int]]:
    """Losses, a digest of all weights, seconds, and the length of each batch."""
    try:
        transformers = import_module("transformers")
    except ModuleNotFoundError:
        raise UsageError("transformers is not installed.", hint="pip install 'transformers[torch]'.") from None
    transformers.set_seed(0)
    config = transformers.GPT2Config(
        n_layer=layers,
        n_embd=width,
        n_head=HEADS,
        vocab_size=WORDS,
        n_positions=POSITIONS,
        bos_token_id=None,
        eos_token_id=None,
        use_cache=False,
    )
    model = transformers.GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"
    sizes: list[int] = []

    def collate(rows: list[Sequence[int]]) -> dict[str, torch.Tensor]:
        sizes.append(max(map(len, rows)))
        return _padded(rows, sizes[-1])

    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            folder,
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
            learning_rate=1e-3,
            num_train_epochs=1,
            per_device_train_batch_size=BATCH,
            logging_steps=1,
            save_strategy="no",
        )
        trainer = transformers.Trainer(
            model, arguments, train_dataset=list(paragraphs), data_collator=collate, callbacks=callbacks
        )
        trainer.remove_callback(transformers.PrinterCallback)
        begun = time.perf_counter()
        trainer.train()
        seconds = time.perf_counter() - begun
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return losses, b"".join(map(digest, model.state_dict().values())), seconds, sizes


def _padded(rows: Sequence[Sequence[int]], length: int) -> dict[str, torch.Tensor]:
    tokens = torch.full((len(rows), length), PADDING)
    for place, row in enumerate(rows):
        tokens[place, : len(row)] = torch.tensor(row)
    mask = (tokens != PADDING).long()
    return {"input_ids": tokens, "attention_mask": mask, "labels": tokens.masked_fill(mask == 0, NO_LABEL)}


def _paragraphs() -> list[list[int]]:
    """The paragraphs of the packaged text as numbers of words, the frequent ones first; all others are unknown."""
    with files("lowtide").joinpath(TEXT).open("rb") as file:
        text = gzip.decompress(file.read()).decode("utf-8")
    split = [re.findall(r"\w+|[^\w\s]", part.lower()) for part in re.split(r"\n\s*\n", text)]
    counted = Counter(word for part in split for word in part).most_common(WORDS - 2)
    numbers = {word: place + 2 for place, (word, _) in enumerate(counted)}
    return [[numbers.get(word, UNKNOWN) for word in part[:POSITIONS]] for part in split if len(part) > 1]
