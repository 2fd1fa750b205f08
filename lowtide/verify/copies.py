"""A step with all that it holds, copied: the model, the optimizer, the batch, and the variables that the step names.

What is reached twice is copied once, so the optimizer's copy trains the model's copy. The copy knows the way back: it
can put everything that was copied into the state that it had then, in the caller's own objects.
"""

from __future__ import annotations

import copy
import dis
import functools
import random
import sysconfig
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch

from lowtide import private, tree
from lowtide.errors import UsageError

PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter)
SHARED = (ModuleType, type, BuiltinFunctionType, functools.partial)  # as they are, where a step names them
PLAIN = (bool, int, float, complex, str, bytes, type(None))  # which nobody can change
OF_GLOBALS = ("LOAD_GLOBAL", "STORE_GLOBAL", "DELETE_GLOBAL", "LOAD_NAME")  # instructions of Python
GENERATORS = (  # there is one of each
    random.random.__self__,  # type: ignore[attr-defined]
    np.random.rand.__self__,  # type: ignore[attr-defined]
    torch.default_generator,
)
NOT_USERS = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib")})


@dataclass(frozen=True)
class Variable:
    """A variable that a function of the user names, in its closure or among the globals."""

    name: str
    home: CellType | dict[str, Any]

    @property
    def value(self) -> Any:
        """What it holds now."""
        return self.home.cell_contents if isinstance(self.home, CellType) else self.home.get(self.name)

    def put(self, value: Any) -> None:
        """Let it hold this."""
        if isinstance(self.home, CellType):
            self.home.cell_contents = value
        else:
            self.home[self.name] = value


