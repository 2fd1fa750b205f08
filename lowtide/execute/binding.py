"""Between the caller's objects and the program: what it is given, and what it leaves behind."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch

from lowtide import private, tree
from lowtide.captured import Captured, TensorSpec
from lowtide.errors import BatchError


class StaleError(BatchError):
    """The caller's objects are not as they were when the step was captured; capture it again."""


class Binding:
    """Finds a captured step's inputs in the caller's objects and puts its outputs there."""

    def __init__(self, captured: Captured) -> None:
        self.captured = captured
        graph = captured.graph
        self.modules = tuple(captured.model.modules())
        batch_paths = {path: place for place, path in enumerate(captured.batch.paths())}
        self.sources: list[tuple[str, Any, Any]] = []
        for item in graph.inputs:
            kind, path = graph.values[item.value].kind, item.path
            if kind in ("parameter", "buffer"):
                slot = captured.slots[str(path[0])]
                self.sources.append(("slot", slot.holder, slot.key))
            elif kind in ("state", "gradient"):
                self.sources.append((kind, captured.slots[str(path[0])], path[1]))
            elif kind == "batch":
                self.sources.append(("batch", batch_paths[path], None))
            elif kind == "constant":
                self.sources.append(("constant", captured.constants[int(path[0])], None))
            else:
                self.sources.append(("option", int(path[0]), path[1:]))
        self.updates = captured.optimizer is not None and any(op.phase == "update" for op in graph.ops)
        self.kept_gradients = {
            item.path[0] for item in graph.inputs if graph.values[item.value].kind == "gradient" and item.stays
        }

    def check(self, batch: tuple[Any, ...]) -> list[Any]:
        """The leaves of the batch, after checking that the program fits the call; nothing is changed."""
        leaves = self.check_batch(batch)
        self.check_model()
        if self.captured.optimizer is not None:
            self.check_options()
        return leaves

    def inputs(self, leaves: list[Any]) -> list[Any]:
        """The tensors and numbers of this call."""
        captured = self.captured
        found = []
        for kind, place, key in self.sources:
            if kind == "slot":
                found.append(place[key])
            elif kind == "batch":
                found.append(leaves[place])
            elif kind == "state":
                found.append(captured.optimizer.state[place.holder[place.key]][key])
            elif kind == "gradient":
                found.append(place.holder[place.key].grad)
            elif kind == "constant":
                found.append(place)
            else:
                option = captured.optimizer.param_groups[place]
                for part in key:
                    option = option[part]
                found.append(float(option))
        return found

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
            elif output.role == "buffer":
                slot = captured.slots[str(output.path[0])]
                slot.holder[slot.key] = tensor
        if self.updates:
            private.mark_stepped(captured.optimizer)
        return captured.results.build(
            [leaf[0] if isinstance(leaf, tuple) else outputs[leaf] for leaf in captured.result_leaves]
        )

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

    def check_model(self) -> None:
        """The model's modes, and which tensors train and have gradients, must be those of the capture."""
        captured = self.captured
        if tuple(module.training for module in self.modules) != captured.training:
            raise StaleError(
                "the model is in another mode (train or eval) than when the step was captured.",
                hint="call model.train() before the step, or capture it in this mode.",
            )
        for name, slot in captured.slots.items():
            if slot.holder[slot.key].requires_grad != (name in captured.trains):
                raise StaleError(f"{name!r} was frozen or unfrozen since the step was captured.", hint="capture again.")
        for name, present in captured.gradients.items():
            slot = captured.slots[name]
            if (slot.holder[slot.key].grad is not None) != present:
                had, has = ("a", "none") if present else ("no", "one")
                raise StaleError(
                    f"{name!r} had {had} gradient before the step when it was captured and has {has} now.",
                    hint="clear the gradients in the step, or capture again.",
                )

    def check_options(self) -> None:
        """Hyperparameters that are constants of the graph must not have changed."""
        captured = self.captured
        groups = captured.optimizer.param_groups
        if len(groups) != len(captured.options):
            raise StaleError(f"the optimizer has {len(groups)} parameter groups, at capture {len(captured.options)}.")
        for number, (group, options) in enumerate(zip(groups, captured.options, strict=True)):
            for key, option in options.items():
                if group[key] != option:
                    raise StaleError(
                        f"{key!r} of parameter group {number} is {group[key]!r}, at capture {option!r}.",
                        hint="only lr, momentum, betas and weight_decay may change between steps; capture again.",
                    )
        for guard in captured.guards:
            option = groups[guard.path[0]]
            for part in guard.path[1:]:
                option = option[part]
            if getattr(operator, guard.comparison)(option, guard.other) != guard.answer:
                raise StaleError(
                    f"{guard.path[1]!r} of parameter group {guard.path[0]} is {option!r}, which makes the optimizer "
                    "take another path than at capture.",
                    hint="capture again.",
                )
