"""Edits that put hooks on modules, on all modules, on the wrapped model and on the optimizer."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

from lowtide.bench.trust.edits import FACTOR, Edit, Undo, scale
from lowtide.bench.trust.twins import Twin


def hook_edits(twin: Twin) -> Iterator[Edit]:
    """Hooks on modules, on all modules, on the optimizer, and on the wrapped model."""
    for name, _ in twin.model.named_modules():
        for how, work in _HOOKS.items():
            yield Edit("hook", f"model.{name}", how, functools.partial(_hook, name, work))
    for how, work in _HOOKS.items() if twin.wrapped else ():
        yield Edit("hook", "net", how, functools.partial(_hook_net, work))
    for how, everywhere in _GLOBAL_HOOKS.items():
        yield Edit("hook", "all modules", how, functools.partial(_hook_everywhere, everywhere))
    if twin.optimizers:
        for how, around in _OPTIMIZER_HOOKS.items():
            yield Edit("hook", "optimizer", how, functools.partial(_hook_optimizer, around))


def _note(twin: Twin, what: str) -> Callable[..., None]:
    notes = twin.notes  # a hook must not reach what the campaign itself keeps
    return lambda *_: notes.append(what)


def _keep(twin: Twin) -> Callable[..., None]:
    notes = twin.notes
    return lambda module, args, out: notes.append(out.detach() if isinstance(out, Tensor) else None)


_HOOKS: dict[str, Callable[[nn.Module, Twin], Any]] = {
    "forward hook that scales": lambda module, _: module.register_forward_hook(lambda m, a, out: scale(out)),
    "forward hook that notes": lambda module, twin: module.register_forward_hook(_note(twin, "forward")),
    "forward hook that keeps": lambda module, twin: module.register_forward_hook(_keep(twin)),
    "pre-forward hook that scales": lambda module, _: module.register_forward_pre_hook(
        lambda m, args: tuple(_scale_floats(arg) for arg in args)
    ),
    "pre-forward hook that notes": lambda module, twin: module.register_forward_pre_hook(_note(twin, "before")),
    "backward hook that scales": lambda module, _: module.register_full_backward_hook(
        lambda m, inputs, outputs: _scale_all(inputs)
    ),
    "backward hook that notes": lambda module, twin: module.register_full_backward_hook(_note(twin, "backward")),
    "pre-backward hook that scales": lambda module, _: module.register_full_backward_pre_hook(
        lambda m, outputs: _scale_all(outputs)
    ),
    "state_dict hook": lambda module, _: module.register_state_dict_pre_hook(lambda *_: None),
}


def _scale_all(gradients: Any) -> Any:
    return tuple(scale(gradient) for gradient in gradients)


def _scale_floats(thing: Any) -> Any:
    return thing * FACTOR if isinstance(thing, Tensor) and thing.is_floating_point() else thing


def _hook(name: str, work: Callable[[nn.Module, Twin], Any], twin: Twin) -> Undo:
    handle = work(twin.model.get_submodule(name), twin)
    return lambda: handle.remove()


def _hook_net(work: Callable[[nn.Module, Twin], Any], twin: Twin) -> Undo:
    handle = work(twin.handle, twin)
    return lambda: handle.remove()


def _of_twin(twin: Twin, work: Callable[..., Any]) -> Callable[..., Any]:
    """A hook that minds the modules of one twin only."""
    model = twin.model
    return lambda module, *rest: work(module, *rest) if any(module is m for m in model.modules()) else None


_GLOBAL_HOOKS: dict[str, Callable[[Twin], Any]] = {
    "forward hook that scales": lambda twin: nn.modules.module.register_module_forward_hook(
        _of_twin(twin, lambda m, a, out: scale(out))
    ),
    "forward hook that notes": lambda twin: nn.modules.module.register_module_forward_hook(
        _of_twin(twin, _note(twin, "forward"))
    ),
    "pre-forward hook that notes": lambda twin: nn.modules.module.register_module_forward_pre_hook(
        _of_twin(twin, _note(twin, "before"))
    ),
    "backward hook that notes": lambda twin: nn.modules.module.register_module_full_backward_hook(
        _of_twin(twin, _note(twin, "backward"))
    ),
}


def _hook_everywhere(work: Callable[[Twin], Any], twin: Twin) -> Undo:
    handle = work(twin)
    return lambda: handle.remove()


def _shrink_steps(optimizer: Any, *_: Any) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                parameter.grad.mul_(FACTOR)


_OPTIMIZER_HOOKS: dict[str, Callable[[Any, Twin], Any]] = {
    "hook before its step": lambda optimizer, _: optimizer.register_step_pre_hook(_shrink_steps),
    "hook after its step": lambda optimizer, twin: optimizer.register_step_post_hook(_note(twin, "stepped")),
}


def _hook_optimizer(work: Callable[[Any, Twin], Any], twin: Twin) -> Undo:
    handle = work(twin.optimizers[0], twin)
    return lambda: handle.remove()
