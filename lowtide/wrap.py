"""The side door: a model in, one out that runs its forward and backward within a budget, in the caller's own loop.

The planned step is the model's forward, a *handover* at which the caller's code goes on with the outputs, and the
backward with the gradients that it comes back with. To autograd all of it is one function.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from lowtide import graph, private, tree
from lowtide.capture import capture
from lowtide.captured import Captured
from lowtide.errors import CaptureError, UsageError
from lowtide.execute import Half, Halves
from lowtide.fit import CostsFrom, Fit, Fitted, Manner, PlanFrom, Request, Tell
from lowtide.guards import Place
from lowtide.plan import TIME_LIMIT

# How a gradient comes back: laid out as its output, in the order of its sizes, one number for all, or with these
# strides; None: not at all, for the loss does not use that output.
Named = Literal["alike", "contiguous", "expanded"]
Habit = Named | tuple[int, ...] | None
NAMED: tuple[Named, ...] = get_args(Named)
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
    optimizer's. Everything else is as in `fit`.
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
    return Wrapped(model, _Loop(request, _detached(batch)))


class Wrapped(nn.Module):
    """A model whose forward and backward run by a program. To all others it is the model: its parts are its own."""

    unwrapped: nn.Module
    fitted: Fitted  # what runs it, with its plan, its peak and its report
    _loop: _Loop

    def __init__(self, model: nn.Module, loop: _Loop) -> None:
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
        half = self._loop.begin(_detached((args, kwargs)))
        ends: _Ends = half.captured.step.ends  # type: ignore[attr-defined]
        sources = _sources(self.unwrapped, args, kwargs)
        roots = _Handover.apply(half, ends.roots, self._loop, *sources)  # type: ignore[no-untyped-call]
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


class _Loop:
    """A step with a handover in the caller's loop, planned for gradients that come back as they came the last time."""

    def __init__(self, request: Request, example: tuple[Any, ...]) -> None:
        self._habits: tuple[Habit, ...] = ()
        self._waiting: tuple[Any, ...] = ()  # handles of hooks that have not run
        alone = "a wrapped model can't be verified: its backward is in your loop, which lowtide can't run beside eager."
        self.fitted = Fitted(request, example, Manner(self._capture, Halves, alone, lasting=False))

    def begin(self, batch: tuple[Any, ...]) -> Half:
        """The first half of a step."""
        for handle in self._waiting:
            handle.remove()
        self._waiting = ()
        half: Half = self.fitted(*batch)
        return half

    def alone(self, node: Any, output: int, gradient: Tensor) -> None:
        """Let autograd's next node refuse to go on if others add to a gradient that is a sum already.

        Eager adds all of it up one by one, in another order than a sum of sums, and would round otherwise.
        """
        expected = gradient.data_ptr(), private.version_of(gradient)

        def check(found: Sequence[Tensor | None]) -> None:
            handle.remove()
            given = found[output]
            if given is None or (given.data_ptr(), private.version_of(given)) != expected:
                raise UsageError(
                    "a tensor that the wrapped model uses several times (a tied weight, an input) has another gradient "
                    "from elsewhere in the same backward: eager would add them up in another order, and the last bits "
                    "would differ. Some gradients of this backward are there, some are not.",
                    hint="clear them by zero_grad(); then give the whole step to lowtide.fit, or let one call of the "
                    "model do all (one batch for both calls, a penalty on weights as part of its forward).",
                )

        handle = node.register_prehook(check)
        self._waiting += (handle,)

    def meet(self, half: Half, given: Sequence[Tensor | None]) -> Half:
        """The half by a program for gradients like these: where it is another program, the forward runs again."""
        strides = tuple(None if one is None else tuple(one.stride()) for one in given)
        if half.done or _strides_of(half.captured) == strides:
            return half
        half.refuse_autocast()
        outputs = half.outputs[: len(given)]
        self._habits = tuple(_habit(one, output) for one, output in zip(given, outputs, strict=True))

        def suits(fit: Fit) -> bool:
            return _strides_of(fit.runner.captured) == strides and _halves(fit).fits(half.batch)

        with half.rewound():
            if not half.halves.fits(half.batch):
                raise UsageError(
                    "what the model's forward reads changed between forward and backward, and the loss uses the "
                    "model's outputs otherwise than before, so the forward would have to run again.",
                    hint="change it after backward(); or call the model again, now that this use of it is known.",
                )
            fit = self.fitted.find(half.batch, suits, "the loss uses the model's outputs otherwise than before")
        return half.again(_halves(fit))

    def _capture(self, request: Request, batch: tuple[Any, ...], numbers: tuple[Place, ...]) -> Captured:
        captured = capture(_Whole(self._habits), request.model, None, batch, numbers=numbers)
        if not captured.foreseen:
            names = ", ".join(effect.place.name for effect in captured.effects[:4])
            raise CaptureError(
                f"the model keeps or prints what it computes ({names}), which a wrapped model can't repeat.",
                hint="return it from the forward, or give the whole step to lowtide.fit; what is kept of one call "
                "for all others (lru_cache) may be called once before.",
            )
        return replace(captured, gradients={}, trained=())  # gradients are autograd's business


