"""Forwards without gradients of an attached model: eager's, unless that would hold more than the budget."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from lowtide.budget import LEAST, read_budget
from lowtide.capture import capture
from lowtide.choice import eager_peak
from lowtide.errors import CaptureError, LowtideWarning
from lowtide.execute import Batch, Key
from lowtide.fit import Fitted, Request
from lowtide.handover import Autocast
from lowtide.measure import roofline
from lowtide.rewrite import EXACT, apply

CLOSE = 0.9  # of the budget: below it, what ops hold inside, which an estimate does not know, is no matter
KEPT = 256  # kinds of batches at most that are known


class Evaluation:
    """Knows for each kind of batch whether eager's forward stays within the budget, and plans those that do not."""

    def __init__(self, request: Request, forward: Callable[..., Any]) -> None:
        self._request, self._forward = request, forward
        self._known: dict[tuple[Any, ...], Fitted | None] = {}  # None: eager runs it
        self._fits: tuple[int, int] | None = None  # of a forward of eager's that fits: bytes of its batch, its peak
        self._hopeless = False  # it can't be captured

    def find(self, args: tuple[Any, ...], kwargs: dict[str, Any], budget: int | None) -> Fitted | None:
        """What runs this call within the budget; None: eager does."""
        if budget is None or self._hopeless:
            return None
        autocast, batch = Autocast.now(), Batch.of((args, kwargs))
        key: Key = (autocast, self._request.model.training, budget, *batch.key)
        if key in self._known:
            return self._known[key]
        size = sum(leaf.nbytes for leaf in batch.leaves if isinstance(leaf, torch.Tensor))
        if self._surely(size, budget):
            return None
        if len(self._known) >= KEPT:
            self._known.clear()
        step = _Forward(self._forward, autocast)
        with contextlib.nullcontext() if autocast is None else torch.autocast("cpu", enabled=False):
            try:
                with without_inference_mode():
                    self._known[key] = self._decide(step, (args, kwargs), size, budget)
            except CaptureError as error:
                self._hopeless = True
                warnings.warn(
                    f"forwards without gradients are not planned, and may hold more than the budget: {error.message}",
                    LowtideWarning,
                    stacklevel=5,
                )
                return None
        return self._known[key]

    def run(self, fitted: Fitted, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One forward by its plan."""
        with (
            without_inference_mode(),
            torch.autocast("cpu", enabled=False) if Autocast.now() is not None else contextlib.nullcontext(),
        ):
            return fitted(args, kwargs)

    def forget(self) -> None:
        """Let go of all plans."""
        self._known.clear()

    def _surely(self, size: int, budget: int) -> bool:
        """Whether eager's forward fits for sure: what a forward holds grows with the square of its batch at most."""
        if self._fits is None:
            return False
        known, peak = self._fits
        return peak * max(1.0, (size / max(1, known)) ** 2) <= CLOSE * budget

    def _decide(self, step: _Forward, batch: tuple[Any, ...], size: int, budget: int) -> Fitted | None:
        graph = capture(step, self._request.model, None, batch).graph
        rewritten = apply(graph, EXACT)
        peak = eager_peak(graph, rewritten, roofline(rewritten.graph), roofline)
        if peak <= CLOSE * budget:
            if self._fits is None or size >= self._fits[0]:
                self._fits = size, peak
            return None
        self._request.say(f"eager's forward would hold {peak:,} bytes: it is planned")
        wanted = LEAST if self._request.budget == LEAST else budget  # a larger batch than those of training needs more
        return Fitted(replace(self._request, step=step, budget=wanted, beside=0, plan=None), batch)


@contextlib.contextmanager
def without_inference_mode() -> Iterator[None]:
    """A context without gradients in which tensors are ordinary ones, as programs make them."""
    with (
        torch.inference_mode(False) if torch.is_inference_mode_enabled() else contextlib.nullcontext(),
        torch.no_grad(),
    ):
        yield


class _Forward:
    """A step that is a forward alone."""

    def __init__(self, forward: Callable[..., Any], autocast: Autocast | None) -> None:
        self._forward, self._autocast = forward, autocast

    def __call__(self, _: Any, __: None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with contextlib.nullcontext() if self._autocast is None else self._autocast.context():
            return self._forward(*args, **kwargs)


def budget_of(request: Request, fitted: Fitted | None) -> int | None:
    """The bytes that a forward without gradients may hold; None: nobody has said."""
    if request.budget is None and request.plan is None:
        return None
    if fitted is not None:
        return fitted.plan.budget
    if request.budget is None or request.budget == LEAST or str(request.budget).strip().endswith("%"):
        return None  # known after the first step
    return max(1, read_budget(request.budget, persistent=0, eager_peak=0) - request.beside)
