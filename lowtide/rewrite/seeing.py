"""What a pass asks about calls that it may write otherwise: how they see values, who made these, who writes to them."""

from __future__ import annotations

import torch

from lowtide.graph import Constant, Graph, Read
from lowtide.kernels.shapes import Shapes

PRODUCT, CLONE = "aten.bmm.default", "aten.clone.default"


class Other(Exception):
    """The calls are written otherwise than a pass knows."""


class Seeing:
    """A graph, and its values as calls see them."""

    def __init__(self, graph: Graph) -> None:
        self.graph, self.shapes = graph, Shapes(graph.values, graph.views)
        self.written = {old for op in graph.ops for _, old in op.updates}

    def tensor(self, read: Read) -> torch.Tensor:
        """What a call sees of a value."""
        return self.shapes.tensor(read)

    def is_copy(self, index: int) -> bool:
        """Whether an op copies what it reads into plain order."""
        op = self.graph.ops[index]
        usual = (("memory_format", Constant("memory_format", "contiguous_format")),)
        return op.target == CLONE and op.kwargs == usual and isinstance(op.args[0], Read) and not op.forgotten

    def is_reshaped(self, read: Read) -> bool:
        """Whether all of a value is seen in the order of memory."""
        seen, value = self.tensor(read), self.graph.values[read.value]
        return seen.is_contiguous() and seen.numel() * 4 == value.nbytes and str(seen.dtype) == "torch.float32"

    def is_as_made(self, read: Read) -> bool:
        """Whether a value is seen as it lies."""
        seen, value = self.tensor(read), self.graph.values[read.value]
        return (tuple(seen.shape), tuple(seen.stride()), seen.storage_offset()) == (value.shape, value.stride, 0)

    def is_turned(self, read: Read, other: Read, *, flat: bool = False) -> bool:
        """Whether one read is the other with rows and columns exchanged."""
        mine, theirs = self.tensor(read), self.tensor(other)
        theirs = (theirs.flatten(0, 1) if flat and theirs.dim() == 4 else theirs).transpose(1, 2)
        same = (mine.shape, mine.stride(), mine.storage_offset()) == (
            theirs.shape,
            theirs.stride(),
            theirs.storage_offset(),
        )
        return read.value == other.value and same

    def is_written(self, value: int) -> bool:
        """Whether somebody writes over a value, so that it may not be read later than it is."""
        return value in self.written

    def target(self, index: int) -> str:
        """What an op calls."""
        return self.graph.ops[index].target

    def both(self, product: int) -> tuple[Read, Read]:
        """What a product reads."""
        one, other = self.graph.ops[product].args
        if not isinstance(one, Read) or not isinstance(other, Read):
            raise Other
        if any(str(self.tensor(read).dtype) != "torch.float32" for read in (one, other)):
            raise Other
        return one, other

    def made_by(self, value: int, target: str) -> int:
        """The op that makes a value, which calls this."""
        maker = self.graph.maker[value]
        if maker < 0 or self.target(maker) != target:
            raise Other
        return maker

    def old(self, index: int) -> int:
        """What an op writes over."""
        if len(self.graph.ops[index].updates) != 1:
            raise Other
        return self.graph.ops[index].updates[0][1]
