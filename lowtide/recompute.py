"""Functions that forget: what they make between their arguments and their results is made again in the backward.

torch.utils.checkpoint runs a function twice; what stands around it here makes the second run leave no traces. Tensors
that the function writes to and did not make, such as the statistics of a batch norm, are copied before the first run
writes to them; the second run sees copies of these copies, as they were, and writes to them. Attributes of modules and
Python's and numpy's generators are put back to what the first run found, and afterwards to what they were.
"""

from __future__ import annotations

import copyreg
import functools
import inspect
import random
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any, TypeVar, cast

import numpy
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from lowtide import tree
from lowtide.errors import UsageError
from lowtide.private import StorageWeakRef, TorchDispatchMode, registries, schema, storage_key

aten = torch.ops.aten

F = TypeVar("F", bound=Callable[..., Any])
STATISTICS = {  # batch norms: the arguments that they write to without saying so, in training, and where that is said
    aten.native_batch_norm.default: ((3, 4), 5),
    aten.cudnn_batch_norm.default: ((3, 4), 5),
    aten.miopen_batch_norm.default: ((3, 4), 5),
}
MISSING = object()
NEW = vars(copyreg)["__newobj__"]  # what copies and pickles make an object by, before it has its attributes
CLONE = "give the function a copy: x.clone(), or leave out inplace=True."

_forgetful: weakref.WeakSet[Callable[..., Any]] = weakref.WeakSet()  # functions that recompute has made
_running = threading.local()  # the second runs that are under way in each thread


def recompute(function: F) -> F:
    """Return `function` as one that forgets: its intermediate results are made again in the backward.

    Use it for a function, a method, an nn.Module or a class of them, in plain eager code:

        @lowtide.recompute
        def feed_forward(x):
            return outer(dropout(F.gelu(inner(x))))

        model.blocks[3] = lowtide.recompute(model.blocks[3])

    Results, gradients, buffers and the generators are those of the function without it, to the bit; dropout draws what
    it drew, and batch norms update their statistics once. The price is a second run. A module is changed itself; its
    parameters keep their names. Inside `fit` and `wrap` the second run is part of the step that is planned. What the
    function does to other Python objects (a list that it appends to, a file) it does twice.
    """
    if isinstance(function, type) and issubclass(function, nn.Module):
        function.forward = _forgetting(function.forward, function.__qualname__)
        return function
    if isinstance(function, nn.Module):
        module, kind = cast(Any, function), cast(Any, type(function))
        module.__class__ = _forgetful_class(kind)
        return function
    if not callable(function) or isinstance(function, type):
        raise UsageError(
            f"lowtide.recompute takes a function or an nn.Module, not {_name(function)}.",
            hint="write it above a function, or call it with one: lowtide.recompute(function)(x).",
        )
    return _forgetting(function, _name(function))


def second_run() -> str:
    """The name of the innermost function that runs for the second time now; empty where none does."""
    return _stack()[-1].name if _stack() else ""


def _stack() -> list[_Second]:
    if not hasattr(_running, "stack"):
        _running.stack = []
    stack: list[_Second] = _running.stack
    return stack


def _name(thing: Any) -> str:
    named: str = getattr(thing, "__qualname__", "") or type(thing).__qualname__
    return named.rpartition("<locals>.")[2]


