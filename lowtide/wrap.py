"""The side door: a model in, one out that runs its forward and backward within a budget, in the caller's own loop.

The planned step is the model's forward, a *turn* at which the caller's code goes on with the outputs, and the backward
with the gradients that it comes back with. To autograd all of it is one function.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from lowtide import tree
from lowtide.capture import capture
from lowtide.captured import Captured
from lowtide.errors import CaptureError, UsageError
from lowtide.execute import Half, Halves
from lowtide.fit import CostsFrom, Fitted, Manner, PlanFrom, Request, Tell
from lowtide.guards import Place
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
) -> Wrapped:
    """Return `model` as one that gives the same outputs and gradients, and never holds more than the budget.

    Call it where the model was called, `net(x)`; `loss.backward()`, the optimizer and all else stay as they are. The
    budget counts what the model has and makes from `net(x)` to the end of `backward()`: parameters, buffers, inputs,
    outputs, gradients and all between; not what the loop itself makes, such as the loss and the optimizer's state.
    `example` are the arguments of one call, a mapping if they have names; other arguments are planned when they come,
    within the same budget. Everything else is as in `fit`.
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
    request = Request(model, model, budget=budget, plan=plan, time_limit=time_limit, costs=costs, tell=tell)
    return Wrapped(model, Fitted(request, _detached(batch), IN_HALVES))


class Wrapped(nn.Module):
    """A model whose forward and backward run by a program. To all others it is the model: its parts are its own."""

    unwrapped: nn.Module
    fitted: Fitted  # what runs it, with its plan, its peak and its report

    def __init__(self, model: nn.Module, fitted: Fitted) -> None:
        mode = model.training
        self.__dict__["unwrapped"] = model  # past Module, which would make it a part
        super().__init__()
        self.__dict__.update({name: model.__dict__[name] for name in PARTS})
        self.training = mode
        self.fitted = fitted

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the model makes of these arguments; under `torch.no_grad()` the model itself does it."""
        if not torch.is_grad_enabled():
            return self.unwrapped(*args, **kwargs)
        _refuse_autocast()
        half: Half = self.fitted(*_detached((args, kwargs)))
        ends: _Ends = half.captured.step.ends  # type: ignore[attr-defined]
        roots = _Turn.apply(half, ends, *_sources(self.unwrapped, args, kwargs))  # type: ignore[no-untyped-call]
        return ends.build([*roots, *half.outputs[len(roots) :]])

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

    def __reduce_ex__(self, _: Any) -> Any:
        raise UsageError(
            "a wrapped model can't be copied or pickled: its program is for this process and these parameters.",
            hint="copy or save the model, net.unwrapped, or its state_dict(), and wrap what you get.",
        )


@dataclass(frozen=True)
class _Ends:
    """What a model returns: its tensors, those with a history first, and where they go."""

    roots: int  # how many have a history
    structure: tree.Tree
    leaves: tuple[Any, ...]  # an int for each tensor: its place among what is handed over; others as (value,)
    reach: tuple[frozenset[int], ...]  # for each with a history the sources, by place, that it depends on

    def build(self, tensors: Sequence[Tensor]) -> Any:
        """The model's result with these tensors."""
        return self.structure.build([leaf[0] if isinstance(leaf, tuple) else tensors[leaf] for leaf in self.leaves])


