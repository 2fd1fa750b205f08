"""Follows the Python code of a step while it is traced: which names its lines load, before they do.

User code is all that is neither torch's, numpy's, the standard library's nor our own; its lines are followed one by
one. Of all other code it is only noted which attributes it may ask for.
"""

from __future__ import annotations

import array
import builtins
import collections
import contextlib
import functools
import importlib
import operator
import os
import random
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from types import CodeType, FrameType, ModuleType
from typing import Any

import numpy
import torch

from lowtide import private
from lowtide.capture import lines
from lowtide.capture.impure import Calls, environment_followed, kept_away, refuse_impure, refuse_unseeded
from lowtide.capture.lines import Load, Use
from lowtide.capture.origin import user_line
from lowtide.capture.world import World, is_cached, library
from lowtide.errors import CaptureError
from lowtide.guards import MISSING

_TORCH, _NUMPY = (os.path.dirname(module.__file__ or "") + os.sep for module in (torch, numpy))
_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_OWN_USERS = tuple(os.path.join(_OURS, room) + os.sep for room in ("models", "bench"))
_STANDARD = tuple(sysconfig.get_paths()[key] + os.sep for key in ("stdlib", "platstdlib"))
_SITE = tuple(sysconfig.get_paths()[key] + os.sep for key in ("purelib", "platlib"))
_NOT_FILES = ("<frozen", "<lowtide", "<__array_function__", "<attrs", "<eval_with_key>")
EVERYTHING = frozenset(("__dict__", "vars", "asdict", "astuple", "deepcopy", "__getstate__", "dir"))  # asks for all


_SEED = random.Random.seed.__code__
_IMPORT = importlib.import_module.__code__
GETTERS = frozenset(("attrgetter", "methodcaller"))  # they make functions that ask for attributes by their names
CONTAINERS = (list, dict, set, collections.deque, bytearray, array.array)
CONTENTS = ("tolist", "numpy", "__array__")  # of a tensor: they give Python what is in it


@cache
def is_user_file(filename: str) -> bool:
    """Whether the code of this file is the user's."""
    if filename.startswith("<"):
        return not filename.startswith(_NOT_FILES)
    if filename.startswith((_TORCH, _NUMPY)):
        return False
    if filename.startswith(_OURS):
        return filename.startswith(_OWN_USERS)
    return filename.startswith(_SITE) or not filename.startswith(_STANDARD)


@dataclass
class Global:
    """A global name that lines of the step loaded."""

    home: dict[str, Any]
    name: str
    value: Any  # before the step changed it; MISSING: it is a builtin, or nothing
    source: str  # "train.py:42"
    uses: set[Use] = field(default_factory=set)
    attributes: set[str] = field(default_factory=set)  # that were taken of it at once, as of a module


