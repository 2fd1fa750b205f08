"""The recorder: sees every call that the step makes on fake tensors, and writes it down as an op of a Graph.

It stands above autograd's formulas and below Python, so what it sees is what eager would run: aten calls of forward,
backward and update, in order. Tensors are told apart by their storage; a call that writes to a storage gives it a new
value; a call that returns a view of a storage is no op but a way to read it.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections import Counter
from typing import Any, NoReturn

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from lowtide.capture.origin import Origins, user_line
from lowtide.capture.scalars import ScalarNode, refuse_data
from lowtide.capture.stand_in import fake_like
from lowtide.captured import Guard
from lowtide.errors import CaptureError
from lowtide.graph import Arg, Constant, Kind, Op, Read, Value, View

aten = torch.ops.aten

IDENTITIES = {aten.detach.default, aten.alias.default, aten.lift.default}
# Calls that write to arguments without saying so in their schema: argument positions.
UNDECLARED_WRITES = {aten.native_batch_norm.default: (3, 4)}
# Calls that return the same outputs when they are given None for what they update.
DETACHABLE = {aten.native_batch_norm.default, aten.cudnn_batch_norm.default, aten.miopen_batch_norm.default}
ACCUMULATES = 2**64 - 1  # the sequence number of autograd's AccumulateGrad nodes
PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


class _Storage:
    """One storage: its present value, and how many tensors are alive on it."""

    def __init__(self, number: int, weak: StorageWeakRef, value: int, base: torch.Tensor) -> None:
        self.number = number
        self.weak = weak  # keeps the address from being used again
        self.value = value
        self.alive = 0
        self.meta = (tuple(base.shape), tuple(base.stride()), base.dtype)


class _Handle:
    """One tensor object: the storage that it is on and the view through which it sees it."""

    def __init__(self, storage: _Storage, view: int | None, weak: weakref.ref[Any]) -> None:
        self.storage = storage
        self.view = view
        self.weak = weak


class Recorder(TorchDispatchMode):
    """Writes down the ops of a step that runs on fake tensors."""

    def __init__(self, fake_mode: FakeTensorMode, origins: Origins, device: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.backend = device.partition(":")[0].upper()  # the dispatch key of the device's own kernels
        self.fake_mode = fake_mode
        self.origins = origins
        self.ops: list[Op] = []
        self.values: list[Value] = []
        self.views: list[View] = []
        self.guards: list[Guard] = []
        self.constants: list[torch.Tensor] = []  # real tensors that the step read
        self.constant_values: list[int] = []
        self.gradient_values: set[int] = set()
        self._view_numbers: dict[View, int] = {}
        self._storages: dict[int, _Storage] = {}
        self._handles: dict[int, _Handle] = {}
        self._fakes: dict[int, FakeTensor] = {}  # real constant -> its stand-in
        self._reals: dict[int, torch.Tensor] = {}  # and back
        self._names: Counter[str] = Counter()
        self._scalars: dict[Any, torch.SymFloat] = {}
        self._ends: dict[int, int] = {}
        self._composites: dict[Any, bool] = {}

    # What the caller puts in and takes out

    def add_input(self, tensor: torch.Tensor, name: str, kind: Kind) -> int:
        """Register a tensor that is there before the step."""
        value = self._new_value(name, tensor, kind, nbytes=tensor.numel() * tensor.element_size())
        self._register(tensor, self._new_storage(tensor, value), None)
        return value

    def add_scalar_input(self, name: str, hint: float, path: tuple[str | int, ...]) -> tuple[int, torch.SymFloat]:
        """Register a number that the caller gives at every step."""
        scalar = self._new_scalar(name)
        scalar.node.hint, scalar.node.path = hint, path
        return scalar.node.value, scalar

    def read(self, tensor: torch.Tensor) -> Read:
        """How this tensor is read now."""
        handle = self._handle(tensor)
        return Read(handle.storage.value, handle.view)

    def read_any(self, leaf: torch.Tensor | torch.SymFloat) -> Read:
        """How a result of the step is read: a tensor, made here or not, or a number."""
        return self.read(self._plain(leaf)) if isinstance(leaf, torch.Tensor) else Read(leaf.node.value)

    def mark_gradient(self, tensor: torch.Tensor) -> None:
        """Remember that this tensor is the gradient of a parameter."""
        self.gradient_values.add(self._handle(tensor).storage.value)

    def finish(self) -> tuple[tuple[Op, ...], tuple[Value, ...], tuple[View, ...]]:
        """The ops, values and views, complete."""
        last_read: dict[int, int] = {}
        for index, op in enumerate(self.ops):
            for number in op.reads:
                last_read[number] = index
        gradients = {self.values[number].storage for number in self.gradient_values}
        values = []
        for number, value in enumerate(self.values):
            end = self._ends.get(number, -1)
            if end >= 0:
                end = max(end, last_read.get(number, end))
            kind = value.kind
            if value.storage in gradients and kind in ("activation", "activation gradient"):
                kind = "gradient"
            values.append(dataclasses.replace(value, eager_end=end, kind=kind))
        return tuple(self.ops), tuple(values), tuple(self.views)

    def forget(self) -> None:
        """Let go of every tensor."""
        self._handles.clear()
        self._fakes.clear()
        self._reals.clear()

    # What the step calls

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace in ("prim", "profiler"):
            return func(*args, **kwargs)
        if func is aten._local_scalar_dense.default:
            return self._item(args[0])
        if self._is_composite(func):
            with self:
                return func.decompose(*args, **kwargs)
        if func is aten.lift_fresh.default:
            return self._lift(args[0])
        plain_args = tuple(map(self._plain, args))
        plain_kwargs = {key: self._plain(arg) for key, arg in kwargs.items()}
        result = func(*plain_args, **plain_kwargs)
        self._follow_gradient(plain_args)
        self._note(func, plain_args, plain_kwargs, args, kwargs, result)
        if isinstance(result, torch.Tensor) and id(result) in self._reals:
            return self._reals[id(result)]
        return result

    def _is_composite(self, func: Any) -> bool:
        """Whether eager runs this call as other calls; most are taken apart before they come here."""
        if func not in self._composites:
            has = torch._C._dispatch_has_kernel_for_dispatch_key
            own = has(func.name(), self.backend) or has(func.name(), "CompositeExplicitAutograd")
            self._composites[func] = has(func.name(), "CompositeImplicitAutograd") and not own
        return self._composites[func]

    def _follow_gradient(self, args: tuple[Any, ...]) -> None:
        """What autograd hands to a parameter is its gradient."""
        node = torch._C._current_autograd_node()
        if node is not None and node._sequence_nr() == ACCUMULATES and args and isinstance(args[0], torch.Tensor):
            self.mark_gradient(args[0])

    def _item(self, tensor: torch.Tensor) -> Any:
        fake = self._plain(tensor)
        if fake.constant is not None:
            return aten._local_scalar_dense.default(fake.constant)
        if not tensor.dtype.is_floating_point:
            refuse_data("looks at the contents of a tensor", user_line())
        scalar = self._new_scalar("item")
        self._add_op("aten._local_scalar_dense.default", (self.read(fake),), (), (scalar.node.value,))
        return scalar

    def _lift(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor made from Python numbers: a constant of the graph, copied afresh at every step."""
        if isinstance(tensor, FakeTensor):
            return tensor
        constant = self._stand_in(tensor)
        made = fake_like(tensor, self.fake_mode)
        value = self._new_value("tensor", made, self._made_kind())
        self._register(made, self._new_storage(made, value), None)
        self._add_op("aten.clone.default", (self.read(constant),), (), (value,))
        return made

    def _note(
        self,
        func: Any,
        plain_args: tuple[Any, ...],
        plain_kwargs: dict[str, Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        result: Any,
    ) -> None:
        results = list(result) if isinstance(result, (tuple, list)) else [result]
        written = _written(func, plain_args, plain_kwargs)
        if not written and not any(isinstance(item, torch.Tensor) for item in results):
            return
        if not written and self._note_views(func, plain_args, plain_kwargs, results, isinstance(result, (tuple, list))):
            return
        recorded_args = tuple(self._arg(plain, arg) for plain, arg in zip(plain_args, args, strict=True))
        recorded_kwargs = tuple((key, self._arg(plain_kwargs[key], kwargs[key])) for key in kwargs)
        updates: list[tuple[int, int]] = []
        for tensor in written:
            storage = self._handle(tensor).storage
            if any(self.values[old].storage == storage.number for _, old in updates):
                continue
            old = storage.value
            new = len(self.values)
            self.values.append(self.values[old])
            storage.value = new
            self._ends[old] = len(self.ops)
            updates.append((new, old))
        outputs: list[int | None] = []
        base_name = func._schema.name.split("::")[1]
        for item in results:
            if not isinstance(item, torch.Tensor):
                outputs.append(None)
            elif item.untyped_storage()._cdata in self._storages:
                outputs.append(None)
                self._handle(item)
            else:
                value = self._new_value(base_name, item, self._made_kind())
                self._register(item, self._new_storage(item, value), None)
                outputs.append(value)
        random = torch.Tag.nondeterministic_seeded in func.tags and not _without_dropout(func, plain_args, plain_kwargs)
        self._add_op(
            _name_of(func),
            recorded_args,
            recorded_kwargs,
            tuple(outputs),
            updates=tuple(updates),
            detachable=func in DETACHABLE,
            random=random,
        )

    def _note_views(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], results: list[Any], listed: bool
    ) -> bool:
        """Register the results if all of them are views of the first argument; otherwise say no."""
        if not args or not isinstance(args[0], torch.Tensor):
            return False
        home = args[0].untyped_storage()._cdata
        if any(not isinstance(item, torch.Tensor) or item.untyped_storage()._cdata != home for item in results):
            return False
        source = self._handle(args[0])
        for number, item in enumerate(results):
            if id(item) in self._handles:
                continue
            view = source.view
            if func not in IDENTITIES:
                rest = tuple(self._arg(arg, arg) for arg in args[1:]) + tuple(self._arg(a, a) for a in kwargs.values())
                if kwargs:
                    self._register_strided(item, source.storage)
                    continue
                view = self._view(View(source.view, _name_of(func), rest, number if listed else None))
            self._register(item, source.storage, view)
        return True

    # Arguments

    def _plain(self, arg: Any) -> Any:
        """The argument as the fake tensors can take it: numbers for scalars, stand-ins for real tensors."""
        if isinstance(arg, FakeTensor):
            return arg
        if isinstance(arg, torch.Tensor):
            return self._stand_in(arg)
        if isinstance(arg, torch.SymFloat):
            return 1.0 if arg.node.hint is None else arg.node.hint
        if isinstance(arg, (list, tuple)):
            return type(arg)(self._plain(item) for item in arg)
        return arg

    def _stand_in(self, real: torch.Tensor) -> FakeTensor:
        """The fake tensor for a real one that the step reads from somewhere else."""
        known = self._fakes.get(id(real))
        if known is not None:
            return known
        where = user_line()
        if type(real) not in PLAIN_TENSORS:
            raise CaptureError(
                f"{where}: the step uses a {type(real).__module__}.{type(real).__name__}, a tensor subclass.",
                hint="lowtide plans plain tensors; convert it to torch.Tensor first.",
            )
        if real.grad_fn is not None:
            raise CaptureError(
                f"{where}: the step uses a tensor of an earlier step, of shape {tuple(real.shape)}, with its history.",
                hint="detach it and pass it to the step as part of the batch.",
            )
        if real.requires_grad and torch.is_grad_enabled():
            raise CaptureError(
                f"{where}: the step trains a tensor of shape {tuple(real.shape)} that is neither in the model nor "
                "in the optimizer.",
                hint="register it as a parameter of the model, or use it under torch.no_grad().",
            )
        fake = self.fake_mode.from_tensor(real, static_shapes=True)
        self._fakes[id(real)] = fake
        self._reals[id(fake)] = real
        self.constant_values.append(self.add_input(fake, f"constant {len(self.constants)}", "constant"))
        self.constants.append(real)
        return fake

    def _arg(self, plain: Any, arg: Any) -> Arg:
        """The argument as the graph keeps it."""
        if isinstance(plain, torch.Tensor):
            return self.read(plain)
        if isinstance(arg, torch.SymFloat):
            return Read(arg.node.value)
        if isinstance(plain, (list, tuple)):
            return tuple(self._arg(p, a) for p, a in zip(plain, arg, strict=True))
        if plain is None or isinstance(plain, (bool, int, float, complex, str)):
            return plain
        if isinstance(plain, torch.dtype):
            return Constant("dtype", str(plain).removeprefix("torch."))
        if isinstance(plain, torch.layout):
            return Constant("layout", str(plain).removeprefix("torch."))
        if isinstance(plain, torch.memory_format):
            return Constant("memory_format", str(plain).removeprefix("torch."))
        if isinstance(plain, torch.device):
            return Constant("device", str(plain))
        if isinstance(plain, torch.Generator):
            raise CaptureError(
                f"{user_line()}: the step draws from a torch.Generator of its own.",
                hint="draw from the default generator, or draw outside the step and pass the numbers in the batch.",
            )
        raise CaptureError(f"{user_line()}: an op takes a {type(plain).__name__}, which lowtide cannot write down.")

    # Books

    def _handle(self, tensor: torch.Tensor) -> _Handle:
        handle = self._handles.get(id(tensor))
        if handle is not None:
            return handle
        storage = self._storages.get(tensor.untyped_storage()._cdata)
        if storage is None:
            raise CaptureError(
                f"{user_line()}: the step uses a tensor of shape {tuple(tensor.shape)} that lowtide did not see made.",
                hint="this is a gap in lowtide; please report the op.",
            )
        return self._register_strided(tensor, storage)

    def _register_strided(self, tensor: torch.Tensor, storage: _Storage) -> _Handle:
        """A tensor on a known storage, however it came about: seen by its sizes and strides."""
        shape, stride, dtype = storage.meta
        size, steps, offset = tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset())
        if tensor.dtype != dtype:
            raise CaptureError(f"{user_line()}: a tensor is seen as {tensor.dtype} where its memory is {dtype}.")
        if (size, steps, offset) == (shape, stride, 0):
            return self._register(tensor, storage, None)
        return self._register(tensor, storage, self._view(View(None, "aten.as_strided.default", (size, steps, offset))))

    def _register(self, tensor: torch.Tensor, storage: _Storage, view: int | None) -> _Handle:
        key = id(tensor)

        def gone(_: Any) -> None:
            if self._handles.get(key) is handle:
                del self._handles[key]
            storage.alive -= 1
            if storage.alive == 0:
                self._ends[storage.value] = len(self.ops) - 1

        handle = _Handle(storage, view, weakref.ref(tensor, gone))
        storage.alive += 1
        self._ends.pop(storage.value, None)
        self._handles[key] = handle
        return handle

    def _new_storage(self, tensor: torch.Tensor, value: int) -> _Storage:
        untyped = tensor.untyped_storage()
        storage = _Storage(self.values[value].storage, StorageWeakRef(untyped), value, tensor)
        self._storages[untyped._cdata] = storage
        return storage

    def _new_value(self, name: str, tensor: torch.Tensor, kind: Kind, *, nbytes: int | None = None) -> int:
        number = len(self.values)
        self.values.append(
            Value(
                name=name,
                nbytes=tensor.untyped_storage().nbytes() if nbytes is None else nbytes,
                kind=kind,
                storage=number,
                dtype=str(tensor.dtype).removeprefix("torch."),
                shape=tuple(tensor.shape),
                stride=tuple(tensor.stride()),
            )
        )
        return number

    def _new_scalar(self, name: str) -> torch.SymFloat:
        number = len(self.values)
        self.values.append(Value(name=name, nbytes=0, kind="scalar", storage=number, dtype="float64"))
        return torch.SymFloat(ScalarNode(number, self._record_scalar, self._refuse_scalar, guards=self.guards))

    def _record_scalar(self, target: str, operands: tuple[ScalarNode, ...]) -> torch.SymFloat:
        args = tuple(node.constant if node.value is None else Read(node.value) for node in operands)
        known = self._scalars.get((target, args))
        if known is None:
            known = self._scalars[target, args] = self._new_scalar(target.removeprefix("operator."))
            self._add_op(target, args, (), (known.node.value,))
        return known

    def _refuse_scalar(self, what: str) -> NoReturn:
        refuse_data(what, user_line())

    def _view(self, view: View) -> int:
        number = self._view_numbers.setdefault(view, len(self.views))
        if number == len(self.views):
            self.views.append(view)
        return number

    def _made_kind(self) -> Kind:
        return "activation gradient" if torch._C._current_autograd_node() is not None else "activation"

    def _add_op(
        self,
        target: str,
        args: tuple[Arg, ...],
        kwargs: tuple[tuple[str, Arg], ...],
        outputs: tuple[int | None, ...],
        *,
        updates: tuple[tuple[int, int], ...] = (),
        detachable: bool = False,
        random: bool = False,
    ) -> None:
        phase, module, source = self.origins.here()
        short = target.split(".")[1]
        number = self._names[short]
        self._names[short] += 1
        self.ops.append(
            Op(
                name=f"{short}_{number}",
                target=target,
                args=args,
                kwargs=kwargs,
                outputs=outputs,
                updates=updates,
                detachable=detachable,
                random=random,
                phase=phase,
                module=module,
                source=source,
            )
        )


def _name_of(func: Any) -> str:
    return f"{func.namespace}.{func._opname}.{func._overloadname}"


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors that the call writes to."""
    found: list[torch.Tensor] = []
    for position, argument in enumerate(func._schema.arguments):
        declared = argument.alias_info is not None and argument.alias_info.is_write
        if not declared and position not in UNDECLARED_WRITES.get(func, ()):
            continue
        given = args[position] if position < len(args) else kwargs.get(argument.name)
        if not declared and not args[5]:
            continue  # batch norm outside training leaves its statistics alone
        found += [item for item in (given if isinstance(given, (list, tuple)) else [given]) if item is not None]
    return found


def _without_dropout(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call that may draw random numbers has its dropout at zero."""
    for position, argument in enumerate(func._schema.arguments):
        if argument.name == "dropout_p":
            given = args[position] if position < len(args) else kwargs.get("dropout_p", argument.default_value)
            return bool(given == 0)
    return False
