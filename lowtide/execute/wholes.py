"""What of the caller's a program has in parts: parameters, optimizer state, the batch.

The owner's tensors are put into parts when a step first needs them so, and stay the same objects.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import torch

from lowtide.captured import Captured
from lowtide.errors import LowtideWarning
from lowtide.execute.stale import StaleError
from lowtide.forms import MASK, VALUES, Layout, Whole, layout_of, wholes
from lowtide.packed import Content, Packed, make_plain, put_in_parts


@dataclass(frozen=True)
class _Wanted:
    """An input in parts, and how the program wants it."""

    whole: Whole
    layout: Layout

    @property
    def name(self) -> str:
        """What it is called."""
        return " ".join(map(str, self.whole.path))


class Wholes:
    """Finds the parts of a captured step's inputs in the caller's objects."""

    def __init__(self, captured: Captured) -> None:
        self.captured = captured
        graph = captured.graph
        found = [_Wanted(whole, layout_of(graph, whole)) for whole in wholes(graph)]
        self.parameters = [one for one in found if one.whole.kind == "parameter"]
        self.states = [one for one in found if one.whole.kind == "state"]
        self.batch = {one.whole.path: one for one in found if one.whole.kind == "batch"}
        self.names = frozenset(str(one.whole.path[0]) for one in self.parameters)
        self._plain = [name for name in captured.slots if name not in self.names]

    def settle(self) -> None:
        """Put all parameters and states into the form that the program has them in."""
        for name in self._plain:
            slot = self.captured.slots[name]
            if isinstance(slot.holder[slot.key], Packed):
                make_plain(slot.holder[slot.key])
        dropped = sum(self._content(one, self._parameter(one), None)[1] for one in self.parameters)
        if dropped:
            text = (
                f"{dropped:,} weights that were not zero are zero now: the smallest ones, for which there is no room."
            )
            warnings.warn(text, LowtideWarning, stacklevel=6)
        if self.states and any(self._state(one) is None for one in self.states):
            self.captured.prepare()
        for one in self.states:
            tensor = self._state(one)
            if not isinstance(tensor, torch.Tensor):
                raise StaleError(f"the optimizer's state {one.name!r} is not there, or not as at capture.")
            self._content(one, tensor, self._parameter(one))

    def put(self, into: list[Any]) -> None:
        """Put the parts of parameters and states into their places of a list."""
        for one in (*self.parameters, *self.states):
            tensor = self._parameter(one) if one.whole.kind == "parameter" else self._state(one)
            for part, place in one.whole.inputs.items():
                into[place] = tensor.content.parts[part]

    def put_batch(self, into: list[Any], path: tuple[str | int, ...], leaf: torch.Tensor) -> None:
        """Put the parts of a tensor of the batch into their places; what is plain is packed for this step."""
        one = self.batch[path]
        content = packed_leaf(leaf, one.layout, one.name).content
        for part, place in one.whole.inputs.items():
            into[place] = content.parts[part]

    def _content(self, one: _Wanted, tensor: torch.Tensor, parameter: torch.Tensor | None) -> tuple[Content, int]:
        """The content of a tensor, put into parts if it is not yet; and how many weights were dropped."""
        of = parameter.content if isinstance(parameter, Packed) and one.layout.count is not None else None
        if isinstance(tensor, Packed):
            if _suits(tensor.content, one.layout) and (of is None or tensor.content.parts[MASK] is of.parts[MASK]):
                return tensor.content, 0
            make_plain(tensor)
        layout = one.layout
        made = Content(tensor, layout, one.name, of=of)
        dropped = made.write(tensor.detach())
        put_in_parts(tensor, made)
        return made, dropped

    def _parameter(self, one: _Wanted) -> Any:
        slot = self.captured.slots[str(one.whole.path[0])]
        return slot.holder[slot.key]

    def _state(self, one: _Wanted) -> Any:
        owner = self.captured.owners[str(one.whole.path[0])]
        return (owner.state.get(self._parameter(one)) or {}).get(str(one.whole.path[1]))


def packed_leaf(leaf: torch.Tensor, layout: Layout, name: str) -> Packed:
    """A tensor of the batch in parts."""
    if isinstance(leaf, Packed) and _suits(leaf.content, layout):
        return leaf
    content = Content(leaf, layout, name)
    content.write(leaf)
    return Packed(content)


def _suits(content: Content, layout: Layout) -> bool:
    """Whether parts are as a program wants them; weights that moved from layer to layer since then stay there."""
    known = content.layout
    alike = (known.dtype, known.scaled, known.channel) == (layout.dtype, layout.scaled, layout.channel)
    return (
        alike
        and known.count == layout.count
        and (known.counted or not layout.counted)
        and VALUES in content.parts
        and (MASK in content.parts or known.count is None)
    )
