"""What can go wrong, as answers: what happened, the numbers, and what to do next."""

from __future__ import annotations


class LowtideError(Exception):
    """The root of every error that lowtide raises on purpose."""

    exit_code = 1

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        message = message.encode("utf-8", "backslashreplace").decode()  # names of files may have what can't be printed
        super().__init__(message if hint is None else f"{message}\nhint: {hint}")
        self.message = message
        self.hint = hint


class LowtideWarning(UserWarning):
    """Something works less well than it could here, and how it would work well."""


class UsageError(LowtideError):
    """A call with a wrong name, number or combination."""

    exit_code = 2


class BudgetError(LowtideError):
    """A budget that no known program of the step fits; `least` bytes can be planned."""

    exit_code = 3

    def __init__(
        self, message: str, *, hint: str | None = None, least: int | None = None, budget: int | None = None
    ) -> None:
        super().__init__(message, hint=hint)
        self.least, self.budget = least, budget


class CaptureError(LowtideError):
    """A step that cannot be turned into data; nothing was changed."""

    exit_code = 4


class BatchError(LowtideError):
    """A call whose batch, gradients or hyperparameters are not those the step was captured with."""


class FileError(LowtideError):
    """A file that is damaged, foreign, or belongs to another graph."""


class ProgramError(LowtideError):
    """A program that the judge refuses, with the instruction at fault."""

    def __init__(self, rule: str, message: str, *, instruction: int | None = None) -> None:
        super().__init__(message)
        self.rule = rule
        self.instruction = instruction


class StepError(LowtideError):
    """A step that failed half-way, with what it had changed by then."""

    def __init__(self, message: str, *, hint: str, parameters: tuple[str, ...], buffers: tuple[str, ...]) -> None:
        super().__init__(message, hint=hint)
        self.parameters = parameters  # that it had updated, or whose optimizer state it had
        self.buffers = buffers


class RankError(LowtideError):
    """Ranks that can't go on together: one of them failed, is gone, or is about to do something else."""


class PlaceError(LowtideError):
    """A place for values away from the device that can't be had, or a copy from or to it that failed."""


class VersionError(LowtideError, ImportError):
    """A torch that lowtide can't use, found at `import lowtide`."""


class VerifyError(LowtideError):
    """A step that does not do what eager PyTorch does; everything is as it was before the step."""

    exit_code = 5

    def __init__(self, message: str, *, hint: str, differing: tuple[str, ...] = (), op: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.differing = differing  # the names of what differs
        self.op = op  # the first op that does, where it is known: "mul_3"