def _halves(fit: Fit) -> Halves:
    assert isinstance(fit.call, Halves)
    return fit.call


@dataclass(frozen=True)
class _Ends:
    """What a model returns: its tensors, those with a history first, and where they go."""

    roots: int  # how many have a history
    structure: tree.Tree
    leaves: tuple[Any, ...]  # an int for each tensor: its place among what is handed over; others as (value,)
    strides: tuple[tuple[int, ...] | None, ...]  # of the gradient of each with a history; None: it has none
    shared: frozenset[int]  # the sources, by place, whose gradient is a sum of several

    def build(self, tensors: Sequence[Tensor]) -> Any:
        """The model's result with these tensors."""
        return self.structure.build([leaf[0] if isinstance(leaf, tuple) else tensors[leaf] for leaf in self.leaves])


class _Whole:
    """The step that is planned: forward, handover, backward."""

    def __init__(self, habits: tuple[Habit, ...]) -> None:
        self.ends: _Ends | None = None  # known after it was traced
        self._habits = habits
        self._mark = torch.zeros(1)  # what the handover writes to

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
        habits: list[Habit] = ["alike" for _ in roots]
        if len(self._habits) == len(roots):
            habits = list(self._habits)
        strides = tuple(_strides(habit, root) for habit, root in zip(habits, roots, strict=True))
        used = [place for place, one in enumerate(strides) if one is not None]
        shared = _shared([roots[place] for place in used], sources)
        self.ends = _Ends(len(roots), structure, handed, strides, shared)
        with torch.no_grad():
            steps = [step for one in strides if one is not None for step in one]
            given = torch.ops.lowtide.handover(self._mark, roots, [*others, *model.buffers()], used, steps)
        gradients = torch.autograd.grad([roots[place] for place in used], sources, given, allow_unused=True)
        return roots, others, gradients, given


class _Handover(torch.autograd.Function):
    """A step in halves, as autograd sees it."""

    @staticmethod
    def forward(ctx: Any, half: Half, roots: int, loop: _Loop, *_: Tensor) -> tuple[Tensor, ...]:
        ctx.half, ctx.loop = half, loop
        ctx.set_materialize_grads(False)
        # Others than those that the step holds: these lead to it, and nobody could ever let go of the circle.
        return tuple(output.detach() for output in half.outputs[:roots])

    @staticmethod
    def backward(ctx: Any, *given: Tensor | None) -> Any:
        """What the loss does not use has no gradient, and neither have the sources that only it depends on."""
        if torch.is_grad_enabled():
            raise UsageError(
                "a gradient of a gradient is asked for (create_graph=True), which a wrapped model does not have.",
                hint="leave create_graph out, or give the whole step, penalty and all, to lowtide.fit.",
            )
        found = [one for one in given if one is not None]
        if not found:
            return (None,) * len(ctx.needs_input_grad)
        ctx.half = ctx.loop.meet(ctx.half, given)
        _, _, gradients, _ = ctx.half.finish(found)
        for place in ctx.half.captured.step.ends.shared:
            ctx.loop.alone(*ctx.next_functions[place], gradients[place])
        return None, None, None, *gradients


def _shared(roots: Sequence[Tensor], sources: Sequence[Tensor]) -> frozenset[int]:
    """The places of those sources that autograd adds up several gradients of."""
    places = {id(source): place for place, source in enumerate(sources)}
    uses = Counter(places[id(root)] for root in roots if id(root) in places)
    seen, waiting = set(), [root.grad_fn for root in roots]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        for following, _ in node.next_functions:
            waiting.append(following)
            place = places.get(id(getattr(following, "variable", None)))
            uses.update(() if place is None else (place,))
    return frozenset(place for place, count in uses.items() if count > 1)


def _strides_of(captured: Captured) -> tuple[tuple[int, ...] | None, ...]:
    """How the gradients come that a step is planned for."""
    return captured.step.ends.strides  # type: ignore[attr-defined, no-any-return]


def _habit(gradient: Tensor | None, output: Tensor) -> Habit:
    """How a gradient came, so that it is known for outputs of other sizes, too."""
    if gradient is None:
        return None
    stride = tuple(gradient.stride())
    for habit in NAMED:
        if _strides(habit, output) == stride:
            return habit
    return stride


def _strides(habit: Habit, output: Tensor) -> tuple[int, ...] | None:
    """The strides of the gradient of an output."""
    match habit:
        case "alike":
            return tuple(torch.empty_like(output, device="meta").stride())
        case "contiguous":
            return tuple(torch.empty(output.shape, device="meta").stride())
        case "expanded":
            return (0,) * output.dim()
        case tuple() if len(habit) != output.dim():
            return _strides("alike", output)
        case _:
            return habit


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
