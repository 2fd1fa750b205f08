"""Between the caller's objects and the program: what it is given, and what it leaves behind."""

from __future__ import annotations

import operator
import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy
import torch

from lowtide import private
from lowtide.captured import Captured, Computed, Slot, TensorSpec
from lowtide.errors import BatchError
from lowtide.execute.apart import Apart
from lowtide.execute.batch import Batch, is_settled, key_of
from lowtide.execute.effects import repeat
from lowtide.execute.stale import StaleError
from lowtide.execute.tensors import Settle, Slots, States
from lowtide.execute.wholes import Wholes
from lowtide.forms import is_part
from lowtide.guards import APPLY, MISSING, Change, Comparison, Entry, Place
from lowtide.packed import plain
from lowtide.watch import Watcher, same
from lowtide.watch.quick import Quick


class _Options:
    """Parameter groups with their constant options and parameters, to be compared by identity."""

    def __init__(self, groups: list[dict[str, Any]], constants: Sequence[Mapping[str, Any]]) -> None:
        self._groups = [*groups]
        keys = [(group, key) for group, options in zip(groups, constants, strict=True) for key in ("params", *options)]
        entries = [Entry(Place(group, key, str(key)), group[key]) for group, key in keys]
        plain = all(type(group["params"]) is list for group in groups)
        lists = [(group["params"], group["params"]) for group in groups] if plain else ()
        self._quick = Quick(entries, lists=lists) if plain else None

    def same(self, groups: list[dict[str, Any]]) -> bool:
        """Whether these are the same groups, and nothing in them was replaced."""
        alike = len(groups) == len(self._groups) and all(map(operator.is_, groups, self._groups))
        return alike and self._quick is not None and self._quick.same()


