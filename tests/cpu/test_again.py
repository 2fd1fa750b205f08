"""Activations made again in the parts of a backward: the same gradients, and no such tensor is whole there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_split import Recipe, assert_same_gradients, backward, rewritten
from torch import Tensor, nn

import lowtide
from lowtide.errors import UsageError
from lowtide.graph import Graph
from lowtide.measure import roofline
from lowtide.plan import least as least_plan
from lowtide.rewrite.split import AGAIN

MADE_AGAIN = f"0.125/{AGAIN}"


class Residual(nn.Module):
    """A block that normalises before each convolution, with dropout between them."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *(nn.BatchNorm2d(width), nn.ReLU(inplace=True), nn.Conv2d(width, width, 3, padding=1, bias=False)),
            *(nn.BatchNorm2d(width), nn.ReLU(), nn.Dropout(dropout)),
            nn.Conv2d(width, width, 3, padding=1, bias=False),
        )

    def forward(self, images: Tensor) -> Tensor:
        added: Tensor = self.body(images) + images
        return added


class Skipping(nn.Module):
    """A way down and a way up, with a concatenation across."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(3, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(inplace=True))
        self.below = nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(width, 2 * width, 3, padding=1), nn.GELU())
        self.enlarge = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.up = nn.Sequential(nn.Conv2d(2 * width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(inplace=True))
        self.head = nn.Conv2d(width, 4, 1)

    def forward(self, images: Tensor) -> Tensor:
        across = self.down(images)
        both = torch.cat([across, self.enlarge(self.below(across))], dim=1)
        logits: Tensor = self.head(self.up(both)).mean((2, 3))
        return logits


def residual(*, blocks: int = 2, examples: int = 5, dropout: float = 0.2, width: int = 8, size: int = 8) -> Recipe:
    torch.manual_seed(0)
    net = (Residual(width, dropout) for _ in range(blocks))
    model = nn.Sequential(nn.Conv2d(3, width, 3, padding=1), *net, nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return step, model, (torch.randn(examples, 3, size, size), torch.randint(0, 4, (examples,)))


def skipping() -> Recipe:
    torch.manual_seed(0)
    return step, Skipping(8), (torch.randn(7, 3, 8, 8), torch.randint(0, 4, (7,)))


def perceptron() -> Recipe:
    torch.manual_seed(0)
    wide = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 16))
    return step, nn.Sequential(nn.Linear(12, 16), wide, nn.Linear(16, 4)), (torch.randn(9, 12), torch.arange(9) % 4)


def step(model: Any, _: None, inputs: Tensor, labels: Tensor) -> Tensor:
    return backward(F.cross_entropy(model(inputs), labels))


@pytest.mark.parametrize("recipe", [residual, skipping, perceptron], ids=lambda recipe: recipe.__name__)
def test_gradients_are_those_of_the_whole_batch(recipe: Any) -> None:
    assert_same_gradients(recipe(), "split", MADE_AGAIN)


@pytest.mark.parametrize("recipe", [residual, skipping, perceptron], ids=lambda recipe: recipe.__name__)
def test_what_is_made_again_draws_nothing(recipe: Any) -> None:
    graph = again(rewritten(recipe(), "split", MADE_AGAIN)[1])
    assert graph
    assert not [op.name for op in graph if op.random]


def again(graph: Graph) -> list[Any]:
    return [op for op in graph.ops if f"~{AGAIN}" in op.name]


def test_the_backward_reads_no_activation_that_cheap_ops_make() -> None:
    """Results of convolutions and of residual sums are read; batch norms and ReLUs of them are made in the parts."""
    _, graph = rewritten(residual(dropout=0.0), "split", MADE_AGAIN)
    sizes = {graph.values[op.outputs[0]].shape for op in graph.ops if "norm_apply" in op.target and op.outputs[0]}
    assert max(size[0] for size in sizes) < 5


def test_whole_activations_are_not_there_in_the_backward() -> None:
    """The least peak falls by most of the tensor that a convolution's backward read besides its batch norm's."""
    recipe = residual(blocks=4, examples=16, dropout=0.0, size=16)
    whole = 16 * 8 * 16 * 16 * 4
    peaks = [least_plan(graph, roofline(graph)).peak for graph in graphs(recipe, 0.125, MADE_AGAIN)]
    assert peaks[1] < peaks[0] - 0.6 * whole, (peaks, whole)


def graphs(recipe: Recipe, *settings: Any) -> list[Graph]:
    return [rewritten(recipe, "split", setting)[1] for setting in settings]


def test_a_gradient_that_is_read_in_pieces_is_made_as_pieces() -> None:
    """Of the gradient of a concatenation, what goes on below need not wait for what goes across."""
    _, graph = rewritten(skipping(), "split", MADE_AGAIN)
    both = [value for value in graph.values if value.shape == (7, 16, 8, 8) and value.kind == "activation gradient"]
    assert not both
    assert any("_piece1" in op.name for op in graph.ops)


def test_a_step_runs_within_what_is_planned() -> None:
    step, model, example = residual(blocks=4, examples=16, dropout=0.0, size=16)
    asked: dict[str, Any] = {"budget": "least", "time_limit": 0.3, "allow": f"split:{MADE_AGAIN}"}
    train = lowtide.fit(step, model, None, example=example, **asked)
    assert all(torch.isfinite(train(*example)) for _ in range(3))
    assert [str(one) for one in train.plan.rewrites if one.exactness != "bitwise"] == [f"split {MADE_AGAIN}"]
    assert train.peak is not None
    assert train.peak <= train.plan.peak
    assert train.mismatches == 0


def test_the_labels_that_count_are_those_of_all_parts() -> None:
    """A loss in a region of its own tells the backward outside what all labels weigh, and not those of one part."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 4, 3, padding=1))
    example = torch.randn(5, 3, 8, 8), torch.randint(0, 4, (5, 8, 8))
    example[1][2] = -100
    for setting in (0.5, 0.125, MADE_AGAIN):
        assert_same_gradients((step, model, example), "split", setting)


@pytest.mark.parametrize("told", ["some", "0.125/twice", "0", "2", "0.5/"])
def test_a_setting_that_says_nothing_is_refused(told: str) -> None:
    with pytest.raises(UsageError, match="which ops are large"):
        rewritten(residual(), "split", told)
