"""All that can be reached from a twin, as leaves by path, and what differs between two of them."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence, Set
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from lowtide.bench.trust.twins import Twin

State = dict[str, Any]

HOOKS = "_hooks"  # in the names of what hooks are kept in: their keys count up in the whole process
SCALARS = (bool, int, float, complex, str, bytes, type(None))
OPTIMIZER = ("param_groups", "state", "defaults")
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def state(twin: Twin, result: Any = None, *, copied: bool = False) -> State:
    """The leaves of a twin and of what its last step returned; `copied` where it will change."""
    walk = _Walk(copied)
    walk.visit("model", twin.model)
    walk.visit("optimizer", twin.optimizer)
    walk.visit("batch", twin.batch)
    walk.visit("notes", twin.notes)
    for name, module in twin.own.items():
        walk.names(name, module)
    walk.visit("step", twin.step)
    walk.visit("result", result)
    return walk.found


def differences(one: State, other: State) -> list[str]:
    """The paths where two states differ, and how."""
    paths = [*one, *(path for path in other if path not in one)]
    return [text for path in paths if (text := _difference(path, one, other)) is not None]


def _difference(path: str, one: State, other: State) -> str | None:
    if path not in one or path not in other:
        return f"{path} only in {'eager' if path in one else 'lowtide'}"
    if same(one[path], other[path]):
        return None
    return f"{path} is {shown(other[path])} and should be {shown(one[path])}"


def shown(leaf: Any) -> str:
    """A leaf, short."""
    if not isinstance(leaf, Tensor):
        return str(leaf)[:60]
    if leaf.numel() == 1:
        return f"{leaf.item():.9g}"
    return f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)} of sum {leaf.double().sum().item():.9g}"


def same(one: Any, other: Any) -> bool:
    """Whether two leaves are equal, bit for bit where they are tensors; all NaN are one."""
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        return bool(one == other)
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    if one.is_meta or other.is_meta:
        return one.is_meta and other.is_meta
    one, other = one.detach().contiguous(), other.detach().contiguous()
    if not one.dtype.is_floating_point:
        return torch.equal(one, other)
    kind = BITS[one.element_size()]
    return bool(((one.view(kind) == other.view(kind)) | (one.isnan() & other.isnan())).all())


def _named(key: Any, number: int) -> str:
    """A key as a part of a path; a parameter that the model has not is known by its place."""
    return f"parameter {number}" if isinstance(key, Tensor) else str(key)


class _Walk:
    """A walk over objects, each visited once; where it is met again, its first path stands for it."""

    def __init__(self, copied: bool) -> None:
        self.found: State = {}
        self._copied = copied
        self._paths: dict[int, str] = {}
        self._alive: list[Any] = []  # so that no address is used again

    def visit(self, path: str, thing: Any) -> None:
        if isinstance(thing, SCALARS):
            self.found[path] = f"{type(thing).__name__} {thing!r}"
        elif isinstance(thing, enum.Enum):
            self.found[path] = str(thing)
        elif isinstance(thing, Tensor) and not isinstance(thing, nn.Parameter):
            self._tensor(path, thing)
        elif type(thing) is tuple:
            self._object(path, thing)
        elif id(thing) in self._paths:
            self.found[path] = f"the same as {self._paths[id(thing)]}"
        else:
            self._paths[id(thing)] = path
            self._alive.append(thing)
            self._object(path, thing)

    def names(self, path: str, module: ModuleType) -> None:
        """The globals of a module."""
        for name, thing in list(vars(module).items()):
            if not name.startswith("__"):
                self.visit(f"{path}.{name}", thing)

    def _tensor(self, path: str, tensor: Tensor) -> None:
        plain = tensor.detach()
        self.found[path] = plain.clone() if self._copied else plain
        if isinstance(tensor, nn.Parameter):
            self.found[f"{path}.requires_grad"] = tensor.requires_grad
        if tensor.is_leaf and tensor.grad is not None:
            self._tensor(f"{path}.grad", tensor.grad)

    def _object(self, path: str, thing: Any) -> None:
        match thing:
            case nn.Parameter():
                self._tensor(path, thing)
            case torch.optim.Optimizer():
                for name in OPTIMIZER:
                    self.visit(f"{path}.{name}", vars(thing)[name])
            case torch.Generator():
                self.found[path] = thing.get_state()
            case Mapping():
                self._mapping(path, thing)
            case Set():
                self.found[path] = str(sorted(map(str, thing)))
            case Sequence():
                self.found[f"{path} length"] = f"{type(thing).__name__} {len(thing)}"
                for number, part in enumerate(thing):
                    self.visit(f"{path}[{number}]", part)
            case FunctionType():
                self._function(path, thing)
            case MethodType():
                self.found[path] = thing.__qualname__
                self.visit(f"{path}.self", thing.__self__)
            case type():
                self._class(path, thing)
            case ModuleType() | BuiltinFunctionType():
                self.found[path] = str(thing.__name__)
            case numpy.ndarray() | numpy.generic():
                self.found[path] = (thing.dtype, thing.shape, thing.tobytes())
            case _:
                self._attributes(path, thing)

    def _mapping(self, path: str, thing: Mapping[Any, Any]) -> None:
        names = {key: self._paths.get(id(key)) or _named(key, number) for number, key in enumerate(thing)}
        if not path.endswith("optimizer.state"):
            self.found[f"{path} keys"] = ", ".join(names.values())
        for key, part in thing.items():
            self.visit(f"{path}[{names[key]}]", part)

    def _function(self, path: str, thing: FunctionType) -> None:
        self.found[path] = thing.__qualname__
        self.visit(f"{path}.__defaults__", thing.__defaults__)
        for name, cell in zip(thing.__code__.co_freevars, thing.__closure__ or (), strict=True):
            try:
                self.visit(f"{path}.{name}", cell.cell_contents)
            except ValueError:
                self.found[f"{path}.{name}"] = "empty"

    def _class(self, path: str, thing: type) -> None:
        self.found[path] = thing.__qualname__
        if thing.__module__.partition(".")[0] in ("torch", "builtins", "typing", "types", "enum"):
            return
        for name, part in list(vars(thing).items()):
            if not name.startswith("_") and isinstance(part, (*SCALARS, list, dict, tuple)):
                self.visit(f"{path}.{name}", part)

    def _attributes(self, path: str, thing: Any) -> None:
        self.found[path] = type(thing).__qualname__
        if type(thing).__module__.partition(".")[0] in ("logging", "weakref", "threading"):
            return
        for name, part in list(getattr(thing, "__dict__", {}).items()):
            if not name.endswith(HOOKS) and HOOKS + "_" not in name and name != "_is_full_backward_hook":
                self.visit(f"{path}.{name}", part)
