"""A step in halves, as autograd sees it: its backward gives each gradient to autograd soon after it is made.

One node is not enough for that: autograd takes what a node returns when it is done. So there is a row of nodes. The
first is given the gradients of the outputs, runs the step up to where the first gradients leave, and returns these;
the next, to which a *token* leads, goes on from there. Between two nodes autograd adds to what is there, calls hooks
and lets go: whatever it does to gradients it does itself, in its own order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from lowtide import private
from lowtide.errors import UsageError
from lowtide.execute import Half


class Meeting(Protocol):
    """What knows how gradients come back, and where they may not be added to."""

    def meet(self, half: Half, given: Sequence[Tensor | None]) -> Half:
        """The half by a program for gradients like these."""

    def alone(self, node: Any, output: int, gradient: Tensor) -> None:
        """Let autograd's next node refuse to go on if others add to this gradient."""


class Backward:
    """The second half of one step, taken up to where it has the gradients that are asked for."""

    def __init__(self, half: Half, loop: Meeting, sources: Sequence[Tensor]) -> None:
        self._half, self._loop = half, loop
        self._made: dict[int, Tensor] = {}  # source, by place -> its gradient
        self._begun = False
        self._count = len(sources)

    @property
    def parts(self) -> list[list[int]]:
        """The sources, by place, whose gradients leave together, in their order; the last are those of the end."""
        captured, stops = self._half.captured, self._half.halves.runner.stops
        sources: dict[int, list[int]] = {}
        for one in captured.leaving:
            sources.setdefault(one.output, []).append(one.source)
        found = [[place for output in stop.outputs for place in sources[output]] for stop in stops]
        early = {place for part in found for place in part}
        return [*found, [place for place in range(self._count) if place not in early]]

    @property
    def outputs(self) -> list[Any]:
        """What the step hands over."""
        return self._half.outputs

    def begin(self, given: Sequence[Tensor | None], *, whole: bool) -> None:
        """Go back from the outputs with these gradients; where others follow that go on, not to the end."""
        self._half = self._loop.meet(self._half, given)
        if not whole:
            # Where only some gradients are asked for, autograd leaves out the nodes that lead to no such gradient.
            private.autograd_engine.queue_callback(self._half.close)
        self._take(self._half.go_on([one for one in given if one is not None]))
        self._begun = True

    def gradients(self, places: Sequence[int], node: Any, first: int) -> list[Tensor | None]:
        """The gradients of these sources, which the node returns from its place `first` on."""
        if not self._begun:
            return [None] * len(places)
        while not self._half.done and any(place not in self._made for place in places):
            self._take(self._half.go_on(None))
        found = [self._made.pop(place, None) for place in places]
        shared = self._half.captured.step.ends.shared  # type: ignore[attr-defined]
        for number, (place, gradient) in enumerate(zip(places, found, strict=True)):
            if place in shared and gradient is not None:
                following, output = node.next_functions[first + number]
                self._loop.alone(following, output, gradient)
        return found

    def _take(self, outputs: dict[int, Tensor]) -> None:
        for one in self._half.captured.leaving:
            if one.output in outputs:
                self._made[one.source] = outputs[one.output]


class _Rest(torch.autograd.Function):
    """Goes on where the node before it stopped."""

    @staticmethod
    def forward(ctx: Any, backward: Backward, places: list[int], token: Tensor | None, *_: Tensor) -> Tensor:
        ctx.step, ctx.places, ctx.last = backward, places, token is None
        ctx.set_materialize_grads(False)
        return torch.empty(0)

    @staticmethod
    def backward(ctx: Any, _: Tensor | None) -> Any:
        first = 0 if ctx.last else 1
        found = ctx.step.gradients(ctx.places, ctx, first)
        return None, None, None if ctx.last else torch.empty(0), *found


class _Handover(torch.autograd.Function):
    """The outputs lead to this node."""

    @staticmethod
    def forward(
        ctx: Any, backward: Backward, roots: int, places: list[int], token: Tensor | None, *_: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.step, ctx.places, ctx.last = backward, places, token is None
        ctx.set_materialize_grads(False)
        # Others than those that the step holds: these lead to it, and nobody could ever let go of the circle.
        return tuple(output.detach() for output in backward.outputs[:roots])

    @staticmethod
    def backward(ctx: Any, *given: Tensor | None) -> Any:
        """What the loss does not use has no gradient, and neither have the sources that only it depends on."""
        if torch.is_grad_enabled():
            raise UsageError(
                "a gradient of a gradient is asked for (create_graph=True), which a planned forward does not have.",
                hint="leave create_graph out, or give the whole step, penalty and all, to lowtide.fit.",
            )
        first = 0 if ctx.last else 1
        if all(one is None for one in given):
            return (None,) * (4 + len(ctx.places))
        ctx.step.begin(given, whole=ctx.last)
        found = ctx.step.gradients(ctx.places, ctx, first)
        return None, None, None, None if ctx.last else torch.empty(0), *found


def handed_over(half: Half, loop: Meeting, sources: Sequence[Tensor], roots: int) -> tuple[Tensor, ...]:
    """The first outputs of a step at its handover, with a history that leads to its second half."""
    backward = Backward(half, loop, sources)
    *early, last = backward.parts
    token: Tensor | None = None
    if early:
        token = _Rest.apply(backward, last, None, *(sources[place] for place in last))  # type: ignore[no-untyped-call]
        for part in reversed(early[1:]):
            token = _Rest.apply(backward, part, token, *(sources[place] for place in part))  # type: ignore[no-untyped-call]
        last = early[0]
    found = _Handover.apply(backward, roots, last, token, *(sources[place] for place in last))  # type: ignore[no-untyped-call]
    return found  # type: ignore[no-any-return]