class Follower:
    """What the lines of one step loaded and stored."""

    def __init__(self, world: World, stand_in: Callable[[Any], Any]) -> None:
        self.world = world
        self.stand_in = stand_in  # for a function that must not be called while the step is traced; None for others
        self.globals: dict[tuple[int, str], Global] = {}
        self.attributes: dict[str, set[Use]] = {}  # attributes that lines of the user loaded
        self.cells: dict[str, set[Use]] = {}
        self.asked: set[str] = set()  # attributes that any code may have loaded
        self.gotten: set[str] = set()  # attributes that `getattr` was asked for
        self.stores: dict[tuple[str, str], str] = {}  # (kind, name) -> the line that stored to it
        self.imported: dict[str, ModuleType] = {}  # by lines of the step
        self.borrowed: dict[tuple[str, str], ModuleType] = {}  # data in modules of libraries that such lines import
        self.environment: dict[Any, Any] = {}  # variables that were read, as the dict of os.environ has them
        self.refusals: list[CaptureError] = []  # of lines that did what can't be repeated; their code might catch them
        self.calls = Calls(is_user_file, self.refusals.append)
        self.codes: set[CodeType] = set()
        self._made: set[CodeType] = set()  # of functions that the step itself makes
        self.replaced: list[tuple[dict[str, Any], str, Any]] = []
        self._lines: set[tuple[CodeType, int]] = set()

    @property
    def everything(self) -> bool:
        """Whether user code asks for all attributes of objects at once."""
        return not EVERYTHING.isdisjoint(self.attributes) or any(name in EVERYTHING for _, name in self.globals)

    @contextlib.contextmanager
    def followed(self) -> Iterator[None]:
        """A context in which the code that runs in this thread is followed."""
        before, getattr_before = sys.gettrace(), builtins.getattr

        def noted(thing: Any, name: str, *default: Any) -> Any:
            self.asked.add(name)
            self.gotten.add(name)
            return getattr_before(thing, name, *default)

        builtins.getattr = noted
        sys.settrace(self._call)
        try:
            with (
                kept_away(self.calls),
                environment_followed(is_user_file, self._read_variable, self.refusals.append),
                _contents_kept(self.refusals.append),
                _memory_kept(self.refusals.append),
                self.calls.watched(),
            ):
                yield
        finally:
            sys.settrace(before)
            builtins.getattr = getattr_before
            for home, name, value in self.replaced:
                if value is MISSING:
                    del home[name]
                else:
                    home[name] = value

    def _call(self, frame: FrameType, event: str, _: Any) -> Any:
        code = frame.f_code
        if is_user_file(code.co_filename):
            if code not in self.codes:
                self.codes.add(code)
                self._made.update(item for item in code.co_consts if isinstance(item, CodeType))
                if not GETTERS.isdisjoint(code.co_names):
                    self.asked |= lines.attributes(code)
            return self._line
        if code is _SEED and _from_user(frame.f_back):
            self._refuse(refuse_unseeded, frame.f_locals.get("a"), user_line(frame))
        if code is _IMPORT and frame.f_back is not None and is_user_file(frame.f_back.f_code.co_filename):
            self._import(frame.f_back, frame.f_locals["name"], (), user_line(frame))
        if code not in self.codes:
            self.codes.add(code)
            if not code.co_filename.startswith(_OURS):
                self.asked |= lines.attributes(code)
        return None

    def _line(self, frame: FrameType, event: str, _: Any) -> Any:
        if event == "line" and (frame.f_code, frame.f_lineno) not in self._lines:
            self._lines.add((frame.f_code, frame.f_lineno))
            found = lines.lines(frame.f_code).get(frame.f_lineno)
            if found is not None:
                source = f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
                for load in found.loads:
                    self._load(frame, load, source)
                for name, then in found.imports:
                    self._import(frame, name, then, source)
                for store in found.stores:
                    self.stores.setdefault((store.kind, store.name), source)
                    if store.kind == "global":
                        self.world.hold_name(frame.f_globals, store.name, os.path.basename(frame.f_code.co_filename))
        return self._line

    def _load(self, frame: FrameType, load: Load, source: str) -> None:
        if load.kind == "attribute":
            self.attributes.setdefault(load.name, set()).add(load.use)
            self.asked.add(load.name)
        elif load.kind == "cell":
            if load.name in frame.f_code.co_cellvars or frame.f_code in self._made:
                return  # a variable of the step's own
            self.cells.setdefault(load.name, set()).add(load.use)
            value = frame.f_locals.get(load.name, MISSING)
            if value is not MISSING:
                self.world.see(value, load.name)
        else:
            self._global(frame, load, source)

    def _global(self, frame: FrameType, load: Load, source: str) -> None:
        home = frame.f_globals
        key = (id(home), load.name)
        found = self.globals.get(key)
        if found is None:
            value = self.world.hold_name(home, load.name, os.path.basename(frame.f_code.co_filename))
            found = self.globals[key] = Global(home, load.name, value, source)
            other = _is_instance if value is MISSING and load.name == "isinstance" else self.stand_in(value)
            if other is not None:
                self.replaced.append((home, load.name, value))
                home[load.name] = other
            elif isinstance(value, operator.attrgetter):
                self.asked.update(part for path in value.__reduce__()[1] for part in path.split("."))
            elif value is not MISSING and not _of_library(value):
                self.world.see(value, f"{load.name} ({os.path.basename(frame.f_code.co_filename)})")
        found.uses.add(load.use)
        found.attributes.update(load.then[:1])
        value = found.value if found.value is not MISSING else getattr(builtins, load.name, None)
        self._refuse(refuse_impure, value, source)
        for attribute in load.then:
            if not isinstance(value, ModuleType):
                break
            value = value.__dict__.get(attribute)
            if value is sys.modules and frame.f_code.co_filename.startswith(_SITE):
                break  # packages ask it which others are there
            self._refuse(refuse_impure, value, source)
            if isinstance(value, CONTAINERS):
                self.world.see(value, f"{load.name}.{attribute}")

    def _refuse(self, refuse: Callable[[Any, str], None], value: Any, source: str) -> None:
        try:
            refuse(value, source)
        except CaptureError as error:
            self.refusals.append(error)
            raise

    def _read_variable(self, key: Any) -> None:
        self.environment.setdefault(key, private.environment().get(key, MISSING))

    def _import(self, frame: FrameType, name: str, then: tuple[str, ...], source: str) -> None:
        """A module that a line imports, and what it takes of it at once."""
        module = sys.modules.get(name)
        if module is None:
            return
        self.asked.update(then)
        for attribute in then:
            self._refuse(refuse_impure, module.__dict__.get(attribute), source)
        if not library(name):
            self.imported[name] = module
            self.world.see(module, name)
            return
        for attribute in (lines.attributes(frame.f_code) | set(then)) & module.__dict__.keys():
            value = module.__dict__[attribute]
            if value is sys.modules and not frame.f_code.co_filename.startswith(_SITE):
                self._refuse(refuse_impure, value, source)
            elif isinstance(value, CONTAINERS) and value is not sys.modules:
                self.world.see(value, f"{name}.{attribute}")
                self.borrowed[name, attribute] = module


