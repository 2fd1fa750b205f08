"""What a caller of scan gives for each time step: the inputs, the state, the lengths, and what the cell answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from lowtide import tree
from lowtide.errors import UsageError

Leaves = list[Tensor]
Build = Callable[[Sequence[Tensor]], Any]  # from leaves to what has them
READINGS = "return (output, new state), or only the new state, with the same structure as the state that you pass in."


class TimeSteps:
    """The inputs; `leaves` are the caller's own tensors, with time first, or those of each time step in turn."""

    def __init__(self, inputs: Any) -> None:
        sequence = isinstance(inputs, (list, tuple)) and not isinstance(inputs, torch.Size)
        self.stacked = not sequence or "_fields" in dir(type(inputs))
        if self.stacked:
            self.leaves, self.tree = tree.flatten(inputs)
            _refuse_others(self.leaves, "the inputs")
            lengths = {leaf.shape[0] if leaf.dim() else 0 for leaf in self.leaves}
            if len(lengths) != 1:
                raise UsageError(
                    f"the inputs are of {sorted(lengths)} time steps.",
                    hint="give tensors with time first, all as long.",
                )
            self.length = lengths.pop()
        else:
            flat = [tree.flatten(time_step) for time_step in inputs]
            self.tree = flat[0][1] if flat else tree.LEAF
            self.leaves = [leaf for leaves, _ in flat for leaf in leaves]
            _refuse_others(self.leaves, "the inputs")
            if any(list(form.paths()) != list(self.tree.paths()) for _, form in flat):
                raise UsageError("the time steps of the inputs differ in structure.", hint="give all of them alike.")
            self.length = len(flat)
        if self.length == 0:
            raise UsageError(
                "there are no time steps to run.", hint="give inputs with at least one time step, time first."
            )

    def columns(self) -> list[Sequence[Tensor]]:
        """The leaves of each time step, as views of what the caller gave."""
        if self.stacked:
            return list(zip(*(leaf.unbind(0) for leaf in self.leaves), strict=True))
        count = len(self.leaves) // self.length
        return [self.leaves[start : start + count] for start in range(0, len(self.leaves), count)]


class Cell:
    """The caller's cell on flat lists of tensors; how to read its answer shows at its first call."""

    def __init__(self, function: Callable[[Any, Any], Any], time_steps: TimeSteps, state: Any) -> None:
        self.function, self.build_inputs = function, _builder(time_steps.tree)
        self.state, self.first_state = tree.flatten(state)
        self.first_build = _builder(self.first_state)
        self.next_build: Build | None = None
        _refuse_others(self.state, "the state")
        if not self.state:
            raise UsageError(
                "the state has no tensor.", hint="give what the cell needs at the first time step, say zeros."
            )
        self.next_state: tree.Tree | None = None  # as the cell returns it
        self.outputs: tree.Tree = tree.LEAF
        self.pair = False

    def __call__(
        self, time_step: int, inputs: Sequence[Tensor], state: Sequence[Tensor], mask: Tensor | None
    ) -> tuple[list[Any], Leaves]:
        """The leaves of the output, some of them None, and of the next state."""
        build = self.first_build if time_step == 0 else self.next_build
        assert build is not None
        result = self.function(self.build_inputs(inputs), build(state))
        if self.next_state is None:
            self._read(result)
        made = result[1] if self.pair else result
        after = _leaves(made)
        outputs = _leaves(result[0]) if self.pair else after[:1]
        if len(after) != len(state):
            raise UsageError(
                f"the cell returned a state of {len(after)} tensors for one of {len(state)}.", hint=READINGS
            )
        if mask is not None:
            after = [torch.where(_like(mask, new), new, old) for new, old in zip(after, state, strict=True)]
            outputs = [None if one is None else torch.where(_like(mask, one), one, 0) for one in outputs]
        return outputs, after

    def _read(self, result: Any) -> None:
        """See whether the cell returns an output too, and remember the structures."""
        wanted = list(self.first_state.paths())
        leaves, form = tree.flatten(result)
        if list(form.paths()) == wanted:
            state = form
        elif isinstance(result, (tuple, list)) and len(result) == 2:
            leaves, state = tree.flatten(result[1])
            outputs, self.outputs = tree.flatten(result[0])
            self.pair = True
            _refuse_others([leaf for leaf in outputs if leaf is not None], "the cell's output")
        else:
            state = form
        if list(state.paths()) != wanted:
            raise UsageError(f"the cell was given the state {self.first_state} and returned {form}.", hint=READINGS)
        _refuse_others(leaves, "the state that the cell returned")
        self.next_state, self.next_build = state, _builder(state)

    def results(self, outputs: Sequence[Any], state: Sequence[Tensor]) -> tuple[Any, Any]:
        """What scan returns."""
        assert self.next_state is not None
        return self.outputs.build(outputs), self.next_state.build(state)


