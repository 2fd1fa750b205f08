"""The forward of a training step's model by itself: without gradients, in `eval()`, on what the step calls it with."""

from __future__ import annotations

from typing import Any

import torch

from lowtide.batch.scale import Parts
from lowtide.errors import UsageError
from lowtide.handover import detached


def forward_of(parts: Parts) -> Parts:
    """A step that is one forward of the model, with the arguments of its first call in the training step."""
    called = _Called()
    handle = parts.model.register_forward_pre_hook(called, prepend=True, with_kwargs=True)
    before = torch.get_rng_state()
    try:
        parts.step(parts.model, parts.optimizer, *parts.example)
    except _FirstCall:
        pass
    finally:
        handle.remove()
        torch.set_rng_state(before)
    if called.arguments is None:
        raise UsageError(
            f"the step never calls the {type(parts.model).__name__} as a whole, so its forward is not known.",
            hint="let the step call model(...); or leave out --forward, for the throughput of the whole step.",
        )
    return Parts(_forward, parts.model.eval(), None, detached(called.arguments))


def _forward(model: Any, _: None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    with torch.no_grad():
        return model(*args, **kwargs)


class _FirstCall(BaseException):
    """Ends a step once its model is called; no Exception, which the step might catch."""


class _Called:
    """A hook that keeps what a model is called with."""

    def __init__(self) -> None:
        self.arguments: tuple[tuple[Any, ...], dict[str, Any]] | None = None

    def __call__(self, _: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.arguments = args, kwargs
        raise _FirstCall
