"""Optimizers with little state, and low-rank adapters, each in plain PyTorch, as the table of low memory trains them.

GaLore: Zhao et al. 2024 (arXiv 2403.03507). Adam-mini: Zhang et al. 2024 (arXiv 2406.16793), one step size for each row
of a matrix; the paper also joins rows into attention heads, which is left out. LoRA: Hu et al. 2021 (arXiv 2106.09685).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


class GaLore(Optimizer):
    """Adam on gradients of matrices projected to a low rank; every so many steps the projection is found anew."""

    def __init__(
        self, parameters: Iterable[nn.Parameter], lr: float = 1e-3, *, rank: int = 16, every: int = 200, scale: float = 0.25
    ) -> None:
        super().__init__(parameters, {"lr": lr, "betas": (0.9, 0.999), "eps": 1e-8})
        self.every, self.scale, self.count = every, scale, 0
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter] = self._start(parameter, rank)

    @staticmethod
    def _start(parameter: Tensor, rank: int) -> dict[str, Tensor]:
        state = {"step": torch.zeros(())}
        shape: tuple[int, ...] = tuple(parameter.shape)
        if parameter.dim() == 2 and min(shape) > rank:
            state["projection"] = torch.zeros(shape[0], rank)
            shape = (rank, shape[1])
        return {**state, "exp_avg": torch.zeros(shape), "exp_avg_sq": torch.zeros(shape)}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update."""
        anew = self.count % self.every == 0
        self.count += 1
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group, anew=anew)

    def _update(self, parameter: Tensor, group: dict[str, Any], *, anew: bool) -> None:
        state, gradient = self.state[parameter], parameter.grad
        assert gradient is not None
        projection = state.get("projection")
        if projection is not None:
            if anew:
                left = torch.linalg.svd(gradient, full_matrices=False).U
                projection.copy_(left[:, : projection.size(1)])
            gradient = projection.t() @ gradient
        direction = _adam(state, gradient, group)
        if projection is None:
            parameter.add_(direction, alpha=-group["lr"])
        else:
            parameter.addmm_(projection, direction, alpha=-group["lr"] * self.scale)


class AdamMini(Optimizer):
    """Adam with one second moment for each row of a matrix, and one for each vector."""

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float = 1e-3) -> None:
        super().__init__(parameters, {"lr": lr, "betas": (0.9, 0.999), "eps": 1e-8})
        for group in self.param_groups:
            for parameter in group["params"]:
                rows = (parameter.size(0), *(1,) * (parameter.dim() - 1)) if parameter.dim() > 1 else ()
                start = {"exp_avg": torch.zeros_like(parameter), "exp_avg_sq": torch.zeros(rows)}
                self.state[parameter] = {"step": torch.zeros(()), **start}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update."""
        for group in self.param_groups:
            for parameter in group["params"]:
                gradient = parameter.grad
                if gradient is None:
                    continue
                dimensions = tuple(range(1, gradient.dim())) if gradient.dim() > 1 else None
                squares = gradient.square().mean(dimensions, keepdim=gradient.dim() > 1)
                direction = _adam(self.state[parameter], gradient, group, squares)
                parameter.add_(direction, alpha=-group["lr"])


def _adam(state: dict[str, Tensor], gradient: Tensor, group: dict[str, Any], squares: Tensor | None = None) -> Tensor:
    """The direction of Adam, with the squares of the gradient or means of them; the state goes on."""
    first, second = group["betas"]
    state["step"] += 1
    count = state["step"].item()
    state["exp_avg"].lerp_(gradient, 1 - first)
    if squares is None:
        state["exp_avg_sq"].mul_(second).addcmul_(gradient, gradient, value=1 - second)
    else:
        state["exp_avg_sq"].mul_(second).add_(squares, alpha=1 - second)
    size = (1 - second**count) ** 0.5
    root = state["exp_avg_sq"].sqrt().add_(group["eps"] * size)
    return state["exp_avg"].div(root).mul_(size / (1 - first**count))


class Adapted(nn.Module):
    """A frozen linear layer, and a product of two thin matrices that is learnt and added to it."""

    def __init__(self, layer: nn.Linear, rank: int) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, layer.in_features) / math.sqrt(layer.in_features))
        self.up = nn.Parameter(torch.zeros(layer.out_features, rank))

    def forward(self, inputs: Tensor) -> Tensor:
        output: Tensor = self.layer(inputs) + inputs @ self.down.t() @ self.up.t()
        return output


def adapted(model: nn.Module, rank: int = 8) -> nn.Module:
    """The model with all parameters frozen but those of adapters of its linear layers, which are changed in place."""
    model.requires_grad_(False)
    for module in list(model.modules()):
        for name, layer in list(module.named_children()):
            if isinstance(layer, nn.Linear) and not isinstance(module, Adapted):
                setattr(module, name, Adapted(layer, rank))
    return model
