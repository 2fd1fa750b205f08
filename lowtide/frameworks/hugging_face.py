"""Hugging Face's Trainer: the model that it trains is attached while it trains."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback as Callback

from lowtide.attach import MARK, Attached, attach, detach


class TrainerCallback(Callback):
    """Trains within a budget: `Trainer(..., callbacks=[lowtide.TrainerCallback(budget="2GiB")])`.

    The budget counts the optimizer's state, too. Options are those of `lowtide.attach`.
    """

    def __init__(self, budget: int | str | None = None, **options: Any) -> None:
        self.attached: Attached | None = None  # what runs the model, from the beginning of a training on
        self._budget, self._options = budget, options

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Attach the model; a training before this one may have ended in an error."""
        model = given["model"]
        if MARK in model.__dict__:
            detach(model)
        self.attached = attach(model, self._budget, given.get("optimizer"), **self._options)

    def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Let the model be as it was."""
        if self.attached is not None and MARK in self.attached.model.__dict__:
            detach(self.attached.model)
