"""Every private part of torch, and of others, that lowtide uses, each under one name, with what it is for.

No other file reaches into torch (tests/pure/test_house.py), and each name has a canary (tests/cpu/test_private.py).
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import logging
import os
import random
import re
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy
import torch
from torch.optim import optimizer as optimizer_module

from lowtide.errors import VersionError

FIRST, BEYOND = (2, 12), (2, 16)  # torch from the first minor version on, and below the second


def _refusal(what: str, version: str = torch.__version__) -> VersionError:
    wanted = f"torch>={'.'.join(map(str, FIRST))},<{'.'.join(map(str, BEYOND))}"
    return VersionError(f"lowtide can't use torch {version}, {what}; pip install '{wanted}'.")


def refuse_version(version: str) -> None:
    """Refuse a torch whose private parts nobody has looked at."""
    try:
        major, minor = (int(part) for part in version.split(".")[:2])
    except ValueError:
        raise _refusal("whose version it can't read", version) from None
    if not FIRST <= (major, minor) < BEYOND:
        raise _refusal("with which it was never tried", version)


refuse_version(torch.__version__)

try:
    from torch._subclasses import fake_tensor
    from torch.multiprocessing import reductions
    from torch.utils import _device, _python_dispatch, flop_counter

    # Stand-ins for tensors, on which a step is traced, and what they raise where they would need contents.
    FakeTensor = fake_tensor.FakeTensor
    FakeTensorMode = fake_tensor.FakeTensorMode
    DataDependentOutputException = fake_tensor.DataDependentOutputException
    DynamicOutputShapeException = fake_tensor.DynamicOutputShapeException
    # Sees every call below autograd: the recorder of capture, the watch over the cell of a scan.
    TorchDispatchMode = _python_dispatch.TorchDispatchMode
    # Tensor subclasses that stand for other tensors, which are refused.
    is_traceable_wrapper_subclass = _python_dispatch.is_traceable_wrapper_subclass
    # Real tensors inside a trace: the state of the generator.
    without_modes = _python_dispatch._disable_current_modes
    # Holds the address of a storage, so that no later one has it, but not its memory.
    StorageWeakRef = reductions.StorageWeakRef
    # The ops whose operations torch counts: products, and how many operations each takes.
    flop_registry = flop_counter.flop_registry
    # A program runs aten's kernels as they are: there is no graph of autograd to make.
    below_autograd = torch._C._AutoDispatchBelowAutograd
    # What is put back after a forward was run again is no change of the caller's.
    preserving_version = torch.autograd.grad_mode._unsafe_preserve_version_counter
    # The meta tensor inside a stand-in is made while modes are on.
    without_dispatch = torch._C._DisableTorchDispatch
    # A stand-in takes the place of a parameter in the caller's own object, and gives it back.
    swap_tensor_impl = torch._C._swap_tensor_impl
    # A tensor that stands for others, without memory of its own; its calls come to us below autograd only.
    wrapper_subclass = torch.Tensor._make_wrapper_subclass
    without_torch_function = torch._C._disabled_torch_function_impl
    # The node of autograd whose backward runs now, or None: tells backward from forward.
    current_node = torch._C._current_autograd_node
    # Autograd's engine: torch.autograd.grad would check every root again at each cell of a scan.
    autograd_engine: Any = torch.autograd.Variable._execution_engine
    # The number of autograd's next node: ties a backward op to the line of its forward op.
    next_sequence_number = torch._C._autograd._get_sequence_nr
    # The name of the key under which a device has its kernels, and whether an op has one under a key: whether eager
    # runs a call as it is or as other calls.
    dispatch_key_for_device = torch._C._dispatch_key_for_device
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    # Modes and transforms that are on: whether a scan is being traced.
    mode_count = torch._C._len_torch_dispatch_stack
    function_mode_count = torch._C._len_torch_function_stack
    # Settings that a captured step depends on, read before every step.
    mkldnn_enabled = torch._C._get_mkldnn_enabled
    # How many bits of a float count in a product, by library and kind of op.
    product_precision = torch._C._get_fp32_precision_getter
    innermost_transform = torch._C._functorch.peek_interpreter_stack
    # The trace that torch.jit.trace makes, if one is being made.
    jit_state = torch._C._get_tracing_state
    # The modes that see calls of torch's functions, and the one among them that only says where tensors are made.
    function_modes = torch.overrides._get_current_function_mode_stack
    DeviceContext = _device.DeviceContext
    # Hooks at every module and every update.
    _GLOBAL_HOOKS: tuple[Any, ...] = (
        torch.nn.modules.module._global_forward_hooks,
        torch.nn.modules.module._global_forward_pre_hooks,
        torch.nn.modules.module._global_backward_hooks,
        torch.nn.modules.module._global_backward_pre_hooks,
        optimizer_module._global_optimizer_pre_hooks,
        optimizer_module._global_optimizer_post_hooks,
    )
except (ImportError, AttributeError) as error:
    raise _refusal(f"which has changed inside ({error})") from error

_P, _I64, _I32 = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
_capsule = ctypes.pythonapi.PyCapsule_New
_capsule.restype, _capsule.argtypes = ctypes.py_object, [_P, ctypes.c_char_p, _P]

ACCUMULATES = 2**64 - 1  # the sequence number of the nodes that add to a parameter's gradient


def as_parameter(tensor: torch.Tensor) -> None:
    """Let a tensor of another class count as a parameter: isinstance(tensor, torch.nn.Parameter) asks for this."""
    tensor._is_param = True


def sequence_number(node: Any) -> int:
    """When a node of autograd was made."""
    number: int = node._sequence_nr()
    return number


def fake_mode() -> FakeTensorMode:
    """A mode for stand-ins that takes real tensors, too, and remembers nothing of earlier traces."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    mode.cache_enabled = False  # graphs depended on what torch had seen before
    return mode


