"""A model's step in the caller's own loop: its forward, a *handover* at which the caller's code goes on, its backward.

The caller's code goes on with the outputs, and comes back with their gradients. To autograd all of it is one function.
"""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol, get_args

import torch
from torch import Tensor, nn

from lowtide import private, tree
from lowtide.arriving import Arriving, uses_of
from lowtide.capture import ONE_AT_A_TIME, capture
from lowtide.captured import Captured, Leaving
from lowtide.errors import BudgetError, CaptureError, LowtideWarning, UsageError
from lowtide.execute import Half, Halves
from lowtide.fit import Fit, Fitted, Manner, Request
from lowtide.giving import handed_over
from lowtide.guards import Place

# How a gradient comes back: laid out as its output, in the order of its sizes, one number for all, or with these
# strides; None: not at all, for the loss does not use that output.
Named = Literal["alike", "contiguous", "expanded"]
Habit = Named | tuple[int, ...] | None
NAMED: tuple[Named, ...] = get_args(Named)
ALONE = "a model in your own loop can't be verified: its backward is there, and lowtide can't run that beside eager."


@dataclass(frozen=True)
class Autocast:
    """How the caller's code casts the arguments of calls on the CPU."""

    dtype: torch.dtype
    cached: bool  # whether weights are cast once

    @classmethod
    def now(cls) -> Autocast | None:
        """As it is now; None where nothing is cast."""
        if private.autocast_state() is None:
            return None
        if not torch.is_autocast_enabled("cpu"):
            raise UsageError(
                "the model is called under an autocast of another device than the CPU, where lowtide trains.",
                hint='write torch.autocast("cpu", dtype=torch.bfloat16).',
            )
        return cls(torch.get_autocast_dtype("cpu"), torch.is_autocast_cache_enabled())

    def context(self) -> torch.autocast:
        """The same in a `with`."""
        return torch.autocast("cpu", dtype=self.dtype, cache_enabled=self.cached)


class Among(Protocol):
    """The place of a part among others that run in the same step."""

    def manner(self, usual: Manner) -> Manner:
        """How it is captured and priced."""

    def runs(self) -> None:
        """It runs now."""


