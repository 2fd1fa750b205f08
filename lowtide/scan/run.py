"""A schedule of a loop, run: the first sweep when scan is called, the rest when autograd asks for gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from lowtide.errors import UsageError
from lowtide.plan.classics.chain import Backward, Forward
from lowtide.plan.loop import LoopPlan
from lowtide.private import accumulation_hooks, autograd_engine
from lowtide.scan.first import First, Generator, Kept, run_with_graph, unknown_leaf
from lowtide.scan.time_steps import Cell, Leaves, Stacked, TimeSteps

Gradient = Tensor | None


class Loop:
    """One call of scan on its way."""

    def __init__(
        self,
        cell: Cell,
        time_steps: TimeSteps,
        masks: list[Tensor | None],
        truncate: int | None,
        first: First,
        plan: LoopPlan,
        generator: Generator,
        begin: Tensor,
    ) -> None:
        self.cell, self.time_steps, self.masks, self.truncate = cell, time_steps, masks, truncate
        self.first: First | None = first  # until its time step is taken over
        self.captured, self.often, self.needs = first.captured, first.often, first.needs
        self.quiet, self.shared, self.twins = first.quiet, first.shared, first.twins
        self.differentiable = [edge is not None for edge in first.kept.outputs]
        self.generator = generator if first.random else None
        self.begin = begin
        self.plan, self.done = plan, 0  # actions
        self.columns = time_steps.columns()
        self.stored: dict[int, tuple[Leaves, Tensor | None]] = {}  # with the generator's state
        self.kept: dict[int, Kept] = {}
        # Whether autograd itself may add up the gradients of what the cell has captured, as it does in the plain loop.
        self.adds = all(tensor.is_leaf and not accumulation_hooks(tensor) for tensor in self.captured)
        self.at, self.state = 0, cell.state
        self.outputs: list[Stacked | None] = []
        self.views: list[Sequence[Tensor] | None] = []
        # output -> the leaf of the state that is the same tensor, once for each
        self.same = {output: leaf for leaf, output in reversed(list(enumerate(self.shared))) if output is not None}
        self.passes = first.passes
        self.handed_on = {place for place in first.passes if place is not None}
        self.origins = [_origin(place, first.passes, self.same) for place in range(len(self.shared))]

    # Forwards

    def sweep(self) -> None:
        """Run the actions up to the first backward."""
        for action in self.plan.actions:
            if isinstance(action, Backward):
                return
            outputs = self._forward(action)
            if not self.outputs:
                self.outputs = [None if one is None else Stacked(self.plan.length) for one in outputs]
            for stack, one in zip(self.outputs, outputs, strict=True):
                if stack is not None:
                    stack.put(action.step, one)
            self.done += 1

    def _forward(self, action: Forward) -> list[Any]:
        time_step = action.step
        if self.at != time_step:
            self.state, drawn = self.stored[time_step]
            if drawn is not None and self.generator is not None:
                self.generator.set(drawn)
        if action.keep == "input" and time_step not in self.stored:
            self.stored[time_step] = self._lean(time_step), self._drawn(time_step)
        outputs, self.state = self._run(time_step, keep=action.keep == "internals")
        self.at = time_step + 1
        return outputs

    def _run(self, time_step: int, *, keep: bool) -> tuple[list[Any], Leaves]:
        if self.first is not None:
            outputs, state, kept = self.first.outputs, self.first.state, self.first.kept
            self.first = None
        elif keep or not self.quiet:
            inputs, mask = self.columns[time_step], self.masks[time_step]
            outputs, state, kept = run_with_graph(
                self.cell, time_step, inputs, self._lean(time_step), mask, self.needs, twins=self.twins
            )
        else:  # grad mode is off, in the sweep and in a backward
            return self.cell(time_step, self.columns[time_step], self.state, self.masks[time_step])
        if keep:
            self.kept[time_step] = kept
        cut = {id(leaf): leaf.detach() for leaf in state}
        return outputs, [cut[id(leaf)] for leaf in state]

    def _drawn(self, time_step: int) -> Tensor | None:
        if self.generator is None:
            return None
        return self.begin if time_step == 0 else self.generator.get()

    def _lean(self, time_step: int) -> Leaves:
        """The state at hand, where what the outputs hold anyway is read there."""
        if time_step == 0 or not self.same:
            return self.state
        found: dict[int, Tensor] = {}
        for output in self.same:
            stack = self.outputs[output] if self.outputs else None
            if stack is not None and stack.whole is not None:
                found[output] = stack.view(time_step - 1)
            elif (views := self.views[output] if self.views else None) is not None:
                found[output] = views[time_step - 1].data
        return [
            leaf if output is None or output not in found else found[output]
            for leaf, output in zip(self.state, self.shared, strict=True)
        ]

    def results(self) -> tuple[list[Gradient], Leaves]:
        """The stacked outputs and the last state, which this then lets go of."""
        outputs = [None if stack is None else stack.take() for stack in self.outputs]
        state, self.outputs, self.state = self.state, [], []
        self.at = -1
        return outputs, state

    def moves(self, place: int) -> bool:
        """Whether the last state has a gradient here: it was made after the last cut, not only handed on since."""
        length = self.plan.length
        begin = 0 if self.truncate is None else (length - 1) // self.truncate * self.truncate
        handed: int | None = place
        for _ in range(begin, length if begin else 0):
            handed = None if handed is None else self.passes[handed]
        return self.needs[place] and (begin == 0 or handed is None)

    # Backwards

    def back(
        self, outputs: Sequence[Gradient], gradients: Sequence[Gradient], last: Sequence[Gradient]
    ) -> tuple[list[Any], list[Gradient], list[Gradient]]:
        """The gradients of the inputs, the first state and the captured tensors."""
        before = self.generator.get() if self.generator is not None else None
        theirs = [tensor.grad for tensor in self.captured] if self.adds else []
        try:
            self.views = [None if one is None else one.detach().unbind(0) for one in outputs]
            for tensor in self.captured if self.adds else ():
                tensor.grad = None
            return self._back([None if one is None else one.unbind(0) for one in gradients], list(last))
        finally:
            for tensor, gradient in zip(self.captured, theirs, strict=False):
                tensor.grad = gradient
            if before is not None and self.generator is not None:
                self.generator.set(before)

    def _back(
        self, gradients: list[Sequence[Tensor] | None], state: list[Gradient]
    ) -> tuple[list[Any], list[Gradient], list[Gradient]]:
        added = self._of_outputs(self.plan.length, gradients)
        state = [_sum(one, other) for one, other in zip(state, added, strict=True)]
        totals: list[Gradient] = [None] * len(self.captured)
        width = len(self.columns[0])
        stacks = [Stacked(self.plan.length) for _ in range(width)] if self.time_steps.stacked else None
        singles: list[Gradient] = [None] * len(self.time_steps.leaves)
        while self.done < len(self.plan.actions):
            action = self.plan.actions[self.done]
            self.done += 1
            if isinstance(action, Forward):
                self._forward(action)
                continue
            time_step = action.step
            self.stored.pop(time_step, None)
            self.at, self.state = -1, []
            state, inputs = self._backward(time_step, self.kept.pop(time_step), gradients, state, totals)
            for place, gradient in enumerate(inputs):
                if stacks is not None:
                    stacks[place].put(time_step, gradient)
                else:
                    singles[time_step * width + place] = gradient
        found = [stack.take() for stack in stacks] if stacks is not None else singles
        return found, state, [tensor.grad for tensor in self.captured] if self.adds else totals

    def _of_outputs(self, time_step: int, gradients: list[Sequence[Tensor] | None]) -> list[Gradient]:
        """For each leaf of the state before a time step the gradient that it gets because it is an output too."""
        begin = 0 if self.truncate is None or time_step == 0 else (time_step - 1) // self.truncate * self.truncate
        found: list[Gradient] = []
        for origin in self.origins:
            made = -1 if origin is None else time_step - 1 - origin[1]
            found.append(None if origin is None or made < begin else _of(gradients, origin[0], made))
        return found

    def _backward(
        self,
        time_step: int,
        kept: Kept,
        gradients: list[Sequence[Tensor] | None],
        state: list[Gradient],
        totals: list[Gradient],
    ) -> tuple[list[Gradient], list[Gradient]]:
        """The backward of one cell: the gradients of the state before it and of its inputs.

        What other parts of the graph have added to a sum before this cell comes goes in as a root, so that autograd
        adds in the order of the plain loop.
        """
        if time_step == self.plan.length - 1 and (strange := unknown_leaf(kept, self.captured)) is not None:
            raise UsageError(
                f"at the last time step the cell uses a tensor of shape {tuple(strange.shape)} that needs a gradient "
                "and that it did not use at the first.",
                hint="use the same parameters at every time step, or scan without a budget.",
            )
        roots: list[GradientEdge | Tensor] = []
        given: list[Tensor] = []

        def root(edge: GradientEdge | Tensor | None, gradient: Gradient) -> None:
            if edge is not None and gradient is not None:
                roots.append(edge)
                given.append(gradient)

        for edge, gradient in zip(kept.after, state, strict=True):
            root(edge, gradient)
        for output, edge in enumerate(kept.outputs):
            if output not in self.same:
                root(edge, _of(gradients, output, time_step))
        apart = time_step > 0 and self.truncate is not None and time_step % self.truncate == 0
        arrived = self._of_outputs(time_step, gradients)
        if not apart:  # what the cell hands on has got this gradient already, at a later time step
            arrived = [None if place in self.handed_on else one for place, one in enumerate(arrived)]
        wanted: list[Tensor] = []
        places: list[int] = []
        if not apart:
            for place, before in enumerate(kept.state):
                needed = self.cell.state[place].requires_grad if time_step == 0 else before.requires_grad
                if needed and not any(before is other for other in wanted):
                    wanted.append(before)
                    places.append(place)
                    root(before, arrived[place])
        ahead = len(wanted)
        wanted += [leaf for leaf in kept.inputs if leaf.requires_grad]
        middle = len(wanted)
        wanted += self.captured
        for place, (tensor, often) in enumerate(zip(self.captured, self.often, strict=True)):
            if often and self.adds:
                root(tensor, tensor.grad)
                tensor.grad = None
            elif often:
                root(tensor, totals[place])
        if not wanted or not roots:
            return arrived, [None] * len(kept.inputs)
        found = autograd_engine.run_backward(
            tuple(roots), tuple(given), False, False, tuple(wanted), allow_unreachable=True, accumulate_grad=self.adds
        )
        if self.adds:  # right where autograd makes them, so that they need no room of their own
            found = [leaf.grad for leaf in wanted[:middle]]
        for place, gradient in zip(places, found[:ahead], strict=True):
            arrived[place] = gradient
        rest = iter(found[ahead:middle])
        inputs = [next(rest) if leaf.requires_grad else None for leaf in kept.inputs]
        for place, gradient in enumerate(found[middle:]):
            total = totals[place]
            if gradient is None:
                continue
            if self.often[place]:
                totals[place] = gradient
            elif total is None:
                totals[place] = gradient.clone()
            else:
                total.add_(gradient)
        return arrived, inputs


class Bound(torch.autograd.Function):
    """A loop as one node of autograd's graph."""

    @staticmethod
    def forward(ctx: Any, loop: Loop, *tensors: Tensor) -> Any:
        outputs, state = loop.results()
        unique = list({id(leaf): leaf for leaf in state}.values())
        ctx.loop, ctx.tensors = loop, len(tensors)
        ctx.outputs = [one is not None for one in outputs]
        ctx.places = [next(p for p, leaf in enumerate(state) if leaf is one) for one in unique]
        ctx.set_materialize_grads(False)
        shared = [outputs[place] if place in loop.same else None for place in range(len(outputs))]
        ctx.save_for_backward(*tensors, *shared)
        fixed = [leaf for leaf, place in zip(unique, ctx.places, strict=True) if not loop.moves(place)]
        fixed += [one for one, moves in zip(outputs, loop.differentiable, strict=True) if one is not None and not moves]
        ctx.mark_non_differentiable(*fixed)
        return (*(one for one in outputs if one is not None), *unique)

    @staticmethod
    def backward(ctx: Any, *gradients: Gradient) -> Any:
        if torch.is_grad_enabled():
            raise UsageError(
                "a scan within a budget can't be differentiated twice (create_graph=True).",
                hint="scan without a budget.",
            )
        shared = ctx.saved_tensors[ctx.tensors :]  # refuses what was written to since
        loop: Loop | None = ctx.loop
        if loop is None:
            raise UsageError(
                "the backward of a scan within a budget ran already, and what it held is gone.",
                hint="call scan again for every backward, or scan without a budget.",
            )
        ctx.loop = None
        given = iter(gradients)
        of_outputs = [next(given) if there else None for there in ctx.outputs]
        of_state: list[Gradient] = [None] * len(loop.needs)
        for place, gradient in zip(ctx.places, given, strict=True):
            of_state[place] = gradient
        inputs, state, captured = loop.back(shared, of_outputs, of_state)
        return (None, *reversed(inputs), *state, *captured)


