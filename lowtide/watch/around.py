"""The settings of torch and of the process that a step depends on, as they are now."""

from __future__ import annotations

from typing import Any

import torch

from lowtide import private

NAMES = (
    "grad mode",
    "inference mode",
    "autocast",
    "the default dtype",
    "deterministic mode",
    "the number of threads",
    "anomaly mode",
    "mkldnn",
    "the precision of matrix products",
    "what becomes of denormal numbers",
    "the kernels for attention",
    "the number of torch function modes",
    "the number of torch dispatch modes",
    "the presence of saved tensor hooks",
    "the global hooks of modules and optimizers",
)


def surroundings() -> tuple[Any, ...]:
    """Each setting, in the order of its names."""
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        private.autocast_state(),
        torch.get_default_dtype(),
        private.deterministic_state(),
        torch.get_num_threads(),
        torch.is_anomaly_enabled(),
        private.mkldnn_enabled(),
        private.precision(),
        private.flushes_denormals(),
        private.attention_kernels(),
        private.function_mode_count(),
        private.mode_count(),
        private.saves_by_hooks(),
        private.global_hooks(),
    )