class Loop:
    """A step with a handover in the caller's loop, planned for gradients that come back as they came the last time."""

    def __init__(
        self,
        request: Request,
        example: tuple[Any, ...],
        forward: Callable[..., Any] | None = None,
        *,
        autocast: Autocast | None = None,
        made: frozenset[int] = frozenset(),
        part: Among | None = None,
    ) -> None:
        """`made` are the tensors given, by place, that ops have made; with `part` it is one of several in a step."""
        self._model, self._budget, self._made, self._part = request.model, request.budget, made, part
        self._forward, self._autocast = forward or request.model, autocast
        self._habits: tuple[Habit, ...] = ()
        self._waiting: tuple[Any, ...] = ()  # handles of hooks that have not run
        self._begun: weakref.WeakSet[Half] = weakref.WeakSet()
        self._said = 1  # so many at a time need no word
        manner = Manner(self._capture, Halves, ALONE, lasting=False)
        with _said(request.model):
            self.fitted = Fitted(request, detached(example), manner if part is None else part.manner(manner))

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the model makes of these arguments, with a history that leads to the second half of the step."""
        for handle in self._waiting:
            handle.remove()
        self._waiting = ()
        if private.current_node() is None:  # a backward that failed in a hook: torch still holds its nodes
            for one in [one for one in self._begun if one.stopped]:
                one.close()
        if self._part is not None:
            self._part.runs()
        with _said(self._model):
            half: Half = self.fitted(*detached((args, kwargs)))
        self._begun.difference_update([one for one in self._begun if one.done])
        self._begun.add(half)
        self._count()
        ends: Ends = half.captured.step.ends  # type: ignore[attr-defined]
        sources = sources_of(self._model, args, kwargs)
        roots = handed_over(half, self, [*sources, *(sources[place] for place in ends.singly)], ends.roots)
        return ends.build([*roots, *half.pass_on()[len(roots) :]])

    @property
    def _uses(self) -> str:
        if self._autocast is not None:
            return "a tensor that the planned model uses under torch.autocast"
        return "a tensor that the planned model uses several times (a tied weight, an input)"

    @property
    def outstanding(self) -> tuple[int, int]:
        """How many forwards wait for their backward, and the bytes that they hold until the last one has had it."""
        waiting = [half for half in self._begun if not half.done]
        held = [half.holds for half in waiting]
        more = (half.halves.runner.program.arena - one for half, one in zip(waiting, held, strict=True))
        return len(waiting), sum(held) + max(more, default=0)  # one at a time goes on, with all that its backward needs

    @property
    def held(self) -> int:
        """The bytes that forwards hold now which wait for their backward."""
        return sum(half.holds for half in self._begun if not half.done)

    def _count(self) -> None:
        """Say what forwards hold together that wait for their backward, where that is more than the budget."""
        if self._part is not None or len(self._begun) <= self._said:  # parts are counted together
            return
        count, nbytes = self.outstanding
        budget, persistent = self.fitted.plan.budget, self.fitted.costs.persistent(self.fitted.captured.graph)
        if count > self._said and budget is not None and persistent + nbytes > budget:
            self._said = 2 * count - 1
            warnings.warn(
                f"{count} forwards of the model wait for their backward and hold {nbytes:,} bytes together, beside "
                f"{persistent:,} that persist; the budget of {budget:,} counts one forward at a time.\n"
                "hint: call backward() after each forward, call the model under torch.no_grad() where no backward "
                "comes, or give the step with all its forwards to lowtide.fit.",
                LowtideWarning,
                stacklevel=6,
            )

    def alone(self, node: Any, output: int, gradient: Tensor) -> None:
        """Let autograd's next node refuse to go on if others add to a gradient that is a sum already.

        Eager adds all of it up one by one, in another order than a sum of sums, and would round otherwise.
        """
        expected = gradient.data_ptr(), private.version_of(gradient)

        def check(found: Sequence[Tensor | None]) -> None:
            handle.remove()
            given = found[output]
            if given is None or (given.data_ptr(), private.version_of(given)) != expected:
                weight = getattr(node, "variable", None)
                if weight is not None and private.gradient_hooks(weight):
                    raise UsageError(
                        f"{self._uses} has a hook that changes its gradient (register_hook), so it can't be seen "
                        "whether others added to it, which eager would do in another order.",
                        hint="change it in a hook that runs after (register_post_accumulate_grad_hook), or after "
                        "backward(); or give the whole step to lowtide.fit.",
                    )
                raise UsageError(
                    f"{self._uses} has another gradient from elsewhere in the same backward: eager would add them up "
                    "in another order, and the last bits would differ. Some gradients of this backward are there, some "
                    "are not.",
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

        with ONE_AT_A_TIME:  # traces and second forwards set the one generator of all threads
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
        step = Whole(self._forward, self._habits, self._autocast, self._made, singly=self._part is not None)
        with _unseen_by_checkpoints():
            captured = capture(step, request.model, None, batch, numbers=numbers, hooked=True)
        if not captured.foreseen:
            names = ", ".join(effect.place.name for effect in captured.effects[:4])
            raise CaptureError(
                f"the model keeps or prints what it computes ({names}), which can't be repeated in your own loop.",
                hint="return it from the forward, or give the whole step to lowtide.fit; what is kept of one call "
                "for all others (lru_cache) may be called once before.",
            )
        # Gradients are autograd's business.
        return replace(captured, gradients={}, trained=(), leaving=_leaving(captured, request.model))


def _unseen_by_checkpoints() -> contextlib.AbstractContextManager[Any]:
    """A context in which a checkpoint around the call does not count what the trace saves for its backward."""
    if not private.saves_by_hooks():
        return contextlib.nullcontext()
    return torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)


def _halves(fit: Fit) -> Halves:
    assert isinstance(fit.call, Halves)
    return fit.call


@dataclass(frozen=True)
class Ends:
    """What a model returns: its tensors, those with a history first, and where they go."""

    roots: int  # how many have a history
    structure: tree.Tree
    leaves: tuple[Any, ...]  # an int for each tensor: its place among what is handed over; others as (value,)
    strides: tuple[tuple[int, ...] | None, ...]  # of the gradient of each with a history; None: it has none
    shared: frozenset[int]  # the sources, by place, whose gradient is a sum of several
    singly: tuple[int, ...] = ()  # the sources, by place, of gradients that come last, not added up

    def build(self, tensors: Sequence[Tensor]) -> Any:
        """The model's result with these tensors."""
        return self.structure.build([leaf[0] if isinstance(leaf, tuple) else tensors[leaf] for leaf in self.leaves])


