"""The recorder: sees every call that the step makes on fake tensors, and writes it down as an op of a Graph.

It stands above autograd's formulas and below Python, so what it sees is what eager would run: aten calls of forward,
backward and update, in order. Tensors are told apart by their storage; a call that writes to a storage gives it a new
value; a call that returns a view of a storage is no op but a way to read it.
"""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any, NoReturn

import torch

from lowtide import kernels, private
from lowtide.aten import DETACHABLE, IDENTITIES
from lowtide.capture.books import Books
from lowtide.capture.calls import name_of, without_dropout, written_by
from lowtide.capture.draws import Draws, drawn, foregone
from lowtide.capture.expect import expected
from lowtide.capture.fold import Fold
from lowtide.capture.origin import Origins, user_line
from lowtide.capture.recall import Recall
from lowtide.capture.scalars import ScalarNode, refuse_data, result_of
from lowtide.capture.stand_in import fake_like
from lowtide.errors import CaptureError
from lowtide.graph import Arg, Constant, Kind, Op, Read, Value, View
from lowtide.guards import Comparison, Expression
from lowtide.kernels.expected import EXPECT
from lowtide.private import DynamicOutputShapeException, FakeTensor, FakeTensorMode, TorchDispatchMode, storage_key
from lowtide.recompute import second_run

aten = torch.ops.aten

PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


