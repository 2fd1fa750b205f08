"""A step is captured with tensors that lie apart in memory: a batch may not lie where the step writes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from lowtide.errors import UsageError
from lowtide.graph import Graph
from lowtide.packed import Packed
from lowtide.watch.memory import spans


class Apart:
    """Looks at the tensors of a batch before each step that writes to some of its inputs."""

    def __init__(self, graph: Graph) -> None:
        values = graph.values
        written = {values[new].storage for op in graph.ops for new, _ in op.updates}
        named = {number: values[item.value] for number, item in enumerate(graph.inputs)}
        self._batch = [(number, one.name) for number, one in named.items() if one.kind == "batch"]
        self._written = [(number, one.name) for number, one in named.items() if one.storage in written]
        self._changed = {name for _, name in {*self._batch}.intersection(self._written)}
        self._persistent = [row for row in self._written if named[row[0]].kind in ("parameter", "buffer")]
        self._held: list[Any] | None = None  # the inputs of which the next is known
        self._homes: dict[int, str] = {}  # by the address of a storage, what the step writes to there

    def check(self, inputs: Sequence[Any], held: list[Any] | None) -> None:
        """Raise where a tensor of the batch lies where the step writes; `held` are the inputs that stay the same."""
        if not self._written or not self._batch:
            return
        if self._held is not held or held is None:
            there = ((inputs[number], name) for number, name in self._persistent)
            self._homes, self._held = {_address(one): name for one, name in there if _lies(one)}, held
        batch = {name: inputs[number] for number, name in self._batch if _lies(inputs[number])}
        for name, tensor in batch.items():
            if (home := self._homes.get(_address(tensor))) is not None:
                _refuse(name, home)
        if self._changed and len(batch) > 1:
            found = spans(batch)
            for start, end, name in [one for one in found if one[2] in self._changed]:
                for other, last, beside in found:
                    if beside != name and start < last and other < end:
                        _refuse(beside, name)


def _lies(tensor: Any) -> bool:
    """Whether it has an address."""
    return isinstance(tensor, torch.Tensor) and not isinstance(tensor, Packed) and tensor.numel() > 0


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _refuse(name: str, home: str) -> None:
    raise UsageError(
        f"{name} shares memory with {home}, which the step changes in place, and was captured apart from it.",
        hint="give the step a copy: .clone().",
    )
