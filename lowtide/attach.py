"""The door for a loop that others wrote: the model stays the same object, and its forward runs by a program.

The forward in the model's own `__dict__` stands before the one of its class; nothing is captured before the first call.
"""

from __future__ import annotations

import copy
import functools
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from types import MethodType
from typing import Any, Literal, get_args

import torch
from torch import nn

from lowtide import graph, private, tree
from lowtide.budget import LEAST
from lowtide.capture.door import refuse_at_the_door, refuse_to_run
from lowtide.capture.optimizer import state_bytes
from lowtide.errors import BudgetError, CaptureError, UsageError
from lowtide.evaluation import Evaluation, budget_of
from lowtide.fit import CostsFrom, Fitted, PlanFrom, Request, Tell
from lowtide.guards import MISSING
from lowtide.handover import Autocast, Loop, given_to, made_among, sources_of, warn_of_copy
from lowtide.parts import Idle, Parts, Piece
from lowtide.plan import TIME_LIMIT
from lowtide.wrap import Wrapped

MARK = "_lowtide"  # the name under which a model has what runs it
EVALUATION = ("in eval()", "without gradients")
BY_PARTS = "by its parts"
GREW = 2  # times the bytes of an idle part's arguments: it is tried again
Fallback = Literal["modules"]
KEYS = (MARK, "forward", "__deepcopy__", "__reduce_ex__")  # what an attached model has in its own __dict__


def attach(
    model: nn.Module,
    budget: int | str | None = None,
    optimizer: Any = None,
    *,
    plan: PlanFrom | None = None,
    time_limit: float = TIME_LIMIT,
    tell: Tell | None = None,
    costs: CostsFrom = "measured",
    offload: graph.Place | None = None,
    offload_budget: int | str | None = None,
    offload_dir: str | os.PathLike[str] | None = None,
    allow: str | Iterable[str] | None = None,
    fallback: Fallback | None = None,
) -> Attached:
    """Let `model` run its forward and backward within the budget from its next call on, in whatever loop calls it.

    The model stays the same object; its first call with gradients on is captured and planned. It runs as ever in
    `eval()`, under `torch.no_grad()` and where others trace it, but under `torch.no_grad()` a forward of eager's that
    would hold more than the budget is planned, too. Autocast is followed. `detach(model)` ends it. With
    `optimizer` the bytes of the optimizer's state are within the budget, too; without it, they are beside it. Copies
    and pickles of the model are plain models. Everything else is as in `wrap`.

    With `fallback="modules"`, where the whole model can't be captured, its largest parts that can be are planned each
    by itself, and it is said which. A budget in bytes is of all of them and of what the rest keeps; a percentage is
    of each.
    """
    _refuse(model, fallback)
    if fallback is not None and (plan is not None or offload is not None):
        raise UsageError(
            f'fallback="{fallback}" plans parts by themselves: a plan or a place to offload to is of one step.',
            hint="leave plan= and offload= out.",
        )
    state = 0 if optimizer is None else state_bytes(optimizer)
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
        beside=state or 0,
        tell=tell,
    )
    request.say(_counted(model, optimizer, state))
    return Attached(request, fallback=fallback is not None)


def detach(model: nn.Module) -> None:
    """Let an attached model run as ever, and give back what its plans hold."""
    attached = model.__dict__.get(MARK) if isinstance(model, nn.Module) else None
    if not isinstance(attached, Attached):
        raise UsageError(
            f"the {type(model).__name__} is not attached.", hint="give detach the object that was given to attach."
        )
    attached.end()


