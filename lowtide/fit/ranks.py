"""What the ranks of a process group agree on before a step: that all can take it, and that it has the same collectives.

Each plans for itself, within its own budget: a program keeps the order of the graph's collectives, whatever else it
does. Where all ask for the same, rank 0 measures and plans, and the others take over what it found. Before each step
one small exchange says of every rank whether it is ready, has to capture the step anew, or has failed; no rank begins
a collective that another one does not come to.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

from lowtide import private
from lowtide.capture.ranks import COMMUTES, ORDER, ranked
from lowtide.errors import BudgetError, CaptureError, LowtideError, RankError, UsageError
from lowtide.fit.request import Request
from lowtide.graph import Graph, Op, Read
from lowtide.kernels.collectives import ALL_REDUCE, COLLECTIVES, GATHER
from lowtide.program import Program, Run

Thing = TypeVar("Thing")

OTHERS = "the ranks would do different things together: other buckets, another order, or only some synchronise"
ALONE = "this rank's batch has another shape than before, or its world has changed, and that of another rank has not"
ASKED = "with fully_shard all ranks run one plan, and they were asked for different ones: another budget, plan or limit"
TOGETHER = "start all ranks again from the last checkpoint, once the cause is mended."


def of(request: Request) -> Ranks | None:
    """The ranks that take a step together; None where the model is of this process alone."""
    if not isinstance(request.model, torch.nn.Module) or not ranked(request.model):
        return None
    if request.allowed:
        raise UsageError(
            "allow (--allow) is for one process: with several ranks every bit stays.",
            hint="leave allow and rounding out, or give the model without DistributedDataParallel.",
        )
    if request.offload is not None and any(map(private.fully_sharded, request.model.modules())):
        raise UsageError(
            "offload (--offload) is not there for a model of fully_shard: each rank would copy at another time.",
            hint="leave offload out, or use DistributedDataParallel.",
        )
    return Ranks(request.model)


class Ranks:
    """This rank among the others of the default process group."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.number, self.count = distributed.get_rank(), distributed.get_world_size()
        self.sharded = any(map(private.fully_sharded, model.modules()))  # then all run one sequence of ops
        self._agreed = False  # on the step that is about to run
        for module in model.modules():
            if isinstance(module, DistributedDataParallel):
                if self.count > COMMUTES and not hasattr(module, ORDER):
                    order = private.ddp_order(module)
                    if order is not None:
                        setattr(module, ORDER, order)
                private.release_reducer(module)

    def step(self) -> None:
        """A step is asked for: nothing is agreed on yet."""
        self._agreed = False

    def ready(self, signature: int) -> None:
        """Go on once all ranks can run a step with these collectives; a RankError where that will not be."""
        if self._agreed:
            return
        while True:
            failed, waiting, _, most, least = self._exchange(0, 0, 1, signature, -signature)
            if failed:
                self._raise_failure(None)
            if not waiting:
                break
        if most != -least:
            self._raise_failure(OTHERS)
        self._agreed = True

    def needs(self) -> bool:
        """Say that this rank has no step for its batch yet; whether that is so on all of them."""
        failed, _, ready, _, _ = self._exchange(0, 1, 0, 0, 0)
        if failed:
            self._raise_failure(None)
        if ready and self.sharded:
            raise UsageError(ALONE, hint="give all ranks batches of the same shapes, padded to the same length.")
        return not ready

    def largest(self, number: int | None) -> int | None:
        """Of ranks that share a sequence the largest number, where one has any."""
        if not self.sharded:
            return number
        (found,) = self._exchange(-1 if number is None else number)
        return None if found < 0 else found

    def any(self, ask: Callable[[], bool]) -> bool:
        """Whether any rank says so; where one can't tell, all of them raise."""
        return self._exchange(int(self.all_or_none(ask))) != [0]

    def all_temporaries(self, own: Mapping[int, tuple[int, int]]) -> Mapping[int, tuple[int, int]]:
        """By op, the largest temporaries that any of the ranks has seen that share a sequence."""
        if not self.sharded:
            return own
        found: dict[int, tuple[int, int]] = {}
        for seen in self._gather(dict(own)):
            for op, (piece, heap) in seen.items():
                known = found.get(op, (0, 0))
                found[op] = max(piece, known[0]), max(heap, known[1])
        return found

    def fail(self, error: BaseException) -> None:
        """Let the others know that this rank can't take the step; nothing to say where they know that it runs."""
        if not self._agreed and not isinstance(error, RankError) and isinstance(error, Exception):
            self._agreed = True
            self._exchange(1, 0, 0, 0, 0)
            self._gather(_words(error))

    def all_or_none(self, make: Callable[[], Thing]) -> Thing:
        """What this rank makes, if all of them can make theirs; else each raises, one its own error."""
        try:
            made = make()
        except Exception as error:
            self._agreed = True
            self._gather(_words(error))
            raise
        self._refuse(self._gather(None))
        return made

    def same(self, signature: int) -> None:
        """Raise where the steps of two ranks have other collectives."""
        if len(set(self._gather(signature))) > 1:
            self._raise_failure(OTHERS)

    def shared(self, asked: Any, make: Callable[[], Thing]) -> Thing:
        """What rank 0 makes, where all ask for the same; else what each makes for itself."""
        asks = self._gather(asked)
        if any(one != asks[0] for one in asks):
            if self.sharded:
                self._raise_failure(ASKED)
            return self.all_or_none(make)
        if self.number == 0:
            return self._for_all(make)
        made, error = self._from_first(None)
        if error is not None:
            raise error
        found: Thing = made
        return found

    def _for_all(self, make: Callable[[], Thing]) -> Thing:
        """On rank 0: make something for all ranks; an error is theirs, too."""
        try:
            made = make()
        except Exception as error:
            same = error if isinstance(error, BudgetError | CaptureError) else RankError(_words(error), hint=TOGETHER)
            self._from_first((None, same))
            raise
        self._from_first((made, None))
        return made

    def _raise_failure(self, words: str | None) -> None:
        self._agreed = True
        self._refuse(self._gather(words))

    def _refuse(self, words: list[str | None]) -> None:
        said = [(rank, text) for rank, text in enumerate(words) if text is not None]
        if said:
            where = "all ranks" if len(said) == self.count > 1 else f"rank {said[0][0]} of {self.count}"
            raise RankError(f"{where}: {said[0][1]}. No rank has taken this step.", hint=TOGETHER)

    def _exchange(self, *numbers: int) -> list[int]:
        """The largest that any rank has of each number."""
        largest = torch.tensor(numbers, dtype=torch.int64)
        self._talk(lambda: distributed.all_reduce(largest, distributed.ReduceOp.MAX))
        return [int(number) for number in largest.tolist()]

    def _gather(self, thing: Any) -> list[Any]:
        """What all ranks have to say."""
        found: list[Any] = [None] * self.count
        self._talk(lambda: distributed.all_gather_object(found, thing))
        return found

    def _from_first(self, thing: Any) -> Any:
        """What rank 0 has."""
        found = [thing]
        self._talk(lambda: distributed.broadcast_object_list(found, 0))
        return found[0]

    def _talk(self, exchange: Callable[[], Any]) -> None:
        try:
            exchange()
        except RuntimeError as error:
            self._agreed = True
            text = (str(error).strip().splitlines() or [""])[0].rstrip(".")
            raise RankError(
                f"rank {self.number} of {self.count} lost the others before the step: {text}. This rank is as it was.",
                hint="a rank has died or was slower than the group's timeout: its own output says why. Start all of "
                "them again from the last checkpoint.",
            ) from error