def storage_key(tensor: torch.Tensor) -> int:
    """What tells the storage of a tensor from all others that are alive."""
    key: int = tensor.untyped_storage()._cdata
    return key


def version_of(tensor: torch.Tensor) -> int:
    """How often a tensor was written to: whether it has changed between forward and backward."""
    return tensor._version


def gradient_hooks(tensor: torch.Tensor) -> bool:
    """Whether hooks of the user see the gradient of a tensor."""
    return bool(tensor._backward_hooks)


def accumulation_hooks(tensor: torch.Tensor) -> bool:
    """Whether hooks of the user run when a parameter's gradient is complete."""
    return bool(tensor._post_accumulate_grad_hooks)


def hook_registers(tensor: torch.Tensor) -> list[dict[Any, Any]]:
    """Where the hooks of a tensor are, as far as it ever had some of a kind."""
    both = (tensor._backward_hooks, tensor._post_accumulate_grad_hooks)
    return [hooks for hooks in both if hooks is not None]


def object_fields(tensor: torch.Tensor) -> tuple[int, int]:
    """The words of a tensor's Python object, and which of them is the address of the tensor in C++."""
    words = torch._C.TensorBase.__basicsize__ // 8
    fields = (ctypes.c_int64 * words).from_address(id(tensor))
    return words, list(fields).index(tensor._cdata)


def registries(module: torch.nn.Module) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """The dicts in which a module keeps parameters, buffers and submodules, to be put back after a trace."""
    return module._parameters, module._buffers, module._modules


def compiled_in_place(module: torch.nn.Module) -> bool:
    """Whether module.compile() was called: what runs then is no Python that can be traced."""
    return module._compiled_call_impl is not None


def is_compiled(function: Callable[..., Any]) -> bool:
    """Whether torch.compile made this function of another."""
    return getattr(function, "_torchdynamo_orig_callable", None) is not None


