"""The settings of torch and of the process that a step depends on, as they are now."""

from __future__ import annotations

from typing import Any

import torch

from lowtide import private


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
        ("mkldnn", private.mkldnn_enabled()),
        ("float32 matmul precision", private.matmul_precision()),
        ("attention kernels", _attention()),
        ("torch function modes", private.function_mode_count()),
        ("torch dispatch modes", private.mode_count()),
        ("saved tensor hooks", private.saved_tensor_hooks(True) is not None),
        ("global module hooks", _global_hooks()),
    )


def _autocast() -> tuple[bool, Any]:
    enabled = private.autocast_enabled()
    return enabled, (torch.get_autocast_dtype("cpu"), torch.is_autocast_cache_enabled()) if enabled else None


def _deterministic() -> tuple[bool, bool, bool]:
    return private.deterministic(), private.deterministic_warns(), private.deterministic_fills()


def _attention() -> tuple[bool, bool, bool]:
    return private.flash_attention(), private.efficient_attention(), private.plain_attention()


def _global_hooks() -> tuple[int, ...]:
    return tuple(identity for one in private.GLOBAL_HOOKS for identity in map(id, one.values()))
