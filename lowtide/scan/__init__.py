"""A recurrent loop over your own cell, within a budget: it keeps some states and cells, and runs the others again.

outputs, state = lowtide.scan(cell, inputs, state, budget="5%")
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lowtide import private
from lowtide.budget import read_budget
from lowtide.errors import LowtideError, UsageError
from lowtide.plan.loop import LoopPlan, plan_loop
from lowtide.scan.first import First, Generator, first_time_step
from lowtide.scan.run import Loop, bind
from lowtide.scan.time_steps import Cell, TimeSteps, masks

__all__ = ["ScanPlan", "scan", "scan_plan"]


@dataclass(frozen=True)
class ScanPlan:
    """What a scan holds and runs."""

    length: int  # time steps
    state_bytes: int  # of a state that is stored; what is in the outputs too is not stored again
    cell_bytes: int  # of what one cell saves for its backward, the state before it included
    plain_bytes: int  # of what the plain loop saves: percentages are of this
    budget: int | None  # bytes
    nbytes: int  # the most that it will hold
    forwards: int  # runs of the cell, forward and backward together
    least: int  # the smallest budget that works, in bytes


def scan(
    cell: Callable[[Any, Any], Any],
    inputs: Any,
    state: Any,
    *,
    budget: int | str | None = None,
    lengths: Tensor | Sequence[int] | None = None,
    truncate: int | None = None,
) -> tuple[Any, Any]:
    """Run a cell over all time steps of the inputs, with the results and gradients of the plain loop to the bit.

    `inputs` is a tensor with time first, a list of one tensor (or tree) for each time step, or a tree of tensors with
    time first; `state` is a tree of tensors. The cell is called as `cell(x, state)` and returns `(output, new state)`,
    or only the new state, whose first tensor is then the output. Returned are the outputs, stacked with time first, and
    the last state. An output of None is not stacked.

    `budget` is bytes ("20MiB") or a part ("5%") of what the plain loop saves for its backward: what the loop keeps
    between forward and backward, and what it recomputes into. Parameters, inputs, outputs and the first state are there
    anyway; gradients, the state at hand and what one cell needs while it runs come on top. A state that is an output
    too is read from the outputs, so these must not be written to before the backward. Without a budget everything is
    kept. Inside `fit` the loop is planned with the rest of the step, within fit's budget.

    With `lengths` a sequence's state stops changing after as many time steps, and its outputs are zero from there on.
    With truncate=k no gradient goes back across the time steps k, 2k, ..

    Recomputed cells repeat their random numbers from torch's own generator. A cell may not write to tensors that it did
    not make. A parameter that is used outside of the loop too may get a gradient that is rounded differently.
    """
    given = _Call(cell, inputs, state, lengths, truncate)
    if budget is not None:
        if isinstance(budget, str):
            read_budget(budget, persistent=0, eager_peak=10**12)  # a wrong one is refused before anything runs
        _refuse_autocast()
        if torch.is_grad_enabled() and not _traced():
            found = given.within(budget)
            if found is not None:
                return found
    return given.plainly()


def scan_plan(
    cell: Callable[[Any, Any], Any],
    inputs: Any,
    state: Any,
    *,
    budget: int | str | None = None,
    lengths: Tensor | Sequence[int] | None = None,
) -> ScanPlan:
    """What `scan` would do with these arguments; only the first time step is run."""
    given = _Call(cell, inputs, state, lengths, None)
    begin = given.generator.get()
    try:
        with torch.enable_grad():
            first = given.first()
    finally:
        given.generator.set(begin)
    if first is None:
        raise UsageError("nothing in this loop needs a gradient, so nothing is kept.", hint="train a parameter.")
    plan = given.plan(first, budget)
    return ScanPlan(
        length=plan.length,
        state_bytes=plan.sizes.state,
        cell_bytes=plan.sizes.cell,
        plain_bytes=first.plain.plain(plan.length),
        budget=plan.budget,
        nbytes=plan.nbytes,
        forwards=plan.forwards,
        least=plan.least,
    )


class _Call:
    """The arguments of one call, read."""

    def __init__(self, function: Any, inputs: Any, state: Any, lengths: Any, truncate: int | None) -> None:
        if truncate is not None and (isinstance(truncate, bool) or not isinstance(truncate, int) or truncate < 1):
            raise UsageError(
                f"truncate={truncate!r} is no number of time steps.", hint="give a whole number from 1 on."
            )
        self.function, self.truncate = function, truncate
        self.time_steps = TimeSteps(inputs)
        self.cell = Cell(function, self.time_steps, state)
        self.masks = masks(lengths, self.time_steps, self.cell.state)
        self.generator = Generator(self.cell.state[0].device)

    def plainly(self) -> tuple[Any, Any]:
        """The plain loop."""
        state = self.cell.state
        stacks: list[list[Any]] = []
        for time_step, (inputs, mask) in enumerate(zip(self.time_steps.columns(), self.masks, strict=True)):
            if self.truncate is not None and time_step > 0 and time_step % self.truncate == 0:
                cut = {id(leaf): leaf.detach() for leaf in state}
                state = [cut[id(leaf)] for leaf in state]
            outputs, state = self.cell(time_step, inputs, state, mask)
            stacks = stacks or [[] for _ in outputs]
            for stack, one in zip(stacks, outputs, strict=True):
                stack.append(one)
        return self.cell.results([None if stack[0] is None else torch.stack(stack) for stack in stacks], state)

    def within(self, budget: int | str) -> tuple[Any, Any] | None:
        """The loop within a budget; None where nothing needs a gradient, and the plain loop keeps nothing."""
        begin = self.generator.get()
        try:
            first = self.first()
            _refuse_hooks(first.captured if first is not None else ())
            plan = None if first is None else self.plan(first, budget)
        except LowtideError:
            self.generator.set(begin)
            raise
        if first is None or plan is None:
            self.generator.set(begin)
            return None
        loop = Loop(self.cell, self.time_steps, self.masks, self.truncate, first, plan, self.generator, begin)
        del first
        with torch.no_grad():
            loop.sweep()
        return self.cell.results(*bind(loop))

    def first(self) -> First | None:
        """The first time step."""
        inputs = self.time_steps.columns()[0]
        return first_time_step(self.function, self.cell, inputs, self.masks[0], self.generator)

    def plan(self, first: First, budget: int | str | None) -> LoopPlan:
        """The schedule."""
        length = self.time_steps.length
        nbytes = None if budget is None else read_budget(budget, persistent=0, eager_peak=first.plain.plain(length))
        return plan_loop(length, first.sizes, nbytes)


def _traced() -> bool:
    """Whether this runs on stand-ins, so that somebody can plan the whole step."""
    return private.mode_count() > 0 or private.innermost_transform() is not None or torch.compiler.is_compiling()


def _refuse_autocast() -> None:
    if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
        raise UsageError(
            "a scan within a budget can't run under autocast, which casts each parameter once for all time steps.",
            hint="cast the cell itself (cell.bfloat16()), or scan without a budget.",
        )


def _refuse_hooks(captured: Sequence[Tensor]) -> None:
    for tensor in captured:
        if private.gradient_hooks(tensor):
            raise UsageError(
                f"a tensor of shape {tuple(tensor.shape)} has a hook, which would see the gradient of every time step.",
                hint="remove the hook and look at .grad after the backward, or scan without a budget.",
            )