def bind(loop: Loop) -> tuple[list[Any], Leaves]:
    """The outputs and the last state of a loop after its sweep, as results that autograd knows.

    The inputs go in backwards: a tensor that is the input of several time steps gets its gradients as in a plain loop.
    """
    state = list(loop.state)
    inside = [stack is not None for stack in loop.outputs]
    results = list(
        Bound.apply(loop, *reversed(loop.time_steps.leaves), *loop.cell.state, *loop.captured)  # type: ignore[no-untyped-call]
    )
    outputs = [results.pop(0) if there else None for there in inside]
    unique = iter(results)
    found: dict[int, Tensor] = {}
    for leaf in state:
        if id(leaf) not in found:
            found[id(leaf)] = next(unique)
    return outputs, [found[id(leaf)] for leaf in state]


def _origin(place: int, passes: Sequence[int | None], same: dict[int, int]) -> tuple[int, int] | None:
    """The output that a leaf of the state is, and for how many time steps it was handed on; None if it is none."""
    for delay in range(len(passes)):
        for output, leaf in same.items():
            if leaf == place:
                return output, delay
        before = passes[place]
        if before is None or before == place:
            return None
        place = before
    return None


def _of(gradients: list[Sequence[Tensor] | None], output: int, time_step: int) -> Gradient:
    found = gradients[output]
    return None if found is None else found[time_step]


def _sum(one: Gradient, other: Gradient) -> Gradient:
    if one is None or other is None:
        return other if one is None else one
    return one + other