def sums(graph: Graph) -> list[int]:
    """The ops that add up a bucket over the ranks, in order."""
    return [number for number, op in enumerate(graph.ops) if op.target == ALL_REDUCE]


def signature(graph: Graph) -> int:
    """A number for what a step does together with other ranks: its collectives in order, and what is in their buckets.

    Steps of two ranks can run together if theirs are equal; it is below 2**62.
    """
    said = []
    for place, op in enumerate(graph.ops):
        if op.target in COLLECTIVES:
            read = [graph.values[item.value] for item in op.arguments()]
            shapes = [value.shape for value in read] if op.target != GATHER else [op.args[1:], read[0].shape[1:]]
            said.append((op.target, [value.dtype for value in read], shapes))
            said += [_filling(graph, one, read[0].storage) for one in graph.ops[:place] if op.target == ALL_REDUCE]
    return _number(said)


def order(graph: Graph, program: Program) -> int:
    """A number for the order in which a program runs the collectives of its graph, some of them several times."""
    runs = [item.op for item in program.instructions if isinstance(item, Run)]
    return _number([op for op in runs if graph.ops[op].target in COLLECTIVES])


def _number(said: Any) -> int:
    return int.from_bytes(hashlib.sha256(repr(said).encode()).digest()[:8], "big") >> 2


def _filling(graph: Graph, op: Op, storage: int) -> Any:
    """How an op writes to a bucket, if it does: where, and by which numbers."""
    if all(graph.values[old].storage != storage for _, old in op.updates):
        return None
    found: list[Any] = [op.target]
    for arg in (*op.args, *(arg for _, arg in op.kwargs)):
        if not isinstance(arg, Read):
            found.append(arg)
        elif graph.values[arg.value].storage == storage:
            found.append(_seen(graph, arg.view))
    return found


def _seen(graph: Graph, view: int | None) -> list[Any]:
    """A view by the calls that make it."""
    found: list[Any] = []
    while view is not None:
        item = graph.views[view]
        found.append((item.target, item.args))
        view = item.parent
    return found


def _words(error: BaseException) -> str:
    message = error.message if isinstance(error, LowtideError) else f"{type(error).__name__}: {error}"
    return (message.strip().splitlines() or [""])[0].rstrip(".")