class Recorder(TorchDispatchMode):
    """Writes down the ops of a step that runs on fake tensors."""

    def __init__(self, fake_mode: FakeTensorMode, origins: Origins, device: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.backend = private.dispatch_key_for_device(torch.device(device).type)  # of the device's own kernels
        self.fake_mode = fake_mode
        self.recall = Recall(fake_mode)
        self.origins = origins
        self.ops: list[Op] = []
        self.books = Books(self.ops)
        self.draws = Draws()
        self.fold = Fold(self.ops, self.books)
        self.comparisons: list[Comparison] = []  # of numbers that the caller has
        self.constants: list[torch.Tensor] = []  # real tensors that the step read
        self.constant_values: list[int] = []
        self._fakes: dict[int, FakeTensor] = {}  # real constant -> its stand-in
        self._reals: dict[int, torch.Tensor] = {}  # and back
        self._names: Counter[str] = Counter()
        self._scalars: dict[Any, ScalarNode] = {}
        self._composites: dict[Any, bool] = {}

    # What the caller puts in and takes out

    def add_input(self, tensor: torch.Tensor, name: str, kind: Kind) -> int:
        """Register a tensor that is there before the step."""
        value = self.books.new_value(name, tensor, kind, nbytes=tensor.numel() * tensor.element_size())
        self.books.register(tensor, self.books.new_storage(tensor, value), None)
        return value

    def add_scalar_input(self, name: str, hint: float, path: tuple[str | int, ...]) -> tuple[int, Any]:
        """Register a number that the caller gives at every step."""
        node = self._new_scalar(name, integer=isinstance(hint, int))
        node.hint, node.expression = hint, Expression(None, path=path)
        assert node.value is not None
        return node.value, private.symbolic(node)

    def read_any(self, leaf: torch.Tensor | torch.SymFloat) -> Read:
        """How a result of the step is read: a tensor, made here or not, or a number."""
        return self.books.read(self._plain(leaf)) if isinstance(leaf, torch.Tensor) else Read(leaf.node.value)

    def forget(self) -> None:
        """Let go of every tensor."""
        self.books.forget()
        self._fakes.clear()
        self._reals.clear()

    # What the step calls

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else every call goes through a guard against compilation, which costs as much as the rest

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        follower, calls = sys.gettrace(), sys.getprofile()  # they follow the step, not what becomes of its calls
        sys.settrace(None)
        sys.setprofile(None)
        try:
            return self._called(func, args, kwargs or {})
        finally:
            sys.setprofile(calls)
            sys.settrace(follower)

    def _called(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # autograd asks for it at every turn
        if func.namespace in ("prim", "profiler"):
            return func(*args, **kwargs)
        if func is aten._local_scalar_dense.default:
            return self._item(args[0])
        if self._is_composite(func):
            with self:
                return func.decompose(*args, **kwargs)
        if func is aten.lift_fresh.default:
            return self._lift(args[0])
        self._refuse_integers(func, args)
        plain_args = tuple(map(self._plain, args))
        plain_kwargs = {key: self._plain(arg) for key, arg in kwargs.items()}
        try:
            result = self.recall.call(func, plain_args, plain_kwargs)
        except DynamicOutputShapeException:
            if (known := self._folded(func, plain_args, plain_kwargs)) is None:
                raise
            return known
        self._follow_gradient(plain_args)
        self._note(func, plain_args, plain_kwargs, args, kwargs, result)
        if isinstance(result, torch.Tensor) and id(result) in self._reals:
            return self._reals[id(result)]
        return result

    def _folded(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What a call makes that has as many elements as the contents of its arguments say, where these are known."""
        found = self.fold.call(
            func, tuple(self._arg(arg, arg) for arg in args), tuple((key, self._arg(a, a)) for key, a in kwargs.items())
        )
        return (
            tuple(map(self._lift, found)) if isinstance(found, tuple) else None if found is None else self._lift(found)
        )

    def _is_composite(self, func: Any) -> bool:
        """Whether eager runs this call as other calls; most are taken apart before they come here."""
        if func not in self._composites:
            has = private.has_kernel
            own = has(func.name(), self.backend) or has(func.name(), "CompositeExplicitAutograd")
            self._composites[func] = has(func.name(), "CompositeImplicitAutograd") and not own
        return self._composites[func]

    def _follow_gradient(self, args: tuple[Any, ...]) -> None:
        """What autograd hands to a parameter is its gradient."""
        node = self.origins.node()
        adds = node is not None and private.sequence_number(node) == private.ACCUMULATES
        if adds and args and isinstance(args[0], torch.Tensor):
            self.books.mark_gradient(args[0])

    def _item(self, tensor: torch.Tensor) -> Any:
        fake = self._plain(tensor)
        if fake.constant is not None:
            return aten._local_scalar_dense.default(fake.constant)
        read = self.books.read(fake)
        if (known := self.fold.number(read)) is not None:
            return known
        if not tensor.dtype.is_floating_point:
            return self._decision(tensor, read)
        node = self._new_scalar("item")
        self._add_op("aten._local_scalar_dense.default", (self.books.read(fake),), (), (node.value,))
        return private.symbolic(node)

    def _decision(self, tensor: torch.Tensor, read: Read) -> bool:
        """What the step's own code is told where it asks whether something is so."""
        if (answer := foregone(self.ops, read)) is not None:
            return answer
        if tensor.dtype == torch.bool and (assumed := expected(self.ops, read)) is not None:
            self._add_op(EXPECT, (read, *assumed), (), (), channels=kernels.CHANNELS[EXPECT])
            return assumed[0]
        refuse_data("looks at the contents of a tensor", user_line())

    def is_given(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is one of the caller's, or in the memory of one."""
        made = ("activation", "activation gradient")
        return not self.books.knows(tensor) or self.books.values[self.books.read(tensor).value].kind not in made

    def _lift(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor made from Python numbers: a constant of the graph, copied afresh at every step."""
        if isinstance(tensor, FakeTensor):
            return tensor
        constant = self._stand_in(tensor)
        made = fake_like(tensor, self.fake_mode)
        value = self.books.new_value("tensor", made, self._made_kind())
        self.books.register(made, self.books.new_storage(made, value), None)
        self._add_op("aten.clone.default", (self.books.read(constant),), (), (value,))
        with private.without_modes():
            self.fold.known[value] = tensor.detach().clone()
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
        written = written_by(func, plain_args, plain_kwargs)
        if not written and not any(isinstance(item, torch.Tensor) for item in results):
            return
        if not written and self._note_views(func, plain_args, plain_kwargs, results, isinstance(result, (tuple, list))):
            return
        recorded_args = tuple(self._arg(plain, arg) for plain, arg in zip(plain_args, args, strict=True))
        recorded_kwargs = tuple((key, self._arg(plain_kwargs[key], kwargs[key])) for key in kwargs)
        changes = [self.books.update(tensor, len(self.ops)) for tensor in written]
        updates = tuple(change for change in changes if change is not None)
        outputs: list[int | None] = []
        base_name = private.base_name(func)
        for item in results:
            if not isinstance(item, torch.Tensor):
                outputs.append(None)
            elif self.books.has_storage(item):
                outputs.append(None)
                self.books.handle(item)
            else:
                value = self.books.new_value(base_name, item, self._made_kind())
                self.books.register(item, self.books.new_storage(item, value), None)
                outputs.append(value)
        target = name_of(func)
        what, same = None, None
        random = torch.Tag.nondeterministic_seeded in func.tags and not without_dropout(func, plain_args, plain_kwargs)
        if random:
            what = drawn(func, plain_args, plain_kwargs, recorded_args, recorded_kwargs, written)
            same = self.draws.before(what)
        if same is not None:
            self.books.drawn_again.add((len(self.ops), same.value))
        if same is not None and updates:
            target, recorded_args, recorded_kwargs = name_of(aten.copy_.default), (recorded_args[0], same), ()
        elif same is not None:
            target, recorded_args, recorded_kwargs = name_of(aten.clone.default), (same,), ()
        self._add_op(
            target,
            recorded_args,
            recorded_kwargs,
            tuple(outputs),
            updates=updates,
            detachable=name_of(func) in DETACHABLE,
            channels=("generator",) if random and same is None else kernels.CHANNELS.get(target, ()),
        )
        if random and same is None:
            self.draws.add(what, self.books.read(results[0]))

    def _note_views(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], results: list[Any], listed: bool
    ) -> bool:
        """Register the results if all of them are views of the first argument; otherwise say no."""
        if not args or not isinstance(args[0], torch.Tensor):
            return False
        home = storage_key(args[0])
        if any(not isinstance(item, torch.Tensor) or storage_key(item) != home for item in results):
            return False
        source = self.books.handle(args[0])
        for number, item in enumerate(results):
            if self.books.knows(item):
                continue
            view = source.view
            if name_of(func) not in IDENTITIES:
                rest = tuple(self._arg(arg, arg) for arg in args[1:]) + tuple(self._arg(a, a) for a in kwargs.values())
                if kwargs:
                    self.books.register_strided(item, source.storage)
                    continue
                view = self.books.view(View(source.view, name_of(func), rest, number if listed else None))
            self.books.register(item, source.storage, view)
        return True

    # Arguments

    def _refuse_integers(self, func: Any, args: tuple[Any, ...]) -> None:
        """Refuse arithmetic of integers that change with tensors of integers, which would become tensors of floats."""
        if any(isinstance(arg, torch.SymFloat) and arg.node.integer for arg in args):
            tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
            if tensors and not any(arg.dtype.is_floating_point for arg in tensors):
                refuse_data(f"calls {func} with an integer that changes", user_line())

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
            return self.books.read(plain)
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

    def _new_scalar(self, name: str, *, integer: bool = False) -> ScalarNode:
        number, dtype = len(self.books.values), "int64" if integer else "float64"
        self.books.values.append(Value(name=name, nbytes=0, kind="scalar", storage=number, dtype=dtype))
        return ScalarNode(
            number, self._record_scalar, self._refuse_scalar, integer=integer, comparisons=self.comparisons
        )

    def _record_scalar(self, target: str, operands: tuple[ScalarNode, ...]) -> ScalarNode:
        args = tuple(node.constant if node.value is None else Read(node.value) for node in operands)
        key = (target, tuple((type(arg), arg) for arg in args))
        known = self._scalars.get(key)
        if known is None:
            integer, hint, expression = result_of(target, operands)
            known = self._scalars[key] = self._new_scalar(target.removeprefix("operator."), integer=integer)
            known.hint, known.expression = hint, expression
            self._add_op(target, args, (), (known.value,))
        return known

    def _refuse_scalar(self, what: str) -> NoReturn:
        refuse_data(what, user_line())

    def _made_kind(self) -> Kind:
        return "activation gradient" if self.origins.node() is not None else "activation"

    def _add_op(
        self,
        target: str,
        args: tuple[Arg, ...],
        kwargs: tuple[tuple[str, Arg], ...],
        outputs: tuple[int | None, ...],
        *,
        updates: tuple[tuple[int, int], ...] = (),
        detachable: bool = False,
        channels: tuple[str, ...] = (),
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
                channels=channels,
                forgotten=second_run(),
                phase=phase,
                module=module,
                source=source,
            )
        )
