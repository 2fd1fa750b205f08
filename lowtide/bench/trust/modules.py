"""Edits of the modules of a model."""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from lowtide.bench.trust.edits import FACTOR, Edit, Undo, remember, scale
from lowtide.bench.trust.twins import Twin


def _scaled_copy(module: nn.Module) -> nn.Module:
    """Another module of the same shape."""
    other = copy.deepcopy(module)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(FACTOR)
    return other


def module_edits(twin: Twin) -> Iterator[Edit]:
    """Modules replaced, deleted, appended, swapped, and other ways forward."""
    for name, module in twin.model.named_modules():
        parent, _, key = name.rpartition(".")
        if name:
            for how, other in _REPLACED.items():
                yield Edit("module", f"model.{name}", how, functools.partial(_replace, parent, key, other))
            yield Edit("module", f"model.{name}", "deleted", functools.partial(_drop, parent, key))
        for how, work in _FORWARDS.items():
            yield Edit("module", f"model.{name}", how, functools.partial(_forward, name, work))
        yield Edit("mode", f"model.{name}", "eval", functools.partial(_train, name, False), value=True)
        yield Edit("mode", f"model.{name}", "train", functools.partial(_train, name, True), value=True)
        if isinstance(module, nn.Sequential | nn.ModuleList) and len(module) > 0:
            yield Edit("module", f"model.{name}", "appended a copy of its last", functools.partial(_append, name))
            yield Edit("module", f"model.{name}", "first two swapped", functools.partial(_swap, name))
        yield Edit("module", f"model.{name}", "given an unused module", functools.partial(_add_unused, name))
        yield Edit("module", f"model.{name}", "class changed", functools.partial(_reclass, name))
    for how, cast in _CASTS.items():
        yield Edit("parameter", "model", how, functools.partial(_cast, cast))
    if not twin.wrapped:
        return
    yield Edit("net", "net", "eval", lambda twin: _whole_mode(twin, False), value=True)
    yield Edit("net", "net", "given an unused module", _add_to_net)


_REPLACED: dict[str, Callable[[nn.Module], nn.Module]] = {
    "replaced by another of its shape": _scaled_copy,
    "replaced by an equal one": copy.deepcopy,
    "replaced by Identity": lambda _: nn.Identity(),
    "put into a Sequential": lambda module: nn.Sequential(module),
    "followed by Tanh": lambda module: nn.Sequential(module, nn.Tanh()),
}

_FORWARDS: dict[str, Callable[[Any], Callable[..., Any]]] = {
    "forward scaled": lambda old: lambda self, *args, **kwargs: scale(old(*args, **kwargs)),
    "forward wrapped": lambda old: lambda self, *args, **kwargs: old(*args, **kwargs),
}

_CASTS: dict[str, Callable[[nn.Module], Any]] = {
    "in float64": lambda model: model.double(),
    "in bfloat16": lambda model: model.bfloat16(),
    "frozen": lambda model: model.requires_grad_(False),
    "in channels_last": lambda model: model.to(memory_format=torch.channels_last),  # type: ignore[call-overload]
}


def _replace(parent: str, key: str, work: Callable[[nn.Module], nn.Module], twin: Twin) -> Undo:
    holder = twin.model.get_submodule(parent)
    undo = remember(holder)
    setattr(holder, key, work(holder.get_submodule(key)))
    return undo


def _drop(parent: str, key: str, twin: Twin) -> Undo:
    holder = twin.model.get_submodule(parent)
    undo = remember(holder)
    delattr(holder, key)
    return undo


def _forward(name: str, work: Callable[[Any], Callable[..., Any]], twin: Twin) -> Undo:
    module = twin.model.get_submodule(name)
    undo = remember(module)
    module.forward = types.MethodType(work(module.forward), module)
    return undo


def _train(name: str, mode: bool, twin: Twin) -> Undo:
    module = twin.model.get_submodule(name)
    old = {part: part.training for part in module.modules()}
    module.train(mode)

    def undo() -> None:
        for part, before in old.items():
            part.training = before

    return undo


def _whole_mode(twin: Twin, mode: bool) -> Undo:
    old = {part: part.training for part in twin.model.modules()}
    twin.handle.train(mode)

    def undo() -> None:
        for part, before in old.items():
            part.training = before

    return undo


def _append(name: str, twin: Twin) -> Undo:
    module = twin.model.get_submodule(name)
    undo = remember(module)
    module.append(copy.deepcopy(module[len(module) - 1]))  # type: ignore[operator,index,arg-type]
    return undo


def _swap(name: str, twin: Twin) -> Undo:
    module = twin.model.get_submodule(name)
    undo = remember(module)
    keys = list(module._modules)[:2]
    first, last = keys[0], keys[-1]
    module._modules[first], module._modules[last] = module._modules[last], module._modules[first]
    return undo


def _add_unused(name: str, twin: Twin) -> Undo:
    module = twin.model.get_submodule(name)
    undo = remember(module)
    extra = nn.Linear(2, 2)
    with torch.no_grad():
        for parameter in extra.parameters():
            parameter.fill_(0.5)
    module.add_module("unused", extra)
    return undo


def _add_to_net(twin: Twin) -> Undo:
    undo = remember(twin.model)
    twin.handle.add_module("unused", nn.Identity())
    return undo


def _reclass(name: str, twin: Twin) -> Undo:
    module = twin.model.get_submodule(name)
    undo = remember(module)
    kind = type(module)
    made = type(kind.__name__, (kind,), {"forward": lambda self, *a, **k: scale(kind.forward(self, *a, **k))})
    module.__class__ = made
    return undo


def _cast(cast: Callable[[nn.Module], Any], twin: Twin) -> Undo:
    undo = remember(*twin.model.modules(), *twin.model.parameters(), *twin.model.buffers())
    cast(twin.model)
    return undo