class Whole:
    """The step that is planned: forward, handover, backward."""

    def __init__(
        self,
        forward: Callable[..., Any],
        habits: tuple[Habit, ...] = (),
        autocast: Autocast | None = None,
        made: frozenset[int] = frozenset(),
        *,
        singly: bool = False,
    ) -> None:
        self.ends: Ends | None = None  # known after it was traced
        self._forward, self._habits, self._autocast, self._made = forward, habits, autocast, made
        self._singly = singly  # others may add to what it adds up, so it leaves that to autograd
        self._mark = torch.zeros(1)  # what the handover writes to

    def __call__(self, model: nn.Module, _: None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        sources, views = sources_of(model, args, kwargs), as_made(args, kwargs, self._made)
        with contextlib.nullcontext() if self._autocast is None else self._autocast.context():
            result = self._forward(*replaced(args, views), **replaced(kwargs, views))
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
        handed = tuple(order.get(id(leaf), (leaf,)) for leaf in leaves)
        habits = list(self._habits) if len(self._habits) == len(roots) else _first_habits(result, roots)
        strides = tuple(_strides(habit, root) for habit, root in zip(habits, roots, strict=True))
        used = [place for place, one in enumerate(strides) if one is not None]
        stand_ins = {place: views[id(one)] for place, one in enumerate(sources) if id(one) in views}
        uses = uses_of([roots[place] for place in used], sources, stand_ins)
        shared = frozenset(place for place, found in uses.items() if len(found) > 1)
        arriving = Arriving({place: uses[place] for place in shared if None not in uses[place]} if self._singly else {})
        shared -= arriving.places
        if self._autocast is not None:  # eager adds gradients of a weight that was cast once in the cast's precision
            once = (place for place in range(len(sources)) if place not in stand_ins)
            shared |= {place for place in once if sources[place].dtype == torch.float32}
        with torch.no_grad():
            steps = [step for one in strides if one is not None for step in one]
            theirs = {
                private.storage_key(one)
                for one in (*sources, *model.parameters(), *model.buffers(), *given_to(args, kwargs))
            }
            held = [one for one in (*roots, *others) if private.storage_key(one) not in theirs]
            given = torch.ops.lowtide.handover(self._mark, roots, [*others, *model.buffers()], held, used, steps)
        with arriving:
            gradients = torch.autograd.grad([roots[place] for place in used], sources, given, allow_unused=True)
        whole = [None if place in arriving.places else one for place, one in enumerate(gradients)]
        self.ends = Ends(len(roots), structure, handed, strides, shared, arriving.order)
        return roots, others, [*whole, *arriving.gradients], given


def _leaving(captured: Captured, model: nn.Module) -> tuple[Leaving, ...]:
    """The outputs that are gradients, and of what."""
    results, _ = captured.results.build(captured.result_leaves)
    names = {id(slot.holder[slot.key]): name for name, slot in captured.slots.items()}
    trained = [names.get(id(one), "") for one in model.parameters() if one.requires_grad]
    singly = len(captured.step.ends.singly)  # type: ignore[attr-defined]
    return tuple(
        Leaving(leaf, place, trained[place] if place < len(trained) else "", last=place >= len(results[2]) - singly)
        for place, leaf in enumerate(results[2])
        if isinstance(leaf, int)
    )


def _first_habits(result: Any, roots: Sequence[Tensor]) -> list[Habit]:
    """How gradients come back as long as nobody knows: of a result with a loss, of the loss alone."""
    loss = result.get("loss") if isinstance(result, Mapping) else getattr(result, "loss", None)
    named = isinstance(loss, Tensor) and loss.dim() == 0 and any(root is loss for root in roots)
    return ["alike" if not named or root is loss else None for root in roots]


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


def sources_of(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """All that gets a gradient: parameters, each once, and arguments."""
    return [tensor for tensor in (*model.parameters(), *given_to(args, kwargs)) if tensor.requires_grad]


def given_to(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors among arguments."""
    leaves, _ = tree.flatten((args, kwargs))
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def made_among(args: tuple[Any, ...], kwargs: dict[str, Any]) -> frozenset[int]:
    """The tensors among arguments, by place, that ops have made and that get a gradient."""
    given = enumerate(given_to(args, kwargs))
    return frozenset(place for place, one in given if one.requires_grad and one.grad_fn is not None)


def as_made(args: tuple[Any, ...], kwargs: dict[str, Any], made: frozenset[int]) -> dict[int, Tensor]:
    """For the tensors at these places a view of each, by its id: what ops have made, autocast casts at each use."""
    return {id(one): one.view_as(one) for place, one in enumerate(given_to(args, kwargs)) if place in made}


def replaced(arguments: Any, views: Mapping[int, Tensor]) -> Any:
    """The arguments with these views in place of their tensors."""
    leaves, structure = tree.flatten(arguments)
    return structure.build([views.get(id(leaf), leaf) for leaf in leaves])


def detached(batch: tuple[Any, ...]) -> tuple[Any, ...]:
    """The batch without its history."""
    leaves, structure = tree.flatten(batch)
    parts = [leaf.detach().requires_grad_(leaf.requires_grad) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    return tuple(structure.build(parts))


@contextlib.contextmanager
def _said(model: nn.Module) -> Iterator[None]:
    """Where no plan fits: say what is there at the end of every backward of one's own loop."""
    try:
        yield
    except BudgetError as error:
        trained = sum(one.nbytes for one in model.parameters() if one.requires_grad)
        more = (
            f"in your own loop all gradients, {trained:,} bytes, are there at the end of backward(), for the optimizer "
            "comes after it; lowtide.fit(step, model, optimizer, ...) updates each weight once its gradient is made."
        )
        hint = f"{error.hint}\n{more}"
        raise BudgetError(error.message, hint=hint, least=error.least, budget=error.budget) from None


def warn_of_copy(what: str) -> None:
    """Say that a copy runs as torch runs it."""
    warnings.warn(
        f"{what} is copied or pickled: what you get is the plain model, without its plan, which is for this process "
        "and these parameters.\nhint: attach or wrap the copy where it is to be trained within a budget, too.",
        LowtideWarning,
        stacklevel=4,
    )
