"""The settings of torch and of the process that a step depends on, as they are now."""

from __future__ import annotations

from typing import Any

import torch


def surroundings() -> tuple[tuple[str, Any], ...]:
    """Each setting by its name."""
    return (
        ("grad mode", torch.is_grad_enabled()),
        ("inference mode", torch.is_inference_mode_enabled()),
        ("autocast", _autocast()),
        ("torch.get_default_dtype()", torch.get_default_dtype()),
        ("deterministic algorithms", _deterministic()),
        ("torch.get_num_threads()", torch.get_num_threads()),
        ("anomaly mode", torch.is_anomaly_enabled()),
        ("mkldnn", torch._C._get_mkldnn_enabled()),
        ("float32 matmul precision", torch._C._get_float32_matmul_precision()),
        ("attention kernels", _attention()),
        ("torch function modes", torch._C._len_torch_function_stack()),
        ("torch dispatch modes", torch._C._len_torch_dispatch_stack()),
        ("saved tensor hooks", torch._C._autograd._top_saved_tensors_default_hooks(True) is not None),
        ("global module hooks", _global_hooks()),
    )


def _autocast() -> tuple[bool, Any]:
    enabled = torch._C._is_any_autocast_enabled()
    return enabled, (torch.get_autocast_dtype("cpu"), torch.is_autocast_cache_enabled()) if enabled else None


def _deterministic() -> tuple[bool, bool, bool]:
    return (
        torch._C._get_deterministic_algorithms(),
        torch._C._get_deterministic_algorithms_warn_only(),
        torch._C._get_deterministic_fill_uninitialized_memory(),
    )


def _attention() -> tuple[bool, bool, bool]:
    return (
        torch._C._get_flash_sdp_enabled(),
        torch._C._get_mem_efficient_sdp_enabled(),
        torch._C._get_math_sdp_enabled(),
    )


def _global_hooks() -> tuple[int, ...]:
    home = torch.nn.modules.module
    hooks = (
        home._global_forward_hooks,
        home._global_forward_pre_hooks,
        home._global_backward_hooks,
        home._global_backward_pre_hooks,
    )
    return tuple(identity for one in hooks for identity in map(id, one.values()))
