"""What a caller does with a model that is there in parts: see it whole, save it, go on with it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from lowtide import tree
from lowtide.captured import optimizers_of
from lowtide.errors import UsageError
from lowtide.execute.wholes import packed_leaf
from lowtide.forms import BLOCK, MASK, SCALES, VALUES, layout_of, wholes
from lowtide.graph import Graph
from lowtide.packed import Content, Packed, make_plain, mask_bits, put_in_parts
from lowtide.rewrite.sparse import room

SAME = "fit the same model with the same allow."


def packed_batch(graph: Graph, batch: tuple[Any, ...]) -> tuple[Any, ...]:
    """The batch with those tensors in parts that the step wants so."""
    wanted = {whole.path: layout_of(graph, whole) for whole in wholes(graph) if whole.kind == "batch"}
    leaves, structure = tree.flatten(batch)
    found = [
        packed_leaf(leaf, wanted[path], "batch") if path in wanted and isinstance(leaf, torch.Tensor) else leaf
        for path, leaf in zip(structure.paths(), leaves, strict=True)
    ]
    return tuple(structure.build(found))


@contextmanager
def dense(model: torch.nn.Module, say: Callable[[str], None]) -> Iterator[torch.nn.Module]:
    """The model with plain tensors; what changed inside the block is packed again after it."""
    packed = [tensor for tensor in _tensors(model) if isinstance(tensor, Packed)]
    contents = [tensor.content for tensor in packed]
    nbytes = sum(tensor.numel() * tensor.element_size() for tensor in packed)
    say(f"the model is plain now: {nbytes:,} bytes more, beside {sum(one.nbytes for one in contents):,} in parts")
    for tensor in packed:
        make_plain(tensor)
    try:
        yield model
    finally:
        for tensor, content in zip(packed, contents, strict=True):
            if not isinstance(tensor, Packed):
                before, now = content.dense(), tensor.detach()
                if not torch.equal(before.view(torch.int32), now.view(torch.int32)):
                    content.write(now)
                put_in_parts(tensor, content)


def state_of(model: torch.nn.Module, optimizer: Any) -> dict[str, dict[str, torch.Tensor]]:
    """All parts of parameters and states, by name: what the rest of a run depends on to the bit."""
    return {
        name: {part: one.clone() for part, one in content.parts.items()} for name, content in _named(model, optimizer)
    }


def load_state(
    model: torch.nn.Module, optimizer: Any, state: Mapping[str, Mapping[str, torch.Tensor]], *, moved: bool = False
) -> None:
    """Put the parts back; all of them or, where one does not fit, none. `moved`: weights go from layer to layer."""
    found = dict(_named(model, optimizer))
    if found.keys() != state.keys():
        odd = sorted(found.keys() ^ state.keys())
        raise UsageError(
            f"the saved parts are not those of this step: {', '.join(odd[:3])}.",
            hint="take a step before they are loaded, with the same model and the same allow.",
        )
    for name, content in found.items():
        parts = state[name]
        kinds = {part: (one.dtype, one.dim()) for part, one in content.parts.items()}
        if {part: (one.dtype, one.dim()) for part, one in parts.items()} != kinds:
            raise UsageError(f"the saved parts of {name!r} have another form.", hint="fit with the same allow.")
        if not _fit(content, parts, moved=moved):
            raise UsageError(f"the saved parts of {name!r} are of another size.", hint=SAME)
    if sum(state[name][VALUES].numel() - one.parts[VALUES].numel() for name, one in found.items()):
        raise UsageError("the saved sparse weights are not as many as those of this step.", hint=SAME)
    for name, content in found.items():
        for part, one in state[name].items():
            known = content.parts[part]
            if known.shape == one.shape:
                known.copy_(one)
            else:  # weights have moved between layers
                content.parts[part] = one.clone()


def _fit(content: Content, parts: Mapping[str, torch.Tensor], *, moved: bool) -> bool:
    """Whether saved parts have the sizes of a tensor's; where weights move, a layer may have others than it has."""
    sizes = {part: one.shape for part, one in content.parts.items()}
    count, elements = content.layout.count, math.prod(content.size)
    if moved and count is not None and MASK in parts:
        there = int(mask_bits(parts[MASK].contiguous(), elements).sum()) if parts[MASK].shape == sizes[MASK] else -1
        if there > room(count, elements):
            return False
        sizes[VALUES] = torch.Size([there])
        if SCALES in sizes:
            sizes[SCALES] = torch.Size([-(-there // BLOCK)])
    return sizes == {part: one.shape for part, one in parts.items()}


def _named(model: torch.nn.Module, optimizer: Any) -> Iterator[tuple[str, Content]]:
    """The contents of a model's parameters and of its optimizers' state."""
    names = {id(tensor): name for name, tensor in model.named_parameters()}
    for name, tensor in model.named_parameters():
        if isinstance(tensor, Packed):
            yield name, tensor.content
    for one in optimizers_of(optimizer):
        for parameter, entries in one.state.items():
            for key, item in entries.items():
                if isinstance(item, Packed):
                    yield f"{names.get(id(parameter), 'optimizer')} {key}", item.content


def _tensors(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    yield from model.parameters()
    yield from model.buffers()
