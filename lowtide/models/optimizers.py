"""The optimizers that every built-in model can be trained with."""

from collections.abc import Iterable
from typing import Annotated, Literal

import torch
from torch import nn
from torch.optim import Optimizer

from lowtide.models.options import Rate


def make_optimizer(
    parameters: Iterable[nn.Parameter],
    *,
    optimizer: Annotated[
        Literal["sgd", "nesterov", "adam", "adamw", "rmsprop", "adagrad"],
        "the update rule; sgd and nesterov have momentum 0.9",
    ] = "sgd",
    lr: Annotated[
        Rate | None, "learning rate; left out, 0.01 for sgd, nesterov and adagrad and 0.001 for the others"
    ] = None,
) -> Optimizer:
    """Make the named optimizer over these parameters."""
    match optimizer:
        case "sgd":
            return torch.optim.SGD(parameters, lr=lr or 0.01, momentum=0.9)
        case "nesterov":
            return torch.optim.SGD(parameters, lr=lr or 0.01, momentum=0.9, nesterov=True, weight_decay=1e-4)
        case "adam":
            return torch.optim.Adam(parameters, lr=lr or 0.001)
        case "adamw":
            return torch.optim.AdamW(parameters, lr=lr or 0.001)
        case "rmsprop":
            return torch.optim.RMSprop(parameters, lr=lr or 0.001)
        case "adagrad":
            return torch.optim.Adagrad(parameters, lr=lr or 0.01)
