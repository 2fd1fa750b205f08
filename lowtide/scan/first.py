"""The first time step of a scan: what its cell saves, which tensors it uses, and whether it may run again."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks
from torch.overrides import TorchFunctionMode

from lowtide.errors import UsageError
from lowtide.plan.loop import Sizes
from lowtide.private import sequence_number, storage_key
from lowtide.scan.time_steps import Cell, Leaves
from lowtide.scan.watch import Known, Watch, memory, owner_of, tensors


@dataclass
class Kept:
    """A cell that ran with its graph: what its backward needs, and none of its results."""

    state: Leaves  # before it, cut off from earlier cells; a tensor that fills two places is one object
    inputs: Leaves  # likewise
    after: list[GradientEdge | None]  # for each leaf of the state after it
    outputs: list[GradientEdge | None]


@dataclass
class First:
    """The first time step, and what it tells about all."""

    sizes: Sizes  # as scan holds them: state that is in the outputs takes nothing
    plain: Sizes  # as the plain loop holds them
    captured: list[Tensor]  # parameters and other tensors outside that need a gradient
    often: list[bool]  # for each of them: whether a cell uses it more than once
    needs: tuple[bool, ...]
    quiet: bool
    random: bool
    shared: list[int | None]  # for each leaf of the state: the output that is the same tensor
    passes: tuple[int | None, ...]  # for each leaf of the state after it the one before it that it hands on
    twins: bool  # whether a tensor fills two places of the state
    kept: Kept
    outputs: list[Any]
    state: Leaves  # after it


class Generator:
    """The state of torch's generator on one device."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.module = device, None if device.type == "cpu" else torch.get_device_module(device)

    def get(self) -> Tensor:
        """A copy of the state."""
        if self.module is None:
            return torch.get_rng_state()
        found: Tensor = self.module.get_rng_state(self.device)
        return found

    def set(self, state: Tensor) -> None:
        """Go on from a state."""
        if self.module is None:
            torch.set_rng_state(state)
        else:
            self.module.set_rng_state(state, self.device)


def run_with_graph(
    cell: Cell,
    time_step: int,
    inputs: Sequence[Tensor],
    state: Sequence[Tensor],
    mask: Tensor | None,
    needs: Sequence[bool],
    *,
    twins: bool = True,
) -> tuple[list[Any], Leaves, Kept]:
    """Run one cell under autograd, cut off from what was before; `twins`: a tensor may fill two places of the state."""
    with torch.enable_grad():
        before = [leaf.detach().requires_grad_(needed) for leaf, needed in zip(state, needs, strict=True)]
        if twins:
            one = {id(leaf): cut for leaf, cut in reversed(list(zip(state, before, strict=True)))}
            before = [one[id(leaf)] for leaf in state]
        given = [leaf.detach().requires_grad_() if leaf.requires_grad else leaf for leaf in inputs]
        outputs, after = cell(time_step, given, before, mask)
        known: dict[int, GradientEdge | None] = {}
        return outputs, after, Kept(before, given, _edges(after, known), _edges(outputs, known))


def _edges(leaves: Iterable[Any], known: dict[int, GradientEdge | None]) -> list[GradientEdge | None]:
    """The edges of these tensors; those of tensors that fill several places are found once."""
    found = []
    for leaf in leaves:
        if id(leaf) not in known:
            known[id(leaf)] = get_gradient_edge(leaf) if leaf is not None and leaf.requires_grad else None
        found.append(known[id(leaf)])
    return found