def _from_user(frame: FrameType | None) -> bool:
    """Whether a frame was called by user code, past those of the generator's own class."""
    while frame is not None and frame.f_code.co_filename == _SEED.co_filename:
        frame = frame.f_back
    return frame is not None and is_user_file(frame.f_code.co_filename)


@contextlib.contextmanager
def _contents_kept(note: Callable[[CaptureError], None]) -> Iterator[None]:
    """A context in which user code can't take the contents of a real tensor, which others may change."""
    own = {name: torch.Tensor.__dict__.get(name) for name in CONTENTS}
    thread = threading.get_ident()  # others go on beside it

    def guarded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            frame = sys._getframe(1)
            real = type(tensor) in (torch.Tensor, torch.nn.Parameter) and threading.get_ident() == thread
            if real and is_user_file(frame.f_code.co_filename):
                source = f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
                error = CaptureError(
                    f"{source}: the step takes the contents of a tensor out of torch, by {name}.",
                    hint="do it before or after the step; the step may take it as part of its batch.",
                )
                note(error)
                raise error
            return function(tensor, *args, **kwargs)

        return call

    try:
        for name in CONTENTS:
            setattr(torch.Tensor, name, guarded(name, getattr(torch.Tensor, name)))
        yield
    finally:
        for name, function in own.items():
            if function is None:
                delattr(torch.Tensor, name)
            else:
                setattr(torch.Tensor, name, function)


@contextlib.contextmanager
def _memory_kept(note: Callable[[CaptureError], None]) -> Iterator[None]:
    """A context in which no tensor is given the memory of another one, which no op says."""
    own: Any = torch.Tensor.data
    thread = threading.get_ident()  # others go on beside it

    def refuse(tensor: torch.Tensor, data: torch.Tensor) -> None:
        if threading.get_ident() != thread:
            own.__set__(tensor, data)
            return
        if private.storage_key(tensor) == private.storage_key(data) and _same_place(tensor, data):
            return  # as of tensor.data += 1
        error = CaptureError(
            f"{user_line() or 'the step'}: the step puts another tensor in the place of a tensor's memory "
            "(tensor.data = ...), which can't be followed.",
            hint="write to it in place: tensor.data.copy_(...) instead of tensor.data = ...",
        )
        note(error)
        raise error

    torch.Tensor.data = property(own.__get__, refuse)  # type: ignore[assignment]
    try:
        yield
    finally:
        del torch.Tensor.data


def _same_place(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of one storage are the same elements."""
    shown = [(item.shape, item.dtype, item.stride(), item.storage_offset()) for item in (one, other)]
    return shown[0] == shown[1]


def _of_library(value: Any) -> bool:
    """Whether an object is a part of a library, which users do not change."""
    if value is os.environ:
        return True  # each variable that is read is noted
    if isinstance(value, ModuleType):
        return library(value.__name__)
    if isinstance(value, functools.partial) or is_cached(value):
        return False
    return callable(value) and library(getattr(value, "__module__", None) or "")


def _is_instance(thing: Any, kind: Any) -> bool:
    """`isinstance` as user code means it: a number that is an input of the program is a number."""
    if type(thing) is torch.SymFloat:
        return isinstance(0 if thing.node.integer else 0.0, kind)
    return isinstance(thing, kind)
