"""Between the caller's objects and the program: what it is given, and what it leaves behind."""

from __future__ import annotations

import operator
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy
import torch

from lowtide import private, tree
from lowtide.captured import Captured, Computed, TensorSpec
from lowtide.errors import BatchError
from lowtide.execute.effects import repeat
from lowtide.guards import APPLY, MISSING, Change, Comparison
from lowtide.watch import Watcher, same


class StaleError(BatchError):
    """The caller's objects are not as they were when the step was captured; capture it again."""

    def __init__(self, message: str, *, hint: str | None = None, change: Change | None = None) -> None:
        super().__init__(message, hint=hint)
        self.change = change if change is not None else Change(message.split(" is ")[0], message)


class Binding:
    """Finds a captured step's inputs in the caller's objects and puts its outputs there."""

    def __init__(self, captured: Captured) -> None:
        self.captured = captured
        graph = captured.graph
        self.watcher = Watcher(captured.guards)
        self.drawn: list[Any] = []
        self.state_watch: Callable[[list[Any]], int | None] | None = None  # made when the state is there
        self.told = False  # the step's effects and new buffers are there before its end
        self.rebinds = any(output.role == "buffer" for output in graph.outputs)
        self.tensors = self.present()
        self.tensor_watch = private.tensor_watch(self.tensors)
        self.trained = [tensor for tensor in self.tensors if tensor.requires_grad]
        self.addresses = [tensor.data_ptr() for tensor in self.tensors]
        slots = [captured.slots[name] for name in captured.gradients]
        self.with_gradients, self.gradients = [slot.holder[slot.key] for slot in slots], [*captured.gradients.values()]
        batch_paths = {path: place for place, path in enumerate(captured.batch.paths())}
        self.sources: list[tuple[str, Any, Any]] = []
        for item in graph.inputs:
            kind, path = graph.values[item.value].kind, item.path
            if kind in ("parameter", "buffer"):
                slot = captured.slots[str(path[0])]
                self.sources.append(("slot", slot.holder, slot.key))
            elif kind == "state":
                slot = captured.slots[str(path[0])]
                self.sources.append((kind, (captured.owners[str(path[0])], slot), path[1]))
            elif kind == "gradient":
                self.sources.append((kind, captured.slots[str(path[0])], path[1]))
            elif kind == "batch":
                self.sources.append(("batch", batch_paths[path], None))
            elif kind == "constant":
                self.sources.append(("constant", captured.constants[int(path[0])], None))
            elif path[0] in ("number", "draw"):
                self.sources.append((str(path[0]), int(path[1]), None))
            else:
                self.sources.append(("option", int(path[0]), path[1:]))
        self.updates = bool(captured.optimizers) and any(op.phase == "update" for op in graph.ops)
        self.kept_gradients = {
            item.path[0] for item in graph.inputs if graph.values[item.value].kind == "gradient" and item.stays
        }

    def check(self, batch: tuple[Any, ...]) -> list[Any]:
        """The leaves of the batch, after checking that the program fits the call; nothing is changed."""
        try:
            leaves = self.check_batch(batch)
        except BatchError as error:
            change = Change("the batch", error.message.rstrip("."), expected=True)
            raise StaleError(error.message, hint=error.hint, change=change) from error
        changed = self.watcher.changed()
        if changed is not None:
            raise StaleError(f"{changed.what}.", hint="capture the step again.", change=changed)
        self.check_tensors()
        self.check_options()
        self.drawn = self.draw()
        return leaves

    def inputs(self, leaves: list[Any]) -> list[Any]:
        """The tensors and numbers of this call."""
        captured = self.captured
        found = []
        states = []
        for kind, place, key in self.sources:
            if kind == "slot":
                found.append(place[key])
            elif kind == "batch":
                found.append(leaves[place])
            elif kind == "state":
                owner, slot = place
                states.append(owner.state[slot.holder[slot.key]].get(key))
                found.append(states[-1])
            elif kind == "gradient":
                found.append(place.holder[place.key].grad)
            elif kind == "constant":
                found.append(place)
            elif kind == "number":
                found.append(captured.guards.numbers[place].get())
            elif kind == "draw":
                found.append(self.drawn[place])
            else:
                found.append(self.given((place, *key)))
                if isinstance(found[-1], bool) or not isinstance(found[-1], (int, float)):
                    raise StaleError(
                        f"{key[0]!r} of parameter group {place} is a {type(found[-1]).__name__}, no number."
                    )
        self.check_states(states)
        return found

    def check_states(self, states: list[Any]) -> None:
        """The optimizer's state must be there, with the sizes and dtypes of the capture."""
        if self.state_watch is None:
            graph = self.captured.graph
            values = [graph.values[item.value] for item in graph.inputs if graph.values[item.value].kind == "state"]
            for value, tensor in zip(values, states, strict=True):
                fits = isinstance(tensor, torch.Tensor) and tuple(tensor.shape) == value.shape
                if not fits or str(tensor.dtype) != f"torch.{value.dtype}" or tuple(tensor.stride()) != value.stride:
                    raise StaleError(f"the optimizer's state {value.name!r} is not there, or not as at capture.")
            self.state_watch = private.tensor_watch(states)
        try:
            different = self.state_watch(states)
        except (TypeError, AttributeError):  # something else than a tensor, or nothing, is there
            different = 0
        if different is not None:
            raise StaleError("the optimizer's state is not there, or has other sizes or dtypes than at capture.")

    def take_gradients(self) -> None:
        """The gradients that were there belong to the step now, unless they stay where they are."""
        for name in self.captured.trained:
            if name not in self.kept_gradients:
                slot = self.captured.slots[name]
                slot.holder[slot.key].grad = None

    def leave(self, outputs: Sequence[Any]) -> Any:
        """Put the gradients and buffers that are new where the step leaves them, and build its results."""
        captured = self.captured
        for output, tensor in zip(captured.graph.outputs, outputs, strict=True):
            if output.role == "gradient":
                slot = captured.slots[str(output.path[0])]
                slot.holder[slot.key].grad = tensor
            elif output.role == "buffer" and not self.told:
                slot = captured.slots[str(output.path[0])]
                slot.holder[slot.key] = tensor
        if self.updates:
            for optimizer in captured.optimizers:
                private.mark_stepped(optimizer)
        results, left = self.results(outputs)
        if not self.told:
            repeat(captured.effects, left)
        return results

    def tell(self) -> None:
        """Do what the step does to Python objects before its end, where that is known without running it."""
        if self.captured.effects:
            _, left = self.results((None,) * len(self.captured.graph.outputs))
            repeat(self.captured.effects, left)

    def results(self, outputs: Sequence[Any]) -> Any:
        """What the step returns, and what its effects leave behind."""
        return self.captured.results.build([self._result(leaf, outputs) for leaf in self.captured.result_leaves])

    def _result(self, leaf: Any, outputs: Sequence[Any]) -> Any:
        if isinstance(leaf, tuple):
            return leaf[0]
        if isinstance(leaf, Computed):
            number = leaf.expression.value(self.given, APPLY)
            return int(number) if leaf.integer else number
        return outputs[leaf]

    def check_batch(self, batch: tuple[Any, ...]) -> list[Any]:
        """The leaves of the batch, if it looks like the example."""
        captured = self.captured
        leaves, structure = tree.flatten(batch)
        if structure != captured.batch:
            raise BatchError(
                f"the batch is {structure}, the step was captured with {captured.batch}.",
                hint="pass the same arguments as in `example`.",
            )
        for path, leaf, expected in zip(structure.paths(), leaves, captured.batch_leaves, strict=True):
            name = "argument " + ".".join(map(str, path))
            if not isinstance(expected, TensorSpec):
                if type(leaf) is not type(expected) or leaf != expected:
                    raise BatchError(
                        f"{name} is {leaf!r}, the step was captured with {expected!r}.",
                        hint="what is no tensor is a constant of the captured step; capture again for another one.",
                    )
                continue
            if not isinstance(leaf, torch.Tensor):
                raise BatchError(f"{name} is a {type(leaf).__name__}, the step was captured with {expected}.")
            if (
                tuple(leaf.shape) != expected.shape
                or leaf.dtype != getattr(torch, expected.dtype)
                or (str(leaf.device) != expected.device)
            ):
                found = f"{str(leaf.dtype).removeprefix('torch.')}[{'x'.join(map(str, leaf.shape))}] on {leaf.device}"
                raise StaleError(
                    f"{name} is {found}, the step was captured with {expected}.",
                    hint="pad or drop the odd batch (drop_last=True), or capture the step for this one too.",
                )
            if leaf.requires_grad != expected.requires_grad:
                does = "requires" if leaf.requires_grad else "does not require"
                raise StaleError(f"{name} {does} a gradient, otherwise than when the step was captured.")
            if tuple(leaf.stride()) != expected.stride and leaf.numel() > 1:
                raise StaleError(
                    f"{name} has strides {tuple(leaf.stride())}, the step was captured with {expected.stride}.",
                    hint="pass it in the same memory format as the example: x.contiguous() or channels_last.",
                )
        return leaves

    def check_tensors(self) -> None:
        """Parameters and buffers must be as at the capture, and which of them train and have gradients."""
        captured = self.captured
        if self.rebinds:
            self.tensors = self.present()
        if (different := self.tensor_watch(self.tensors)) is not None:
            name = list(captured.slots)[different]
            raise StaleError(f"{name!r} has other sizes, strides or dtype than at capture, or was frozen or unfrozen.")
        if private.any_hooks(self.trained):
            raise StaleError("a parameter has a hook that it did not have at capture.")
        addresses = [tensor.data_ptr() for tensor in self.tensors]
        if addresses != self.addresses:
            if len(set(addresses)) < len(set(self.addresses)):
                raise StaleError("parameters or buffers share memory that they did not share at capture.")
            self.addresses = addresses
        if [tensor.grad is not None for tensor in self.with_gradients] == self.gradients:
            return
        for name, present in captured.gradients.items():
            slot = captured.slots[name]
            if (slot.holder[slot.key].grad is not None) != present:
                had, has = ("a", "none") if present else ("no", "one")
                raise StaleError(
                    f"{name!r} had {had} gradient before the step when it was captured and has {has} now.",
                    hint="clear the gradients in the step, or capture again.",
                )

    def present(self) -> list[Any]:
        """The parameters and buffers that are there now."""
        return [slot.holder[slot.key] for slot in self.captured.slots.values()]

    def given(self, path: tuple[str | int, ...]) -> Any:
        """A number that the caller gives, as it is now."""
        if path[0] == "number":
            return self.captured.guards.numbers[int(path[1])].get()
        if path[0] == "draw":
            return self.drawn[int(path[1])]
        option: Any = self.captured.groups[int(path[0])]
        for part in path[1:]:
            option = option[part]
        return option

    def check_options(self) -> None:
        """Hyperparameters that are constants of the graph, and comparisons of those that are not, must be the same."""
        captured = self.captured
        groups = captured.groups
        if len(groups) != len(captured.options):
            raise StaleError(f"the optimizer has {len(groups)} parameter groups, at capture {len(captured.options)}.")
        for number, (group, options) in enumerate(zip(groups, captured.options, strict=True)):
            members, parameters = captured.members[number], group["params"]
            if len(members) != len(parameters) or not all(map(operator.is_, members, parameters)):
                raise StaleError(f"parameter group {number} has other parameters than at capture.")
            for key, option in options.items():
                now = group.get(key, MISSING)
                if now is not option and (now is MISSING or not same(option, now)):
                    raise StaleError(
                        f"{key!r} of parameter group {number} is {now!r}, at capture {option!r}.",
                        hint="only lr, momentum, betas and weight_decay may change between steps; capture again.",
                    )
        for place in captured.guards.numbers:
            if isinstance(place.get(), bool) or not isinstance(place.get(), (int, float)):
                raise StaleError(f"{place.name} is no number any more.", hint="capture again.")
        for comparison in captured.guards.comparisons:
            if comparison.draws or self.holds(comparison):
                continue
            name = comparison.show([place.name for place in captured.guards.numbers])
            raise StaleError(
                f"{name} makes the step take another path than at capture.",
                hint="capture again.",
                change=Change(name, f"{name} is otherwise than at capture"),
            )

    def holds(self, comparison: Comparison) -> bool:
        """Whether a comparison has the answer that it had at capture."""
        one, other = (side.value(self.given, APPLY) for side in (comparison.expression, comparison.other))
        return bool(getattr(operator, comparison.comparison)(one, other)) == comparison.answer

    def draw(self) -> list[Any]:
        """The numbers that the step draws from Python's and numpy's generators; put back where it is another's turn."""
        guards = self.captured.guards
        if not guards.draws:
            return []
        states = random.getstate(), numpy.random.get_state()
        self.drawn = []
        for draw in guards.draws:
            home = private.python_generator() if draw.generator == "random" else private.numpy_generator()
            value = getattr(home, draw.method)(*draw.args, **dict(draw.kwargs))
            if draw.value is not MISSING and not same(draw.value, value):
                break
            self.drawn.append(float(value) if draw.value is MISSING else value)
        else:
            if all(map(self.holds, (one for one in guards.comparisons if one.draws))):
                return self.drawn
        random.setstate(states[0])
        numpy.random.set_state(states[1])
        where = ", ".join(dict.fromkeys(draw.source for draw in guards.draws))
        expected = all(draw.value is MISSING for draw in guards.draws)  # few outcomes, by comparisons of floats
        raise StaleError(
            f"the numbers that are drawn at {where} make the step take another path.",
            hint="capture again.",
            change=Change(f"the draws at {where}", "they lead elsewhere", expected=expected),
        )
