"""Functions of the standard library whose answer is another one at every call, and those that act on the outside."""

from __future__ import annotations

import datetime
import os
import secrets
import time
import uuid
from typing import Any, NoReturn

from lowtide.errors import CaptureError

CLOCKS = {
    getattr(time, name): f"time.{name}"
    for name in (
        "time",
        "time_ns",
        "perf_counter",
        "perf_counter_ns",
        "monotonic",
        "monotonic_ns",
        "process_time",
        "sleep",
    )
}
OUTSIDE = {
    open: "open",
    input: "input",
    os.urandom: "os.urandom",
    os.getenv: "os.getenv",
    os.system: "os.system",
    uuid.uuid1: "uuid.uuid1",
    uuid.uuid4: "uuid.uuid4",
    secrets.token_hex: "secrets.token_hex",
    secrets.randbelow: "secrets.randbelow",
    datetime.datetime: "datetime.datetime",
}


def refuse_impure(value: Any, source: str) -> None:
    """Raise where a line uses one of these."""
    if value is os.environ:
        _refuse(f"{source}: the step looks at os.environ, which is outside of the step.")
    if not callable(value):
        return
    try:
        clock, outside = CLOCKS.get(value), OUTSIDE.get(value)
    except TypeError:  # it has no hash
        return
    if clock is not None:
        _refuse(f"{source}: the step calls {clock}, whose answer is another one at every step.")
    if outside is not None:
        _refuse(f"{source}: the step uses {outside}, which acts on something outside of Python or depends on it.")


def _refuse(message: str) -> NoReturn:
    raise CaptureError(message, hint="do it before or after the step; the step may take it as part of its batch.")
