"""The check of a decision that a program assumes to end the same way at every step."""

from __future__ import annotations

import torch

EXPECT = "lowtide.expect.default"


class UnexpectedError(Exception):
    """A step decided otherwise by its data than its program assumes."""


def define(library: torch.library.Library) -> None:
    """Define the op."""
    library.define("expect(Tensor answer, bool wanted, str otherwise) -> ()")
    library.impl("expect", _expect, "CompositeExplicitAutograd")


def _expect(answer: torch.Tensor, wanted: bool, otherwise: str) -> None:
    if bool(answer) != wanted:
        raise UnexpectedError(f"with this batch {otherwise}")
