"""What is refused at the door: models, tensors and processes of which a captured step would be something else."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from lowtide import private, tree
from lowtide.device import known
from lowtide.errors import CaptureError

WHOLE_STEP = "give the whole step to lowtide.fit(step, DistributedDataParallel(model), optimizer, ...), on every rank"

# torch's classes of modules, by their names: they are recognised without importing what may not be there.
MODULES: Mapping[str, tuple[str, str]] = {
    "DistributedDataParallel": (
        "that class averages gradients between processes with hooks that a part of a step does not have, so the ranks "
        "would drift apart in silence",
        f"{WHOLE_STEP}.",
    ),
    "FullyShardedDataParallel": (
        "its parameters are shards that it gathers and scatters around each layer, with hooks that a captured step "
        "does not have",
        f"{WHOLE_STEP}, in place of FullyShardedDataParallel.",
    ),
    "FSDPModule": (
        "fully_shard made its parameters shards that are gathered around each layer, with hooks that a part of a step "
        "does not have",
        "give the whole step to lowtide.fit(step, model, optimizer, ...), on every rank.",
    ),
    "DataParallel": (
        "it copies the model to several devices at each call, and lowtide plans one device",
        "give the model inside it: model.module.",
    ),
    "OptimizedModule": (
        "torch.compile runs other kernels, whose results are not eager's to the bit, and lowtide plans each of eager's",
        "give the model that was compiled: model._orig_mod.",
    ),
    "ScriptModule": (
        "torch.jit runs it by an interpreter of its own, which fuses ops as it likes",
        "give the Python module that it was scripted or traced from.",
    ),
}
QUANTIZED = "its packed weights are no tensors, have no gradients, and can't be trained"
LAZY = "it has no shape before its first forward"


def refuse_at_the_door(
    step: Callable[..., Any], model: torch.nn.Module, example: tuple[Any, ...], *, ranks: bool = False
) -> None:
    """Raise where a captured step could not be what eager's is, before anything is traced; nothing is changed.

    With `ranks` there may be DistributedDataParallel or fully_shard: they become ops of the step.
    """
    _refuse_surroundings()
    averaged = False
    for name, module in model.named_modules():
        shown = f"module {name!r}" if name else "the model"
        if ranks and isinstance(module, DistributedDataParallel):
            averaged = True
            _refuse_settings(shown, module)
        elif ranks and private.fully_sharded(module):
            averaged = True  # by what lowtide.fit does around the capture
        else:
            _refuse_module(shown, module)
    for name, tensor in _tensors(model, example):
        _refuse_tensor(name, tensor)
    _refuse_compiled_step(step)
    if not averaged:
        _refuse_ranks()
    _refuse_device(_tensors(model, example))


def _refuse_surroundings() -> None:
    """Refuse modes around the call whose effect on eager's step depends on more than the step."""
    if private.autocast_state() is not None:
        raise CaptureError(
            "the step is called under torch.autocast, whose cache of cast weights outlives the step.",
            hint="put the autocast into the step: with torch.autocast(...): loss = ...",
        )
    if torch.is_inference_mode_enabled():
        raise CaptureError(
            "the step is called under torch.inference_mode, in which nothing can be trained.",
            hint="call it outside of torch.inference_mode().",
        )


def refuse_to_run(model: torch.nn.Module) -> None:
    """Raise where a model can be captured and planned, but has no numbers to train."""
    if not isinstance(model, torch.nn.Module):
        return  # which the capture refuses in words
    for name, tensor in _tensors(model, ()):
        if tensor.device.type == "meta":
            raise CaptureError(
                f"{name} is on the meta device: it has sizes and no numbers, so there is nothing to train.",
                hint='model.to_empty(device="cpu") and initialise it; capture, roofline and plan work without numbers.',
            )


def _refuse_module(name: str, module: torch.nn.Module) -> None:
    for cls in type(module).__mro__:
        if cls.__name__ in MODULES and _is_torchs(cls):
            reason, hint = MODULES[cls.__name__]
            raise CaptureError(f"{name} is of class {cls.__name__}: {reason}.", hint=hint)
        if _is_torchs(cls) and ".quantized" in cls.__module__:
            raise CaptureError(
                f"{name} is a quantized {cls.__name__}: {QUANTIZED}.", hint="train it before it is converted."
            )
    if isinstance(module, torch.nn.Embedding | torch.nn.EmbeddingBag) and module.sparse:
        raise CaptureError(
            f"{name} makes sparse gradients (sparse=True): their bytes depend on the data, and lowtide plans dense "
            "tensors.",
            hint="sparse=False makes the same gradients as dense tensors.",
        )
    if private.compiled_in_place(module):
        raise CaptureError(
            f"{name} was compiled in place by module.compile(): {MODULES['OptimizedModule'][0]}.",
            hint="leave out the call of compile().",
        )


