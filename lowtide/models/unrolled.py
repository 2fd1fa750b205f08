"""Recurrent models whose loop over time is written in Python, so that each time step is a node of the graph."""

import math
from typing import Annotated, Literal

import torch
from torch import Tensor, nn

from lowtide.models.examples import generator, labelled_frames
from lowtide.models.options import Count
from lowtide.models.steps import Recipe, classify_each, match_last_outputs


def lstm_cell(
    *,
    length: Annotated[Count, "time steps in a sequence"] = 200,
    width: Annotated[Count, "units of the cell and numbers in one input"] = 256,
    loss: Annotated[Literal["each", "end"], "compare each output with a target, or only the last"] = "each",
    batch: Annotated[Count, "sequences in a batch"] = 64,
) -> Recipe:
    """One nn.LSTMCell unrolled over a sequence of vectors."""
    source = generator()
    inputs = torch.randn(batch, length, width, generator=source)
    targets = torch.rand(batch, length if loss == "each" else 1, width, generator=source) - 0.5
    return Recipe(match_last_outputs, UnrolledCell(width, length), (inputs, targets))


class UnrolledCell(nn.Module):
    """A cell that is run once for each time step; the outputs are a list.

    Its memory starts out as long as the sequence, as in Tallec and Ollivier 2018 (arXiv 1804.11188). Without
    that the gradient of the last output fades to denormal numbers, which take fifteen times as long.
    """

    def __init__(self, width: int, length: int) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(width, width)
        with torch.no_grad():
            input_gate, forget_gate, _, _ = self.cell.bias_ih.chunk(4)
            input_gate.fill_(-math.log(length))
            forget_gate.fill_(math.log(length))

    def forward(self, inputs: Tensor) -> list[Tensor]:
        outputs: list[Tensor] = []
        state: tuple[Tensor, Tensor] | None = None
        for time_step in inputs.unbind(1):
            state = self.cell(time_step, state)
            outputs.append(state[0])
        return outputs


def deep_rnn(
    *,
    layers: Annotated[Count, "recurrent layers"] = 16,
    width: Annotated[Count, "units in each layer and numbers in one input"] = 256,
    length: Annotated[Count, "time steps in a sequence"] = 50,
    classes: Annotated[Count, "labels to tell apart at each time step"] = 29,
    batch: Annotated[Count, "sequences in a batch"] = 4,
) -> Recipe:
    """Deep residual RNN of Diamos et al. 2016, Persistent RNNs: many tanh layers, each added to its input."""
    model = nn.Sequential(*(ResidualRecurrence(width) for _ in range(layers)), nn.Linear(width, classes))
    return Recipe(classify_each, model, labelled_frames(batch, length, width, classes))


class ResidualRecurrence(nn.Module):
    """One tanh RNN layer over a whole sequence, added to its input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inputs = nn.Linear(width, width)
        self.recurrence = nn.Linear(width, width, bias=False)

    def forward(self, sequence: Tensor) -> Tensor:
        time_steps = self.inputs(sequence).unbind(1)
        states = [torch.tanh(time_steps[0])]
        for time_step in time_steps[1:]:
            states.append(torch.tanh(time_step + self.recurrence(states[-1])))
        return sequence + torch.stack(states, dim=1)