class _Whole:
    """The step that is planned: forward, turn, backward."""

    def __init__(self) -> None:
        self.ends: _Ends | None = None  # known after it was traced
        self._mark = torch.zeros(1)  # what the turn writes to

    def __call__(self, model: nn.Module, _: None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = model(*args, **kwargs)
        leaves, structure = tree.flatten(result)
        tensors = {id(leaf): leaf for leaf in leaves if isinstance(leaf, Tensor)}
        roots = [leaf for leaf in tensors.values() if leaf.requires_grad]
        if not roots:
            raise CaptureError(
                "nothing that the model returns requires a gradient.",
                hint="return tensors, in tuples, lists, dicts or dataclasses, and leave some parameter unfrozen.",
            )
        others = [leaf for leaf in tensors.values() if not leaf.requires_grad]
        order = {id(leaf): place for place, leaf in enumerate([*roots, *others])}
        sources = _sources(model, args, kwargs)
        handed = tuple(order.get(id(leaf), (leaf,)) for leaf in leaves)
        self.ends = _Ends(len(roots), structure, handed, tuple(_reach(root, sources) for root in roots))
        with torch.no_grad():
            given = torch.ops.lowtide.turn(self._mark, roots, [*others, *model.buffers()])
        gradients = torch.autograd.grad(roots, sources, given, allow_unused=True)
        return roots, others, gradients, given


def _capture_whole(request: Request, batch: tuple[Any, ...], numbers: tuple[Place, ...]) -> Captured:
    captured = capture(_Whole(), request.model, None, batch, numbers=numbers)
    if not captured.foreseen:
        names = ", ".join(effect.place.name for effect in captured.effects[:4])
        raise CaptureError(
            f"the model keeps or prints what it computes ({names}), which a wrapped model can't repeat.",
            hint="return it from the forward, or give the whole step to lowtide.fit.",
        )
    return replace(captured, gradients={}, trained=())  # gradients are autograd's business


IN_HALVES = Manner(
    _capture_whole,
    Halves,
    "a wrapped model can't be verified: its backward is in your loop, which lowtide can't run beside eager.",
)


class _Turn(torch.autograd.Function):
    """A step in halves, as autograd sees it."""

    @staticmethod
    def forward(ctx: Any, half: Half, ends: _Ends, *_: Tensor) -> tuple[Tensor, ...]:
        ctx.half, ctx.ends = half, ends
        ctx.set_materialize_grads(False)
        # Others than those that the step holds: these lead to it, and nobody could ever let go of the circle.
        return tuple(output.detach() for output in half.outputs[: ends.roots])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *given: Tensor | None) -> Any:
        """What the loss does not use has no gradient, and neither have the sources that only it depends on."""
        reached = frozenset().union(*(ctx.ends.reach[place] for place, one in enumerate(given) if one is not None))
        outputs = ctx.half.outputs[: len(given)] or [None] * len(given)  # none after its backward, and it says so then
        filled = [
            torch.zeros_like(at) if one is None and at is not None else one
            for one, at in zip(given, outputs, strict=True)
        ]
        _, _, gradients, _ = ctx.half.finish(filled)
        return None, None, *(one if place in reached else None for place, one in enumerate(gradients))


def _reach(root: Tensor, sources: Sequence[Tensor]) -> frozenset[int]:
    """The places of those sources that a tensor was made from."""
    places = {id(source): place for place, source in enumerate(sources)}
    found, seen, waiting = {places[id(root)]} if id(root) in places else set(), set(), [root.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        place = places.get(id(getattr(node, "variable", None)))
        found |= set() if place is None else {place}
        waiting += [following for following, _ in node.next_functions]
    return frozenset(found)


def _sources(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """All that gets a gradient: parameters, each once, and arguments."""
    leaves, _ = tree.flatten((args, kwargs))
    given = (leaf for leaf in leaves if isinstance(leaf, Tensor))
    return [tensor for tensor in (*model.parameters(), *given) if tensor.requires_grad]


def _detached(batch: tuple[Any, ...]) -> tuple[Any, ...]:
    """The batch without its history."""
    leaves, structure = tree.flatten(batch)
    parts = [leaf.detach().requires_grad_(leaf.requires_grad) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    return tuple(structure.build(parts))


def _refuse_autocast() -> None:
    if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
        raise UsageError(
            "the model is called under torch.autocast, which a wrapped model can't follow.",
            hint="put the autocast into the model's forward, or give the whole step to lowtide.fit.",
        )