def _refuse_settings(name: str, ddp: DistributedDataParallel) -> None:
    """Refuse what DDP can be told to do that is not in a captured step."""
    for wrong, what, hint in (
        (private.ddp_hooked(ddp), "a hook that says how gradients or buffers travel", "leave the hook out"),
        (private.ddp_joining(ddp), "join() around it, for ranks with fewer batches", "give all ranks as many batches"),
        (ddp.static_graph, "static_graph=True", "leave it out: a captured step is the same at every call anyway"),
        (ddp.mixed_precision is not None, "mixed_precision", "use torch.autocast inside the step"),
        (ddp.device_ids is not None, "device_ids", "leave them out, as on the CPU"),
        (bool(getattr(ddp, "bucket_bytes_cap_list", ())), "bucket_cap_mb_list", "use bucket_cap_mb"),
        (private.ddp_delays(ddp), "delay_all_reduce_named_params", "leave it out"),
        (ddp.process_group is not torch.distributed.group.WORLD, "a process group of its own", "use the default one"),
        ("DDP_SET_LAST_BUCKET_CAP" in os.environ, "DDP_SET_LAST_BUCKET_CAP in the environment", "leave it out"),
    ):
        if wrong:
            raise CaptureError(
                f"{name} is a DistributedDataParallel with {what}, which is not in a captured step.", hint=f"{hint}."
            )


def _refuse_tensor(name: str, tensor: torch.Tensor) -> None:
    if isinstance(tensor, UninitializedBuffer | UninitializedParameter):
        raise CaptureError(f"{name} is of a lazy module: {LAZY}.", hint="call the model once before it is fitted.")
    if any(cls.__name__ == "DTensor" and _is_torchs(cls) for cls in type(tensor).__mro__):
        raise CaptureError(
            f"{name} is a DTensor, of which this process has a part only: a captured step would not speak with the "
            "others.",
            hint=f"tensor.full_tensor() gathers one; for several processes {WHOLE_STEP}.",
        )
    if tensor.is_nested:
        raise CaptureError(
            f"{name} is a nested tensor: its sizes are data, and lowtide plans sizes that it knows.",
            hint="pad it: tensor.to_padded_tensor(0.0), with a mask.",
        )
    if tensor.is_quantized:
        raise CaptureError(
            f"{name} is a quantized tensor of {tensor.dtype}, which has no gradients.", hint="tensor.dequantize() it."
        )
    if tensor.layout is not torch.strided:
        raise CaptureError(
            f"{name} is a sparse tensor, of layout {tensor.layout}: its bytes depend on the data, and lowtide plans "
            "dense tensors.",
            hint="tensor.to_dense() it.",
        )


def _refuse_compiled_step(step: Callable[..., Any]) -> None:
    if isinstance(step, torch.jit.ScriptFunction):
        raise CaptureError(
            f"the step is a torch.jit function: {MODULES['ScriptModule'][0]}.", hint="give the Python function."
        )
    if private.is_compiled(step):
        raise CaptureError(
            f"the step was compiled by torch.compile: {MODULES['OptimizedModule'][0].removeprefix('torch.compile ')}.",
            hint="give the function that was compiled.",
        )


def _refuse_ranks() -> None:
    distributed = torch.distributed
    if not distributed.is_available() or not distributed.is_initialized():
        return
    ranks = distributed.get_world_size()
    if ranks > 1:
        raise CaptureError(
            f"this process is rank {distributed.get_rank()} of {ranks} of a process group: nothing in a captured step "
            "keeps the ranks together, and they would drift apart in silence.",
            hint=f"{WHOLE_STEP}. For runs that have nothing to do with each other, fit before init_process_group() or "
            "after destroy_process_group().",
        )


def _refuse_device(tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
    """Refuse a device that lowtide does not know; that there are several is for the capture to say."""
    homes = {str(tensor.device): name for name, tensor in tensors}
    if len(homes) == 1:
        ((device, name),) = homes.items()
        if not known(device):
            raise CaptureError(
                f"{name} is on {device}: lowtide runs on the CPU only for now; its plans, its meter and its arena are "
                "of the CPU's memory.",
                hint='model.to("cpu") and batches there too, or train on that device without lowtide.',
            )


def _tensors(model: torch.nn.Module, example: tuple[Any, ...]) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of the model and of the batch, with names for a person."""
    for name, parameter in model.named_parameters():
        yield f"parameter {name!r}", parameter
    for name, buffer in model.named_buffers():
        yield f"buffer {name!r}", buffer
    leaves, structure = tree.flatten(example)
    for path, leaf in zip(structure.paths(), leaves, strict=True):
        if isinstance(leaf, torch.Tensor):
            yield "batch " + ".".join(map(str, path)), leaf


def _is_torchs(cls: type) -> bool:
    return cls.__module__.partition(".")[0] == "torch"