def state_maker(optimizer: torch.optim.Optimizer) -> Callable[..., Any] | None:
    """What makes the state of a parameter group before its first step; None where an optimizer has no such thing."""
    maker: Callable[..., Any] | None = getattr(optimizer, "_init_group", None)
    return maker


def mark_stepped(optimizer: torch.optim.Optimizer) -> None:
    """Say that the optimizer has stepped, as a step does that a scheduler wrapped, which else warns."""
    if getattr(optimizer.step, "_wrapped_by_lr_sched", False):
        optimizer._opt_called = True  # type: ignore[attr-defined]


def schema(overload: Any) -> Any:
    """The arguments and results of an op: what it writes to, and what it returns."""
    return overload._schema


def dispatched(found: Any) -> bool:
    """Whether this is an overload of an op that the dispatcher knows; torch.ops has more, such as `aten.warn`."""
    if not isinstance(found, torch._ops.OpOverload):
        return False
    try:
        torch._C._dispatch_find_schema_or_throw(found._schema.name, found._schema.overload_name)
    except RuntimeError:
        return False
    return True


def base_name(overload: Any) -> str:
    """The name of an op without namespace and overload: `mm`."""
    name: str = overload._opname
    return name


def overload_name(overload: Any) -> str:
    """The name of an overload alone: `default`."""
    name: str = overload._overloadname
    return name


def bare_kernel(overload: Any) -> Callable[..., Any]:
    """The call of an op without torch's Python around it, for generated code."""
    kernel: Callable[..., Any] = overload._op
    return kernel


def symbolic(node: Any) -> torch.SymFloat:
    """A number that torch hands on unread: arithmetic with it comes to the methods of our node."""
    return torch.SymFloat(node)


def traced_by_others() -> bool:
    """Whether modes or transforms see the calls that are made now, and not only say where tensors are made."""
    if mode_count() or innermost_transform() is not None or jit_state() is not None:
        return True
    modes: list[Any] = function_modes() if function_mode_count() else []  # type: ignore[no-untyped-call]
    return any(not isinstance(mode, DeviceContext) for mode in modes)


USUAL_PRECISION = ("highest", *["ieee"] * 4)  # all bits of a float count


def autocast_state() -> tuple[Any, ...] | None:
    """What autocast does to calls on the CPU; None where it is off."""
    if not torch._C._is_any_autocast_enabled():
        return None
    return torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), torch.is_autocast_cache_enabled()


def deterministic_state() -> tuple[bool, bool, bool]:
    """Whether kernels must be deterministic, only warn, and fill what they do not initialise."""
    return (
        torch._C._get_deterministic_algorithms(),
        torch._C._get_deterministic_algorithms_warn_only(),
        torch._C._get_deterministic_fill_uninitialized_memory(),
    )


def precision() -> tuple[str, ...]:
    """How many bits of a float count in products: what torch is told for all of them, and for each library's."""
    kinds = (("generic", "all"), ("mkldnn", "all"), ("mkldnn", "conv"), ("mkldnn", "matmul"))
    told = (str(product_precision(*kind)) for kind in kinds)
    try:
        generic = torch.get_float32_matmul_precision()
    except RuntimeError:  # libraries were told one by one, and torch has no one word for that
        generic = "by library"
    return generic, *("ieee" if one == "none" else one for one in told)


DENORMAL = 5e-324


def flushes_denormals() -> bool:
    """Whether this thread makes zeros of numbers so small, as after torch.set_flush_denormal; others may not."""
    return DENORMAL * 1.0 == 0.0


def usual_arithmetic() -> bool:
    """Whether kernels are chosen, and numbers rounded, as in a process that was told nothing."""
    told = not mkldnn_enabled() or precision() != USUAL_PRECISION or deterministic_state()[0]
    return not told and not flushes_denormals()


