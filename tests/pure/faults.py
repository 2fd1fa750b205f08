"""Makes the n-th call of a function of the system fail, as a full or broken disk does."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest


@dataclass
class Count:
    """How often the function was called."""

    calls: int = 0


@contextmanager
def failing(module: Any, name: str, nth: int, *, code: int = errno.ENOSPC, half: bool = False) -> Iterator[Count]:
    """The n-th call, counted from 1, raises; with `half`, a write first does half of its work, as the system may."""
    count, real = Count(), getattr(module, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        count.calls += 1
        if count.calls == nth:
            if not half:
                raise OSError(code, "No space left on device" if code == errno.ENOSPC else "Input/output error")
            file, content = args
            return real(file, content[: len(content) // 2 or 1])
        return real(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, name, call)
        yield count


def outcome(action: Callable[[], Any], allowed: type[Exception]) -> Exception | None:
    """The error that an action ended with, if it is of the allowed kind."""
    try:
        action()
    except allowed as error:
        return error
    return None
