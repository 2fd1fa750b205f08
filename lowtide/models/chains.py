"""Models that are one chain of layers: the simplest graphs that a plan can be made for."""

from typing import Annotated

import torch
from torch import Tensor, nn

from lowtide.models.examples import generator
from lowtide.models.options import Count
from lowtide.models.steps import Recipe, classify, minimize_output


def mlp(
    *,
    width: Annotated[Count, "units in each hidden layer"] = 1024,
    depth: Annotated[Count, "hidden layers"] = 8,
    features: Annotated[Count, "numbers in one input"] = 784,
    classes: Annotated[Count, "labels to tell apart"] = 10,
    batch: Annotated[Count, "inputs in a batch"] = 1024,
) -> Recipe:
    """Fully connected layers with ReLU between them."""
    layers: list[nn.Module] = []
    for inputs in [features] + [width] * (depth - 1):
        linear = nn.Linear(inputs, width)
        nn.init.kaiming_normal_(linear.weight, nonlinearity="relu")
        layers += [linear, nn.ReLU()]
    model = nn.Sequential(*layers, nn.Linear(width, classes))
    source = generator()
    rows = torch.randn(batch, features, generator=source)
    labels = torch.randint(classes, (batch,), generator=source)
    return Recipe(classify, model, (rows, labels))


def tanh_chain(
    *,
    length: Annotated[Count, "tanh nodes in the chain"] = 100,
    width: Annotated[Count, "numbers in a row; a node takes 4 * batch * width bytes"] = 1024,
    batch: Annotated[Count, "rows of a node"] = 256,
) -> Recipe:
    """One tanh after another, each node 1 MiB by default, with a single parameter added to the input."""
    inputs = torch.randn(batch, width, generator=generator())
    return Recipe(minimize_output, TanhChain(length, batch, width), (inputs,))


class TanhChain(nn.Module):
    """A chain whose only parameter is as large as each of its nodes."""

    def __init__(self, length: int, batch: int, width: int) -> None:
        super().__init__()
        self.length = length
        self.offset = nn.Parameter(torch.zeros(batch, width))

    def forward(self, inputs: Tensor) -> Tensor:
        node = inputs + self.offset
        for _ in range(self.length):
            node = torch.tanh(node)
        return node