class Copy:
    """A copy of a step, its model, its optimizers and its batch, as they are now."""

    def __init__(self, step: Callable[..., Any], model: Any, optimizer: Any, batch: tuple[Any, ...]) -> None:
        self._memo: dict[int, Any] = {id(one): one for one in GENERATORS}
        self._originals: list[Any] = []
        self._storages: dict[int, torch.UntypedStorage] = {}
        self._globals: dict[int, dict[str, Any]] = {}
        self.variables: list[tuple[Variable, Variable]] = []  # the caller's, and ours
        for tensor in lasting_tensors(model, optimizer, batch):
            self._tensor(tensor)
        try:
            self.model = self._deep(model)
            self.optimizer = self._deep(optimizer)
            self.batch = self._deep(batch)
            self.step = self._callable(step)
        except Exception as error:
            raise UsageError(
                f"the step can't be run beside eager, for it can't be copied: {type(error).__name__}: {error}",
                hint="copy.deepcopy of model, optimizer and batch must work; without verify nothing is copied.",
            ) from error

    def restore(self) -> None:
        """Put the caller's own objects into the state that was copied; only for a copy that was not used."""
        back = {id(self._memo[id(original)]): original for original in self._originals}
        for original in self._originals:
            _put_back(original, self._memo[id(original)], back)
        for theirs, ours in self.variables:
            theirs.put(back.get(id(ours.value), ours.value))

    # Tensors

    def _tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy with the same strides, on a storage that those have in common that had one."""
        if id(tensor) in self._memo:
            found: torch.Tensor = self._memo[id(tensor)]
            return found
        key = private.storage_key(tensor)
        if key not in self._storages:
            self._storages[key] = tensor.untyped_storage().clone()
        with torch.no_grad():
            made = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
            made.set_(self._storages[key], tensor.storage_offset(), tensor.shape, tensor.stride())
        if isinstance(tensor, torch.nn.Parameter):
            made = torch.nn.Parameter(made, requires_grad=tensor.requires_grad)
        else:
            made.requires_grad_(tensor.requires_grad)
        made.__dict__.update(tensor.__dict__)
        if tensor.grad is not None:
            made.grad = self._tensor(tensor.grad)
        self._note(tensor, made)
        return made

    # Everything else

    def _deep(self, thing: Any) -> Any:
        """A deep copy; one that fails half-way leaves no trace."""
        trial = dict(self._memo)
        made = copy.deepcopy(thing, trial)
        self._originals += trial.pop(id(trial), [])
        self._memo.update(trial)
        return made

    def _callable(self, step: Any) -> Any:
        if isinstance(step, FunctionType):
            return self._function(step)
        if isinstance(step, MethodType):
            function = self._function(step.__func__) if isinstance(step.__func__, FunctionType) else step.__func__
            return MethodType(function, self._deep(step.__self__))
        if isinstance(step, functools.partial):
            return functools.partial(self._callable(step.func), *self._deep(step.args), **self._deep(step.keywords))
        return self._deep(step)

    def _function(self, function: FunctionType) -> FunctionType:
        """The function with a closure and globals of its own, as far as it names them."""
        if id(function) in self._memo or not _is_users(function):
            known: FunctionType = self._memo.get(id(function), function)
            return known
        theirs = function.__globals__
        world = self._globals.setdefault(id(theirs), dict(theirs))
        cells = tuple(CellType() for _ in function.__closure__ or ())
        made = FunctionType(function.__code__, world, function.__name__, function.__defaults__, cells or None)
        made.__kwdefaults__ = function.__kwdefaults__
        made.__dict__.update(function.__dict__)
        self._note(function, made)
        for name, cell, own in zip(function.__code__.co_freevars, function.__closure__ or (), cells, strict=True):
            if _filled(cell):
                self._variable(Variable(name, cell), Variable(name, own))
        for name in dict.fromkeys(_names(function.__code__)):
            if name in theirs and world[name] is theirs[name]:
                self._variable(Variable(name, theirs), Variable(name, world))
        return made

    def _variable(self, theirs: Variable, ours: Variable) -> None:
        value = theirs.value
        if isinstance(value, FunctionType):
            ours.put(self._function(value))
            return
        try:
            made = value if isinstance(value, SHARED) else self._deep(value)
        except Exception:  # a lock, a file, a logger: both runs share it
            made = value
        ours.put(made)
        if made is value and not isinstance(value, PLAIN):
            return
        self.variables.append((theirs, ours))

    def _note(self, original: Any, made: Any) -> None:
        self._memo[id(original)] = made
        self._originals.append(original)


def optimizers_of(optimizer: Any) -> list[tuple[str, torch.optim.Optimizer]]:
    """The optimizers of a step, with names for a person."""
    leaves, structure = tree.flatten(optimizer)
    named = zip(structure.paths(), leaves, strict=True)
    found = [(path, leaf) for path, leaf in named if isinstance(leaf, torch.optim.Optimizer)]
    return [(" ".join(["optimizer", *map(str, path)]), leaf) for path, leaf in found]


def lasting_tensors(model: torch.nn.Module, optimizer: Any, batch: tuple[Any, ...]) -> Iterator[torch.Tensor]:
    """The plain tensors that are there before a step: parameters, buffers, optimizer state and batch."""
    found: list[Any] = [*model.parameters(), *model.buffers()]
    for _, one in optimizers_of(optimizer):
        found += [parameter for group in one.param_groups for parameter in group["params"]]
        found += [item for state in one.state.values() for item in state.values()]
    for leaf in (*found, *tree.flatten(batch)[0]):
        if type(leaf) in PLAIN_TENSORS and leaf.is_leaf:
            yield leaf


def _put_back(original: Any, copied: Any, back: dict[int, Any]) -> None:
    """Give one object the content that its copy has, made of the caller's own objects."""
    if isinstance(original, torch.Tensor):
        _put_tensor_back(original, copied, back)
    elif isinstance(original, dict):
        items = [(back.get(id(key), key), back.get(id(item), item)) for key, item in copied.items()]
        original.clear()
        for key, item in items:
            original[key] = item
    elif isinstance(original, list):
        original[:] = [back.get(id(item), item) for item in copied]
    elif isinstance(original, set | deque):
        items = [back.get(id(item), item) for item in copied]
        original.clear()
        (original.update if isinstance(original, set) else original.extend)(items)
    elif isinstance(original, torch.Generator):
        original.set_state(copied.get_state())
    elif isinstance(own := getattr(copied, "__dict__", None), dict) and not isinstance(original, FunctionType):
        # Of most objects the attributes are a dict that was copied, too; not of those that say what is copied.
        vars(original).update((key, back[id(item)]) for key, item in own.items() if id(item) in back)


def _put_tensor_back(original: torch.Tensor, copied: torch.Tensor, back: dict[int, Any]) -> None:
    with torch.no_grad():
        storage, other = original.untyped_storage(), copied.untyped_storage()
        same = (original.shape, original.stride(), original.dtype) == (copied.shape, copied.stride(), copied.dtype)
        if same and storage.nbytes() == other.nbytes() and original.storage_offset() == copied.storage_offset():
            storage.copy_(other)
        else:
            original.data = copied.detach().clone()
    gradient = copied.grad
    original.grad = None if gradient is None else back.get(id(gradient), gradient)


def _is_users(function: FunctionType) -> bool:
    """Whether a function is the user's own: neither Python's, nor of a package that was installed."""
    file = function.__code__.co_filename
    return not file.startswith(NOT_USERS) and "-packages" not in file


def _filled(cell: CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def _names(code: CodeType) -> Iterator[str]:
    """The globals that a function uses, and those that functions inside it use."""
    yield from (item.argval for item in dis.get_instructions(code) if item.opname in OF_GLOBALS)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
