"""The side door: a model in, one out that runs its forward and backward within a budget, in the caller's own loop.

The model itself is left as it is; `lowtide/attach.py` changes the model instead. Both hand over by
`lowtide/handover.py`.
"""

from __future__ import annotations

import copy
import functools
import os
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from lowtide import graph
from lowtide.errors import UsageError
from lowtide.fit import CostsFrom, Fitted, PlanFrom, Request, Tell
from lowtide.handover import Loop, warn_of_copy
from lowtide.plan import TIME_LIMIT

PARTS = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")  # of a Module


def wrap(
    model: nn.Module,
    *,
    example: tuple[Any, ...] | Mapping[str, Any],
    budget: int | str | None = None,
    plan: PlanFrom | None = None,
    time_limit: float = TIME_LIMIT,
    tell: Tell | None = None,
    costs: CostsFrom = "measured",
    offload: graph.Place | None = None,
    offload_budget: int | str | None = None,
    offload_dir: str | os.PathLike[str] | None = None,
    allow: str | Iterable[str] | None = None,
) -> Wrapped:
    """Return `model` as one that gives the same outputs and gradients, and never holds more than the budget.

    Call it where the model was called, `net(x)`; `loss.backward()`, the optimizer and all else stay as they are. The
    budget counts what the model has and makes from `net(x)` to the end of `backward()`: parameters, buffers, inputs,
    outputs, gradients and all between; not what the loop itself makes, such as the loss and the optimizer's state.
    `example` are the arguments of one call, a mapping if they have names; other arguments are planned when they come,
    within the same budget. With `offload` values may wait elsewhere; parameters stay where they are, for they are your
    optimizer's. Everything else is as in `fit`, `allow` too.
    """
    if not isinstance(model, nn.Module):
        raise UsageError(
            f"the model is a {type(model).__name__}, not a torch.nn.Module.",
            hint="a function has no parameters of its own: give a whole step to lowtide.fit.",
        )
    if not isinstance(example, tuple | Mapping):
        raise UsageError(
            f"example is a {type(example).__name__}, not a tuple or a mapping.",
            hint='write example=(x,) for net(x), and example={"x": x} for net(x=x).',
        )
    _refuse_autocast()
    batch = (example, {}) if isinstance(example, tuple) else ((), dict(example))
    request = Request(
        model,
        model,
        budget=budget,
        plan=plan,
        time_limit=time_limit,
        costs=costs,
        offload=offload,
        offload_budget=offload_budget,
        offload_dir=offload_dir,
        allow=allow,
        tell=tell,
    )
    return Wrapped(model, Loop(request, batch))


class Wrapped(nn.Module):
    """A model whose forward and backward run by a program. To all others it is the model: its parts are its own."""

    unwrapped: nn.Module
    fitted: Fitted  # what runs it, with its plan, its peak and its report
    _loop: Loop

    def __init__(self, model: nn.Module, loop: Loop) -> None:
        mode = model.training
        self.__dict__["unwrapped"] = model  # past Module, which would make it a part
        super().__init__()
        self.__dict__.update({name: model.__dict__[name] for name in PARTS})
        self.training = mode
        self._loop, self.fitted = loop, loop.fitted

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the model makes of these arguments; under `torch.no_grad()` the model itself does it."""
        if not torch.is_grad_enabled():
            return self.unwrapped(*args, **kwargs)
        _refuse_autocast()
        return self._loop(args, kwargs)

    @property
    def training(self) -> bool:
        """The model's mode."""
        return self.unwrapped.training

    @training.setter
    def training(self, mode: bool) -> None:
        self.unwrapped.training = mode

    def __setattr__(self, name: str, value: Any) -> None:
        """The model's attributes are set in the model."""
        if "fitted" in self.__dict__ and name not in self.__dict__:
            setattr(self.unwrapped, name, value)
        else:
            super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self.unwrapped, name)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The model's."""
        return self.unwrapped.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load it into the model."""
        return self.unwrapped.load_state_dict(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.unwrapped, name)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A copy of the model: the program is for these parameters alone."""
        warn_of_copy("a wrapped model")
        return copy.deepcopy(self.unwrapped, memo)

    def __copy__(self) -> Any:
        warn_of_copy("a wrapped model")
        return copy.copy(self.unwrapped)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """As the model is pickled, so that whoever loads it needs no lowtide."""
        warn_of_copy("a wrapped model")
        found: Any = self.unwrapped.__reduce_ex__(protocol)
        make, given, *others = found
        return functools.partial(make, *given), (), *others  # pickle wants copyreg.__newobj__ for the same class only


def _refuse_autocast() -> None:
    if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
        raise UsageError(
            "the model is called under torch.autocast, which a wrapped model can't follow.",
            hint="put the autocast into the model's forward, or give the whole step to lowtide.fit.",
        )
