"""Every training step of the built-in models, written as a user would write it."""

# mypy: allow-untyped-calls
# (torch leaves Tensor.backward without annotations)

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

Step = Callable[..., Tensor]  # step(model, optimizer, *example) -> loss


class Recipe(NamedTuple):
    """What the function that builds a model returns: all of its training but the optimizer."""

    step: Step
    model: nn.Module
    example: tuple[Any, ...]  # the batch: what follows model and optimizer in a call of the step


def classify(model: nn.Module, optimizer: Optimizer, inputs: Tensor, labels: Tensor) -> Tensor:
    """Train on one label for each input, or for each pixel of it."""
    loss = F.cross_entropy(model(inputs), labels)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def classify_each(model: nn.Module, optimizer: Optimizer, inputs: Tensor, labels: Tensor) -> Tensor:
    """Train on one label for each position of a sequence, such as the token that follows it."""
    logits = model(inputs)
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def fill_gaps(model: nn.Module, optimizer: Optimizer, batch: dict[str, Tensor]) -> Tensor:
    """Train on the tokens that were hidden; the others have label -100, which cross_entropy leaves out."""
    logits = model(batch["tokens"], batch["mask"])
    loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def translate(model: nn.Module, optimizer: Optimizer, source: Tensor, target: Tensor) -> Tensor:
    """Train on each next token of the target sentences, with smoothed labels; token 0 is padding."""
    logits = model(source, target[:, :-1])
    labels = target[:, 1:].flatten()
    loss = F.cross_entropy(logits.flatten(0, 1), labels, ignore_index=0, label_smoothing=0.1)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def match_last_outputs(model: nn.Module, optimizer: Optimizer, inputs: Tensor, targets: Tensor) -> Tensor:
    """Train the last outputs of a list towards the targets, of which there may be fewer."""
    outputs = model(inputs)[-targets.size(1) :]
    losses = [F.mse_loss(output, target) for output, target in zip(outputs, targets.unbind(1), strict=True)]
    loss = torch.stack(losses).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def minimize_output(model: nn.Module, optimizer: Optimizer, inputs: Tensor) -> Tensor:
    """Train the sum of the outputs downwards."""
    loss: Tensor = model(inputs).sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def minimize_own_loss(model: nn.Module, optimizer: Optimizer, batch: dict[str, Tensor]) -> Tensor:
    """Train on the loss that the model itself makes of a batch with labels, as those of transformers do."""
    loss: Tensor = model(**batch).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss
