"""Canaries: each private part of torch that lowtide uses still does what it is used for; a failure names the part,
what it is for, and the torch that broke it.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import inspect
import logging
import os
import random
import re
import subprocess
import sys
import tomllib
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy
import pytest
import torch
from torch import distributed
from torch.distributed.fsdp import fully_shard
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.checkpoint import checkpoint

from lowtide import allocator, private
from lowtide.errors import LowtideError, VersionError

aten = torch.ops.aten
WATCHED: set[str] = set()
ROOT = Path(__file__).resolve().parents[2]


def canary(*names: str, does: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A test of these names of lowtide/private.py, which fails with what they are for."""
    WATCHED.update(names)

    def watch(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def watched(*args: Any, **kwargs: Any) -> None:
            try:
                test(*args, **kwargs)
            except Exception as error:
                broken = f"torch {torch.__version__} breaks {' and '.join(names)}, which {does}"
                pytest.fail(f"{broken}: {type(error).__name__}: {error}")

        return watched

    return watch


# ------------------------------------------------------------------------------------------------------------ stand-ins


@contextmanager
def one_rank() -> Iterator[None]:
    """A process group of this process alone."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        distributed.destroy_process_group()


@canary(
    "ddp_buckets", "ddp_order", "ignored_by_ddp", does="gives the buckets of DDP, which decide how sums are rounded"
)
def test_the_buckets_of_ddp() -> None:
    with one_rank():
        layers = [torch.nn.Linear(100, 100) for _ in range(4)]
        ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers), bucket_cap_mb=0.06)
        parameters = [*ddp.parameters()]
        assert private.ddp_buckets(ddp, parameters, None) == [[*range(8)]]  # one for all, until it knows better
        assert private.ddp_order(ddp) is None
        for _ in range(2):
            ddp(torch.randn(3, 100)).sum().backward()
        order = private.ddp_order(ddp)
        assert order is not None
        assert sorted(order) == [*range(8)]
        rebuilt = private.ddp_buckets(ddp, parameters, order)
        said = ddp._get_ddp_logging_data()["rebuilt_bucket_sizes"]
        assert [4 * sum(parameters[one].numel() for one in bucket) for bucket in rebuilt] == [
            int(size) for size in said.split(", ")
        ]
        assert len(rebuilt) > 1
        assert private.ignored_by_ddp(ddp) == set()


@canary(
    "ddp_hooked", "ddp_joining", "ddp_delays", "release_reducer", does="knows what DDP was told, and frees its buckets"
)
def test_what_ddp_was_told() -> None:
    with one_rank():
        ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(100, 100))
        assert not any(asked(ddp) for asked in (private.ddp_hooked, private.ddp_joining, private.ddp_delays))
        with ddp.join():
            assert private.ddp_joining(ddp)
        with allocator.meter() as meter:
            ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(100, 100))
            held = meter.current
            private.release_reducer(ddp)
            assert held - meter.current >= 40_400
            ddp(torch.ones(2, 100)).sum().backward()
        assert isinstance(ddp.reducer, torch.distributed.Reducer)
        ddp.register_comm_hook(None, lambda state, bucket: bucket)
        assert private.ddp_hooked(ddp)


@canary(
    *("fully_sharded", "fsdp_groups", "Sharded", "fsdp_parameters", "fsdp_told", "fsdp_followed", "chunk_cat"),
    *("local_part", "put_parameter"),
    does="knows the shards of fully_shard, and stands in for its hooks",
)
def test_the_shards_of_fully_shard() -> None:
    with one_rank():
        assert not private.fully_sharded(torch.nn.Linear(2, 3))
        model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1, bias=False))
        fully_shard(model[0])
        fully_shard(model)
        assert private.fully_sharded(model)
        groups = private.fsdp_groups(model)
        assert [len(private.fsdp_parameters(group)) for group in groups] == [1, 2]
        assert not any(wrong for group in groups for wrong, _, _ in private.fsdp_told(group))
        one = private.fsdp_parameters(groups[0])[0]
        assert isinstance(one, private.Sharded)
        assert one.parameter is model[1].weight
        assert (one.size, one.places) == ((1, 3), ((model[1], "weight"),))
        assert private.local_part(one.parameter) is one.local
        assert isinstance(one.made(one.local), type(one.parameter))
        said: list[tuple[str, int]] = []
        calls = [lambda group, word=word: said.append((word, groups.index(group))) for word in ("in", "out", "back")]
        with private.fsdp_followed(*calls):
            for group in groups:
                for part in private.fsdp_parameters(group):
                    for module, name in part.places:
                        private.put_parameter(module, name, torch.nn.Parameter(part.local.clone()))
            model(torch.ones(4, 2)).sum().backward()
        assert said == [("in", 0), ("in", 1), ("out", 1), ("out", 0), ("back", 0), ("back", 1)]
        model.set_requires_gradient_sync(False)
        assert [what for wrong, what, _ in private.fsdp_told(groups[0]) if wrong] == [
            "set_requires_gradient_sync(False)"
        ]
    rows = private.chunk_cat([torch.arange(3.0), torch.arange(4.0)], 2)
    assert rows.tolist() == [[0, 1, 0, 1], [2, 0, 2, 3]]


@canary("FakeTensor", "FakeTensorMode", "fake_mode", does="lets a step be traced on tensors without contents")
def test_stand_ins_have_sizes_and_no_memory() -> None:
    mode = private.fake_mode()
    assert mode.cache_enabled is False
    fake = private.FakeTensor(mode, torch.empty_strided((2, 3), (1, 2), device="meta"), torch.device("cpu"))
    assert isinstance(fake, torch.Tensor)
    assert (fake.fake_device, fake.constant) == (torch.device("cpu"), None)
    with mode:
        made = fake @ torch.ones(3, 4)  # a real one among them
        parameter = torch.nn.Parameter(fake)
    assert isinstance(made, private.FakeTensor)
    assert isinstance(parameter, private.FakeTensor)
    assert tuple(made.shape) == (2, 4)
    assert isinstance(mode.from_tensor(torch.ones(2), static_shapes=True), private.FakeTensor)


@canary(
    "DataDependentOutputException", "DynamicOutputShapeException", does="says that a step depends on what is in tensors"
)
def test_stand_ins_refuse_what_needs_contents() -> None:
    with private.fake_mode():
        with pytest.raises(private.DataDependentOutputException) as caught:
            torch.ones(3, dtype=torch.bool).all().__bool__()
        assert str(caught.value.func) == "aten._local_scalar_dense.default"
        with pytest.raises(private.DynamicOutputShapeException) as caught:
            torch.ones(3).nonzero()
        assert str(caught.value.func) == "aten.nonzero.default"


@canary("without_dispatch", does="makes the meta tensor of a stand-in while modes are on")
def test_a_plain_tensor_is_made_while_modes_are_on() -> None:
    with private.fake_mode(), private.without_dispatch():
        assert type(torch.empty(2, device="meta")) is torch.Tensor


@canary("swap_tensor_impl", does="puts a stand-in into the caller's parameter, and takes it out")
def test_the_tensor_behind_an_object_is_swapped_and_back() -> None:
    one, other = torch.ones(2, requires_grad=True), torch.zeros(3)
    place = one.data_ptr()
    private.swap_tensor_impl(one, other)
    assert (tuple(one.shape), tuple(other.shape), other.requires_grad) == ((3,), (2,), True)
    private.swap_tensor_impl(one, other)
    assert (one.data_ptr(), one.requires_grad) == (place, True)


@canary("wrapper_subclass", "without_torch_function", "as_parameter", does="lets a tensor stand for its parts")
def test_a_tensor_without_memory_has_its_calls_come_to_us_and_may_be_a_parameter() -> None:
    class Told(torch.Tensor):
        __torch_function__ = private.without_torch_function

        @classmethod
        def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(torch.full((2, 3), 4.0), *args[1:], **(kwargs or {}))

    made = private.wrapper_subclass(Told, (2, 3), strides=(3, 1), dtype=torch.float32, device=torch.device("cpu"))
    assert torch.equal(made + 1, torch.full((2, 3), 5.0))
    assert type(made + 1) is torch.Tensor
    assert not isinstance(made, torch.nn.Parameter)
    private.as_parameter(made)
    assert isinstance(made, torch.nn.Parameter)


@canary("is_traceable_wrapper_subclass", does="knows tensor subclasses that stand for other tensors, to refuse them")
def test_wrappers_are_told_from_plain_tensors() -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    assert private.is_traceable_wrapper_subclass(TwoTensor(torch.ones(2), torch.ones(2)))
    assert not private.is_traceable_wrapper_subclass(torch.ones(2))


# ---------------------------------------------------------------------------------------------------------------- calls


class Calls(private.TorchDispatchMode):
    """Notes the calls below autograd."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []
        self.nodes: list[Any] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        self.nodes.append(private.current_node())
        return func(*args, **(kwargs or {}))


@canary("TorchDispatchMode", "current_node", does="sees the calls of forward and backward, and which is which")
def test_a_mode_sees_forward_and_backward() -> None:
    weight = torch.ones(2, 2, requires_grad=True)
    with Calls() as calls:
        (weight @ weight).sum().backward()
    forward = [name for name, node in zip(calls.seen, calls.nodes, strict=True) if node is None]
    backward = [name for name, node in zip(calls.seen, calls.nodes, strict=True) if node is not None]
    assert "aten.mm.default" in forward
    assert backward.count("aten.mm.default") == 2


@canary("TorchDispatchMode", does="calls a mode directly where it says that it need not skip compilation")
def test_a_mode_is_asked_whether_compilation_must_be_kept_away() -> None:
    wrapped = private.TorchDispatchMode.__dict__["_should_skip_dynamo"]
    assert isinstance(wrapped, classmethod)
    assert "_should_skip_dynamo" in inspect.getsource(private.TorchDispatchMode.__init_subclass__)


@canary("without_modes", does="reads the real generator inside a trace")
def test_modes_can_be_left_for_a_while() -> None:
    with private.fake_mode(), private.without_modes():
        state = torch.default_generator.get_state()
        torch.default_generator.set_state(state)
    assert type(state) is torch.Tensor


@canary("mode_count", "innermost_transform", does="tells a scan that it is being traced")
def test_modes_and_transforms_are_seen() -> None:
    assert (private.mode_count(), private.innermost_transform()) == (0, None)
    with Calls():
        assert private.mode_count() == 1
    seen: list[Any] = []
    torch.func.vmap(lambda x: (seen.append(private.innermost_transform()), x)[1])(torch.ones(2))
    assert seen != [None]


@canary(
    "traced_by_others",
    "function_modes",
    "DeviceContext",
    "jit_state",
    does="lets an attached model step aside where others trace it",
)
def test_tracing_by_others_is_seen() -> None:
    assert not private.traced_by_others()
    assert changed(private.traced_by_others, Calls()) == (False, True, False)
    assert changed(private.traced_by_others, Functions()) == (False, True, False)
    assert changed(private.traced_by_others, torch.device("cpu")) == (False, False, False)
    seen: list[Any] = []
    torch.func.vmap(lambda x: (seen.append(private.traced_by_others()), x)[1])(torch.ones(2))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, about what is old
        torch.jit.trace(
            lambda x: (seen.append(private.traced_by_others()), x + 1)[1], (torch.ones(2),), check_trace=False
        )
    assert seen
    assert all(seen)
    assert private.jit_state() is None
    assert private.function_modes() == []
    with torch.device("cpu"):
        (mode,) = private.function_modes()
    assert isinstance(mode, private.DeviceContext)


@canary("below_autograd", does="runs programs without autograd's graph")
def test_kernels_run_below_autograd() -> None:
    weight = torch.ones(2, 2, requires_grad=True)
    with private.below_autograd():
        made = private.bare_kernel(aten.mm.default)(weight, weight)
        private.bare_kernel(aten.add_.Tensor)(weight, made)  # in place, on a leaf
    assert not made.requires_grad
    assert weight.detach().tolist() == [[3.0, 3.0], [3.0, 3.0]]


@canary("dispatch_key_for_device", "has_kernel", does="tells which calls eager takes apart")
def test_ops_say_where_they_have_kernels() -> None:
    key = private.dispatch_key_for_device("cpu")
    assert private.has_kernel("aten::mm", key)
    assert private.has_kernel("aten::matmul", "CompositeImplicitAutograd")
    assert not private.has_kernel("aten::matmul", key)
    assert private.has_kernel("aten::ones_like", "CompositeExplicitAutograd")


@canary("dispatched", does="tells ops from what else torch.ops has")
def test_dispatched() -> None:
    assert private.dispatched(aten.mm.default)
    assert not private.dispatched(aten.mm)
    assert not private.dispatched(aten.warn.default)
    assert not private.dispatched(None)


@canary("schema", "base_name", "overload_name", "bare_kernel", does="names ops, and knows what they take and write to")
def test_an_op_knows_its_name_and_its_arguments() -> None:
    op = aten.add_.Tensor
    assert (private.base_name(op), private.overload_name(op), op.namespace) == ("add_", "Tensor", "aten")
    assert private.base_name(aten._to_copy.default) == "_to_copy"
    first, second, *_ = private.schema(op).arguments
    assert (first.name, first.alias_info.is_write, second.alias_info) == ("self", True, None)
    assert [str(item.type) for item in private.schema(aten.split.Tensor).returns] == ["List[Tensor]"]
    assert [item.name for item in private.schema(aten.add.out).arguments if item.is_out] == ["out"]
    assert private.bare_kernel(aten.mul.Tensor)(torch.ones(1), torch.full((1,), 2.0)).item() == 2


@canary("flop_registry", does="tells products from other ops, and counts their operations")
def test_products_are_known_and_counted() -> None:
    assert aten.add not in private.flop_registry
    sizes = torch.empty(2, 3, device="meta"), torch.empty(3, 4, device="meta")
    assert private.flop_registry[aten.mm](*sizes, out_val=sizes[0] @ sizes[1]) == 2 * 2 * 3 * 4


@canary("symbolic", does="carries a learning rate through an optimizer as an input of the program")
def test_arithmetic_with_a_symbolic_number_comes_to_its_node() -> None:
    asked: list[str] = []

    class Node:
        def __getattr__(self, name: str) -> Any:
            if name in ("is_int", "is_bool", "is_constant"):
                return lambda: False
            if name == "is_float":
                return lambda: True
            asked.append(name)
            return lambda *_: self

    number = private.symbolic(Node())
    made = [number + 1, 2 - number, number * 3.0, number / 2, -number]
    assert all(isinstance(item, torch.SymFloat) for item in made)
    assert {"add", "sub", "mul", "float_truediv", "neg", "wrap_float"} <= set(asked)


# ------------------------------------------------------------------------------------------------------------- autograd


@canary("sequence_number", "next_sequence_number", does="ties a backward op to the line of its forward op")
def test_nodes_are_numbered_in_the_order_in_which_they_are_made() -> None:
    weight = torch.ones(2, requires_grad=True)
    before = private.next_sequence_number()
    first, second = (weight * 2).grad_fn, (weight * 3).grad_fn
    assert [private.sequence_number(node) - before for node in (first, second)] == [0, 1]


@canary("ACCUMULATES", does="finds the gradient that autograd hands to a parameter")
def test_nodes_that_add_to_a_gradient_have_the_last_number() -> None:
    node = (torch.ones(2, requires_grad=True) * 2).grad_fn.next_functions[0][0]
    assert private.sequence_number(node) == private.ACCUMULATES


@canary("version_of", does="sees that a tensor was written to between forward and backward")
def test_a_write_is_counted() -> None:
    tensor = torch.ones(2)
    before = private.version_of(tensor)
    tensor.add_(1)
    assert private.version_of(tensor) == before + 1


@canary("preserving_version", does="puts buffers back after a forward was run again, as no change of the caller's")
def test_a_write_can_go_uncounted() -> None:
    tensor = torch.ones(2)
    before = private.version_of(tensor)
    with private.preserving_version(tensor):
        tensor.add_(1)
    assert private.version_of(tensor) == before
    assert tensor.tolist() == [2.0, 2.0]


@canary(
    "gradient_hooks",
    "accumulation_hooks",
    "hook_registers",
    does="sees the hooks of parameters, which can't be repeated",
)
def test_hooks_are_seen() -> None:
    tensor = torch.ones(2, requires_grad=True)
    assert (private.gradient_hooks(tensor), private.accumulation_hooks(tensor)) == (False, False)
    assert private.hook_registers(tensor) == []
    handle = tensor.register_hook(lambda gradient: None)
    assert (private.gradient_hooks(tensor), private.accumulation_hooks(tensor)) == (True, False)
    assert [len(hooks) for hooks in private.hook_registers(tensor)] == [1]
    handle.remove()
    assert private.hook_registers(tensor) == [{}]
    tensor = torch.ones(2, requires_grad=True)
    tensor.register_post_accumulate_grad_hook(lambda tensor: None)
    assert (private.gradient_hooks(tensor), private.accumulation_hooks(tensor)) == (False, True)


@canary("autograd_engine", does="runs the backward of one cell of a scan")
def test_the_engine_gives_the_gradients_that_are_asked_for() -> None:
    from torch.autograd.graph import get_gradient_edge

    weight = torch.ones(2, requires_grad=True)
    edge = get_gradient_edge(weight * 3)
    (found,) = private.autograd_engine.run_backward(
        (edge,), (torch.ones(2),), False, False, (weight,), allow_unreachable=True, accumulate_grad=False
    )
    assert found.tolist() == [3.0, 3.0]


# ------------------------------------------------------------------------------------------------------------- storages


@canary("storage_key", "StorageWeakRef", does="tells storages apart")
def test_views_have_the_storage_of_their_base() -> None:
    tensor, other = torch.ones(2, 2), torch.ones(2, 2)
    assert private.storage_key(tensor.t()) == private.storage_key(tensor) != private.storage_key(other)
    weak = private.StorageWeakRef(tensor.untyped_storage())
    assert weak.cdata == private.storage_key(tensor)
    assert not weak.expired()
    del tensor
    assert weak.expired()


@canary("object_fields", does="finds a tensor in C++ through its Python object, to compare it before each step")
def test_an_object_holds_the_address_of_its_tensor() -> None:
    for tensor in (torch.ones(2), torch.nn.Parameter(torch.ones(2))):
        words, place = private.object_fields(tensor)
        assert 2 <= place < words  # behind the count of references and the class
        fields = (ctypes.c_int64 * words).from_address(id(tensor))
        assert fields[place] == tensor._cdata
        other = torch.zeros(2) if type(tensor) is torch.Tensor else torch.nn.Parameter(torch.zeros(2))
        torch.utils.swap_tensors(tensor, other)
        assert fields[place] == tensor._cdata
        before = list(fields)
        if tensor.requires_grad:
            tensor.register_hook(lambda gradient: None)
            assert list(fields) != before


# --------------------------------------------------------------------------------------------- modules and optimizers


@canary("registries", does="puts back what a traced step did to the registers of modules")
def test_a_module_keeps_its_parts_in_three_dicts() -> None:
    norm = torch.nn.BatchNorm1d(2)
    parameters, buffers, _ = private.registries(norm)
    assert (list(parameters), list(buffers)) == (
        ["weight", "bias"],
        ["running_mean", "running_var", "num_batches_tracked"],
    )
    replaced = torch.zeros(2)
    buffers["running_mean"] = replaced
    assert norm.running_mean is replaced
    assert list(private.registries(torch.nn.Sequential(norm))[2]) == ["0"]


@canary("compiled_in_place", "is_compiled", does="refuses what torch.compile has changed")
def test_what_torch_compile_has_changed_is_known() -> None:
    module = torch.nn.Linear(2, 2)
    assert (private.compiled_in_place(module), private.is_compiled(torch.relu)) == (False, False)
    module.compile(backend="eager")
    assert private.compiled_in_place(module)
    assert private.is_compiled(torch.compile(lambda x: x, backend="eager"))


OPTIMIZERS = [getattr(torch.optim, name) for name in ("Adam", "AdamW", "RMSprop", "Adagrad", "NAdam", "RAdam")]


@pytest.mark.parametrize("kind", OPTIMIZERS)
@canary("state_maker", does="makes the state of an optimizer before its first step, as its first step would")
def test_the_state_is_what_the_first_step_finds(kind: Any) -> None:
    weight = torch.ones(2, requires_grad=True)
    weight.grad = torch.ones(2)
    optimizer = kind([weight])
    maker = private.state_maker(optimizer)
    assert maker is not None
    lists = list(inspect.signature(maker).parameters)[1:]
    optimizer.state.clear()
    maker(optimizer.param_groups[0], *([] for _ in lists))
    made = {key: torch.as_tensor(item).clone() for key, item in optimizer.state[weight].items()}
    optimizer.step()
    assert set(made) == set(optimizer.state[weight])
    assert private.state_maker(torch.optim.LBFGS([weight])) is None


@canary("mark_stepped", does="keeps schedulers from the warning that they go first")
def test_a_scheduler_believes_that_the_optimizer_has_stepped() -> None:
    optimizer = torch.optim.SGD([torch.ones(2, requires_grad=True)], lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    private.mark_stepped(optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scheduler.step()


@canary("keep_fraction", does="lets torch.compile keep a fraction of the activations, in our races")
def test_compile_is_told_how_much_to_keep() -> None:
    import torch._functorch.config as settings

    before = settings.activation_memory_budget
    try:
        private.keep_fraction(0.5)
        assert settings.activation_memory_budget == 0.5
    finally:
        settings.activation_memory_budget = before


# ------------------------------------------------------------------------------------------------------------- settings


def changed(read: Callable[[], Any], context: Any) -> tuple[Any, Any, Any]:
    """What is read before a context, in it, and after it."""
    before = read()
    with context:
        inside = read()
    return before, inside, read()


class Functions(torch.overrides.TorchFunctionMode):
    """Hands every function on."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@canary(
    "function_mode_count",
    "autocast_state",
    "saves_by_hooks",
    "attention_kernels",
    does="sees contexts around a step that it depends on",
)
def test_contexts_around_a_step_are_seen() -> None:
    assert changed(private.function_mode_count, Functions()) == (0, 1, 0)
    cast = (True, torch.bfloat16, True)
    assert changed(private.autocast_state, torch.autocast("cpu", torch.bfloat16)) == (None, cast, None)
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)
    assert changed(private.saves_by_hooks, hooks) == (False, True, False)
    plain = torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH)
    assert changed(private.attention_kernels, plain) == ((True,) * 3, (False, False, True), (True,) * 3)


@canary(
    *("deterministic_state", "product_precision", "precision", "mkldnn_enabled", "usual_arithmetic", "USUAL_PRECISION"),
    *("flushes_denormals", "DENORMAL"),
    does="sees settings that a step depends on",
)
def test_settings_are_seen() -> None:
    before = private.deterministic_state(), private.precision(), private.mkldnn_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory
    assert before == ((False, False, fill), private.USUAL_PRECISION, True)
    assert private.usual_arithmetic()
    try:
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = not fill
        assert private.deterministic_state() == (True, True, not fill)
        torch.set_float32_matmul_precision("high")
        assert private.precision()[0] == "high"
        assert not private.usual_arithmetic()
        torch.set_float32_matmul_precision(before[1][0])
        libraries: list[Any] = [torch.backends, torch.backends.mkldnn.matmul, torch.backends.cuda.matmul]
        for library in libraries:
            library.fp32_precision = "tf32"  # of torch's newer words for it, for which it has no older one
            assert not private.usual_arithmetic()
            library.fp32_precision = "none"
        torch._C._set_mkldnn_enabled(False)
        assert not private.mkldnn_enabled()
        assert not private.flushes_denormals()
        if torch.set_flush_denormal(True):
            assert private.flushes_denormals()
    finally:
        torch.set_flush_denormal(False)
        torch._C._set_mkldnn_enabled(True)
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = fill
        torch.set_float32_matmul_precision(before[1][0])
    assert before == (private.deterministic_state(), private.precision(), private.mkldnn_enabled())


MODULES = torch.nn.modules.module


@pytest.mark.parametrize(
    "register",
    [
        MODULES.register_module_forward_hook,
        MODULES.register_module_forward_pre_hook,
        MODULES.register_module_full_backward_hook,
        MODULES.register_module_full_backward_pre_hook,
        register_optimizer_step_pre_hook,
        register_optimizer_step_post_hook,
    ],
)
@canary("global_hooks", does="sees hooks on all modules and optimizers")
def test_hooks_on_all_modules_and_optimizers_are_seen(register: Callable[..., Any]) -> None:
    def hook(*_: Any) -> None: ...

    handle = register(hook)
    try:
        assert private.global_hooks() == (id(hook),)
    finally:
        handle.remove()
    assert private.global_hooks() == ()


# ------------------------------------------------------------------------------------------- of Python's and of numpy's


@canary("python_generator", "numpy_generator", does="knows the generators behind random and numpy.random")
def test_the_generators_behind_the_functions() -> None:
    assert private.python_generator().getstate() == random.getstate()
    assert random.random.__self__ is private.python_generator()
    assert numpy.random.random.__self__ is private.numpy_generator()


@canary("cached_answers", "cached_arguments", does="knows what functools.lru_cache keeps")
@pytest.mark.parametrize("room", [None, 2, 8])
@pytest.mark.parametrize("typed", [False, True])
def test_what_a_cached_function_keeps(room: int | None, typed: bool) -> None:
    @functools.lru_cache(maxsize=room, typed=typed)
    def function(*args: Any, **kwargs: Any) -> Any:
        return [args, kwargs]

    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        ((), {}),
        ((1,), {}),
        (((1, 2),), {}),
        ((1, "a"), {"one": 2.5, "two": None}),
        ((), {"one": 2.5}),
        ((1,), {}),
    ]
    for args, kwargs in calls:
        answer = function(*args, **kwargs)
        kept, answers = private.cached_answers(function)
        assert len(kept) == len(answers) == function.cache_info().currsize
        assert any(one is answer for one in answers.values())
        assert all([*private.cached_arguments(function, key)] == one for key, one in answers.items())
        if room == 8 or room is None:
            [key] = [key for key, one in answers.items() if one is answer]
            del kept[key]
            assert function(*args, **kwargs) is not answer


@canary("logged", "log_by", does="sees what a step logs")
def test_every_call_of_a_logger_comes_to_one_function(caplog: pytest.LogCaptureFixture) -> None:
    seen: list[str] = []
    real = private.logged()
    private.log_by(lambda logger, level, message, *rest, **options: seen.append(message))
    try:
        logger = logging.getLogger("canary")
        logger.error("a")
        logger.log(logging.CRITICAL, "b")
        logging.getLogger().error("c")
    finally:
        private.log_by(real)
    assert seen == ["a", "b", "c"]


@canary("environment", does="watches the variables of the environment that a step reads")
def test_the_environment_is_a_dict_of_what_the_system_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOWTIDE_CANARY", "one")
    key = os.environ.encodekey("LOWTIDE_CANARY")  # type: ignore[attr-defined]
    assert os.fsdecode(private.environment()[key]) == "one"
    monkeypatch.delenv("LOWTIDE_CANARY")
    assert key not in private.environment()


# -------------------------------------------------------------------------- what has no name in private.py, but matters


@canary("allocator.cpp", does="meters and arranges torch's memory, with c10's headers")
def test_the_allocator_compiles_against_this_torch() -> None:
    allocator.build.load()


@canary("checkpoint", does="asks torch.get_rng_state and torch.set_rng_state, which are ours while a step is traced")
def test_checkpoint_asks_for_the_state_of_the_generator(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    for home in (torch, torch.random):
        for name in ("get_rng_state", "set_rng_state"):
            real = getattr(torch.random, name)
            monkeypatch.setattr(
                home, name, lambda *args, real=real, name=name, **kwargs: (asked.append(name), real(*args, **kwargs))[1]
            )
    x = torch.ones(2, requires_grad=True)
    checkpoint(torch.nn.functional.dropout, x, use_reentrant=False).sum().backward()
    assert {"get_rng_state", "set_rng_state"} <= set(asked)


# ---------------------------------------------------------------------------------------------------------- the refusal


def test_every_name_has_a_canary() -> None:
    names = {
        name
        for name, thing in vars(private).items()
        if not name.startswith("_")
        and not isinstance(thing, ModuleType)
        and name not in ("Any", "Callable", "Iterator", "NamedTuple", "Sequence")
    }
    refusal = {"FIRST", "BEYOND", "PARTS", "VersionError", "refuse_version", "refuse_missing", "annotations"}
    assert names - refusal - WATCHED == set()
    assert WATCHED - names == {"allocator.cpp", "checkpoint"}


def load_again() -> None:
    """Run lowtide/private.py as a new module."""
    spec = importlib.util.spec_from_file_location("private_again", private.__file__)
    assert spec is not None
    assert spec.loader is not None
    spec.loader.exec_module(importlib.util.module_from_spec(spec))


def needed() -> str:
    """The torch that the package asks for."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return next(line for line in project["dependencies"] if line.startswith("torch"))


def sentence(error: LowtideError) -> str:
    assert error.hint is None
    assert str(error).count("\n") == 0
    return str(error)


@pytest.mark.parametrize("version", ["2.11.0", "1.13.1", "2.16.0", "2.16.0.dev20270101+cpu", "3.0.0"])
def test_another_version_is_refused_in_one_sentence(version: str) -> None:
    with pytest.raises(VersionError) as caught:
        private.refuse_version(version)
    assert sentence(caught.value) == (
        f"lowtide can't use torch {version}, with which it was never tried; pip install '{needed()}'."
    )
    assert isinstance(caught.value, ImportError)


@pytest.mark.parametrize("version", ["2.12.0", "2.13.0+cpu", "2.14.1+cu130", "2.15.0a0+git1234"])
def test_versions_that_were_tried_are_taken(version: str) -> None:
    private.refuse_version(version)


def test_a_version_that_says_nothing_is_refused() -> None:
    with pytest.raises(VersionError, match="whose version it can't read"):
        private.refuse_version("unknown")


@pytest.mark.parametrize(
    ("home", "name"),
    [
        (torch._C, "_swap_tensor_impl"),
        (torch._C, "_AutoDispatchBelowAutograd"),
        (torch._C._functorch, "peek_interpreter_stack"),
        (torch._subclasses.fake_tensor, "FakeTensorMode"),
        (torch.utils._python_dispatch, "_disable_current_modes"),
        (torch.optim.Adam, "_init_group"),
        (torch._C, "_is_any_autocast_enabled"),
        (torch.nn.modules.module, "_global_backward_pre_hooks"),
        (torch._C._autograd, "_top_saved_tensors_default_hooks"),
    ],
)
def test_a_missing_part_is_named_in_one_sentence(monkeypatch: pytest.MonkeyPatch, home: Any, name: str) -> None:
    monkeypatch.delattr(home, name)
    with pytest.raises(VersionError) as caught:
        load_again()
    assert name in sentence(caught.value)
    assert f"torch {torch.__version__}" in sentence(caught.value)


def test_import_lowtide_refuses(tmp_path: Path) -> None:
    code = "import torch; torch.__version__ = '2.11.0'; import lowtide"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT)
    last = ran.stderr.strip().splitlines()[-1]
    assert last.startswith(
        "lowtide.errors.VersionError: lowtide can't use torch 2.11.0, with which it was never tried;"
    )


def test_the_bounds_are_those_of_the_package() -> None:
    first, beyond = re.findall(r"\d+\.\d+", needed())
    assert (first, beyond) == tuple(".".join(map(str, bound)) for bound in (private.FIRST, private.BEYOND))


@canary(
    "opaque_description", "opaque_memory", "opaque_over", does="show tensors to oneDNN in the layout that it works in"
)
def test_tensors_of_the_library_of_convolutions() -> None:
    numbers = torch.arange(16.0 * 2 * 2).view(1, 16, 2, 2)
    own = numbers.to_mkldnn()
    address, nbytes = private.opaque_memory(own)
    assert nbytes == 4 * numbers.numel()
    seen = private.opaque_over(address, (1, 16, 2, 2), private.opaque_description(own))
    assert torch.equal(seen.to_dense(), numbers)