def _forgetting(function: F, name: str) -> F:
    if function in _forgetful:
        return function
    if inspect.isgeneratorfunction(function) or inspect.iscoroutinefunction(function):
        raise UsageError(
            f"{name} is a generator or a coroutine, which runs when it is asked for its parts.",
            hint="put lowtide.recompute on the functions that it calls.",
        )

    @functools.wraps(function)
    def forgetting(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return function(*args, **kwargs)
        return _run(function, name, args, kwargs)

    _forgetful.add(forgetting)
    return forgetting  # type: ignore[return-value]


@functools.cache
def _forgetful_class(kind: Any) -> Any:
    """The class of modules that are like those of another, but forget."""
    if kind.forward in _forgetful:
        return kind
    forward = _forgetting(kind.forward, kind.__qualname__)
    names = {"forward": forward, "__reduce_ex__": _reduce, "__module__": kind.__module__, "__doc__": kind.__doc__}
    return type(kind.__name__, (kind,), names)


def _reduce(module: nn.Module, protocol: Any) -> Any:
    """How a module that forgets is copied and pickled: its class is made where it comes back."""
    kind = type(module).__mro__[1]
    reduced: Any = super(type(module), module).__reduce_ex__(protocol)
    maker, given, *state = reduced
    if maker is NEW:
        maker, given = _remade, (kind, *given[1:])
    return maker, given, *state


def _remade(kind: Any, *rest: Any) -> Any:
    made = _forgetful_class(kind)
    return made.__new__(made, *rest)


def _run(function: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call the function for the first time, and let autograd call it again when it needs what it forgot."""
    leaves, trees = _taken_apart([*args, *kwargs.values()])
    first = _First(name, _modules(function, args, kwargs))
    given = [(args, kwargs)]  # the caller's own containers, for the first run alone

    def call(*leaves: Any) -> Any:
        if given:
            own, named = given.pop()
            return function(*own, **named)
        parts = _put_together(leaves, trees)
        return function(*parts[: len(args)], **dict(zip(kwargs, parts[len(args) :], strict=True)))

    result = checkpoint(call, *leaves, use_reentrant=False, context_fn=lambda: (first, _Second(first)))
    for leaf in leaves:
        if isinstance(leaf, Tensor) and storage_key(leaf) in first.before:
            raise UsageError(
                f"{name} writes to its argument of shape {tuple(leaf.shape)}: run again, it would find what it made.",
                hint=CLONE,
            )
    return result


def _taken_apart(arguments: list[Any]) -> tuple[list[Any], list[tree.Tree]]:
    """All leaves of the arguments; those without tensors stay whole."""
    leaves, trees = [], []
    for argument in arguments:
        parts, structure = tree.flatten(argument)
        if not any(isinstance(part, Tensor) for part in parts):
            parts, structure = [argument], tree.LEAF
        leaves += parts
        trees.append(structure)
    return leaves, trees


def _put_together(leaves: tuple[Any, ...], trees: list[tree.Tree]) -> list[Any]:
    rest = list(leaves)
    made = []
    for structure in trees:
        count = len(list(structure.paths()))
        made.append(structure.build(rest[:count]))
        del rest[:count]
    return made


def _modules(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[nn.Module]:
    """The modules that the function is given or made with, and their parts; those that it calls come later."""
    while isinstance(function, functools.partial):
        args, kwargs, function = (*args, *function.args), {**kwargs, **function.keywords}, function.func
    cells = [cell.cell_contents for cell in getattr(function, "__closure__", None) or () if _filled(cell)]
    defaults = getattr(function, "__defaults__", None) or ()
    owners = [getattr(function, "__self__", None), *args, *kwargs.values(), *cells, *defaults]
    found = {id(part): part for owner in owners if isinstance(owner, nn.Module) for part in owner.modules()}
    return list(found.values())


def _filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not MISSING
    except ValueError:
        return False


class _First(TorchDispatchMode):
    """The first run: keeps what it writes over and did not make, and what it puts in the place of attributes."""

    def __init__(self, name: str, modules: list[nn.Module]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.name = name
        self.before: dict[int, tuple[StorageWeakRef, Tensor]] = {}  # storage -> all of its content
        self.attributes: list[tuple[dict[str, Any], str, Any]] = []  # where, and what was there; MISSING: nothing
        self.generators: list[tuple[Callable[[Any], None], Callable[[], Any], Any]] = []  # set, get, state
        self._made: set[int] = set()
        self._modules = modules
        self._found: dict[int, tuple[dict[str, Any], dict[str, Any]]] = {}  # attributes and buffers, and as they were
        self._states: list[Any] = []
        self._hook: Any = None
        self._thread = threading.get_ident()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else every call goes through a guard against compilation

    def __enter__(self) -> Any:
        for module in self._modules:
            self._look(module)
        self._hook = register_module_forward_pre_hook(self._look)
        self._states = [get() for _, get in GENERATORS]
        return super().__enter__()  # type: ignore[no-untyped-call]

    def _look(self, module: nn.Module, *_: Any) -> None:
        """Remember the attributes of a module that the function may change."""
        if threading.get_ident() == self._thread:
            for holder in (vars(module), registries(module)[1]):
                self._found.setdefault(id(holder), (holder, dict(holder)))

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._hook.remove()
        for holder, found in self._found.values():
            for key in {**found, **holder}:
                if holder.get(key, MISSING) is not found.get(key, MISSING):
                    self.attributes.append((holder, key, found.get(key, MISSING)))
        for (put, get), state in zip(GENERATORS, self._states, strict=True):
            if get() != state:
                self.generators.append((put, get, state))
        self.before = {key: kept for key, kept in self.before.items() if not kept[0].expired()}
        self._modules, self._found, self._states = [], {}, []
        self._made.clear()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        written, fresh = _deeds(func)
        for place in written:
            given = args[place] if isinstance(place, int) and place < len(args) else kwargs.get(str(place))
            for tensor in _tensors(given):
                self._keep(tensor)
        if func in STATISTICS and args[STATISTICS[func][1]]:
            for place in STATISTICS[func][0]:
                for tensor in _tensors(args[place]):
                    self._keep(tensor)
        result = func(*args, **kwargs)
        if fresh:
            self._made.update(map(storage_key, _tensors(result)))
        return result

    def _keep(self, tensor: Tensor) -> None:
        """Copy a storage that the function did not make, before it is written to for the first time."""
        key = storage_key(tensor)
        if key in self._made:
            return
        for second in reversed(_stack()):
            key, tensor = second.original(key, tensor)
        if key not in self.before:
            self.before[key] = StorageWeakRef(tensor.untyped_storage()), _whole(tensor).clone()


class _Second:
    """A second run: it sees what the first one found, and leaves everything as it is."""

    def __init__(self, first: _First) -> None:
        self.first = first
        self.name = first.name
        self._copies: dict[int, Tensor] = {}  # storage -> a copy of its content
        self._owners: dict[int, tuple[int, Tensor]] = {}  # storage of a copy -> the storage that it stands for
        self._left = ExitStack()

    def __enter__(self) -> None:
        for put, get, state in self.first.generators:
            self._left.callback(put, get())
            put(state)
        for holder, key, found in self.first.attributes:
            self._left.callback(_assign, holder, key, holder.get(key, MISSING))
            _assign(holder, key, found)
        _stack().append(self)
        self._left.callback(_stack().remove, self)
        if self.first.before:
            self._left.enter_context(_Instead(self))
            self._left.callback(self._forget)

    def __exit__(self, *_: Any) -> None:
        self._left.close()

    def _forget(self) -> None:
        self._copies, self._owners = {}, {}

    def original(self, key: int, tensor: Tensor) -> tuple[int, Tensor]:
        """The storage for which another stands in this run, and a tensor on it; itself, if it stands for none."""
        return self._owners.get(key, (key, tensor))

    def copy_of(self, tensor: Tensor) -> Tensor | None:
        """What stands for a tensor that the first run wrote to; None for all others."""
        key = storage_key(tensor)
        if key not in self.first.before or self.first.before[key][0].expired():
            return None
        if tensor.requires_grad:
            raise UsageError(
                f"{self.name} writes to a tensor of shape {tuple(tensor.shape)} that it did not make, and trains it: "
                "run again, it would find what it made.",
                hint=CLONE,
            )
        if key not in self._copies:
            whole = self._copies[key] = self.first.before[key][1].clone()
            self._owners[storage_key(whole)] = key, tensor
        return torch.as_strided(self._copies[key], tensor.shape, tensor.stride(), tensor.storage_offset())


class _Instead(TorchFunctionMode):
    """Gives every call the copies of a second run in the place of what they stand for, and takes them back."""

    def __init__(self, second: _Second) -> None:
        super().__init__()
        self.second = second
        self._seen: dict[int, tuple[Tensor, Tensor]] = {}  # tensor -> itself, and what stands for it
        self._back: dict[int, Tensor] = {}  # what stands for a tensor -> that one

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*map(self._see, args), **{key: self._see(item) for key, item in (kwargs or {}).items()})
        return self._back.get(id(result), result) if isinstance(result, Tensor) else result

    def _see(self, arg: Any) -> Any:
        if isinstance(arg, (tuple, list)):
            seen = [self._see(item) for item in arg]
            return arg if all(one is other for one, other in zip(seen, arg, strict=True)) else type(arg)(seen)
        if not isinstance(arg, Tensor):
            return arg
        if id(arg) not in self._seen:
            copy = self.second.copy_of(arg)
            if copy is None:
                return arg
            self._seen[id(arg)] = arg, copy
            self._back[id(copy)] = arg
        return self._seen[id(arg)][1]


@functools.cache
def _deeds(func: Any) -> tuple[tuple[int | str, ...], bool]:
    """Which arguments an op says that it writes to, by place and by name, and whether its results are new tensors."""
    declared = schema(func)
    written = [(place, item.name) for place, item in enumerate(declared.arguments) if _writes(item)]
    fresh = all(item.alias_info is None for item in declared.returns) or func is aten.lift_fresh.default
    return tuple(part for pair in written for part in pair), fresh


def _writes(argument: Any) -> bool:
    return argument.alias_info is not None and bool(argument.alias_info.is_write)


def _tensors(thing: Any) -> Iterator[Tensor]:
    if isinstance(thing, Tensor):
        yield thing
    elif isinstance(thing, (tuple, list)):
        for part in thing:
            yield from _tensors(part)


def _whole(tensor: Tensor) -> Tensor:
    """All of a tensor's storage, as one row."""
    count = tensor.untyped_storage().nbytes() // tensor.element_size()
    return torch.as_strided(tensor, (count,), (1,), 0)


def _assign(holder: dict[str, Any], key: str, found: Any) -> None:
    if found is MISSING:
        holder.pop(key, None)
    else:
        holder[key] = found


def _numpy_state() -> tuple[Any, ...]:
    """The state of numpy's generator, as something that can be compared."""
    state: Any = numpy.random.get_state()
    name, keys, *rest = state
    return name, keys.tobytes(), *rest


def _set_numpy_state(state: tuple[Any, ...]) -> None:
    name, keys, *rest = state
    numpy.random.set_state((name, numpy.frombuffer(keys, numpy.uint32), *rest))


GENERATORS: tuple[tuple[Callable[[Any], None], Callable[[], Any]], ...] = (
    (random.setstate, random.getstate),
    (_set_numpy_state, _numpy_state),
)