def first_time_step(
    function: Callable[..., Any], cell: Cell, inputs: Sequence[Tensor], mask: Tensor | None, generator: Generator
) -> First | None:
    """Run the first time step; None where nothing needs a gradient. The generator has then moved on."""
    before, begin = cell.state, generator.get()
    place, key = memory(function, [*inputs, *before], mask)
    known = place.get(key)
    watched: Leaves = []
    if known is None:
        given = [leaf.detach() for leaf in before]
        with torch.no_grad(), Watch() as watch:
            outputs, after = cell(0, inputs, given, mask)
        passes = tuple(next((place for place, one in enumerate(given) if one is leaf), None) for leaf in after)
        watched = tensors(outputs, after)
        known = Known((False,) * len(before), False, tuple(watch.foreign.values()), passes)
        del watch
    needs = tuple(leaf.requires_grad or need for leaf, need in zip(before, known.needs, strict=True))
    while True:
        generator.set(begin)
        saved: dict[int, torch.UntypedStorage] = {}

        def note(tensor: Tensor, saved: dict[int, torch.UntypedStorage] = saved) -> Tensor:
            saved[storage_key(tensor)] = tensor.untyped_storage()
            return tensor.detach()

        start = _now()
        with saved_tensors_hooks(note, lambda tensor: tensor):
            outputs, after, kept = run_with_graph(cell, 0, inputs, before, mask, needs)
        reached = tuple(need or leaf.requires_grad for need, leaf in zip(needs, after, strict=True))
        if reached == needs:
            break
        needs = reached
    if not any(leaf.requires_grad for leaf in tensors(outputs, after)):
        return None
    quiet = known.quiet or (bool(watched) and _same(watched, tensors(outputs, after)))
    place[key] = Known(needs, quiet, known.foreign, known.passes)
    random = not torch.equal(begin, generator.get())
    own = {id(leaf) for leaf in (*kept.state, *kept.inputs)}
    captured, often = _captured(function, kept, own, start)
    if any(one is None for one in captured):
        end = generator.get()
        captured = _find(cell, inputs, before, mask, needs, captured, kept, start)
        generator.set(end)
    shared = _shared(outputs, after, kept)
    free = {storage_key(leaf) for leaf in (*inputs, *captured, mask) if leaf is not None}
    free |= {storage.cdata for storage in known.foreign}
    measured = [
        _sizes(saved, before, after, free, begin.nbytes if random else 0, which)
        for which in (shared, [None] * len(after))
    ]
    return First(
        sizes=measured[0],
        plain=measured[1],
        captured=[one for one in captured if one is not None],
        often=often,
        needs=needs,
        quiet=quiet,
        random=random,
        shared=shared,
        passes=known.passes,
        twins=any(len({id(leaf) for leaf in leaves}) < len(leaves) for leaves in (before, after)),
        kept=kept,
        outputs=outputs,
        state=after,
    )


# ---------------------------------------------------------------------------------------------------- what it captures


def _now() -> int:
    """The number of autograd's next node in this thread."""
    with torch.enable_grad():
        node = torch.empty(0, requires_grad=True).view_as(torch.empty(0)).grad_fn
    assert node is not None
    return sequence_number(node)


def _walk(
    kept: Kept, start: int, ends: Container[tuple[Any, int]] = ()
) -> tuple[dict[int, tuple[Any, int]], dict[tuple[Any, int], int]]:
    """The leaves that a cell's graph ends in, and the edges into older graphs, each with the number of its uses."""
    seen = {edge.node for edge in (*kept.after, *kept.outputs) if edge is not None}
    waiting = list(seen)
    leaves: dict[int, tuple[Any, int]] = {}
    older: dict[tuple[Any, int], int] = {}
    while waiting:
        node = waiting.pop()
        for following, number in node.next_functions:
            if following is None or (following, number) in ends:
                continue
            leaf = getattr(following, "variable", None)
            if leaf is not None:
                leaves[id(leaf)] = leaf, leaves.get(id(leaf), (leaf, 0))[1] + 1
            elif sequence_number(following) < start:
                older[following, number] = older.get((following, number), 0) + 1
            elif following not in seen:
                seen.add(following)
                waiting.append(following)
    return leaves, older


def _captured(function: Any, kept: Kept, own: set[int], start: int) -> tuple[list[Tensor | None], list[bool]]:
    """The tensors outside the cell that need a gradient, None for those that are not leaves."""
    leaves, older = _walk(kept, start)
    found = {id_: leaf for id_, (leaf, _) in leaves.items() if id_ not in own}
    owner = owner_of(function)
    if isinstance(owner, torch.nn.Module):  # a later time step may use parameters that the first one does not
        found |= {id(one): one for one in owner.parameters() if one.requires_grad}
    uses = [leaves[id_][1] if id_ in leaves else 0 for id_ in found]
    return [*found.values(), *[None] * len(older)], [count != 1 for count in (*uses, *older.values())]


