"""The state that an optimizer of others makes at its first step, found by letting it take one on a copy.

What it puts into its state first is what it starts from, unless that depends on the gradient or the first step does
something else as well: a step from that state must then lead elsewhere than its own first step, and is refused.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch

from lowtide.errors import CaptureError
from lowtide.private import FakeTensor


class _Book(dict[str, Any]):
    """The state of one parameter, and for each of its entries a copy of what was there first."""

    def __init__(self, given: dict[str, Any] | None = None) -> None:
        super().__init__(_copied(given or {}))
        self.first: dict[str, Any] = {}

    def __setitem__(self, key: str, value: Any) -> None:
        self.first.update(_copied({key: value}) if key not in self.first else {})
        super().__setitem__(key, value)

    def setdefault(self, key: str, default: Any = None) -> Any:
        """As of a dict, and written down."""
        if key not in self:
            self[key] = default
        return self[key]

    def update(self, *given: Any, **named: Any) -> None:
        """As of a dict, and written down."""
        for key, value in dict(*given, **named).items():
            self[key] = value


def first_state(optimizer: torch.optim.Optimizer, group: dict[str, Any], parameter: torch.Tensor) -> dict[str, Any]:
    """The state that the optimizer would make for a parameter at its first step."""
    gradient = torch.linspace(-1.0, 1.0, max(1, parameter.numel()), dtype=torch.float64)
    gradient = gradient[: parameter.numel()].reshape(parameter.shape).to(parameter.dtype)
    try:
        with torch.random.fork_rng(devices=[], enabled=not isinstance(parameter, FakeTensor)):
            after, book = _step(optimizer, group, parameter, gradient)
            found = book.first
            if not isinstance(parameter, FakeTensor):
                again, other = _step(optimizer, group, parameter, gradient, found)
                if not _alike({"": after, **book}, {"": again, **other}):
                    raise _refusal(optimizer, "treats its first step in another way than the others")
    except CaptureError:
        raise
    except Exception as error:
        raise _refusal(optimizer, f"has no state yet, and a trial of its first step failed ({error})") from error
    return found


def _step(
    optimizer: Any, group: dict[str, Any], parameter: torch.Tensor, gradient: torch.Tensor, given: Any = None
) -> tuple[torch.Tensor, _Book]:
    """One step of a twin with a copy of the parameter, and what state it leaves."""
    with torch.no_grad():
        stand_in = parameter.detach().clone().requires_grad_()
    stand_in.grad = gradient.clone()
    twin = object.__new__(type(optimizer))
    twin.__dict__.update(optimizer.__dict__)
    twin.__dict__.pop("step", None)  # a scheduler's, which leads to the optimizer itself
    twin.param_groups = [{**group, "params": [stand_in]}]
    twin.state = defaultdict(_Book, {} if given is None else {stand_in: _Book(given)})
    twin.step()
    return stand_in.detach(), twin.state[stand_in]


def _refusal(optimizer: Any, what: str) -> CaptureError:
    return CaptureError(
        f"{type(optimizer).__name__} {what}.",
        hint="take one step in eager PyTorch first, then capture; or lowtide.attach(model), which leaves the optimizer "
        "to your loop.",
    )


def _copied(entries: dict[str, Any]) -> dict[str, Any]:
    return {key: item.clone() if isinstance(item, torch.Tensor) else item for key, item in entries.items()}


def _alike(one: dict[str, Any], other: dict[str, Any]) -> bool:
    if one.keys() != other.keys():
        return False
    pairs = [(one[key], other[key]) for key in one]
    return all(torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in pairs)
