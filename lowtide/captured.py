"""A captured step: its graph, and the caller's own objects that the graph's inputs are found in."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from lowtide.graph import Graph
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
class Guard:
    """A hyperparameter comparison that the step's own code made, and its answer then."""

    path: tuple[str | int, ...]  # (group, "weight_decay")
    comparison: str  # "ne"
    other: float
    answer: bool


@dataclass(frozen=True)
class Captured:
    """A step as data, bound to the caller's model and optimizer."""

    graph: Graph
    step: Callable[..., Any]
    model: Any
    optimizer: Any
    batch: Tree
    batch_leaves: tuple[Any, ...]  # a TensorSpec for each tensor; other leaves as they were
    results: Tree
    result_leaves: tuple[Any, ...]  # an int for each output of the graph; other leaves as (value,)
    slots: Mapping[str, Slot]  # parameter or buffer name -> where it lives
    constants: tuple[Any, ...]
    options: tuple[Mapping[str, Any], ...]  # for each parameter group, the options that are constants of the graph
    guards: tuple[Guard, ...]
    gradients: Mapping[str, bool]  # parameter name -> whether it has a gradient before the step, where that matters
    trained: tuple[str, ...]  # parameters whose gradient the step makes, clears or leaves alone
    trains: frozenset[str]  # parameters and buffers that require a gradient
    training: tuple[bool, ...]  # for each module of the model, whether it is in training mode
    prepare: Callable[[], None]  # makes the optimizer's state, as the optimizer itself would, where it is missing