class Binding:
    """Finds a captured step's inputs in the caller's objects and puts its outputs there."""

    def __init__(self, captured: Captured, settle: Settle = lambda *_: None) -> None:
        self.captured = captured
        graph = captured.graph
        self.key, self.settled = key_of(captured), is_settled(captured.batch_leaves)
        self.watcher = Watcher(captured.guards, [effect.place for effect in captured.effects])
        self.number_kinds = [type(place.get()) for place in captured.guards.numbers]
        self.drawn: list[Any] = []
        self.told = False  # the step's effects and new buffers are there before its end
        self.slots, self.states, self.wholes = Slots(captured), States(captured, settle), Wholes(captured)
        self.apart, self.optimizers = Apart(graph), captured.optimizers
        self.options: _Options | None = None  # as they were when they were last looked at
        self.leaf_kinds = [_kind(leaf) for leaf in captured.batch_leaves]
        self.comparisons = [one for one in captured.guards.comparisons if not one.draws]
        self.held: list[Any] | None = None  # the fixed inputs at their places
        self.leaf_paths = [*captured.batch.paths()]
        batch_paths = {path: place for place, path in enumerate(self.leaf_paths)}
        self.fixed: list[tuple[int, Slot]] = []  # inputs that are the same tensors at every step, and where they are
        self.moving: list[tuple[int, str, Any, Any]] = []  # inputs that are others, or may be
        for number, item in enumerate(graph.inputs):
            kind, path = graph.values[item.value].kind, item.path
            if is_part(graph, item):
                continue
            if kind in ("parameter", "buffer") and path[0] not in self.slots.rebound:
                self.fixed.append((number, captured.slots[str(path[0])]))
            elif kind == "constant":
                self.fixed.append((number, Slot(captured.constants, int(path[0]))))
            elif kind == "buffer":
                self.moving.append((number, kind, captured.slots[str(path[0])], None))
            elif kind == "gradient":
                self.moving.append((number, kind, captured.slots[str(path[0])], path[1]))
            elif kind == "batch":
                self.moving.append((number, kind, batch_paths[path], None))
            elif kind != "state" and path[0] in ("number", "draw"):
                self.moving.append((number, str(path[0]), int(path[1]), None))
            elif kind != "state":
                self.moving.append((number, "option", int(path[0]), path[1:]))
        self.updates = bool(captured.optimizers) and any(op.phase == "update" for op in graph.ops)
        self.kept_gradients = {
            item.path[0] for item in graph.inputs if graph.values[item.value].kind == "gradient" and item.persistent
        }

    def check(self, batch: Batch) -> list[Any]:
        """The leaves of the batch, after checking that the program fits the call; nothing is changed."""
        try:
            leaves = self.check_batch(batch)
        except BatchError as error:
            change = Change("the batch", error.message.rstrip("."), expected=True)
            raise StaleError(error.message, hint=error.hint, change=change) from error
        changed = self.watcher.changed()
        if changed is not None:
            raise StaleError(f"{changed.what}.", hint="capture the step again.", change=changed)
        if self.slots.check():
            self.held = None
        self.check_options()
        self.drawn = self.draw()
        return leaves

    def take(self, batch: Batch) -> list[Any]:
        """What the program is given, if it fits this batch and the model; the optimizer's state is made if missing."""
        return self.inputs(self.check(batch))

    def inputs(self, leaves: list[Any]) -> list[Any]:
        """The tensors and numbers of this call."""
        self.wholes.settle()
        found = self.hold()
        self.states.put(found)
        self.wholes.put(found)
        self.fill(found, leaves)
        self.apart.check(found, self.held)
        return found

    def hold(self) -> list[Any]:
        """A list for all inputs, with those at their places that are the same at every step."""
        if self.held is None:
            self.held = [None] * len(self.captured.graph.inputs)
            for number, slot in self.fixed:
                self.held[number] = slot.holder[slot.key]
        return self.held.copy()

    def fill(self, found: list[Any], leaves: list[Any]) -> None:
        """Put the inputs into their places that may be others at every step."""
        for path in self.wholes.batch:
            self.wholes.put_batch(found, path, leaves[self.leaf_paths.index(path)])
        for number, kind, place, key in self.moving:
            if kind == "batch":
                found[number] = plain(leaves[place])
            elif kind == "buffer":
                found[number] = place.holder[place.key]
            elif kind == "gradient":
                found[number] = place.holder[place.key].grad
            elif kind == "number":
                found[number] = self.captured.guards.numbers[place].get()
            elif kind == "draw":
                found[number] = self.drawn[place]
            else:
                found[number] = option = self.given((place, *key))
                if isinstance(option, bool) or not isinstance(option, (int, float)):
                    raise StaleError(f"{key[0]!r} of parameter group {place} is a {type(option).__name__}, no number.")

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
            for optimizer in self.optimizers:
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

    def check_batch(self, batch: Batch) -> list[Any]:
        """The leaves of the batch, if it looks like the example."""
        captured = self.captured
        leaves, structure = batch.leaves, batch.structure
        if self.settled and batch.key == self.key:
            return leaves
        if structure != captured.batch:
            raise BatchError(
                f"the batch is {structure}, the step was captured with {captured.batch}.",
                hint="pass the same arguments as in `example`.",
            )
        for number, (leaf, expected) in enumerate(zip(leaves, captured.batch_leaves, strict=True)):
            if isinstance(leaf, torch.Tensor) and _kind(leaf) == self.leaf_kinds[number]:
                continue
            name = "argument " + ".".join(map(str, self.leaf_paths[number]))
            if not isinstance(expected, TensorSpec):
                if not _alike(expected, leaf):
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

    def groups(self) -> list[dict[str, Any]]:
        """The parameter groups of all optimizers, as they are now."""
        if len(self.optimizers) == 1:
            return self.optimizers[0].param_groups  # type: ignore[no-any-return]
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def given(self, path: tuple[str | int, ...]) -> Any:
        """A number that the caller gives, as it is now."""
        if path[0] == "number":
            return self.captured.guards.numbers[int(path[1])].get()
        if path[0] == "draw":
            return self.drawn[int(path[1])]
        option: Any = self.groups()[int(path[0])]
        for part in path[1:]:
            option = option[part]
        return option

    def check_options(self) -> None:
        """Hyperparameters that are constants of the graph, and comparisons of those that are not, must be the same."""
        captured = self.captured
        groups = self.groups()
        if self.options is None or not self.options.same(groups):
            self.look_at_options(groups)
            self.options = _Options(groups, captured.options)
        for place, kind in zip(captured.guards.numbers, self.number_kinds, strict=True):
            if type(now := place.get()) is not kind:  # 2 and 2.0 make other numbers, and tensors of other types
                what = f"{place.name} is a {type(now).__name__}, at capture it was a {kind.__name__}"
                raise StaleError(f"{what}.", hint="capture again.", change=Change(place.name, what))
        for comparison in self.comparisons:
            if self.holds(comparison):
                continue
            name = comparison.show([place.name for place in captured.guards.numbers])
            raise StaleError(
                f"{name} makes the step take another path than at capture.",
                hint="capture again.",
                change=Change(name, f"{name} is otherwise than at capture"),
            )

    def look_at_options(self, groups: list[dict[str, Any]]) -> None:
        """Raise a StaleError where the program does not fit the parameter groups."""
        captured = self.captured
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


def _kind(leaf: Any) -> tuple[Any, ...] | None:
    """What a tensor of the batch must be, quickly compared."""
    if isinstance(leaf, TensorSpec):
        return leaf.shape, getattr(torch, leaf.dtype), torch.device(leaf.device), leaf.requires_grad, leaf.stride
    if isinstance(leaf, torch.Tensor):
        return tuple(leaf.shape), leaf.dtype, leaf.device, leaf.requires_grad, leaf.stride()
    return None


def _alike(expected: Any, leaf: Any) -> bool:
    """Whether something in the batch that is no tensor may stand for what the step was captured with."""
    if same(expected, leaf):
        return True
    if type(leaf) is not type(expected) or isinstance(leaf, numpy.ndarray | float | complex):
        return False
    inside = [
        getattr(one, "__dict__", {}) for one in (expected, leaf)
    ]  # a comparison of the user's may not know it all
    return bool(leaf == expected) and same(*inside)