class Stacked:
    """Tensors of all time steps put together as torch.stack does, without having them twice where that can be."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.whole: Tensor | None = None
        self.parts: list[Tensor | None] = [None] * length
        self.shape: torch.Size | None = None

    def put(self, time_step: int, part: Tensor | None) -> None:
        """Take the tensor of one time step; None stands for zeros."""
        if part is None:
            return
        if self.shape is None:
            self.shape = part.shape
            if part.is_contiguous():
                self.whole = part.new_empty((self.length, *part.shape))
                self.views = self.whole.unbind(0)
                self.filled = [False] * self.length
        if self.whole is None:
            self.parts[time_step] = part.detach()
            return
        if part.shape != self.shape or part.dtype != self.whole.dtype:
            raise UsageError(
                f"the cell's output has shape {tuple(self.shape)} at one time step and {tuple(part.shape)} at "
                f"time step {time_step}, or another type.",
                hint="outputs are stacked: return the same shape and type at every time step.",
            )
        self.views[time_step].copy_(part)
        self.filled[time_step] = True

    def view(self, time_step: int) -> Tensor:
        """The tensor of a time step inside the whole; writing to others does not count as writing to it."""
        return self.views[time_step].data

    def take(self) -> Tensor | None:
        """The whole; None where no time step had a tensor."""
        if self.whole is not None:
            for time_step, there in enumerate(self.filled):
                if not there:
                    self.views[time_step].zero_()
            return self.whole
        some = next((part for part in self.parts if part is not None), None)
        if some is None:
            return None
        return torch.stack([torch.zeros_like(some) if part is None else part for part in self.parts])


def masks(lengths: Any, time_steps: TimeSteps, state: Leaves) -> list[Tensor | None]:
    """For each time step which sequences of the batch still go on."""
    if lengths is None:
        return [None] * time_steps.length
    if not isinstance(lengths, Tensor):
        lengths = torch.tensor(lengths, device=state[0].device)
    if lengths.dim() != 1 or lengths.dtype.is_floating_point or lengths.dtype is torch.bool:
        raise UsageError(
            f"lengths has shape {tuple(lengths.shape)} and type {lengths.dtype}.",
            hint="give one whole number for each sequence of the batch: torch.tensor([17, 9, 20]).",
        )
    for leaf in state:
        if not leaf.dim() or leaf.shape[0] != lengths.shape[0]:
            raise UsageError(
                f"there are {lengths.shape[0]} lengths, and a tensor of the state has shape {tuple(leaf.shape)}.",
                hint="with lengths every tensor of the state and of the output has the batch as its first dimension.",
            )
    times = torch.arange(time_steps.length, device=lengths.device)
    return list((times[:, None] < lengths[None]).unbind(0))


def _like(mask: Tensor, tensor: Tensor) -> Tensor:
    return mask.view(-1, *[1] * (tensor.dim() - 1))


def _builder(form: tree.Tree) -> Build:
    """What a tree builds of its leaves; quickly where it is of tuples."""
    if form.form == "leaf":
        return itemgetter(0)
    if form.type is not tuple:
        return form.build
    counts = [sum(1 for _ in child.paths()) for child in form.children]
    if all(child.form == "leaf" for child in form.children):
        return tuple
    if len(counts) == 1:
        alone = _builder(form.children[0])
        return lambda leaves: (alone(leaves),)
    ends = list(accumulate(counts))
    parts = [
        (_builder(child), slice(end - count, end))
        for child, end, count in zip(form.children, ends, counts, strict=True)
    ]
    return lambda leaves: tuple([build(leaves[part]) for build, part in parts])


def _leaves(thing: Any) -> list[Any]:
    """The leaves of what a cell returns; quickly where it is of tuples."""
    if isinstance(thing, Tensor):
        return [thing]
    if type(thing) is not tuple:
        return tree.flatten(thing)[0]
    if len(thing) == 1:
        return _leaves(thing[0])
    found: list[Any] = []
    for part in thing:
        if isinstance(part, Tensor):
            found.append(part)
        else:
            found += _leaves(part)
    return found


def _refuse_others(leaves: Sequence[Any], what: str) -> None:
    for leaf in leaves:
        if not isinstance(leaf, Tensor):
            raise UsageError(f"{what} has a {type(leaf).__name__} where a tensor belongs.", hint="give tensors only.")
