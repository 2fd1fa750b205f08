"""Functions of the standard library whose answer is another one at every call, and those that act on the outside."""

from __future__ import annotations

import contextlib
import contextvars
import datetime
import gc
import os
import posix
import secrets
import socket
import sys
import sysconfig
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import BuiltinFunctionType, FrameType, ModuleType
from typing import Any, NoReturn

import numpy
import torch

from lowtide.errors import CaptureError

CLOCKS = {
    item: f"time.{name}"
    for name, item in vars(time).items()
    if isinstance(item, BuiltinFunctionType) and name not in ("mktime", "strptime", "clock_getres", "get_clock_info")
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
UNSEEN = {globals: "globals()", __import__: "__import__()"}  # they lead to names that no line says
# Functions of the system whose answer stays while a process runs, or that need nothing but their arguments.
STEADY = frozenset(
    (
        *("fspath", "getpid", "getppid", "cpu_count", "strerror", "sched_getaffinity", "sched_yield", "isatty"),
        *("getuid", "geteuid", "getgid", "getegid", "uname", "get_terminal_size", "device_encoding", "_path_normpath"),
        *("major", "minor", "makedev", "register_at_fork", "fsencode", "sysconf", "confstr"),
    )
)
INTERPRETER = {
    gc: ("get_count", "get_stats", "get_objects", "get_referrers"),
    sys: ("getrefcount", "getrecursionlimit", "getswitchinterval", "getallocatedblocks"),
}
CALLS: dict[Any, str] = {
    **CLOCKS,
    **{
        item: f"os.{name}"
        for name, item in vars(posix).items()
        if isinstance(item, BuiltinFunctionType) and name not in STEADY and not name.startswith("W")
    },
    **{getattr(home, name): f"{home.__name__}.{name}" for home, names in INTERPRETER.items() for name in names},
    open: "open",
    input: "input",
    socket.getaddrinfo: "socket.getaddrinfo",
}
# Methods by name, with the class or the kind of object that they must belong to.
METHODS: dict[str, tuple[Any, str]] = {
    **dict.fromkeys(("now", "utcnow", "today"), (datetime.date, "datetime")),
    **dict.fromkeys(("initial_seed", "seed"), (torch.Generator, "torch.Generator")),
    **dict.fromkeys(("connect", "recv", "recv_into", "recvfrom", "send", "sendall"), (socket.SocketType, "socket")),
}
# Files of libraries that do for their caller what it could have done itself.
_STANDARD = sysconfig.get_paths()["stdlib"] + os.sep
THROUGH = (
    *(
        _STANDARD + name
        for name in (
            *("os.py", "posixpath.py", "genericpath.py", "pathlib.py", "pathlib/", "glob.py", "shutil.py"),
            *("tempfile.py", "fileinput.py", "codecs.py", "random.py", "uuid.py", "secrets.py", "datetime.py"),
            *("_collections_abc.py", "subprocess.py", "multiprocessing/", "socket.py", "ssl.py", "urllib/", "http/"),
        )
    ),
    *(f"<frozen {name}>" for name in ("os", "posixpath", "genericpath", "codecs", "_collections_abc")),
    *(os.path.join(os.path.dirname(torch.__file__), name) for name in ("serialization.py", "random.py")),
    os.path.dirname(numpy.__file__) + os.sep,
)
ENVIRONMENT: Any = type(os.environ)

THREADS: tuple[tuple[type, str], ...] = ((threading.Thread, "start"), (ThreadPoolExecutor, "submit"))


class Calls:
    """Refuses calls of user code to C functions whose answer is another one every time, however it came to them."""

    def __init__(self, is_user_file: Callable[[str], bool], note: Callable[[CaptureError], None]) -> None:
        self._is_user_file, self._note = is_user_file, note

    def _watch(self) -> Callable[[FrameType, str, Any], None]:
        """As `sys.setprofile` wants it: a plain function, for it is called a hundred thousand times."""

        def watch(frame: FrameType, event: str, function: Any) -> None:
            if event == "c_call" and (function in CALLS or function.__name__ in METHODS):
                name = _impure(function)
                if name is not None:
                    self.refuse(frame, f"calls {name}, whose answer depends on what is outside of the step")

        return watch

    def refuse(self, frame: FrameType | None, does: str) -> None:
        """Raise where this frame, or the one that it does it for, is the user's."""
        while frame is not None and frame.f_code.co_filename.startswith(THROUGH):
            frame = frame.f_back
        if frame is None or not self._is_user_file(frame.f_code.co_filename):
            return
        try:
            _refuse(f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}: the step {does}.")
        except CaptureError as error:
            self._note(error)
            raise

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """A context in which they are."""
        before = sys.getprofile()
        sys.setprofile(self._watch())
        try:
            yield
        finally:
            _put_back(before)


def _put_back(profiler: Any) -> None:
    """Let a profiler go on: cProfile's is no function of Python, and starts by itself."""
    if profiler is None or callable(profiler):
        sys.setprofile(profiler)
    else:
        profiler.enable()


def _impure(function: Any) -> str | None:
    found = CALLS.get(function)
    if found is None and function.__name__ in METHODS:
        kind, shown = METHODS[function.__name__]
        owner = function.__self__
        if isinstance(owner, kind) or (isinstance(owner, type) and issubclass(owner, kind)):
            found = f"{shown}.{function.__name__}"
    return found


@contextlib.contextmanager
def kept_away(calls: Calls) -> Iterator[None]:
    """A context in which user code can't start threads, and makes no generators of numpy's without a seed."""
    thread = threading.get_ident()  # others go on beside it
    kept: list[tuple[ModuleType | type, str, Callable[..., Any]]] = [
        (numpy.random, "default_rng", numpy.random.default_rng),
        *((home, name, getattr(home, name)) for home, name in THREADS),
    ]

    def guarded(home: ModuleType | type, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            seeded = name == "default_rng" and (args or kwargs) and (*args, *kwargs.values())[0] is not None
            if not seeded and threading.get_ident() == thread:
                another = (home, name) in THREADS
                does = f"calls {home.__name__}.{name}, whose answer is another one every time"
                calls.refuse(sys._getframe(1), "lets another thread work, which can't be followed" if another else does)
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
    if value is sys.modules:
        _refuse_unseen("sys.modules", source)
    if isinstance(value, contextvars.ContextVar):
        _refuse(f"{source}: the step looks at {value.name!r}, a ContextVar, which can't be followed.")
    if not callable(value):
        return
    try:
        clock, outside = CLOCKS.get(value), OUTSIDE.get(value)
    except TypeError:  # it has no hash
        return
    if value in UNSEEN:
        _refuse_unseen(UNSEEN[value], source)
    if clock is not None:
        _refuse(f"{source}: the step calls {clock}, whose answer is another one at every step.")
    if outside is not None:
        _refuse(f"{source}: the step uses {outside}, which acts on something outside of Python or depends on it.")


def _refuse_unseen(what: str, source: str) -> NoReturn:
    raise CaptureError(
        f"{source}: the step looks at {what}, so that it can't be told which names it depends on.",
        hint="name what the step needs in the line itself.",
    )


def _refuse(message: str) -> NoReturn:
    raise CaptureError(message, hint="do it before or after the step; the step may take it as part of its batch.")
