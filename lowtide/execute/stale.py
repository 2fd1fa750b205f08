"""The error that says that a program no longer fits the caller's objects."""

from __future__ import annotations

from lowtide.errors import BatchError
from lowtide.guards import Change


class StaleError(BatchError):
    """The caller's objects are not as they were when the step was captured; capture it again."""

    def __init__(self, message: str, *, hint: str | None = None, change: Change | None = None) -> None:
        super().__init__(message, hint=hint)
        self.change = change if change is not None else Change(message.split(" is ")[0], message)
