"""A model of fully_shard and its optimizers, with this rank's shards as plain tensors for as long as a step runs.

Between steps all is as fully_shard made it: parameters, gradients and state are DTensors. A captured step knows plain
tensors only, so each step begins by putting those in their places, the same ones each time, and ends by putting the
DTensors back. They are the same memory.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from types import TracebackType
from typing import Any

import torch
from torch import optim

from lowtide import private
from lowtide.captured import optimizers_of
from lowtide.check import check
from lowtide.choice import Choice
from lowtide.errors import CaptureError, RankError, UsageError
from lowtide.fit.request import Request
from lowtide.fit.similar import scaled, smaller
from lowtide.graph import Graph
from lowtide.measure import roofline
from lowtide.rewrite import EXACT, apply
from lowtide.simulate import simulate

# Whose updates look at each number alone, so that those of a part are a part of those of the whole.
ELEMENTWISE = (
    *(optim.SGD, optim.Adam, optim.AdamW, optim.Adamax, optim.NAdam, optim.RAdam),
    *(optim.Adagrad, optim.Adadelta, optim.RMSprop, optim.Rprop),
)


def local(request: Request) -> AbstractContextManager[None]:
    """In which a step is made and taken: where its model has shards, these are its parameters."""
    sharded = isinstance(request.model, torch.nn.Module) and any(map(private.fully_sharded, request.model.modules()))
    return Shards(request.model, request.optimizer) if sharded else nullcontext()


def as_first(first: Choice, graph: Graph) -> Choice:
    """What rank 0 chose, for the graph of this rank: the same program, on parts that may be smaller."""
    rewritten = apply(graph, (*EXACT, *(one for one in first.plan.rewrites if one.tried)))
    own = rewritten.graph
    if own.fingerprint == first.graph.fingerprint:
        return first
    pairs = zip(first.graph.ops, own.ops, strict=False)
    same = all((one.target, one.makes, one.reads) == (other.target, other.makes, other.reads) for one, other in pairs)
    if rewritten.rewrites != first.plan.rewrites or not same or not smaller(first.graph, own):
        raise RankError(
            "this rank's step has other ops or sizes than that of rank 0, beside its smaller shards.",
            hint="give all ranks the same model, and batches of the same shapes.",
        )
    costs = replace(scaled(first.costs, first.graph, own, roofline(first.graph)), in_place=first.costs.in_place)
    program = replace(first.plan.program, graph=own.fingerprint)
    check(own, costs, program, budget=first.plan.budget)
    found = replace(first.plan, program=program, peak=simulate(own, costs, program).peak)
    return Choice(own, costs, found, first.eager_peak)


class _Part:
    """One parameter: what users have, and this rank's part of it."""

    def __init__(self, whole: private.Sharded) -> None:
        self.whole = whole
        self.local = torch.nn.Parameter(whole.local.detach(), requires_grad=whole.parameter.requires_grad)
        self.state: dict[str, tuple[Any, Any]] = {}  # by key, as users have it and as a step does
        self.entries: dict[str, Any] = {}  # what the optimizer has of it while a step runs

    def fits(self, whole: private.Sharded) -> bool:
        """Whether it is a part of this parameter, as it is now."""
        same = whole.parameter is self.whole.parameter and whole.local is self.whole.local
        return same and whole.parameter.requires_grad == self.local.requires_grad

    def begin_state(self, entries: dict[str, Any]) -> dict[str, Any]:
        """The state of an optimizer as a step has it; the same objects as long as nobody has replaced any."""
        same = entries.keys() == self.state.keys() and all(entries[key] is self.state[key][0] for key in entries)
        if not same or self.entries.keys() != entries.keys():
            self.entries = {key: private.local_part(item) for key, item in entries.items()}
            self.state = {key: (item, self.entries[key]) for key, item in entries.items()}
        return self.entries

    def end_state(self, entries: dict[str, Any]) -> dict[str, Any]:
        """The state as users have it: what is as large as the parameter is a DTensor, too."""
        self.entries = entries
        self.state = {
            key: known if (known := self.state.get(key)) is not None and known[1] is item else (self._given(item), item)
            for key, item in entries.items()
        }
        return {key: given for key, (given, _) in self.state.items()}

    def _given(self, item: Any) -> Any:
        alike = isinstance(item, torch.Tensor) and item.dim() > 0 and item.shape == self.local.shape
        return self.whole.made(item) if alike else item


class Shards:
    """A context in which the parameters of a model of fully_shard are plain tensors."""

    def __init__(self, model: torch.nn.Module, optimizer: Any) -> None:
        self._model, self._optimizers = model, optimizers_of(optimizer)
        self._refuse()
        for one in self._optimizers:
            if type(one) not in ELEMENTWISE:
                known = ", ".join(kind.__name__ for kind in ELEMENTWISE)
                raise CaptureError(
                    f"{type(one).__name__} is not known to treat each number of a parameter alone, and with "
                    "fully_shard a rank has a part of each.",
                    hint=f"use one of {known}; or DistributedDataParallel, with which others work, too.",
                )
        self._parts: dict[int, _Part] = {}  # by the identity of the DTensor
        self._places: list[tuple[Any, list[Any], int, _Part]] = []  # in optimizers, while a step runs

    def __enter__(self) -> None:
        self._refuse()
        for module in self._model.modules():
            if private.fully_sharded(module):
                module.reshard()  # type: ignore[operator]
        self._parts = {id(one.parameter): self._part(one) for one in self._wholes()}
        for part in self._parts.values():
            for module, name in part.whole.places:
                private.put_parameter(module, name, part.local)
            gradient, part.whole.parameter.grad = part.whole.parameter.grad, None
            part.local.grad = None if gradient is None else private.local_part(gradient)
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                for place, parameter in enumerate(group["params"]):
                    if (found := self._parts.get(id(parameter))) is not None:
                        group["params"][place] = found.local
                        self._places.append((optimizer, group["params"], place, found))
                        if (entries := optimizer.state.pop(parameter, None)) is not None:
                            optimizer.state[found.local] = found.begin_state(entries)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for part in self._parts.values():
            for module, name in part.whole.places:
                private.put_parameter(module, name, part.whole.parameter)
            gradient, part.local.grad = part.local.grad, None
            part.whole.parameter.grad = None if gradient is None else part.whole.made(gradient)
        for optimizer, parameters, place, part in self._places:
            parameters[place] = part.whole.parameter
            if (entries := optimizer.state.pop(part.local, None)) is not None:
                optimizer.state[part.whole.parameter] = part.end_state(entries)
        self._places.clear()

    def _part(self, one: private.Sharded) -> _Part:
        known = self._parts.get(id(one.parameter))
        return known if known is not None and known.fits(one) else _Part(one)

    def _wholes(self) -> list[private.Sharded]:
        return [one for group in private.fsdp_groups(self._model) for one in private.fsdp_parameters(group)]

    def _refuse(self) -> None:
        """Refuse what fully_shard was told that is not in a captured step; it can be told more between steps."""
        for group in private.fsdp_groups(self._model):
            for wrong, what, hint in private.fsdp_told(group):
                if wrong:
                    raise UsageError(
                        f"the model has fully_shard with {what}, which is not in a captured step.", hint=f"{hint}."
                    )
        for one in self._wholes():
            if any(private.hook_registers(one.parameter)):
                raise UsageError(
                    "a parameter of fully_shard has a hook, which would get a part of its gradient.",
                    hint="do in the step what the hook does, or leave it out.",
                )
