"""Edits of parameters and buffers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.utils.parametrizations
import torch.nn.utils.prune
from torch import Tensor, nn

from lowtide.bench.trust.edits import FACTOR, Edit, Undo, remember
from lowtide.bench.trust.twins import Twin
from lowtide.private import registries

Work = Callable[
    [Twin, nn.Module, str, Any], Any
]  # given the module, the name there and the tensor; may return a handle


def parameter_edits(twin: Twin) -> Iterator[Edit]:
    """Parameters and buffers: other objects, other contents, other flags."""
    by_shape: dict[tuple[int, ...], list[str]] = {}
    for name, parameter in twin.model.named_parameters(remove_duplicate=False):
        by_shape.setdefault(tuple(parameter.shape), []).append(name)
    for name, parameter in twin.model.named_parameters(remove_duplicate=False):
        for how, work in _PARAMETERS.items():
            value = how in ("values scaled", "gradient preset")
            yield Edit("parameter", f"model.{name}", how, functools.partial(_with_parameter, name, work), value)
        for other in by_shape[tuple(parameter.shape)][:3]:
            if other != name:
                yield Edit("parameter", f"model.{name}", f"tied to {other}", functools.partial(_tie, name, other))
                how = f"data shared with {other}"
                yield Edit("parameter", f"model.{name}", how, functools.partial(_share, name, other))
    for name, _ in twin.model.named_buffers():
        for how, work in _BUFFERS.items():
            value = how == "values changed"
            yield Edit("buffer", f"model.{name}", how, functools.partial(_with_parameter, name, work), value)
    for how, whole in _WHOLE.items():
        yield Edit("parameter", "model", how, functools.partial(whole), value=how == "loaded")


def _owner(twin: Twin, name: str) -> tuple[nn.Module, str]:
    parent, _, key = name.rpartition(".")
    return twin.model.get_submodule(parent), key


def _with_parameter(name: str, work: Work, twin: Twin) -> Undo:
    module, key = _owner(twin, name)
    tensor = getattr(module, key)
    undo = remember(module, tensor, *twin.optimizers)
    handle = work(twin, module, key, tensor)

    def undo_all() -> None:
        if isinstance(handle, torch.utils.hooks.RemovableHandle):
            handle.remove()
        undo()

    return undo_all


def _fresh(_: Twin, module: nn.Module, key: str, old: Tensor) -> None:
    setattr(module, key, nn.Parameter(old.detach() * FACTOR))


def _fresh_everywhere(twin: Twin, module: nn.Module, key: str, old: Tensor) -> None:
    made = nn.Parameter(old.detach().clone())
    setattr(module, key, made)
    for group in (group for optimizer in twin.optimizers for group in optimizer.param_groups):
        group["params"] = [made if parameter is old else parameter for parameter in group["params"]]


def _data(_: Twin, __: nn.Module, ___: str, old: Tensor) -> None:
    old.data = old.data * FACTOR


def _same_data(_: Twin, __: nn.Module, ___: str, old: Tensor) -> None:
    old.data = old.data.clone()


def _scaled_values(_: Twin, __: nn.Module, ___: str, old: Tensor) -> None:
    with torch.no_grad():
        old.mul_(FACTOR)


def _flip(_: Twin, __: nn.Module, ___: str, old: Tensor) -> None:
    old.requires_grad_(not old.requires_grad)


def _double(_: Twin, __: nn.Module, ___: str, old: Tensor) -> None:
    old.data = old.data.double()


def _transposed(_: Twin, __: nn.Module, ___: str, old: Tensor) -> None:
    old.data = old.data.t().contiguous().t() if old.dim() == 2 else old.data.clone()


def _part_of_larger(_: Twin, __: nn.Module, ___: str, old: Tensor) -> None:
    larger = torch.zeros(2, *old.shape, dtype=old.dtype)
    larger[1] = old.data
    old.data = larger[1]


def _longer(_: Twin, __: nn.Module, ___: str, old: Tensor) -> None:
    old.data = torch.cat([old.data, old.data]) if old.dim() else old.data.clone()


def _gradient(_: Twin, __: nn.Module, ___: str, old: Tensor) -> None:
    old.grad = torch.full_like(old, 0.01)


def _grad_hook(_: Twin, __: nn.Module, ___: str, old: Tensor) -> Any:
    return old.register_hook(lambda gradient: gradient * FACTOR)


def _noting_hook(twin: Twin, __: nn.Module, ___: str, old: Tensor) -> Any:
    notes = twin.notes  # a hook must not reach what the campaign itself keeps
    return old.register_hook(lambda gradient: notes.append(gradient.detach().sum()))


def _scale_gradient(tensor: Tensor) -> None:
    if tensor.grad is not None:
        tensor.grad.mul_(FACTOR)


def _accumulated_hook(_: Twin, __: nn.Module, ___: str, old: Tensor) -> Any:
    return old.register_post_accumulate_grad_hook(_scale_gradient)


def _missing(_: Twin, module: nn.Module, key: str, __: Tensor) -> None:
    setattr(module, key, None)


def _removed(_: Twin, module: nn.Module, key: str, __: Tensor) -> None:
    delattr(module, key)


def _weight_norm(_: Twin, module: nn.Module, key: str, __: Tensor) -> None:
    nn.utils.parametrizations.weight_norm(module, key)


def _prune(_: Twin, module: nn.Module, key: str, __: Tensor) -> None:
    nn.utils.prune.l1_unstructured(module, key, amount=0.3)


def _as_buffer(_: Twin, module: nn.Module, key: str, old: Tensor) -> None:
    delattr(module, key)
    module.register_buffer(key, old.detach().clone())


def _as_tensor(_: Twin, module: nn.Module, key: str, old: Tensor) -> None:
    delattr(module, key)
    setattr(module, key, old.detach().clone() * FACTOR)


_PARAMETERS: dict[str, Work] = {
    "replaced": _fresh,
    "replaced, in the optimizer too": _fresh_everywhere,
    "data replaced": _data,
    "data replaced by equal data": _same_data,
    "values scaled": _scaled_values,
    "requires_grad flipped": _flip,
    "data in float64": _double,
    "data transposed in memory": _transposed,
    "data part of a larger tensor": _part_of_larger,
    "data longer": _longer,
    "gradient preset": _gradient,
    "hook that scales": _grad_hook,
    "hook that notes": _noting_hook,
    "hook after its gradient": _accumulated_hook,
    "= None": _missing,
    "deleted": _removed,
    "with weight_norm": _weight_norm,
    "pruned": _prune,
    "made a buffer": _as_buffer,
    "made a plain tensor": _as_tensor,
}


def _new_buffer(_: Twin, module: nn.Module, key: str, old: Tensor) -> None:
    setattr(module, key, old.clone() + 1 if old.dtype.is_floating_point else old.clone())


def _more_values(_: Twin, __: nn.Module, ___: str, old: Tensor) -> None:
    old.add_(1)


def _smaller(_: Twin, module: nn.Module, key: str, old: Tensor) -> None:
    setattr(module, key, old[: old.shape[0] // 2].clone() if old.dim() else old.clone())


_BUFFERS: dict[str, Work] = {
    "replaced": _new_buffer,
    "values changed": _more_values,
    "data replaced": _data,
    "of half the size": _smaller,
    "data in float64": _double,
    "= None": _missing,
    "deleted": _removed,
}


def _tie(name: str, other: str, twin: Twin) -> Undo:
    module, key = _owner(twin, name)
    undo = remember(module)
    setattr(module, key, twin.model.get_parameter(other))
    return undo


def _share(name: str, other: str, twin: Twin) -> Undo:
    tensor = twin.model.get_parameter(name)
    undo = remember(tensor)
    tensor.data = twin.model.get_parameter(other).data
    return undo


def _remember_all(twin: Twin) -> Undo:
    return remember(*twin.model.modules(), *twin.model.parameters(), *twin.model.buffers())


def _scaled_state(twin: Twin) -> dict[str, Tensor]:
    return {
        name: tensor.clone() * FACTOR if tensor.is_floating_point() else tensor.clone()
        for name, tensor in twin.model.state_dict().items()
    }


def _load(twin: Twin) -> Undo:
    undo = _remember_all(twin)
    twin.handle.load_state_dict(_scaled_state(twin))
    return undo


def _assign(twin: Twin) -> Undo:
    undo = _remember_all(twin)
    twin.handle.load_state_dict(_scaled_state(twin), assign=True)
    return undo


def _untie(twin: Twin) -> Undo:
    undo = remember(*twin.model.modules())
    seen: set[int] = set()
    for module in twin.model.modules():
        for key, parameter in registries(module)[0].items():
            if parameter is not None and id(parameter) in seen:
                setattr(module, key, nn.Parameter(parameter.detach().clone()))
            seen.add(id(parameter))
    return undo


_WHOLE: dict[str, Callable[[Twin], Undo]] = {"loaded": _load, "loaded with assign": _assign, "weights untied": _untie}