class _Look(TorchFunctionMode):
    """Remembers the tensors with a history that a cell is seen to use."""

    def __init__(self, wanted: Iterable[tuple[Any, int]]) -> None:
        super().__init__()
        self.wanted = set(wanted)
        self.found: dict[tuple[Any, int], Tensor] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in tensors(args, kwargs or {}):
            if tensor.grad_fn is not None and (tensor.grad_fn, tensor.output_nr) in self.wanted:
                self.found[tensor.grad_fn, tensor.output_nr] = tensor
        return func(*args, **(kwargs or {}))


def _find(
    cell: Cell,
    inputs: Sequence[Tensor],
    state: Leaves,
    mask: Tensor | None,
    needs: Sequence[bool],
    captured: list[Tensor | None],
    kept: Kept,
    start: int,
) -> list[Tensor | None]:
    """The captured tensors, also those with a history, for which the first time step runs once more."""
    _, older = _walk(kept, start)
    with _Look(older) as look:
        run_with_graph(cell, 0, inputs, state, mask, needs)
    missing = [edge for edge in older if edge not in look.found]
    if missing:
        raise UsageError(
            f"the cell uses a tensor from outside that was made by {missing[0][0].name()} and needs a gradient, and it "
            "can't be seen which.",
            hint="pass it to the cell as a part of the state, or scan without a budget.",
        )
    return [*(one for one in captured if one is not None), *(look.found[edge] for edge in older)]


def unknown_leaf(kept: Kept, captured: Sequence[Tensor]) -> Tensor | None:
    """A tensor outside that a later time step uses and the first one did not."""
    leaves, _ = _walk(kept, 0, {(one.grad_fn, one.output_nr) for one in captured})
    known = {id(leaf) for leaf in (*captured, *kept.state, *kept.inputs)}
    return next((leaf for id_, (leaf, _) in leaves.items() if id_ not in known), None)


# -------------------------------------------------------------------------------------------------------------- sizes


def _sizes(
    saved: dict[int, torch.UntypedStorage],
    before: Leaves,
    after: Leaves,
    free: set[int],
    generator_bytes: int,
    shared: Sequence[int | None],
) -> Sizes:
    """What a cell and a state take, in bytes of whole storages; `free` storages are there anyway."""
    keys = [(storage_key(old), storage_key(new)) for old, new in zip(before, after, strict=True)]
    state = first = second = both = 0
    counted: set[int] = set()
    for (old, new), leaf, output in zip(keys, after, shared, strict=True):
        if new in free or new in counted or old == new or output is not None:
            continue
        counted.add(new)
        nbytes = leaf.untyped_storage().nbytes()
        state += nbytes
        first += nbytes * (old in saved)
        second += nbytes * (new in saved)
        both += nbytes * (old in saved or new in saved)
    apart = free | counted | {old for old, _ in keys}
    inside = sum(storage.nbytes() for key, storage in saved.items() if key not in apart)
    return Sizes(state + generator_bytes, inside + first + second, first, second, both)


def _shared(outputs: list[Any], after: Leaves, kept: Kept) -> list[int | None]:
    """For each leaf of the state the output that is the same tensor, so that it need not be stored twice."""
    old = {id(leaf) for leaf in kept.state}
    places = {id(one): place for place, one in reversed(list(enumerate(outputs))) if one is not None}
    plain = [
        leaf.is_contiguous() and leaf.stride() == torch.empty(leaf.shape, device="meta").stride() for leaf in after
    ]
    return [
        places.get(id(leaf)) if fits and id(leaf) not in old else None for leaf, fits in zip(after, plain, strict=True)
    ]


def _same(ones: Leaves, others: Leaves) -> bool:
    return len(ones) == len(others) and all(
        one.dtype == other.dtype
        and one.stride() == other.stride()
        and torch.equal(_bits(one.detach()), _bits(other.detach()))
        for one, other in zip(ones, others, strict=True)
    )


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)
