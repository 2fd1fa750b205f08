"""Functions of the standard library whose answer is another one at every call, and those that act on the outside."""

from __future__ import annotations

import contextlib
import contextvars
import datetime
import os
import secrets
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import FrameType, ModuleType
from typing import Any, NoReturn

import numpy

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
    os.system: "os.system",
    uuid.uuid1: "uuid.uuid1",
    uuid.uuid4: "uuid.uuid4",
    secrets.token_hex: "secrets.token_hex",
    secrets.randbelow: "secrets.randbelow",
    datetime.datetime: "datetime.datetime",
}
UNSEEN = {globals: "globals()"}  # they lead to names that no line says
ENVIRONMENT: Any = type(os.environ)


THREADS: tuple[tuple[type, str], ...] = ((threading.Thread, "start"), (ThreadPoolExecutor, "submit"))
MODULES: tuple[ModuleType, ...] = (time, os, uuid, secrets)


@contextlib.contextmanager
def kept_away(is_user_file: Callable[[str], bool], note: Callable[[CaptureError], None]) -> Iterator[None]:
    """A context in which user code that calls one of these is refused, however it came to it."""
    thread = threading.get_ident()  # others go on beside it
    kept: list[tuple[ModuleType | type, str, Callable[..., Any]]] = [
        (home, name, item)
        for home in MODULES
        for name, item in vars(home).items()
        if isinstance(item, type(time.time) | type(os.getenv)) and (item in CLOCKS or item in OUTSIDE)
    ]
    kept.append((numpy.random, "default_rng", numpy.random.default_rng))
    kept += [(home, name, getattr(home, name)) for home, name in THREADS]

    def guarded(home: ModuleType | type, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            seeded = name == "default_rng" and (args or kwargs) and (*args, *kwargs.values())[0] is not None
            frame = sys._getframe(1)
            if not seeded and threading.get_ident() == thread and is_user_file(frame.f_code.co_filename):
                source = f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
                try:
                    if (home, name) in THREADS:
                        _refuse(f"{source}: the step lets another thread work, which can't be followed.")
                    _refuse(f"{source}: the step calls {home.__name__}.{name}, whose answer is another one every time.")
                except CaptureError as error:
                    note(error)
                    raise
            return function(*args, **kwargs)

        return call

    try:
        for home, name, function in kept:
            setattr(home, name, guarded(home, name, function))
        yield
    finally:
        for home, name, function in kept:
            setattr(home, name, function)


@contextlib.contextmanager
def environment_followed(
    is_user_file: Callable[[str], bool], read: Callable[[Any], None], note: Callable[[CaptureError], None]
) -> Iterator[None]:
    """A context in which it is noted which variables of the environment are read, by their keys in its dict.

    User code that looks at all of them or changes one is refused.
    """
    thread = threading.get_ident()
    kept = {name: ENVIRONMENT.__dict__[name] for name in ("__getitem__", "__setitem__", "__delitem__", "__iter__")}

    def looked_up(environment: Any, key: Any) -> Any:
        if environment is os.environ and threading.get_ident() == thread:
            read(environment.encodekey(key))
        return kept["__getitem__"](environment, key)

    def guarded(name: str, what: str) -> Callable[..., Any]:
        def call(environment: Any, *args: Any) -> Any:
            frame: FrameType | None = sys._getframe(1)
            while frame is not None and frame.f_code.co_filename.startswith("<frozen"):
                frame = frame.f_back
            if threading.get_ident() == thread and frame is not None and is_user_file(frame.f_code.co_filename):
                source = f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
                try:
                    _refuse(f"{source}: the step {what} os.environ, which is outside of the step.")
                except CaptureError as error:
                    note(error)
                    raise
            return kept[name](environment, *args)

        return call

    try:
        ENVIRONMENT.__getitem__ = looked_up
        ENVIRONMENT.__iter__ = guarded("__iter__", "looks at all of")
        ENVIRONMENT.__setitem__, ENVIRONMENT.__delitem__ = (
            guarded(name, "changes") for name in ("__setitem__", "__delitem__")
        )
        yield
    finally:
        for name, function in kept.items():
            setattr(ENVIRONMENT, name, function)


def refuse_unseeded(seed: Any, source: str) -> None:
    """Raise where a line makes a generator of random numbers without a seed."""
    if seed is None:
        _refuse(f"{source}: the step makes a random.Random() without a seed, whose numbers are others at every step.")


def refuse_impure(value: Any, source: str) -> None:
    """Raise where a line uses one of these."""
    if isinstance(value, contextvars.ContextVar):
        _refuse(f"{source}: the step looks at {value.name!r}, a ContextVar, which can't be followed.")
    if not callable(value):
        return
    try:
        clock, outside = CLOCKS.get(value), OUTSIDE.get(value)
    except TypeError:  # it has no hash
        return
    if value in UNSEEN:
        raise CaptureError(
            f"{source}: the step looks at {UNSEEN[value]}, so that it can't be told which names it depends on.",
            hint="name what the step needs in the line itself.",
        )
    if clock is not None:
        _refuse(f"{source}: the step calls {clock}, whose answer is another one at every step.")
    if outside is not None:
        _refuse(f"{source}: the step uses {outside}, which acts on something outside of Python or depends on it.")


def _refuse(message: str) -> NoReturn:
    raise CaptureError(message, hint="do it before or after the step; the step may take it as part of its batch.")