class Attached:
    """What runs an attached model: its plans, one set for each way in which the caller casts."""

    def __init__(self, request: Request, *, fallback: bool = False, part: Piece | None = None) -> None:
        self.model: nn.Module = request.model
        self.calls: Counter[str] = Counter()  # how many went which way
        self._request = request
        self.evaluation = Evaluation(request, self.model.forward)  # without gradients
        self._loops: dict[tuple[Autocast | None, frozenset[int]], Loop] = {}  # by how it is called
        self._latest: Loop | None = None
        self._before = self.model.__dict__.get("forward", MISSING)
        self._forward: Callable[..., Any] = self.model.forward
        self._ours = MethodType(_standing_before(self._forward), self.model)
        self._part = part  # of a model that can't be captured as a whole, which this is
        self.parts = Parts(request, _attach_part) if fallback else None  # of this model
        self._opened = False  # it runs as ever, and what can be planned are parts of it
        self._idle: int | None = None  # bytes of arguments for which a plan could do nothing
        self._put()

    @property
    def fitted(self) -> Fitted | None:
        """What ran it last, with its plan, its peak and its report; None before the first call."""
        return None if self._latest is None else self._latest.fitted

    @property
    def outstanding(self) -> tuple[int, int]:
        """How many forwards wait for their backward, and the bytes that they hold together."""
        if self._opened and self.parts is not None:
            return self.parts.outstanding
        found = [loop.outstanding for loop in self._loops.values()]
        return sum(count for count, _ in found), sum(nbytes for _, nbytes in found)

    @property
    def held(self) -> int:
        """The bytes that forwards hold now which wait for their backward."""
        return sum(loop.held for loop in self._loops.values())

    @property
    def trains(self) -> bool:
        """Whether any call went by a plan, of the model or of its parts."""
        return bool(self.calls["by a plan"] or self.calls[BY_PARTS])

    def report(self) -> str:
        """What the plan does, what was measured, and which calls went by it, for a person."""
        calls = ", ".join(f"{count:,} {way}" for way, count in self.calls.most_common()) or "none yet"
        parts = [] if self.parts is None else self.parts.report()
        return "\n".join([*([] if self.fitted is None else [self.fitted.report()]), *parts, f"calls: {calls}"])

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the model makes of these arguments, by a plan unless there is a reason to step aside."""
        reason = self._aside(args, kwargs)
        if reason is None and (not self._opened or self._grew(args, kwargs)):
            try:
                result = self._in_its_share(args, kwargs)
            except CaptureError as error:
                parts = self.parts if self._part is None else self._part.parts
                if parts is None:
                    raise
                self._opened = True
                self._idle = _nbytes(args, kwargs) if isinstance(error, Idle) else None
                parts.open(self.model, error)
            else:
                self._opened, self._idle = False, None
                self.calls["by a plan"] += 1
                return result
        if reason in EVALUATION:
            self.calls[reason] += 1
            return self._evaluate(args, kwargs)
        self.calls[reason or BY_PARTS] += 1
        if reason is None and self.parts is not None:
            return self._by_parts(self.parts, args, kwargs)
        return self._forward(*args, **kwargs)

    def _grew(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a plan could do nothing for it, and this batch is so much larger that it might now."""
        return self._idle is not None and _nbytes(args, kwargs) > GREW * self._idle

    def _in_its_share(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The same for a part; where a percentage of it is too little, by its least plan."""
        try:
            return self._by_a_plan(args, kwargs)
        except BudgetError as error:
            if self._part is None:
                raise
            if self._part.parts.together:
                raise self._part.beyond(error) from None
        self.begin_again(replace(self._request, budget=LEAST))
        return self._by_a_plan(args, kwargs)

    def _by_a_plan(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        autocast = Autocast.now()
        with nullcontext() if autocast is None else torch.autocast("cpu", enabled=False):
            made: frozenset[int] = frozenset() if autocast is None else made_among(args, kwargs)
            loop = self._loops.get((autocast, made))
            if loop is None:
                request, part = self._request, self._part
                loop = Loop(request, (args, kwargs), self._forward, autocast=autocast, made=made, part=part)
                self._loops[autocast, made] = loop
            self._latest = loop
            return loop(args, kwargs)

    def _by_parts(self, parts: Parts, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A forward of eager's in which parts run by their plans; where none can, all is as it was before attach."""
        try:
            return parts.run(lambda: self._forward(*args, **kwargs))
        except (BudgetError, CaptureError):
            if not parts.settled:
                self.end()
            raise

    def begin_again(self, request: Request) -> None:
        """Be planned anew at the next call, as this is asked."""
        self._request = request
        self._loops.clear()
        if self._part is not None:
            self._part.budget = request.budget

    def _evaluate(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A forward that is followed by no backward, or by one of eager's."""
        if not self._opened and not torch.is_grad_enabled() and not private.traced_by_others():
            found = self.evaluation.find(args, kwargs, budget_of(self._request, self.fitted))
            if found is not None:
                return self.evaluation.run(found, args, kwargs)
        return self._forward(*args, **kwargs)

    def _aside(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
        """Why a call goes as ever; None: it goes by a plan."""
        if not self.model.training:
            return EVALUATION[0]
        if not torch.is_grad_enabled():
            return EVALUATION[1]
        if private.traced_by_others():
            return "traced by others"
        leaves, _ = tree.flatten((args, kwargs))
        if any(isinstance(leaf, torch.fx.Proxy | private.FakeTensor) for leaf in leaves):
            return "traced by others"
        if not sources_of(self.model, args, kwargs):
            return "with nothing to train"
        return None

    def end(self) -> None:
        """Put everything back; where others have put a forward before ours, that one stays, and ours stands aside."""
        if self.model.__dict__.get("forward") is self._ours:
            del self.model.__dict__["forward"]
            if self._before is not MISSING:
                self.model.__dict__["forward"] = self._before
        if self.model.__dict__.get(MARK) is self:  # else a part was detached, and attached again by itself
            for key in KEYS:
                if key != "forward":
                    self.model.__dict__.pop(key, None)
        if self.parts is not None:
            self.parts.end()
        self._loops.clear()
        self.evaluation.forget()
        self._latest = None

    def _put(self) -> None:
        own = (self, self._ours, self._deepcopy, self._reduce)
        self.model.__dict__.update(zip(KEYS, own, strict=True))

    @contextmanager
    def _plain(self) -> Iterator[nn.Module]:
        """The model as it is without us, to be copied."""
        if self._part is None:
            warn_of_copy("an attached model")
        mine = self.model.__dict__
        kept = dict(mine)
        for key in KEYS:
            if key != "forward" or kept["forward"] is self._ours:
                mine.pop(key, None)
        if self._before is not MISSING and "forward" not in mine:
            mine["forward"] = self._before
        try:
            yield self.model
        finally:
            mine.clear()
            mine.update(kept)

    def _deepcopy(self, memo: dict[int, Any]) -> Any:
        with self._plain() as model:
            return copy.deepcopy(model, memo)

    def _reduce(self, protocol: Any) -> Any:
        with self._plain() as model:
            found = model.__reduce_ex__(protocol)
            if isinstance(found, str) or len(found) < 3 or found[2] is not model.__dict__:
                return found
            return *found[:2], dict(found[2]), *found[3:]


def _nbytes(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    return sum(int(one.nbytes) for one in given_to(args, kwargs))


def _attach_part(request: Request, piece: Piece) -> Attached:
    return Attached(request, part=piece)


def _standing_before(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A method that leads to what runs the model, with the name and the signature of the one before which it stands."""

    @functools.wraps(getattr(forward, "__func__", forward), assigned=("__name__", "__qualname__", "__doc__"))
    def planned(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        attached = None if torch.compiler.is_compiling() else self.__dict__.get(MARK)
        if attached is not None:
            return attached(args, kwargs)
        if getattr(forward, "__self__", self) is self:
            return forward(*args, **kwargs)
        return forward.__func__(self, *args, **kwargs)  # type: ignore[attr-defined] # of a copy

    return planned


def _counted(model: nn.Module, optimizer: Any, state: int | None) -> str:
    """What is said of the optimizer's state."""
    if optimizer is not None and state is not None:
        return f"the optimizer's state is within the budget: {state:,} bytes"
    trained = sum(one.nbytes for one in model.parameters() if one.requires_grad)
    why = "it has none yet, and its size is unknown" if optimizer is not None else "pass optimizer= for that"
    return f"the optimizer's state is not within the budget ({why}); Adam's would be {2 * trained:,} bytes"


def _refuse(model: nn.Module, fallback: str | None) -> None:
    if not isinstance(model, nn.Module):
        raise UsageError(
            f"the model is a {type(model).__name__}, not a torch.nn.Module.",
            hint="a function has no parameters of its own: give a whole step to lowtide.fit.",
        )
    if isinstance(model, Wrapped):
        raise UsageError("the model is wrapped already.", hint="attach the model inside it: net.unwrapped.")
    if MARK in model.__dict__:
        raise UsageError("the model is attached already.", hint="lowtide.detach(model) first.")
    if fallback not in (None, *get_args(Fallback)):
        raise UsageError(f"fallback={fallback!r} is unknown.", hint='write fallback="modules", or leave it out.')
    if fallback is not None and any(MARK in one.__dict__ for one in model.modules()):
        raise UsageError(
            "a part of the model is attached already, and the parts of this one share a budget.",
            hint="lowtide.detach that part first.",
        )
    if fallback is None:
        with torch.autocast("cpu", enabled=False) if Autocast.now() is not None else nullcontext():
            refuse_at_the_door(model.forward, model, ())
    refuse_to_run(model)
