"""What fully_shard does around the layers of a model, as ops of the step: parameters gathered, gradients scattered.

Its own work is done by hooks. While a step is traced the parameters of the model are this rank's shards, as plain
tensors, and those hooks call this file: before the forward of a layer each of its shards is gathered into a parameter
of its own, whose gradient is added up over the ranks, and the shard's rows of it, divided, are the shard's gradient.
What the step does with shards beside that would be about a part of what its code means, and is refused.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge

from lowtide import private
from lowtide.capture.ranks import COMMUTES
from lowtide.capture.recorder import Recorder
from lowtide.errors import CaptureError
from lowtide.graph import Input
from lowtide.kernels.collectives import GATHER

CLEARS = frozenset({"aten.zero_.default", "aten.zeros_like.default"})  # gradients that stay, cleared


class Gathers:
    """What the sharded layers of one traced step do."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._around: dict[int, list[tuple[private.Sharded, torch.Tensor]]] = {}  # by group: parts while it is whole
        self._whole: dict[int, list[torch.Tensor]] = {}  # by group, as last gathered
        self._waiting: set[int] = set()  # groups that have run with gradients, of which none has come
        self._came_so_far: dict[int, dict[int, tuple[torch.Tensor, torch.Tensor]]] = {}  # by group: gradients, parts
        self._begun = False  # a backward
        self._handles: list[Any] = []
        self._nodes: list[Any] = []  # of autograd: they are the same as long as somebody holds them
        self._parts: list[torch.Tensor] = []  # of this rank
        self._storages: set[int] = set()  # of the graph: gradients of shards
        self._allowed: set[int] = set()  # ops of this file that read them

    @contextlib.contextmanager
    def followed(self, model: torch.nn.Module) -> Iterator[None]:
        """A context in which what fully_shard does is made of ops."""
        if not any(map(private.fully_sharded, model.modules())):
            yield
            return
        wholes = [one for group in private.fsdp_groups(model) for one in private.fsdp_parameters(group)]
        self._parts = [_at(one) for one in wholes]
        try:
            with private.fsdp_followed(self._enter, self._leave, self._return):
                yield
        finally:
            for group in [*self._around]:
                self._put_back(group)
            for handle in self._handles:
                handle.remove()
            self._handles.clear()
            self._nodes.clear()
            self._whole.clear()
            self._came_so_far.clear()

    def _enter(self, group: Any) -> None:
        """Before the forward of a layer."""
        number = id(group)
        if number in self._around:
            return  # another module of the group runs, or a checkpoint in the backward
        parameters = private.fsdp_parameters(group)
        if self._recorder.origins.node() is None or number not in self._whole:
            self._refuse_second(number)
            parts = [_at(one) for one in parameters]
            self._whole[number] = [
                self._gathered(number, place, *pair) for place, pair in enumerate(zip(parameters, parts, strict=True))
            ]
        self._around[number] = []
        for one, whole in zip(parameters, self._whole[number], strict=True):
            self._around[number].append((one, _at(one)))
            for module, name in one.places:
                private.put_parameter(module, name, whole)

    def _leave(self, group: Any) -> None:
        """After it."""
        if self._recorder.origins.node() is None:
            self._put_back(id(group))

    def _return(self, group: Any) -> None:
        """Before the backward of a layer: what it computes anew finds its parameters gathered."""
        self._begin()
        if id(group) in self._whole:
            self._enter(group)

    def _put_back(self, number: int) -> None:
        for one, part in self._around.pop(number, ()):
            for module, name in one.places:
                private.put_parameter(module, name, part)

    def _refuse_second(self, number: int) -> None:
        if not torch.is_grad_enabled():
            return
        if number in self._waiting:
            raise CaptureError(
                "a layer of fully_shard runs twice before the backward: which of its gradients are added up together "
                "depends on the order in which they come.",
                hint="call backward after each forward, or give fully_shard the model that calls the layer twice.",
            )
        self._waiting.add(number)

    def _gathered(self, group: int, place: int, one: private.Sharded, part: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            whole = torch.ops.lowtide.gather(part, one.size[0])
        whole = torch.nn.Parameter(whole, requires_grad=part.requires_grad)
        if part.requires_grad and torch.is_grad_enabled():
            node = get_gradient_edge(whole).node
            self._nodes.append(node)
            self._handles.append(node.register_hook(lambda *_: self._came(group, place, whole, part)))
        return whole

    def _came(self, group: int, place: int, whole: torch.Tensor, part: torch.Tensor) -> None:
        """A gathered parameter has its gradient."""
        self._waiting.discard(group)
        gradient, whole.grad = whole.grad, None
        assert gradient is not None
        if gradient.requires_grad:
            raise CaptureError(
                "the step calls backward(create_graph=True) on a model of fully_shard, whose gradients have no history "
                "after they were averaged.",
                hint="leave create_graph out.",
            )
        self._begin()
        self._came_so_far.setdefault(group, {})[place] = (gradient, part)
        alone = torch.distributed.get_world_size() <= COMMUTES
        if alone or len(self._came_so_far[group]) == sum(one.requires_grad for one in self._whole[group]):
            self._scatter(self._came_so_far[group])

    def _begin(self) -> None:
        """In a backward."""
        if not self._begun:
            self._begun = True
            private.autograd_engine.queue_callback(self._finish)

    def _finish(self) -> None:
        """After the backward: the gradients of groups that did not get all of theirs."""
        self._begun = False
        for came in self._came_so_far.values():
            self._scatter(came)
        self._came_so_far.clear()
        for group in [*self._around]:
            self._put_back(group)

    def _scatter(self, came: dict[int, tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Add up gradients over the ranks and give their parts to the shards.

        The rows of one rank are together in one bucket, as fully_shard has them: with more than two ranks it depends on
        places in it in which order a backend adds. A gradient alone is its own bucket.
        """
        if not came:
            return
        gradients, parts = zip(*(came[place] for place in sorted(came)), strict=True)
        came.clear()
        ranks = torch.distributed.get_world_size()
        with torch.no_grad():
            if len(gradients) == 1 and ranks <= COMMUTES:
                summed = gradients[0].contiguous()
                torch.ops.lowtide.all_reduce(summed)
                self._give(parts[0], torch.ops.lowtide.own_part(summed, parts[0].shape[0]))
                return
            bucket = private.chunk_cat(gradients, ranks)
            torch.ops.lowtide.all_reduce(bucket)
            mine, begin = torch.ops.lowtide.own_part(bucket, 1).view(-1), 0
            for gradient, part in zip(gradients, parts, strict=True):
                self._give(part, mine.narrow(0, begin, part.numel()).view(part.shape))
                begin += -(-gradient.shape[0] // ranks) * (gradient.numel() // gradient.shape[0])

    def _give(self, part: torch.Tensor, gradient: torch.Tensor) -> None:
        """Give a shard its gradient, or add it to the one that is there."""
        if part.grad is None:
            part.grad = gradient
        else:
            part.grad += gradient
            self._allowed.add(len(self._recorder.ops) - 1)
        read = self._recorder.books.read(part.grad)
        self._storages.add(self._recorder.books.values[read.value].storage)

    def refuse_reads(self, inputs: list[Input], names: Mapping[int, str]) -> None:
        """Raise where the step itself reads shards, their gradients or their state, of which each rank has others."""
        values, ops = self._recorder.books.values, self._recorder.ops
        sharded = {names[id(part)] for part in self._parts}
        theirs = {values[item.value].storage for item in inputs if item.path and str(item.path[0]) in sharded}
        theirs |= self._storages
        for number, op in enumerate(ops):
            if op.target == GATHER or op.phase == "update" or op.target in CLEARS or number in self._allowed:
                continue
            if any(values[read].storage in theirs for read in op.reads):
                raise CaptureError(
                    f"{op.source or 'the step'}: {op.name} reads a parameter of fully_shard, or its gradient, outside "
                    "of a layer's forward and of the optimizer; this rank has a part of it only.",
                    hint="leave it to the layers and the optimizer, or use DistributedDataParallel.",
                )


def _at(one: private.Sharded) -> torch.Tensor:
    """What is in the place of a parameter now."""
    module, name = one.places[0]
    found: torch.Tensor = private.registries(module)[0][name]
    return found