def attention_kernels() -> tuple[bool, bool, bool]:
    """Which kernels attention may choose from."""
    return (
        torch._C._get_flash_sdp_enabled(),
        torch._C._get_mem_efficient_sdp_enabled(),
        torch._C._get_math_sdp_enabled(),
    )


def saves_by_hooks() -> bool:
    """Whether what autograd saves goes through hooks, as of torch.autograd.graph.save_on_cpu."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def global_hooks() -> tuple[int, ...]:
    """The hooks that run at every module and every update, by their identity."""
    return tuple(id(hook) for hooks in _GLOBAL_HOOKS if hooks for hook in hooks.values())


def python_generator() -> random.Random:
    """The generator behind the functions of `random`."""
    return random._inst


def numpy_generator() -> Any:
    """The generator behind the functions of `numpy.random`."""
    return numpy.random.mtrand._rand


def cached_answers(function: Any) -> tuple[dict[Any, Any], dict[Any, Any]]:
    """What functools.lru_cache keeps of a function: its own mapping, and the answers by their keys in it."""
    _, *links, kept, _, _, _, _, _ = gc.get_referents(function)  # each link: a key, its answer, the class of links
    bounded = dict(
        zip(links[0::3], links[1::3], strict=True)
    )  # the oldest first; a later one of a key is the valid one
    return kept, {key: bounded[key] for key in kept} if links else dict(kept)


def cached_arguments(function: Any, key: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments that functools.lru_cache made a key of."""
    if type(key) is not tuple:
        return (key,), {}
    mark = gc.get_referents(function)[-4]  # between the arguments and those with names
    if (place := next((place for place, part in enumerate(key) if part is mark), None)) is None:
        typed = function.cache_parameters()["typed"]
        return key[: len(key) // 2] if typed else key, {}
    named = key[place + 1 :]
    if function.cache_parameters()["typed"]:  # behind it the classes of all: of the unnamed ones, then of the others
        named = named[: (len(named) - place) * 2 // 3]
    return key[:place], dict(zip(named[0::2], named[1::2], strict=True))


def environment() -> dict[Any, Any]:
    """The dict behind os.environ, with names and contents as the system has them."""
    found: dict[Any, Any] = os.environ._data  # type: ignore[attr-defined]
    return found


def logged() -> Callable[..., Any]:
    """What every call of a logger comes to."""
    return logging.Logger._log


def log_by(function: Callable[..., Any]) -> None:
    """Let every call of a logger come to this."""
    logging.Logger._log = function  # type: ignore[method-assign]


def ddp_buckets(
    ddp: torch.nn.parallel.DistributedDataParallel, parameters: Sequence[torch.Tensor], order: Sequence[int] | None
) -> list[list[int]]:
    """The buckets of DDP, as numbers of parameters: those that it begins with, or made anew in an order of arrival."""
    most = ddp.bucket_bytes_cap
    together: Any = torch.distributed
    first = together._DEFAULT_FIRST_BUCKET_BYTES if ddp.bucket_bytes_cap_default else most
    assign: Callable[..., tuple[list[list[int]], Any]] = together._compute_bucket_assignment_by_size
    if order is not None:
        arrived = [parameters[number] for number in order]
        found, _ = assign(arrived, [first, most], [False] * len(arrived), [*order])
        return found
    limits = ([first, most] if first < most else [most]) if ddp.find_unused_parameters else [sys.maxsize]
    found, _ = assign([*parameters], limits, [False] * len(parameters))
    return [*reversed(found)]


def ignored_by_ddp(ddp: torch.nn.parallel.DistributedDataParallel) -> set[str]:
    """The names of parameters and buffers that DDP leaves alone."""
    return set(ddp.parameters_to_ignore)


def ddp_hooked(ddp: torch.nn.parallel.DistributedDataParallel) -> bool:
    """Whether others say how DDP averages: a communication hook, or optimizers that run in its backward."""
    overlapped = any(hasattr(parameter, "_in_backward_optimizers") for parameter in ddp.parameters())
    return bool(ddp._comm_hooks) or hasattr(ddp, "buffer_hook") or overlapped


def ddp_joining(ddp: torch.nn.parallel.DistributedDataParallel) -> bool:
    """Whether DDP is inside join(), where ranks have different numbers of batches."""
    return bool(ddp._join_config.enable)


def ddp_delays(ddp: torch.nn.parallel.DistributedDataParallel) -> bool:
    """Whether DDP averages some gradients later than the backward."""
    return bool(ddp._delay_all_reduce_params)


def ddp_order(ddp: torch.nn.parallel.DistributedDataParallel) -> tuple[int, ...] | None:
    """The order in which DDP has made its buckets anew, if it has; all ranks ask together."""
    ddp.reducer._rebuild_buckets()  # where its first step was the last: what the next forward would do
    logger: Any = ddp.logger
    logger.set_runtime_stats_and_log()  # after which it knows the buckets
    found = ddp._get_ddp_logging_data().get("rebuilt_per_bucket_param_indices", "")
    return tuple(int(number) for number in re.findall(r"\d+", str(found))) or None


class _Released:
    """In the place of DDP's reducer or logger: makes both again when one of them is asked for anything."""

    def __init__(self, ddp: torch.nn.parallel.DistributedDataParallel, key: str) -> None:
        self._ddp, self._key = weakref.ref(ddp), key

    def __getattr__(self, name: str) -> Any:
        ddp = self._ddp()
        if ddp is None or name.startswith("__"):
            raise AttributeError(name)
        parameters, sparse = ddp._build_params_for_reducer()
        names = ddp._build_debug_param_to_name_mapping(parameters)
        ddp._ddp_init_helper(parameters, sparse, names, ddp.static_graph)
        return getattr(getattr(ddp, self._key), name)


def release_reducer(ddp: torch.nn.parallel.DistributedDataParallel) -> None:
    """Free the buckets that DDP keeps, as large as all gradients, until a step without lowtide wants them again."""
    for key in ("reducer", "logger"):
        setattr(ddp, key, _Released(ddp, key))


def fully_sharded(module: torch.nn.Module) -> bool:
    """Whether fully_shard has made a module's parameters shards; where nobody has imported it, nobody has."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)


def fsdp_groups(model: torch.nn.Module) -> list[Any]:
    """The groups of parameters that fully_shard gathers together."""
    states: list[Any] = [one._get_fsdp_state() for one in model.modules() if fully_sharded(one)]  # type: ignore[operator]
    return [*{id(group): group for state in states for group in state._fsdp_param_groups}.values()]


class Sharded(NamedTuple):
    """A parameter of which each rank has a part."""

    parameter: torch.Tensor  # as users have it, a DTensor
    local: torch.Tensor  # the part of this rank
    size: tuple[int, ...]  # of the whole
    places: tuple[tuple[torch.nn.Module, str], ...]  # where it is, several if it is shared
    made: Callable[[torch.Tensor], torch.Tensor]  # a tensor like the part, as a DTensor


def fsdp_parameters(group: Any) -> list[Sharded]:
    """The parameters of a group."""
    found = []
    for one in group.fsdp_params:
        info = one._module_info
        shared = zip(info.shared_modules, info.shared_param_names, strict=True)
        places = ((info.module, info.param_name), *shared)
        whole = one.sharded_param
        found.append(Sharded(whole, whole._local_tensor, tuple(one._orig_size), places, one.to_sharded_dtensor))
    return found


def fsdp_told(group: Any) -> list[tuple[bool, str, str]]:
    """What fully_shard can be told of a group beside which parameters it has: whether it was, what, and what to do."""
    mesh, policy, params = group.mesh_info, group.mp_policy, group.fsdp_params
    own = torch.distributed.get_rank(), torch.distributed.get_world_size()
    whole = mesh.mesh.ndim == 1 and (mesh.shard_mesh_rank, mesh.shard_mesh_size) == own
    whole = whole and mesh.reduce_scatter_process_group in (None, torch.distributed.group.WORLD)
    usual = ("DefaultAllGather", "DefaultReduceScatter")
    comms = (type(group._all_gather_comm).__name__, type(group._reduce_scatter_comm).__name__)
    kinds = {one.sharded_param.dtype for one in params}
    cast = any((policy.param_dtype, policy.reduce_dtype, policy.output_dtype))
    return [
        (cast, "a mixed precision policy", "use torch.autocast inside the step"),
        (any(one.offload_to_cpu for one in params), "an offload policy", "leave it out: parameters are on the CPU"),
        (not whole, "a mesh of its own", "shard over all ranks, in their order"),
        (any(one.fsdp_placement.dim for one in params), "shards of another dimension than the first", "shard that one"),
        (any(one.is_dtensor for one in params), "parameters that were DTensors before", "leave tensor parallelism out"),
        (not kinds <= {torch.float32, torch.bfloat16}, f"parameters of {kinds}", "use float32 or bfloat16"),
        (any(_extended(one) for one in params), "parameters with all-gathers of their own", "use plain parameters"),
        (comms != usual or group._all_reduce_hook is not None, "collectives of its own", "leave them out"),
        (not group.reduce_grads, "set_requires_gradient_sync(False)", "accumulate inside the step, in one backward"),
        (group.gradient_divide_factor is not None, "set_gradient_divide_factor", "scale the loss"),
        (group.reduce_scatter_unused_params, "zeros for unused parameters", "leave that out"),
        (group.force_sum_reduction_for_comms, "set_force_sum_reduction_for_comms", "leave it out"),
    ]


def _extended(param: Any) -> bool:
    return hasattr(param.sharded_param._local_tensor, "fsdp_pre_all_gather")


@contextlib.contextmanager
def fsdp_followed(
    enter: Callable[[Any], None], leave: Callable[[Any], None], backward: Callable[[Any], None]
) -> Iterator[None]:
    """In the block the hooks of fully_shard do nothing but call these, with a group: around the forward of its modules
    and before their backward.
    """
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
    from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

    def before(group: Any, module: Any, args: Any, kwargs: Any) -> Any:
        enter(group)
        return args, kwargs

    def after(group: Any, module: Any, given: Any, output: Any) -> Any:
        leave(group)
        return output

    def returned(state: Any, output: Any) -> Any:
        def begins(_: torch.Tensor) -> None:
            for group in state._fsdp_param_groups:
                backward(group)

        for leaf in torch.utils._pytree.tree_leaves(output) if torch.is_grad_enabled() else ():
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                leaf.register_hook(begins)
        return output

    ours: list[tuple[Any, str, Any]] = [
        (FSDPParamGroup, "pre_forward", before),
        (FSDPParamGroup, "post_forward", after),
        (FSDPParamGroup, "_prefetch_unshard", staticmethod(lambda *_: None)),
        (FSDPState, "_root_pre_forward", lambda state, module, args, kwargs: (args, kwargs)),
        (FSDPState, "_register_pre_backward_hook", returned),
    ]
    usual = [(owner, name, vars(owner)[name]) for owner, name, _ in ours]
    try:
        for owner, name, function in ours:
            setattr(owner, name, function)
        yield
    finally:
        for owner, name, function in usual:
            setattr(owner, name, function)


def chunk_cat(tensors: Sequence[torch.Tensor], count: int) -> torch.Tensor:
    """Tensors cut into so many pieces along their rows, padded; the first pieces of all in the first row, and so on."""
    found: torch.Tensor = torch._chunk_cat([*tensors], dim=0, num_chunks=count)
    return found


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """The part that this rank has of a DTensor; other tensors are whole."""
    found: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return found


def put_parameter(module: torch.nn.Module, name: str, parameter: Any) -> None:
    """Put a tensor in the place of a parameter, as fully_shard does."""
    if getattr(module.__setattr__, "__func__", None) is torch.nn.Module.__setattr__:
        module._parameters[name] = parameter
    else:
        setattr(module, name, parameter)  # of layers that keep lists of their parameters


def keep_fraction(fraction: float) -> None:
    """Let torch.compile keep this fraction of the activations, when we race against it."""
    import torch._functorch.config as settings

    settings.activation_memory_budget = fraction


def opaque_description(tensor: torch.Tensor) -> bytes:
    """How the library of convolutions has laid out a tensor that is its own."""
    words: torch.Tensor = torch.ops.mkldnn._get_mkldnn_serialized_md(tensor)
    return ctypes.string_at(words.data_ptr(), words.numel())


def opaque_memory(tensor: torch.Tensor) -> tuple[int, int]:
    """The address and the bytes of a tensor that is the library's own."""
    return torch.ops.mkldnn.data_ptr(tensor), torch.ops.mkldnn._nbytes(tensor)


@functools.cache
def _functions() -> ctypes.CDLL:
    """The functions in C that compiled models call: those of the library that torch has loaded already."""
    return ctypes.CDLL(os.path.join(os.path.dirname(torch.__file__), "lib", "libtorch_cpu.so"))


def opaque_over(address: int, sizes: Sequence[int], description: bytes) -> torch.Tensor:
    """A tensor of the library's own over memory of ours, which must outlive it: the library reads what is there."""
    strides, numbers = (ctypes.c_int64 * len(sizes))(), (ctypes.c_int64 * len(sizes))(*sizes)
    functions, handle = _functions(), ctypes.c_void_p()
    found = functions.aoti_torch_create_tensor_from_blob_v2
    place = (functions.aoti_torch_dtype_float32(), functions.aoti_torch_device_type_cpu(), -1)
    layout = functions.aoti_torch_layout__mkldnn()
    found.argtypes = [_P, _I64, _P, _P, _I64, _I32, _I32, _I32, _P, _I32, _P, _I64]
    said = (ctypes.byref(handle), layout, description, len(description))
    made = found(address, len(sizes), numbers, strides, 0, *place, *said)
    if made != 0:
        raise RuntimeError("torch makes no tensor of a description of its own")
    tensor: torch.Tensor = torch._C._aoti.alloc_tensor_by_stealing_from_void_ptr(_capsule(handle.value, None, None))
    return tensor


PARTS = (
    (
        torch._C,
        ("_is_any_autocast_enabled", *(f"_get_{name}_sdp_enabled" for name in ("flash", "mem_efficient", "math"))),
    ),
    (torch._C, ("_get_deterministic_algorithms", "_get_deterministic_algorithms_warn_only")),
    (torch._C, ("_get_deterministic_fill_uninitialized_memory",)),
    (torch._C, ("_dispatch_find_schema_or_throw",)),
    (torch._C._autograd, ("_top_saved_tensors_default_hooks",)),
    (torch.Tensor, ("_version", "_backward_hooks", "_post_accumulate_grad_hooks", "_cdata")),
    (torch.UntypedStorage, ("_cdata",)),
    (torch.ops.aten.mm.default, ("_schema", "_opname", "_overloadname", "_op")),
    (torch._C, ("_dispatch_find_schema_or_throw",)),
    (torch.nn.Module(), ("_parameters", "_buffers", "_modules", "_compiled_call_impl")),
    (torch.optim.Adam, ("_init_group",)),
    (TorchDispatchMode, ("_should_skip_dynamo",)),
)  # what the functions above, and the recorder, reach for


def refuse_missing(parts: tuple[tuple[Any, tuple[str, ...]], ...] = PARTS) -> None:
    """Refuse a torch in which one of these is missing."""
    for home, names in parts:
        for name in names:
            try:
                getattr(home, name)
            except AttributeError as error:
                raise _refusal(f"which has changed inside ({error})") from error


refuse_missing()
