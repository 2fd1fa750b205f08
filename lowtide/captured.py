"""A captured step: its graph, and the caller's own objects that the graph's inputs are found in."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from lowtide.graph import Graph
from lowtide.guards import Effect, Expression, Guards
from lowtide.tree import Tree


@dataclass(frozen=True)
class TensorSpec:
    """What a tensor of the batch must look like."""

    shape: tuple[int, ...]
    dtype: str
    device: str
    stride: tuple[int, ...]
    requires_grad: bool = False

    def __str__(self) -> str:
        return f"{self.dtype}[{'x'.join(map(str, self.shape))}] on {self.device}"


@dataclass(frozen=True)
class Slot:
    """Where a tensor of the caller lives: `holder[key]`."""

    holder: Any
    key: str | int


@dataclass(frozen=True)
class Computed:
    """A number that depends on numbers of the caller alone, not on tensors."""

    expression: Expression
    integer: bool


@dataclass(frozen=True)
class Leaving:
    """An output of the graph that is the gradient of something, and may leave the step as soon as it is made."""

    output: int  # its place among the outputs
    source: int  # the place of what it is the gradient of among all that get one
    parameter: str = ""  # the name of that parameter: whoever is given the gradient may update it
    last: bool = False  # it leaves at the end: the order of those that do is that in which autograd adds them up


@dataclass(frozen=True)
class Captured:
    """A step as data, bound to the caller's model and optimizers."""

    graph: Graph
    step: Callable[..., Any]
    model: Any
    optimizer: Any  # as the step is given it: None, one, or a tuple of them
    batch: Tree
    batch_leaves: tuple[Any, ...]  # a TensorSpec for each tensor; other leaves as they were
    results: Tree  # of a pair: what the step returns, and for each effect what it leaves behind
    result_leaves: tuple[Any, ...]  # an int for each output of the graph, or Computed; others as (value,)
    effects: tuple[Effect, ...]
    slots: Mapping[str, Slot]  # parameter or buffer name -> where it lives
    owners: Mapping[str, Any]  # parameter name -> the optimizer that it belongs to
    constants: tuple[Any, ...]
    options: tuple[Mapping[str, Any], ...]  # for each parameter group, the options that are constants of the graph
    members: tuple[tuple[Any, ...], ...]  # for each parameter group, its parameters
    guards: Guards
    gradients: Mapping[str, bool]  # parameter name -> whether it has a gradient before the step, where that matters
    trained: tuple[str, ...]  # parameters whose gradient the step makes, clears or leaves alone
    trains: frozenset[str]  # parameters and buffers that require a gradient
    prepare: Callable[..., None]  # makes the optimizer's state, as the optimizer itself would, where it is missing
    leaving: tuple[Leaving, ...] = ()  # what may leave before the end of a step in halves
    hooked: bool = False  # parameters may have hooks, for who calls the step sees to it that they run

    @property
    def foreseen(self) -> bool:
        """Whether what the effects leave behind is known without running the graph."""
        results = len(list(self.results.children[0].paths()))
        return not any(isinstance(leaf, int) for leaf in self.result_leaves[results:])

    @property
    def optimizers(self) -> tuple[Any, ...]:
        """All of them."""
        return optimizers_of(self.optimizer)


def optimizers_of(optimizer: Any) -> tuple[Any, ...]:
    """None, one optimizer or several, as a tuple."""
    if optimizer is None:
        return ()
    return tuple(optimizer) if isinstance(optimizer, (tuple, list)) else (optimizer,)
