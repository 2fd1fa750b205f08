"""One tracing of one step: stand-ins in, a captured step out, and everything as it was."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from lowtide import device, private, tree
from lowtide.capture import optimizer as optimizers
from lowtide.capture.assume import Assumptions, refuse_generators
from lowtide.capture.deeds import Deeds
from lowtide.capture.dice import Dice
from lowtide.capture.follow import Follower
from lowtide.capture.origin import Origins, line_of_error
from lowtide.capture.ranks import Arrival, Reductions
from lowtide.capture.recorder import Recorder
from lowtide.capture.refuse import one_device, refuse_odd, refuse_overlaps
from lowtide.capture.scalars import ASIDE, extremes
from lowtide.capture.shards import Gathers
from lowtide.capture.stand_in import fake_like, stand_ins
from lowtide.capture.world import World, is_atom
from lowtide.captured import Captured, Computed, Slot, TensorSpec, optimizers_of
from lowtide.errors import CaptureError
from lowtide.graph import Graph, Input, Kind, Output
from lowtide.guards import Guards, Place
from lowtide.private import DataDependentOutputException, DynamicOutputShapeException, FakeTensor
from lowtide.watch import surroundings


@dataclass(frozen=True)
class Traced:
    """What one tracing found."""

    captured: Captured
    left: Mapping[str, bool]  # for each parameter whether it has a gradient afterwards
    counted: tuple[Place, ...]  # numbers that the step reads and changes: they are others at the next step
    again: Mapping[int, Arrival]  # what another trace should know of its DDP modules; nothing: there is no need of one


def _slots(model: torch.nn.Module, optimizers: tuple[Any, ...]) -> dict[str, Slot]:
    """Where each parameter and buffer lives; tied ones under their first name."""
    found: dict[str, Slot] = {}
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        for registry in private.registries(module)[:2]:
            for key, tensor in registry.items():
                if tensor is not None and id(tensor) not in seen:
                    seen.add(id(tensor))
                    found[f"{prefix}.{key}" if prefix else key] = Slot(registry, key)
    for number, group in enumerate(group for optimizer in optimizers for group in optimizer.param_groups):
        for place, tensor in enumerate(group["params"]):
            if id(tensor) not in seen:
                seen.add(id(tensor))
                found[f"optimizer.{number}.{place}"] = Slot(group["params"], place)
    return found


class Trace:
    """One tracing of one step.

    `numbers` are Python numbers of the caller that become inputs; `phantoms` are parameters that are given a gradient
    which they do not have; `arrivals` is what an earlier trace showed of DDP modules.
    """

    def __init__(
        self,
        step: Callable[..., Any],
        model: torch.nn.Module,
        optimizer: Any,
        example: tuple[Any, ...],
        *,
        numbers: Sequence[Place] = (),
        phantoms: set[str] = frozenset(),  # type: ignore[assignment]
        arrivals: Mapping[int, Arrival] = MappingProxyType({}),
        hooked: bool = False,
    ) -> None:
        self.step, self.model, self.optimizer, self.numbers = step, model, optimizer, tuple(numbers)
        self.optimizers = optimizers_of(optimizer)
        self.slots = _slots(model, self.optimizers)
        self.tensors: dict[str, torch.Tensor] = {name: slot.holder[slot.key] for name, slot in self.slots.items()}
        self.names = {id(tensor): name for name, tensor in self.tensors.items()}
        self.leaves, self.batch_tree = tree.flatten(example)
        batch = {
            "batch " + ".".join(map(str, path)): leaf
            for path, leaf in zip(self.batch_tree.paths(), self.leaves, strict=True)
            if isinstance(leaf, torch.Tensor)
        }
        self.hooked = hooked
        refuse_odd({**self.tensors, **batch}, hooked=hooked)
        self.device = one_device({**self.tensors, **batch})
        refuse_overlaps(self.tensors)
        self.parameters = [name for name, tensor in self.tensors.items() if isinstance(tensor, torch.nn.Parameter)]
        self.gradients: dict[str, torch.Tensor] = {}  # those that are there before the step
        for name in self.parameters:
            gradient = self.tensors[name].grad
            if gradient is not None or name in phantoms:
                self.gradients[name] = self.tensors[name] if gradient is None else gradient
        self.given_gradients: dict[str, torch.Tensor] = {}  # their stand-ins
        self.notes = tuple(note for one in self.optimizers for note in optimizers.plain_loop_note(one))
        self.options = tuple(options for one in self.optimizers for options in optimizers.constant_options(one))
        self.around = surroundings()
        self.fake_mode = private.fake_mode()
        self.origins = Origins(model, self.optimizers)
        self.recorder = Recorder(self.fake_mode, self.origins, self.device)
        self.world = World()
        self.dice = Dice(self.recorder)
        self.follower = Follower(self.world, self.dice.stand_in)
        self.deeds = Deeds(self.world, self.follower)
        self.reductions = Reductions(arrivals)
        self.gathers = Gathers(self.recorder)

    def run(self) -> Traced:
        """The captured step, with everything put back."""
        generator, grad_mode = None, torch.is_grad_enabled()
        try:
            generator = torch.get_rng_state()
            with contextlib.ExitStack() as stack:
                stack.enter_context(_without_collector())
                numbers = stack.enter_context(self._symbolic())
                self.world.see(self.step, "the step")
                self.world.see(self.model, "model")
                self.world.see(self.optimizers, "optimizer")
                stack.callback(self.world.undo)
                stack.enter_context(stand_ins(list(self.tensors.values()), self.fake_mode))
                stack.callback(self.recorder.forget)
                return self._trace(stack, numbers)
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
                hint="run the step in eager PyTorch first; what leaves torch (numpy, .tolist()) can't be captured.",
            ) from error
        finally:
            if generator is not None:
                torch.set_rng_state(generator)
            torch.set_grad_enabled(grad_mode)

    @contextlib.contextmanager
    def _symbolic(self) -> Iterator[list[Input]]:
        """Numbers of the caller as inputs, in their places while the step is traced."""
        inputs: list[Input] = []
        before = [place.get() for place in self.numbers]
        try:
            for number, (place, hint) in enumerate(zip(self.numbers, before, strict=True)):
                value, scalar = self.recorder.add_scalar_input(place.name, hint, ("number", number))
                inputs.append(Input(value, ("number", number)))
                place.set(scalar)
            yield inputs
        finally:
            for place, hint in zip(self.numbers, before, strict=True):
                place.set(hint)

    def _trace(self, stack: contextlib.ExitStack, numbers: list[Input]) -> Traced:
        """Run the step on stand-ins, and write down what it did before they go."""
        inputs = []
        for name, tensor in self.tensors.items():
            kind: Kind = "parameter" if isinstance(tensor, torch.nn.Parameter) else "buffer"
            inputs.append(Input(self.recorder.add_input(tensor, name, kind), (name,)))
        for name, gradient in self.gradients.items():
            fake = fake_like(gradient.detach(), self.fake_mode)
            self.tensors[name].grad = fake
            self.given_gradients[name] = fake
            inputs.append(Input(self.recorder.add_input(fake, f"{name} gradient", "gradient"), (name, "grad")))
        missing: list[tuple[torch.Tensor, str]] = []
        groups = 0
        for optimizer in self.optimizers:
            as_inputs = optimizers.as_inputs(optimizer, self.names, self.recorder, self.fake_mode, groups)
            states, hypers, lacking = stack.enter_context(as_inputs)
            inputs += states
            numbers += hypers
            missing += lacking
            groups += len(optimizer.param_groups)
        fakes = [fake_like(leaf, self.fake_mode) if isinstance(leaf, torch.Tensor) else leaf for leaf in self.leaves]
        for path, fake in zip(self.batch_tree.paths(), fakes, strict=True):
            if isinstance(fake, FakeTensor):
                name = "batch " + ".".join(map(str, path))
                inputs.append(Input(self.recorder.add_input(fake, name, "batch"), path))
        for leaf, name in self.objects():
            self.world.see(leaf, name)
        batch, batch_world = self.batch_tree.build(fakes), World()
        batch_world.see(batch, "the batch")
        with contextlib.ExitStack() as followed:
            followed.enter_context(optimizers.followed(self.optimizers, self._mark_gradients))
            followed.enter_context(self.origins.followed())
            followed.enter_context(self.recorder.draws.followed())
            followed.enter_context(self.dice.followed())
            followed.enter_context(self.reductions.followed())
            followed.enter_context(self.gathers.followed(self.model))
            followed.enter_context(self.fake_mode)
            followed.enter_context(self.recorder)
            followed.enter_context(extremes())
            followed.enter_context(self.deeds.followed())
            followed.enter_context(self.follower.followed())
            try:
                results = self.step(self.model, self.optimizer, *batch)
            finally:  # an error of the step's may come of what is not there
                self._refuse_left_out()
        if self.follower.refusals:
            raise self.follower.refusals[0]
        self.recorder.draws.end()
        self.gathers.refuse_reads(inputs, self.names)
        for path, fake in zip(self.batch_tree.paths(), fakes, strict=True):
            if isinstance(fake, FakeTensor) and fake.is_leaf and fake.grad is not None:
                raise CaptureError(
                    f"the step leaves a gradient in its batch ({'.'.join(map(str, path))}), which requires one.",
                    hint="take it by torch.autograd.grad and return it; or lowtide.attach(model), which gives it.",
                )
        left = {name: self.tensors[name].grad for name in self.parameters}
        self._mark_gradients()
        rebound = self._rebound()
        refuse_generators(self.world)
        for effect, _ in batch_world.effects():
            raise CaptureError(
                f"the step changes its batch: {effect.place.name}.",
                hint="copy the batch's lists and dicts in the step before you change them: batch = dict(batch).",
            )
        assume = Assumptions(self.world, self.follower)
        assumptions = assume.of(self.step, self.model, self.optimizers, self.objects())
        assumptions = assumptions.without({(id(self.slots[name].holder), self.slots[name].key) for name in rebound})
        found = self.deeds.done({id(slot.holder) for slot in self.slots.values()}, assumptions, self.recorder.is_given)
        guards = dataclasses.replace(
            assumptions,
            around=self.around,
            comparisons=tuple(dict.fromkeys(self.recorder.comparisons)),
            numbers=self.numbers,
            draws=tuple(self.dice.draws),
        )
        inputs += numbers + self.dice.inputs
        captured = self._assemble(inputs, (results, found.values), left, rebound, missing)
        captured = dataclasses.replace(captured, guards=guards, effects=found.effects)
        for name in self.parameters:
            self.tensors[name].grad = None
        leaves = {name: gradient is not None for name, gradient in left.items()}
        return Traced(captured, leaves, found.counted, self.reductions.again())

    def objects(self) -> list[tuple[Any, str]]:
        """What is in the batch besides tensors and plain values, and the classes around them: all may change inside."""
        found = zip(self.batch_tree.paths(), self.leaves, strict=True)
        odd = [(path, leaf) for path, leaf in found if not isinstance(leaf, torch.Tensor) and not is_atom(leaf)]
        leaves = [(leaf, "batch " + ".".join(map(str, path))) for path, leaf in odd]
        return [*leaves, *((kind, kind.__name__) for kind in self.batch_tree.kinds())]

    def _refuse_left_out(self) -> None:
        """Raise where the step has read an attribute of its batch that is not among the leaves."""
        for kind, name in self.batch_tree.left_out():
            if name in self.follower.attributes or name in self.follower.gotten:
                raise CaptureError(
                    f"the step reads {name!r} of its batch, which the caller has put beside the items of a "
                    f"{kind.__name__}, and in which not all is tensors, numbers and text.",
                    hint="pass it as an argument of its own, or as one of the items.",
                ) from None

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
                if isinstance(leaf, torch.SymFloat) and leaf.node.expression is not None:
                    bound.append(Computed(leaf.node.expression, leaf.node.integer))
                    continue
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
            persistent = values[item.value].kind != "gradient" or left_on.get(str(item.path[0])) == storage
            bound_inputs.append(dataclasses.replace(item, persistent=persistent))
            if persistent and storage in latest:
                outputs.append(Output(latest[storage], "input", item.path))
        read_gradients = {str(item.path[0]) for item in inputs if values[item.value].kind == "gradient"}
        used_state = {item.path for item in inputs if values[item.value].kind == "state"}
        needed = [(parameter, key) for parameter, key in missing if (self.names[id(parameter)], key) in used_state]
        untouched = {name for name, fake in self.given_gradients.items() if left[name] is fake} - read_gradients
        trained = [
            name
            for name in self.parameters
            if name not in untouched and (self.tensors[name].requires_grad or name in self.gradients)
        ]
        owners = {
            self.names[id(parameter)]: optimizer
            for optimizer in self.optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
        }
        return Captured(
            graph=Graph(
                ops=ops,
                values=values,
                inputs=tuple(bound_inputs),
                outputs=tuple(outputs),
                views=views,
                device=self.device,
                generator_bytes=int(device.of(self.device).generator().get_state().nbytes),
                notes=self.notes,
            ),
            step=self.step,
            model=self.model,
            optimizer=self.optimizer,
            batch=self.batch_tree,
            batch_leaves=tuple(_spec(leaf) for leaf in self.leaves),
            results=result_tree,
            result_leaves=tuple(bound),
            effects=(),
            slots=self.slots,
            owners=owners,
            constants=tuple(recorder.constants),
            options=self.options,
            members=tuple(tuple(group["params"]) for one in self.optimizers for group in one.param_groups),
            guards=Guards(),
            hooked=self.hooked,
            gradients={
                name: name in self.gradients for name in trained if name in read_gradients or name not in self.gradients
            },
            trained=tuple(trained),
            trains=frozenset(name for name, tensor in self.tensors.items() if tensor.requires_grad),
            prepare=functools.partial(optimizers.make_state, self.optimizers, needed),  # a lambda would keep the trace
        )


@contextlib.contextmanager
def _without_collector() -> Iterator[None]:
    """No garbage is collected inside the block: callbacks of the collector are no code of the step's."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _depends_on_data(error: BaseException, what: str) -> CaptureError:
    return CaptureError(
        f"{line_of_error(error) or 'the step'}: {what}, so its ops are not the same at every step.",
        hint=f"compute it with tensor ops of fixed size (torch.where, masks), or move it out of the step.\n{ASIDE}",
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
