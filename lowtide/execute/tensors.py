"""The caller's tensors before a step: whether parameters, buffers and the optimizer's state are as at the capture.

What is as it was when it was last looked at is known quickly, by identity and by numbers (`lowtide/watch/`). All else
is looked at here, one tensor after another, and so is everything where there is no compiler.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from lowtide import private
from lowtide.captured import Captured, Slot
from lowtide.execute.stale import StaleError
from lowtide.execute.wholes import Wholes
from lowtide.forms import is_part
from lowtide.guards import Entry, Names, Place
from lowtide.packed import Packed, make_plain
from lowtide.watch.memory import Span, overlap, spans
from lowtide.watch.quick import Quick
from lowtide.watch.tensors import Rows, State, kind_of, library


class Slots:
    """The parameters and buffers of a captured step."""

    def __init__(self, captured: Captured) -> None:
        self.captured = captured
        rebound = {str(output.path[0]) for output in captured.graph.outputs if output.role == "buffer"}
        self.rebound = [name for name in captured.slots if name in rebound]  # the step leaves others at each time
        in_parts = Wholes(captured).names
        self.in_parts = [name for name in captured.slots if name in in_parts]
        self.steady = [name for name in captured.slots if name not in rebound and name not in self.in_parts]
        self._kinds = {name: kind_of(slot.holder[slot.key]) for name, slot in captured.slots.items()}
        self._spans: list[Span] = []  # of those that are steady
        self._watched: tuple[Quick, Rows] | None = None

    def check(self) -> bool:
        """Raise a StaleError where the program does not fit them; says whether others may be there than before."""
        same = self._watched is not None and all(one.same() for one in self._watched)
        for name in self.in_parts:
            self._look(name)
        if same and not self.rebound:
            return False
        steady = {} if same else {name: self._look(name) for name in self.steady}
        rebound = {name: self._look(name) for name in self.rebound}
        if not same:
            self._spans = spans(steady)
        if overlap([*self._spans, *spans(rebound)]) is not None:
            self._watched = None
            raise StaleError("parameters or buffers share memory that they did not share at capture.")
        if not same:
            self._watched = self._watch(steady)
        return not same

    def _look(self, name: str) -> torch.Tensor:
        """The tensor of this name, if the program fits it."""
        tensor = _at(self.captured.slots[name])
        if not isinstance(tensor, torch.Tensor) or kind_of(tensor) != self._kinds[name]:
            raise StaleError(f"{name!r} has other sizes, strides or dtype than at capture, or was frozen or unfrozen.")
        if not self.captured.hooked and any(private.hook_registers(tensor)):
            raise StaleError(f"{name!r} has a hook that it did not have at capture.")
        expected = self.captured.gradients.get(name)
        if expected is not None and (tensor.grad is not None) != expected:
            had, has = ("a", "none") if expected else ("no", "one")
            raise StaleError(
                f"{name!r} had {had} gradient before the step when it was captured and has {has} now.",
                hint="clear the gradients in the step, or capture again.",
            )
        return tensor

    def _watch(self, tensors: dict[str, torch.Tensor]) -> tuple[Quick, Rows] | None:
        if (found := library()) is None:
            return None
        slots = self.captured.slots
        entries = [
            Entry(Place(slots[name].holder, slots[name].key, name), tensor)
            for name, tensor in tensors.items()
            if isinstance(slots[name].holder, dict)  # else it is a list of parameters, which is compared as a whole
        ]
        registers = ((name, register) for name in tensors for register in private.hook_registers(tensors[name]))
        hooks = [Names(register, (), None, name) for name, register in registers if not self.captured.hooked]
        gradients = [name in self.captured.gradients for name in tensors]
        return Quick(entries, hooks), Rows(found, [*tensors.values()], gradients)


Settle = Callable[[int, torch.Tensor], None]  # told the number of an input, and its tensor, which was just made


class States:
    """The state that an optimizer keeps of parameters, as inputs of a program."""

    def __init__(self, captured: Captured, settle: Settle = lambda *_: None) -> None:
        self.captured, self._settle = captured, settle
        graph = captured.graph
        self._inputs = [
            (place, value, str(item.path[0]), str(item.path[1]))
            for place, item in enumerate(graph.inputs)
            if (value := graph.values[item.value]).kind == "state" and not is_part(graph, item)
        ]
        inputs = graph.inputs
        self._elsewhere = [(place, name, key) for place, _, name, key in self._inputs if inputs[place].home != "device"]
        self._kinds: list[tuple[Any, ...]] | None = None  # known when the state is there
        self._watched: list[State] | None = None

    def put(self, into: list[Any]) -> None:
        """Put them into their places of a list, where the optimizer would make them first, make them."""
        if self._watched is None or not all(one.take(into) for one in self._watched):
            self._look(into)

    def _look(self, into: list[Any]) -> None:
        self.captured.prepare(self._made)
        found = []
        wanted: dict[int, list[tuple[torch.Tensor, str, int]]] = {}
        for place, value, name, key in self._inputs:
            owner, parameter = self.captured.owners[name], _at(self.captured.slots[name])
            tensor: Any = (owner.state.get(parameter) or {}).get(key)
            if isinstance(tensor, Packed):  # by another program
                make_plain(tensor)
            fits = isinstance(tensor, torch.Tensor) and tuple(tensor.shape) == value.shape
            if not fits or str(tensor.dtype) != f"torch.{value.dtype}" or tuple(tensor.stride()) != value.stride:
                raise StaleError(f"the optimizer's state {value.name!r} is not there, or not as at capture.")
            into[place] = tensor
            found.append(kind_of(tensor))
            wanted.setdefault(id(owner), []).append((parameter, key, place))
        if self._kinds is not None and found != self._kinds:
            raise StaleError("the optimizer's state is of another kind, or was made to need a gradient.")
        self._kinds = found
        if (compiled := library()) is not None:
            owners = {id(owner): owner for owner in self.captured.owners.values()}
            self._watched = [State(compiled, owners[number], some) for number, some in wanted.items()]

    def _made(self, parameter: torch.Tensor, state: dict[str, Any]) -> None:
        """Bring state that was just made to where it lives, before more of it is made."""
        for place, name, key in self._elsewhere:
            if _at(self.captured.slots[name]) is parameter and isinstance(state.get(key), torch.Tensor):
                self._settle(place, state[key])


def _at(slot: Slot) -> Any:
    try:
        return slot.holder[slot.key]
    except (KeyError, IndexError):
        return None
