"""Batch norm over groups of examples, against plain autograd; and the batch in parts of whole groups."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowtide
from lowtide import models
from lowtide.errors import UsageError
from lowtide.kernels import kernel
from lowtide.kernels.grouped import BACKWARD, NORM
from lowtide.models.small import SMALL
from lowtide.plan import keep_everything
from lowtide.resized import Resized, resized
from lowtide.rewrite import EXACT, apply, named
from lowtide.rewrites import Rewrite

WRN = "wrn-28-2:blocks=1,batch=12"


class Grouped(nn.Module):
    """A batch norm over groups in plain torch: the statistics of each, mixed with the running ones."""

    def __init__(self, norm: nn.BatchNorm2d, size: int, share: float) -> None:
        super().__init__()
        self.norm, self.size, self.share = norm, size, share

    def forward(self, images: Tensor) -> Tensor:
        norm, share = self.norm, self.share
        assert norm.running_mean is not None
        assert norm.running_var is not None
        groups = images.unflatten(0, (-1, self.size))
        mean, var = groups.mean((1, 3, 4), keepdim=True), groups.var((1, 3, 4), correction=0, keepdim=True)
        old, wide = (item.detach().clone().view(1, 1, -1, 1, 1) for item in (norm.running_mean, norm.running_var))
        middle = share * mean + (1 - share) * old
        spread = share * var + (1 - share) * wide + share * (1 - share) * (mean - old) ** 2
        normal = ((groups - middle) / (spread + norm.eps).sqrt()).flatten(0, 1)
        with torch.no_grad():
            norm(images)  # for the running statistics of all examples, as eager has them
        output: Tensor = normal * norm.weight.view(1, -1, 1, 1) + norm.bias.view(1, -1, 1, 1)
        return output


def named_by(name: str, setting: Any) -> Rewrite:
    found = named(name)
    assert found is not None
    return found.by(setting)


def with_groups(model: nn.Module, size: int, share: float) -> nn.Module:
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.BatchNorm2d) and not isinstance(module, Grouped):
                setattr(module, name, Grouped(child, size, share))
    return model


def built(target: str) -> Any:
    torch.manual_seed(0)
    return models.build(target)


def trained(target: str, *rewrites: Rewrite, steps: int = 2) -> dict[str, Tensor]:
    """All parameters and buffers after some steps of the rewritten graph."""
    step, model, optimizer, example = built(target)
    captured = lowtide.capture(step, model, optimizer, example)
    sizes = cache(lambda size: lowtide.capture(step, model, optimizer, resized(example, size)).graph)
    graph = apply(captured.graph, (*EXACT, *rewrites), Resized(captured.graph, example[0].shape[0], sizes)).graph
    train = lowtide.execute(replace(captured, graph=graph), keep_everything(graph))
    for _ in range(steps):
        train(*example)
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def distance(one: dict[str, Tensor], other: dict[str, Tensor], start: dict[str, Tensor]) -> float:
    """How far two runs are apart, as a part of how far they went."""
    floats = [name for name in one if one[name].is_floating_point()]
    off = torch.cat([(one[name] - other[name]).double().flatten() for name in floats]).norm()
    return float(off / torch.cat([(one[name] - start[name]).double().flatten() for name in floats]).norm())


@pytest.mark.parametrize("size", [1, 2, 6, 12])
@pytest.mark.parametrize("share", [1.0, 0.5])
def test_groups_are_those_of_plain_autograd(size: int, share: float) -> None:
    found = trained(WRN, named_by("batch-statistics", f"{size}/{share}"))
    step, model, _, example = built(WRN)
    start = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with_groups(model, size, share)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    for _ in range(2):
        step(model, optimizer, *example)
    expected = {name.replace(".norm", ""): tensor for name, tensor in model.state_dict().items()}
    assert expected.keys() == found.keys()
    assert distance(expected, found, start) < 1e-5


def test_one_group_of_all_is_eager_up_to_rounding() -> None:
    found = trained(WRN, named_by("batch-statistics", 12))
    step, model, optimizer, example = built(WRN)
    start = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for _ in range(2):
        step(model, optimizer, *example)
    assert distance(dict(model.state_dict()), found, start) < 1e-5


@pytest.mark.parametrize(("setting", "parts"), [("2", 3), ("2", 6), ("3/0.5", 4), ("1", 5), ("6", 4)])
def test_parts_of_whole_groups_give_what_the_whole_gives(setting: str, parts: int) -> None:
    whole = trained(WRN, named_by("batch-statistics", setting))
    split = trained(WRN, named_by("batch-statistics", setting), named_by("microbatch", parts))
    start = dict(built(WRN)[1].state_dict())
    assert 0 < distance(whole, split, start) < 1e-5


def test_without_groups_the_batch_is_not_split() -> None:
    step, model, optimizer, example = built(WRN)
    captured = lowtide.capture(step, model, optimizer, example)
    sizes = cache(lambda size: lowtide.capture(step, model, optimizer, resized(example, size)).graph)
    graph = apply(captured.graph, [named_by("microbatch", 3)], Resized(captured.graph, 12, sizes)).graph
    assert any("couples the examples" in note for note in graph.notes)


@pytest.mark.parametrize("target", [SMALL["gpt"], SMALL["mlp"]])
def test_a_step_without_batch_norm_stays_as_it_is(target: str) -> None:
    step, model, optimizer, example = built(target)
    graph = lowtide.capture(step, model, optimizer, example).graph
    assert apply(graph, [named_by("batch-statistics", 1)]).graph == graph


@pytest.mark.parametrize("wrong", ["0", "two", "2/0", "2/1.5", ""])
def test_settings_that_are_none_are_refused(wrong: str) -> None:
    step, model, optimizer, example = built(WRN)
    graph = lowtide.capture(step, model, optimizer, example).graph
    with pytest.raises(UsageError, match="no number of examples"):
        apply(graph, [named_by("batch-statistics", wrong)])


def test_kernels_refuse_what_they_were_not_written_for() -> None:
    forward, backward = kernel(NORM), kernel(BACKWARD)
    images, saved = torch.randn(4, 3, 5), torch.randn(4, 3, 3)
    odd = [(images.double(), 2), (images[:, :, ::2], 2), (images, 3), (torch.randn(4, 3), 1), (torch.randn(4), 2)]
    for input, group in odd:
        with pytest.raises(ValueError, match="can't be normalised"):
            forward(input, None, None, None, None, group, 1.0, 1e-5)
    with pytest.raises(ValueError, match="no gradient"):
        backward(images, images, None, None, saved[:2], 2, 1.0)
