"""Edits of what is around a model: the optimizer, the modes of torch, the batch and the generators."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lowtide.bench.trust.edits import FACTOR, Edit, Undo, remember
from lowtide.bench.trust.twins import Mode, Twin
from lowtide.tree import flatten

# ------------------------------------------------------------------------------------------------------ optimizer


def optimizer_edits(twin: Twin) -> Iterator[Edit]:
    """Groups, their members, the state, and methods of optimizers; their options are values like others."""
    for which, optimizer in enumerate(twin.optimizers):
        yield from _edits_of(which, optimizer)


def _edits_of(which: int, optimizer: Any) -> Iterator[Edit]:
    name = "optimizer" if which == 0 else f"optimizer {which}"
    for how, work in _OPTIMIZER.items():
        value = how in ("state scaled", "options loaded from its own state_dict", "stepped by a scheduler")
        yield Edit("optimizer", name, how, functools.partial(_with_optimizer, which, work), value)
    for number in range(len(optimizer.param_groups)):
        for how, change in _GROUPS.items():
            work = functools.partial(change, number)
            where = f"{name}.param_groups[{number}]"
            yield Edit("optimizer", where, how, functools.partial(_with_optimizer, which, work))
    for number, parameter in enumerate(_members(optimizer)):
        for key in optimizer.state.get(parameter, {}):
            for how, alter in _STATES.items():
                work = functools.partial(alter, number, key)
                where = f'{name}.state[{number}]["{key}"]'
                yield Edit("optimizer", where, how, functools.partial(_with_optimizer, which, work))


def _members(optimizer: Any) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _with_optimizer(which: int, work: Callable[[Any, Twin], Any], twin: Twin) -> Undo:
    optimizer = twin.optimizers[which]
    kept = [part for entry in optimizer.state.values() for part in entry.values() if isinstance(part, Tensor)]
    undo = remember(twin.model, optimizer, *twin.model.parameters(), *kept)
    entries = {key: dict(entry) for key, entry in optimizer.state.items()}
    work(optimizer, twin)

    def undo_all() -> None:
        undo()
        for key, entry in entries.items():
            optimizer.state[key] = entry

    return undo_all


def _scale_state(optimizer: Any, _: Twin) -> None:
    for entry in optimizer.state.values():
        for part in entry.values():
            if isinstance(part, Tensor) and part.dim() and part.is_floating_point():
                part.mul_(FACTOR)


def _forget_first(optimizer: Any, _: Twin) -> None:
    optimizer.state.pop(_members(optimizer)[0], None)


def _split(optimizer: Any, _: Twin) -> None:
    members = optimizer.param_groups[0]["params"]
    rest = {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}
    moved = [members.pop() for _ in range(len(members) // 2)]
    optimizer.add_param_group({**rest, "params": moved, "lr": rest["lr"] * 0.5})


def _add_stranger(optimizer: Any, twin: Twin) -> None:
    twin.model.register_parameter("stranger", nn.Parameter(torch.ones(3)))
    optimizer.add_param_group({"params": [twin.model.get_parameter("stranger")]})


def _scaled_step(optimizer: Any, _: Twin) -> None:
    old = optimizer.step

    def step(*args: Any, **kwargs: Any) -> Any:
        for parameter in _members(optimizer):
            if parameter.grad is not None:
                parameter.grad.mul_(FACTOR)
        return old(*args, **kwargs)

    optimizer.step = step


_OPTIMIZER: dict[str, Callable[[Any, Twin], Any]] = {
    "groups reversed": lambda optimizer, _: optimizer.param_groups.reverse(),
    "first group split": _split,
    "given a parameter": _add_stranger,
    "state scaled": _scale_state,
    "state cleared": lambda optimizer, _: optimizer.state.clear(),
    "state of the first deleted": _forget_first,
    "options loaded from its own state_dict": lambda optimizer, _: optimizer.load_state_dict(optimizer.state_dict()),
    "step replaced": _scaled_step,
    "zero_grad replaced": lambda optimizer, _: setattr(optimizer, "zero_grad", lambda *a, **k: None),
    "watched by a scheduler": lambda optimizer, _: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9),
    "stepped by a scheduler": lambda optimizer, _: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9).step(),
    "a step taken between": lambda optimizer, _: optimizer.step(),
}


def _tensor_rate(number: int, optimizer: Any, _: Twin) -> None:
    group = optimizer.param_groups[number]
    group["lr"] = torch.as_tensor(group["lr"]).clone()


def _move_out(number: int, optimizer: Any, _: Twin) -> None:
    groups = optimizer.param_groups
    moved = groups[number]["params"].pop()
    if len(groups) > 1:
        groups[number - 1]["params"].append(moved)


_GROUPS: dict[str, Callable[[int, Any, Twin], None]] = {
    "lr as a tensor": _tensor_rate,
    "members reversed": lambda number, optimizer, _: optimizer.param_groups[number]["params"].reverse(),
    "last member moved out": _move_out,
}


def _entry(number: int, optimizer: Any) -> dict[str, Any]:
    entry: dict[str, Any] = optimizer.state[_members(optimizer)[number]]
    return entry


def _replace_state(number: int, key: str, optimizer: Any, _: Twin) -> None:
    entry = _entry(number, optimizer)
    old = entry[key]
    entry[key] = old.clone() * FACTOR if isinstance(old, Tensor) and old.dim() else old


_STATES: dict[str, Callable[[int, str, Any, Twin], Any]] = {
    "replaced": _replace_state,
    "deleted": lambda number, key, optimizer, _: _entry(number, optimizer).pop(key),
}


# ---------------------------------------------------------------------------------------------------------- modes


def mode_edits(_: Twin) -> Iterator[Edit]:
    """What torch is told for the time of a step."""
    for name, mode in MODES.items():
        yield Edit("mode", "torch", name, functools.partial(_set_mode, name, mode))


def _set_mode(name: str, mode: Mode, twin: Twin) -> Undo:
    had = name in twin.around
    twin.around[name] = mode
    return lambda: None if had else twin.around.pop(name, None) and None


def _setting(read: Callable[[], Any], write: Callable[[Any], Any], value: Any) -> Mode:
    """A global setting for the time of a step."""

    @contextmanager
    def mode() -> Iterator[None]:
        old = read()
        write(value)
        try:
            yield
        finally:
            write(old)

    return mode


class _Softer(TorchFunctionMode):
    """A mode of a user that changes what a function does."""

    def __torch_function__(self, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        return result * FACTOR if function in (torch.tanh, torch.nn.functional.linear) else result


def _packing() -> AbstractContextManager[Any]:
    return torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.clone(), lambda tensor: tensor)


def _flag(name: str, value: Any, reader: str, writer: str, owner: Any = torch) -> tuple[str, Mode]:
    return name, _setting(getattr(owner, reader), getattr(owner, writer), value)


def _mkldnn(value: bool) -> None:
    torch.backends.mkldnn.enabled = value  # type: ignore[assignment]


MODES: dict[str, Mode] = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "enable_grad": torch.enable_grad,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "autocast, not enabled": lambda: torch.autocast("cpu", enabled=False),
    "anomaly": lambda: torch.autograd.set_detect_anomaly(True),
    "saved tensors packed": _packing,
    "saved tensors on the host": lambda: torch.autograd.graph.save_on_cpu(),
    "function mode": _Softer,
    "device context": lambda: torch.device("cpu"),
    "meta device context": lambda: torch.device("meta"),
    "mkldnn off": _setting(lambda: bool(torch.backends.mkldnn.enabled), _mkldnn, False),
    **dict(
        [
            _flag("default float64", torch.float64, "get_default_dtype", "set_default_dtype"),
            _flag("deterministic", True, "are_deterministic_algorithms_enabled", "use_deterministic_algorithms"),
            _flag("two threads", 2, "get_num_threads", "set_num_threads"),
            _flag("medium matmuls", "medium", "get_float32_matmul_precision", "set_float32_matmul_precision"),
        ]
    ),
}


# -------------------------------------------------------------------------------------------- batch and generators


def batch_edits(twin: Twin) -> Iterator[Edit]:
    """The next batch: new values, in the same objects or others, of other shapes, types and layouts."""
    leaves, structure = flatten(twin.batch)
    paths = list(structure.paths())
    yield Edit("batch", "batch", "values anew, in new tensors", lambda twin: _rebuilt(twin, _shuffled), value=True)
    yield Edit("batch", "batch", "values anew, in the same containers", _refilled, value=True)
    yield Edit("batch", "batch", "of half the length", lambda twin: _rebuilt(twin, _halved))
    yield Edit("batch", "batch", "longer by one", lambda twin: _rebuilt(twin, _longer))
    for number, (path, leaf) in enumerate(zip(paths, leaves, strict=True)):
        where = "batch" + "".join(f'["{part}"]' if isinstance(part, str) else f"[{part}]" for part in path)
        if isinstance(leaf, Tensor):
            for how, change in _LEAVES.items():
                value = how in ("rolled", "rolled in place", "an equal one")
                yield Edit("batch", where, how, functools.partial(_leaf, number, change), value)
        elif isinstance(leaf, float):
            yield Edit("batch", where, "* 1.25", functools.partial(_leaf, number, lambda old: old * FACTOR), True)
            yield Edit("batch", where, "as a tensor", functools.partial(_leaf, number, torch.tensor))


def _roll_in_place(old: Tensor) -> Tensor:
    with torch.no_grad():
        old.copy_(old.roll(1, 0) if old.dim() else old)
    return old


def _spread(old: Tensor) -> Tensor:
    """The same values, each with room after it."""
    larger = torch.zeros(*old.shape, 2, dtype=old.dtype)
    larger[..., 0] = old.detach()
    return larger[..., 0]


_LEAVES: dict[str, Callable[[Tensor], Any]] = {
    "rolled": lambda old: old.detach().roll(1, 0) if old.dim() else old.detach().clone(),
    "rolled in place": _roll_in_place,
    "an equal one": lambda old: old.detach().clone(),
    "not contiguous": _spread,
    "in float64": lambda old: old.detach().double() if old.is_floating_point() else old.int(),
    "requires a gradient": lambda old: old.detach().clone().requires_grad_(old.is_floating_point()),
    "expanded": lambda old: old.detach()[:1].expand(old.shape) if old.dim() else old.detach().clone(),
    "a parameter": lambda old: nn.Parameter(old.detach().clone(), requires_grad=old.is_floating_point()),
    "on meta": lambda old: old.detach().to("meta"),
    "with a history": lambda old: (old.detach().clone().requires_grad_() * 1.5) if old.is_floating_point() else old,
    "as numpy": lambda old: old.detach().numpy(),
}


def _leaf(number: int, change: Callable[[Any], Any], twin: Twin) -> Undo:
    old = twin.batch
    leaves, structure = flatten(old)
    leaf = leaves[number]
    values = leaf.detach().clone() if isinstance(leaf, Tensor) and not leaf.is_meta else None
    leaves[number] = change(leaf)
    twin.batch = structure.build(leaves)

    def undo() -> None:
        twin.batch = old
        if values is not None:
            with torch.no_grad():
                leaf.copy_(values)

    return undo


def _rebuilt(twin: Twin, change: Callable[[Tensor], Tensor]) -> Undo:
    old = twin.batch
    leaves, structure = flatten(old)
    twin.batch = structure.build([change(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves])
    return lambda: setattr(twin, "batch", old)


def _shuffled(old: Tensor) -> Tensor:
    """Other values of the same kind."""
    old = old.detach()
    return old.flip(0) * 0.9 if old.is_floating_point() and old.dim() else old.flip(0) if old.dim() else old.clone()


def _halved(old: Tensor) -> Tensor:
    return old.detach()[: (old.shape[0] + 1) // 2].clone() if old.dim() else old.detach().clone()


def _longer(old: Tensor) -> Tensor:
    return torch.cat([old.detach(), old.detach()[:1]]) if old.dim() else old.detach().clone()


def _refilled(twin: Twin) -> Undo:
    """Put new tensors into the containers of the batch itself."""
    changed: list[tuple[Any, Any, Any]] = []
    for part in twin.batch:
        keys = part if isinstance(part, dict) else range(len(part)) if isinstance(part, list) else ()
        for key in list(keys):
            if isinstance(part[key], Tensor):
                changed.append((part, key, part[key]))
                part[key] = _shuffled(part[key])
    if not changed:
        return _rebuilt(twin, _shuffled)

    def undo() -> None:
        for part, key, old in changed:
            part[key] = old

    return undo


def generator_edits(_: Twin) -> Iterator[Edit]:
    """Generators seeded anew."""
    seeds: dict[str, Callable[[int], Any]]
    seeds = {"torch": torch.manual_seed, "random": random.seed, "numpy": numpy.random.seed}
    for name, seed in seeds.items():
        for number in (1, 2):
            work = functools.partial(_seed, seed, number)
            yield Edit("generator", name, f"seeded with {number}", work, value=True, shared=True)
    yield Edit("generator", "none", "nothing changed", lambda _: lambda: None, value=True)


def _seed(seed: Callable[[int], Any], number: int, _: Twin) -> Undo:
    seed(number)
    return lambda: None
