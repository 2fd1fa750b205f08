"""What DistributedDataParallel does around a model, as ops of the step: buffers from rank 0, gradients in buckets.

Its own work is done by hooks in C++ that a trace does not see. While a step is traced its forward is this file's, and
hooks on the stand-ins of the parameters write each gradient, divided, into its bucket; a full bucket is added up over
the ranks. Buckets, their order and the places in them are DDP's: with more than two ranks the order in which a backend
adds depends on them. DDP begins with one bucket for all gradients and has made others, in the order in which gradients
came, by its second step; `ORDER` is that order, kept on the module, as an effect of the first step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge
from torch.nn.parallel import DistributedDataParallel

from lowtide import private
from lowtide.errors import CaptureError

ORDER = "lowtide_order"  # attribute of a DDP module: its parameters by number, as their gradients came
COMMUTES = 2  # ranks whose sums are the same in whatever order they are added
ALONE = 2**18  # bytes of a gradient that is summed where it is, if that changes no bit: a bucket would hold it twice


@dataclass(frozen=True)
class Arrival:
    """What one backward showed of the parameters of a DDP module, by their numbers."""

    order: tuple[int, ...]  # as their gradients came
    unused: frozenset[int] = frozenset()  # those that got none


def ranked(model: torch.nn.Module) -> bool:
    """Whether a part of a model averages its gradients over ranks."""
    return any(isinstance(one, DistributedDataParallel) or private.fully_sharded(one) for one in model.modules())


class Reductions:
    """What the DDP modules of one traced step do; `known` is what an earlier trace of it showed."""

    def __init__(self, known: Mapping[int, Arrival]) -> None:
        self.known = known  # by the identity of the module
        self.arrivals: dict[int, Arrival] = {}
        self._rounds: dict[int, _Round] = {}

    @contextlib.contextmanager
    def followed(self) -> Iterator[None]:
        """A context in which the forward of DDP is made of ops."""
        usual = DistributedDataParallel.forward

        def forward(ddp: DistributedDataParallel, *inputs: Any, **kwargs: Any) -> Any:
            return self._forward(ddp, inputs, kwargs)

        DistributedDataParallel.forward = forward  # type: ignore[assignment, method-assign]
        try:
            yield
        finally:
            DistributedDataParallel.forward = usual  # type: ignore[method-assign]
            for one in self._rounds.values():
                one.end()

    def again(self) -> dict[int, Arrival]:
        """What another trace should know; nothing where this one knew all that it needs."""
        wanted = {
            module: found
            for module, found in self.arrivals.items()
            if found.unused or torch.distributed.get_world_size() <= COMMUTES
        }
        return {} if all(self.known.get(module) == found for module, found in wanted.items()) else wanted

    def _forward(self, ddp: DistributedDataParallel, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # By getattr, which is noted: what is read here is what the program assumes.
        averages = torch.is_grad_enabled() and getattr(ddp, "require_backward_grad_sync")  # noqa: B009
        if getattr(ddp, "require_forward_param_sync") and getattr(ddp, "forward_sync_buffers"):  # noqa: B009
            ignored = private.ignored_by_ddp(ddp)
            buffers = [buffer for name, buffer in ddp.module.named_buffers() if name not in ignored]
            if buffers:
                with torch.no_grad():
                    torch.ops.lowtide.broadcast(buffers)
        output = ddp.module(*inputs, **kwargs)
        ddp.require_forward_param_sync = averages
        if averages:
            self._arm(ddp)
        return output

    def _arm(self, ddp: DistributedDataParallel) -> None:
        """Wait for the gradients of a module; those of several forwards come in one backward."""
        last = self._rounds.get(id(ddp))
        if last is None or last.begun:
            self._rounds[id(ddp)] = _Round(ddp, self.known.get(id(ddp)), lambda found: self._arrived(ddp, found))

    def _arrived(self, ddp: DistributedDataParallel, found: Arrival) -> None:
        """The end of a backward: once DDP has seen one, it makes its buckets anew."""
        self.arrivals.setdefault(id(ddp), found)
        rebuilds = torch.distributed.get_world_size() > COMMUTES and not ddp.find_unused_parameters
        if rebuilds and getattr(ddp, ORDER, None) is None:
            setattr(ddp, ORDER, found.order)


class _Round:
    """The gradients of one backward of a DDP module: each into its bucket, each full bucket over the ranks, in turn."""

    def __init__(self, ddp: DistributedDataParallel, known: Arrival | None, done: Callable[[Arrival], None]) -> None:
        self.ddp, self.done = ddp, done
        named = trained(ddp)
        self.names, self.parameters = [name for name, _ in named], [parameter for _, parameter in named]
        self.buckets = _buckets(ddp, self.parameters, known)
        self.bucket_of = {number: place for place, bucket in enumerate(self.buckets) for number in bucket}
        self.missing = [set(bucket) for bucket in self.buckets]
        self.flat: dict[int, torch.Tensor] = {}
        self.kept: dict[int, torch.Tensor] = {}  # gradients that were there before, and are added to
        self.order: list[int] = []
        self.begun, self.next = False, 0
        self.unused = frozenset[int]() if known is None else known.unused
        self.handles: list[Any] = []
        self.nodes: list[Any] = []  # of autograd: they are the same as long as somebody holds them
        for number, parameter in enumerate(self.parameters):
            node = get_gradient_edge(parameter).node
            self.nodes.append(node)
            self.handles.append(node.register_prehook(lambda _, number=number: self._comes(number)))
            self.handles.append(node.register_hook(lambda _, __, number=number: self._came(number)))

    def end(self) -> None:
        """Wait for no gradient any more."""
        for handle in self.handles:
            handle.remove()
        self.handles.clear()
        self.nodes.clear()

    def _comes(self, number: int) -> None:
        """Before a gradient is added to a parameter."""
        if (before := self.parameters[number].grad) is None:
            return
        if self.ddp.gradient_as_bucket_view and not _halves(torch.distributed.get_world_size()):
            raise CaptureError(
                f"{self.names[number]!r} has a gradient before the backward, and DDP's gradient_as_bucket_view=True "
                f"divides by {torch.distributed.get_world_size()} otherwise then.",
                hint="leave gradient_as_bucket_view out, or clear gradients by zero_grad(set_to_none=True).",
            )
        self.kept[number] = before

    def _came(self, number: int) -> None:
        """A parameter has its gradient."""
        if not self.begun:
            self.begun = True
            private.autograd_engine.queue_callback(self._finish)
            for one in sorted(self.unused):
                self._fill(one, None)
        if number in self.order:
            raise CaptureError(
                f"{self.names[number]!r} gets its gradient twice in one backward, which DDP refuses.",
                hint="use checkpoints with use_reentrant=False, or one backward for each forward.",
            )
        self.order.append(number)
        gradient = self.parameters[number].grad
        assert gradient is not None
        if gradient.requires_grad:
            raise CaptureError(
                "the step calls backward(create_graph=True) on a DDP model, whose gradients have no history after "
                "they were averaged.",
                hint="take such gradients by torch.autograd.grad.",
            )
        self._fill(number, gradient)
        if number not in self.kept:
            self.parameters[number].grad = None
        self._launch()

    def _fill(self, number: int, gradient: torch.Tensor | None) -> None:
        """Write a gradient into its bucket, divided as DDP does it; without one there are zeros."""
        place = self.bucket_of[number]
        with torch.no_grad():
            if gradient is not None and self._is_bucket(number, gradient):
                self.flat[place] = gradient.mul_(1.0 / torch.distributed.get_world_size())
                self.missing[place].discard(number)
                return
            if place not in self.flat:
                members = [self.parameters[one] for one in self.buckets[place]]
                size = sum(one.numel() for one in members)
                self.flat[place] = torch.empty(size, dtype=members[0].dtype, device=members[0].device)
            if gradient is None:
                self._part(number).zero_()
            else:
                torch.mul(gradient, 1.0 / torch.distributed.get_world_size(), out=self._part(number))
        self.missing[place].discard(number)

    def _is_bucket(self, number: int, gradient: torch.Tensor) -> bool:
        """Whether a gradient is all of its bucket, byte for byte: then it need not be copied."""
        alone = len(self.buckets[self.bucket_of[number]]) == 1 and number not in self.kept
        return alone and _dense(gradient) and gradient.stride() == self.parameters[number].stride()

    def _part(self, number: int) -> torch.Tensor:
        """Where the gradient of a parameter is in its bucket."""
        place, parameter = self.bucket_of[number], self.parameters[number]
        if self.flat[place].shape == parameter.shape:
            return self.flat[place]
        before = self.buckets[place][: self.buckets[place].index(number)]
        offset = sum(self.parameters[one].numel() for one in before)
        if _dense(parameter):
            return self.flat[place].as_strided(parameter.shape, parameter.stride(), offset)
        return self.flat[place].narrow(0, offset, parameter.numel()).view(parameter.shape)

    def _launch(self) -> None:
        """Add up the buckets that are full, in their order, and give the parameters what they hold then."""
        while self.next < len(self.buckets) and not self.missing[self.next]:
            place, self.next = self.next, self.next + 1
            with torch.no_grad():
                torch.ops.lowtide.all_reduce(self.flat[place])
                for number in self.buckets[place]:
                    if number in self.unused:
                        continue
                    if (before := self.kept.get(number)) is not None:
                        before.copy_(self._part(number))
                    else:
                        self.parameters[number].grad = self._part(number)

    def _finish(self) -> None:
        """After the backward: parameters that got no gradient."""
        missing = sorted(number for bucket in self.missing for number in bucket)
        if missing and not self.ddp.find_unused_parameters:
            some = ", ".join(repr(self.names[number]) for number in missing[:3])
            raise CaptureError(
                f"{len(missing)} parameters of the DDP model get no gradient ({some}{', ...' * (len(missing) > 3)}), "
                "and DDP would wait for them.",
                hint="give DistributedDataParallel find_unused_parameters=True, or train what the loss depends on.",
            )
        self.unused |= set(missing)
        for number in missing:
            self._fill(number, None)
        self._launch()
        self.end()
        self.done(Arrival(tuple(self.order), self.unused))


def trained(ddp: DistributedDataParallel) -> list[tuple[str, torch.nn.Parameter]]:
    """The parameters whose gradients DDP averages, in its own order, with their names."""
    ignored, seen = private.ignored_by_ddp(ddp), set[int]()
    found = []
    for path, module in ddp.module.named_modules():
        for key, parameter in module.named_parameters(recurse=False):
            if parameter.requires_grad and f"{path}.{key}" not in ignored and id(parameter) not in seen:
                seen.add(id(parameter))
                found.append((f"{path}.{key}" if path else key, parameter))
    return found


def _buckets(
    ddp: DistributedDataParallel, parameters: Sequence[torch.Tensor], known: Arrival | None
) -> list[list[int]]:
    """The numbers of the parameters in each bucket, as DDP has them at this step."""
    order = getattr(ddp, ORDER, None)  # noted, so that the program assumes it
    if torch.distributed.get_world_size() > COMMUTES:
        return private.ddp_buckets(ddp, parameters, order)
    if known is not None and not known.unused:
        order = known.order
    return [part for bucket in private.ddp_buckets(ddp, parameters, order) for part in _split(bucket, parameters)]


def _split(bucket: Sequence[int], parameters: Sequence[torch.Tensor]) -> Iterator[list[int]]:
    """A bucket without its large members, each of which is one of its own."""
    small = [number for number in bucket if parameters[number].nbytes < ALONE]
    yield from ([number] for number in bucket if number not in small)
    if small:
        yield small


def _dense(tensor: torch.Tensor) -> bool:
    """Whether a tensor has each of its bytes once: then its gradient has its strides."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def _halves(ranks: int) -> bool:
    """Whether to divide by so many is exact, so that a product with the inverse is the same."""
    return ranks & (ranks - 1) == 0
