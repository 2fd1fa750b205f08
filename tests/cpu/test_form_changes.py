"""Tensors that are in another form already: by another fit, saved of another step, or plain again in between."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from formed import OPTIMIZERS, Batch, step
from torch import nn

import lowtide
from lowtide.fit import Fitted
from lowtide.forms import MASK, VALUES
from lowtide.packed import Packed

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*weights that were not zero are zero now", "ignore:.*more than its budget"
)
ALL = "sparse:0.3,weights16,state8"


def net(width: int = 128) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 64), nn.ReLU(), nn.Linear(64, 10))


def example(size: int = 8) -> Batch:
    drawn = torch.Generator().manual_seed(1)
    return torch.randn(size, 64, generator=drawn), torch.randint(10, (size,), generator=drawn)


def fitted(model: nn.Module, optimizer: Any, allow: str | None, budget: int | str | None = "least") -> Fitted:
    return lowtide.fit(
        step, model, optimizer, example=example(), budget=budget, allow=allow, costs="roofline", time_limit=0.1
    )


def trained(allow: str, width: int = 128) -> tuple[Fitted, nn.Sequential, Any]:
    """A step that was taken once with these techniques, all of them."""
    model = net(width)
    optimizer = OPTIMIZERS["adam"](model.parameters())
    train = fitted(model, optimizer, allow)
    train(*example())
    assert {one.name for one in train.plan.rewrites} >= {name.partition(":")[0] for name in allow.split(",")}
    return train, model, optimizer


@pytest.mark.parametrize("allow", ["weights16", "state8", "sparse:0.3", "sparse:0.3/move:2", ALL])
def test_parts_of_another_model_are_refused(allow: str) -> None:
    """Taken as they are, kernels would read weights of others, or what is no weight."""
    saved = trained(allow)[0].state_dict()
    train = trained(allow, width=64)[0]
    before = copy.deepcopy(train.state_dict())
    with pytest.raises(lowtide.UsageError, match="another size"):
        train.load_state_dict(saved)
    assert all(
        torch.equal(one, before[name][part])
        for name, parts in train.state_dict().items()
        for part, one in parts.items()
    )
    train(*example())


@pytest.mark.parametrize("words", ["", "/move:2"])
def test_parts_of_another_density_are_refused(words: str) -> None:
    saved = trained(f"sparse:0.5{words}")[0].state_dict()
    train = trained(f"sparse:0.2{words}")[0]
    with pytest.raises(lowtide.UsageError, match=r"another size|not as many"):
        train.load_state_dict(saved)
    train(*example())


@pytest.mark.parametrize(("first", "then"), [("sparse:0.5", "sparse:0.1"), ("sparse:0.1", "sparse:0.5")])
def test_another_density_packs_anew(first: str, then: str) -> None:
    _, model, optimizer = trained(first)
    train = fitted(model, optimizer, then)
    train(*example())
    weight = model[0].weight
    assert isinstance(weight, Packed)
    share = float(then.partition(":")[2])
    assert weight.content.parts[VALUES].numel() == pytest.approx(share * weight.numel(), abs=256)
    states = [one for one in optimizer.state[weight].values() if isinstance(one, Packed)]
    assert states
    assert all(one.content.parts[MASK] is weight.content.parts[MASK] for one in states)


def test_a_step_of_which_nothing_is_in_parts_makes_all_plain() -> None:
    _, model, optimizer = trained(ALL)
    twin, plain = copy.deepcopy((model, optimizer))
    train = fitted(model, optimizer, None, budget=None)
    for _ in range(2):
        assert torch.equal(train(*example()), step(twin, plain, *example()))
    tensors = [*model.parameters(), *(one for state in optimizer.state.values() for one in state.values())]
    assert not any(isinstance(one, Packed) for one in tensors)
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), twin.parameters(), strict=True))


def test_states_have_the_mask_of_their_parameter_after_a_step_on_the_plain_model() -> None:
    """Else each number of a state would be that of another weight."""
    train, model, optimizer = trained("sparse:0.3")
    with train.dense() as plain:
        with torch.no_grad():
            for parameter in plain.parameters():
                parameter.copy_(parameter.flip(0))
        train(*example())
    for parameter in (model[0].weight, model[2].weight):
        assert isinstance(parameter, Packed)
        states = [one for one in optimizer.state[parameter].values() if isinstance(one, Packed)]
        assert len(states) == 2
        assert all(one.content.parts[MASK] is parameter.content.parts[MASK] for one in states)
