"""torch -> Graph: the user's own training step, traced once on fake tensors and written down as data."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from lowtide import tree
from lowtide.capture import optimizer as optimizers
from lowtide.capture.door import refuse_at_the_door
from lowtide.capture.origin import Origins, line_of_error
from lowtide.capture.recorder import Recorder
from lowtide.capture.stand_in import fake_like, stand_ins, unchanged_attributes
from lowtide.captured import Captured, Slot, TensorSpec
from lowtide.errors import CaptureError
from lowtide.graph import Graph, Input, Kind, Output

__all__ = ["capture"]


def capture(step: Callable[..., Any], model: torch.nn.Module, optimizer: Any, example: tuple[Any, ...]) -> Captured:
    """Trace `step(model, optimizer, *example)` without running it, and leave everything as it was."""
    if not isinstance(example, tuple):
        raise CaptureError(
            f"example is a {type(example).__name__}, not a tuple.",
            hint="pass the arguments of one call of the step: example=(x, y), or example=(batch,).",
        )
    if not isinstance(model, torch.nn.Module):
        raise CaptureError(f"the model is a {type(model).__name__}, not a torch.nn.Module.")
    refuse_at_the_door(step, model, example)
    if optimizer is not None:
        optimizers.refuse_unknown(optimizer)
    captured, left = _Trace(step, model, optimizer, example).run()
    unsure = {name for name, present in captured.gradients.items() if not present and left[name]}
    if unsure:
        # The step leaves gradients behind: does it read them at the next call, or clear them first?
        again, _ = _Trace(step, model, optimizer, example, phantoms=unsure).run()
        read = {name for name, present in again.gradients.items() if present}
        matter = {name: had for name, had in captured.gradients.items() if name not in unsure or name in read}
        captured = dataclasses.replace(captured, gradients=matter)
    return captured


def _slots(model: torch.nn.Module, optimizer: Any) -> dict[str, Slot]:
    """Where each parameter and buffer lives; tied ones under their first name."""
    found: dict[str, Slot] = {}
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        for registry in (module._parameters, module._buffers):
            for key, tensor in registry.items():
                if tensor is not None and id(tensor) not in seen:
                    seen.add(id(tensor))
                    found[f"{prefix}.{key}" if prefix else key] = Slot(registry, key)
    for number, group in enumerate(optimizer.param_groups if optimizer is not None else ()):
        for place, tensor in enumerate(group["params"]):
            if id(tensor) not in seen:
                seen.add(id(tensor))
                found[f"optimizer.{number}.{place}"] = Slot(group["params"], place)
    return found


def _one_device(tensors: Mapping[str, torch.Tensor]) -> str:
    """The device of all these tensors, or the error that they have several."""
    homes: dict[str, str] = {}
    for name, tensor in tensors.items():
        homes.setdefault(str(tensor.device), name)
    if len(homes) > 1:
        listing = ", ".join(f"{name!r} on {device}" for device, name in homes.items())
        raise CaptureError(
            f"the step uses {len(homes)} devices: {listing}.", hint="move model and batch to one device."
        )
    return next(iter(homes), "cpu")


def _refuse_odd(tensors: Mapping[str, torch.Tensor]) -> None:
    """Refuse tensors that are not plain, dense and free of hooks."""
    for name, tensor in tensors.items():
        if isinstance(tensor, FakeTensor) or is_traceable_wrapper_subclass(tensor):
            kind = f"{type(tensor).__module__}.{type(tensor).__name__}"
            raise CaptureError(
                f"{name!r} is a {kind}, a tensor subclass that stands for other tensors.",
                hint="lowtide plans plain tensors; convert it to torch.Tensor first.",
            )
        if tensor.layout is not torch.strided:
            raise CaptureError(f"{name!r} has layout {tensor.layout}.", hint="lowtide plans dense tensors only.")
        if tensor.grad_fn is not None:
            raise CaptureError(
                f"{name!r}, of shape {tuple(tensor.shape)}, has a history (grad_fn): it belongs to an earlier step.",
                hint="detach it before you pass it to the step.",
            )
        if tensor._backward_hooks or tensor._post_accumulate_grad_hooks:
            raise CaptureError(
                f"{name!r} has a hook, which runs Python code that lowtide cannot repeat.",
                hint="remove the hook and do its work in the step, after backward().",
            )


class _Trace:
    """One tracing of one step; `phantoms` are parameters that are given a gradient which they do not have."""

    def __init__(
        self,
        step: Callable[..., Any],
        model: torch.nn.Module,
        optimizer: Any,
        example: tuple[Any, ...],
        *,
        phantoms: set[str] = frozenset(),  # type: ignore[assignment]
    ) -> None:
        self.step, self.model, self.optimizer = step, model, optimizer
        self.slots = _slots(model, optimizer)
        self.tensors: dict[str, torch.Tensor] = {name: slot.holder[slot.key] for name, slot in self.slots.items()}
        self.names = {id(tensor): name for name, tensor in self.tensors.items()}
        self.leaves, self.batch_tree = tree.flatten(example)
        batch = {
            "batch " + ".".join(map(str, path)): leaf
            for path, leaf in zip(self.batch_tree.paths(), self.leaves, strict=True)
            if isinstance(leaf, torch.Tensor)
        }
        _refuse_odd({**self.tensors, **batch})
        self.device = _one_device({**self.tensors, **batch})
        self.parameters = [name for name, tensor in self.tensors.items() if isinstance(tensor, torch.nn.Parameter)]
        self.gradients: dict[str, torch.Tensor] = {}  # those that are there before the step
        for name in self.parameters:
            gradient = self.tensors[name].grad
            if gradient is not None or name in phantoms:
                self.gradients[name] = self.tensors[name] if gradient is None else gradient
        self.notes = () if optimizer is None else optimizers.plain_loop_note(optimizer)
        self.options = () if optimizer is None else optimizers.constant_options(optimizer)
        self.fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.fake_mode.cache_enabled = False  # `Recall` is ours; torch's made graphs depend on what was there before
        self.origins = Origins(model, optimizer)
        self.recorder = Recorder(self.fake_mode, self.origins, self.device)

    def run(self) -> tuple[Captured, dict[str, bool]]:
        """The captured step, and for each parameter whether it has a gradient afterwards."""
        generator, grad_mode = torch.get_rng_state(), torch.is_grad_enabled()
        try:
            with contextlib.ExitStack() as stack:
                changed = stack.enter_context(unchanged_attributes(self.model))
                stack.enter_context(stand_ins(list(self.tensors.values()), self.fake_mode))
                stack.callback(self.recorder.forget)
                captured, left = self._trace(stack)
        except CaptureError:
            raise
        except DataDependentOutputException as error:
            raise _depends_on_data(error, f"{error.func} looks at the contents of a tensor") from None
        except DynamicOutputShapeException as error:
            raise _depends_on_data(error, f"the size of the result of {error.func} depends on the data") from None
        except Exception as error:
            where = line_of_error(error)
            raise CaptureError(
                f"{where or 'the step'}: the step failed while it was traced: {type(error).__name__}: {error}",
                hint="does it run in eager PyTorch? What leaves torch (numpy, .tolist()) can't be captured.",
            ) from error
        finally:
            torch.set_rng_state(generator)
            torch.set_grad_enabled(grad_mode)
        if changed:
            names = ", ".join(sorted(changed)[:4])
            note = f"the step assigns {names}: Python assignments are not repeated when the program runs."
            captured = dataclasses.replace(
                captured, graph=dataclasses.replace(captured.graph, notes=(*self.notes, note))
            )
        return captured, left

    def _trace(self, stack: contextlib.ExitStack) -> tuple[Captured, dict[str, bool]]:
        """Run the step on stand-ins, and write down what it did before they go."""
        inputs = []
        for name, tensor in self.tensors.items():
            kind: Kind = "parameter" if isinstance(tensor, torch.nn.Parameter) else "buffer"
            inputs.append(Input(self.recorder.add_input(tensor, name, kind), (name,)))
        for name, gradient in self.gradients.items():
            fake = fake_like(gradient.detach(), self.fake_mode)
            self.tensors[name].grad = fake
            inputs.append(Input(self.recorder.add_input(fake, f"{name} gradient", "gradient"), (name, "grad")))
        missing: list[tuple[torch.Tensor, str]] = []
        hypers: list[Input] = []
        if self.optimizer is not None:
            states, hypers, missing = stack.enter_context(
                optimizers.as_inputs(self.optimizer, self.names, self.recorder, self.fake_mode)
            )
            inputs += states
            stack.callback(self.optimizer.register_step_pre_hook(self._mark_gradients).remove)
        fakes = [fake_like(leaf, self.fake_mode) if isinstance(leaf, torch.Tensor) else leaf for leaf in self.leaves]
        for path, fake in zip(self.batch_tree.paths(), fakes, strict=True):
            if isinstance(fake, FakeTensor):
                name = "batch " + ".".join(map(str, path))
                inputs.append(Input(self.recorder.add_input(fake, name, "batch"), path))
        inputs += hypers
        stack.enter_context(self.origins.followed())
        stack.enter_context(self.recorder.draws.followed())
        with torch.enable_grad(), self.fake_mode, self.recorder:
            results = self.step(self.model, self.optimizer, *self.batch_tree.build(fakes))
        self.recorder.draws.end()
        left = {name: self.tensors[name].grad for name in self.parameters}
        self._mark_gradients()
        rebound = self._rebound()
        captured = self._assemble(inputs, results, left, rebound, missing)
        for name in self.parameters:
            self.tensors[name].grad = None
        return captured, {name: gradient is not None for name, gradient in left.items()}

    def _rebound(self) -> dict[str, torch.Tensor]:
        """The buffers in whose place the step put another tensor."""
        found: dict[str, torch.Tensor] = {}
        for name, slot in self.slots.items():
            now = slot.holder[slot.key] if isinstance(slot.key, int) else slot.holder.get(slot.key)
            if now is self.tensors[name]:
                continue
            if name in self.parameters or not isinstance(now, torch.Tensor):
                raise CaptureError(
                    f"the step puts something else in the place of {name!r}.",
                    hint="write to it in place: parameter.copy_(...) instead of module.parameter = ...",
                )
            found[name] = now
        return found

    def _mark_gradients(self, *_: Any) -> None:
        for name in self.parameters:
            gradient = self.tensors[name].grad
            if gradient is not None:
                self.recorder.books.mark_gradient(gradient)

    def _assemble(
        self,
        inputs: list[Input],
        results: Any,
        left: Mapping[str, torch.Tensor | None],
        rebound: Mapping[str, torch.Tensor],
        missing: list[tuple[torch.Tensor, str]],
    ) -> Captured:
        """The graph and its bindings, from what the recorder saw."""
        recorder = self.recorder
        result_leaves, result_tree = tree.flatten(results)
        outputs: list[Output] = []
        bound: list[Any] = []
        for path, leaf in zip(result_tree.paths(), result_leaves, strict=True):
            if isinstance(leaf, (torch.Tensor, torch.SymFloat)):
                read = recorder.read_any(leaf)
                bound.append(len(outputs))
                outputs.append(Output(read.value, "result", path, read.view))
            else:
                bound.append((leaf,))
        left_on: dict[str, int] = {}  # parameter -> storage of the gradient that it is left with
        lasting = {recorder.books.values[item.value].storage for item in inputs}
        for name, gradient in left.items():
            if gradient is not None:
                read = recorder.books.read(gradient)
                left_on[name] = recorder.books.values[read.value].storage
                if left_on[name] not in lasting:
                    outputs.append(Output(read.value, "gradient", (name,), read.view))
        for name, tensor in rebound.items():
            read = recorder.read_any(tensor)
            outputs.append(Output(read.value, "buffer", (name,), read.view))
        ops = tuple(recorder.ops)
        values, views = recorder.books.finish()
        inputs = inputs + [Input(value, (place,)) for place, value in enumerate(recorder.constant_values)]
        read_by_ops = {value for op in ops for value in op.reads} | {output.value for output in outputs}
        optional = ("gradient", "state", "scalar")
        inputs = [item for item in inputs if item.value in read_by_ops or values[item.value].kind not in optional]
        latest = {values[new].storage: new for op in ops for new, _ in op.updates}
        bound_inputs = []
        for item in inputs:
            storage = values[item.value].storage
            stays = values[item.value].kind != "gradient" or left_on.get(str(item.path[0])) == storage
            bound_inputs.append(dataclasses.replace(item, stays=stays))
            if stays and storage in latest:
                outputs.append(Output(latest[storage], "input", item.path))
        read_gradients = {str(item.path[0]) for item in inputs if values[item.value].kind == "gradient"}
        used_state = {item.path for item in inputs if values[item.value].kind == "state"}
        needed = [(parameter, key) for parameter, key in missing if (self.names[id(parameter)], key) in used_state]
        trained = [name for name in self.parameters if self.tensors[name].requires_grad]
        optimizer = self.optimizer
        return Captured(
            graph=Graph(
                ops=ops,
                values=values,
                inputs=tuple(bound_inputs),
                outputs=tuple(outputs),
                views=views,
                device=self.device,
                generator_bytes=int(torch.get_rng_state().nbytes),
                notes=self.notes,
            ),
            step=self.step,
            model=self.model,
            optimizer=optimizer,
            batch=self.batch_tree,
            batch_leaves=tuple(_spec(leaf) for leaf in self.leaves),
            results=result_tree,
            result_leaves=tuple(bound),
            slots=self.slots,
            constants=tuple(recorder.constants),
            options=self.options,
            guards=tuple(dict.fromkeys(recorder.guards)),
            gradients={
                name: name in self.gradients for name in trained if name in read_gradients or name not in self.gradients
            },
            trained=tuple(trained),
            trains=frozenset(name for name, tensor in self.tensors.items() if tensor.requires_grad),
            training=tuple(module.training for module in self.model.modules()),
            prepare=(lambda: optimizers.make_state(optimizer, needed)) if needed else (lambda: None),
        )


def _depends_on_data(error: BaseException, what: str) -> CaptureError:
    return CaptureError(
        f"{line_of_error(error) or 'the step'}: {what}, so its ops are not the same at every step.",
        hint="compute it with tensor ops of fixed size (torch.where, masks), or move it out of the step.",
    )


def _spec(leaf: Any) -> Any:
    """What a leaf of the batch must look like at every call."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return TensorSpec(
        tuple(leaf.shape),
        str(leaf.dtype).removeprefix("torch."),
        str(leaf.device),
        tuple(leaf.stride()),
        leaf.requires_grad,
    )
