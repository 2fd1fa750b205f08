"""A wrapped model in the caller's own loop: the same numbers to the bit, within the budget."""

from __future__ import annotations

import contextlib
import copy
import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from twins import assert_exact, assert_same, everything, same

import lowtide
from lowtide import models, tree
from lowtide.allocator.arena import POOL

QUICK = 0.3  # seconds of planning


class Calls:
    """A model that remembers how it is called."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.example: Any = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.example = kwargs or args
        return self.model(*args, **kwargs)


def wrapping(
    budget: str | None, step: Callable[..., Any], model: nn.Module, optimizer: Any, example: tuple[Any, ...]
) -> Callable[..., Any]:
    """The step with a wrapped model in place of its model."""
    spy = Calls(copy.deepcopy(model))
    with torch.random.fork_rng():
        step(spy, torch.optim.SGD(spy.model.parameters(), lr=0.0), *example)
    net = lowtide.wrap(model, example=spy.example, budget=budget, time_limit=QUICK)

    def train(*batch: Any) -> Any:
        return step(net, optimizer, *batch)

    train.net = net  # type: ignore[attr-defined]
    return train


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("name", models.SMALL)
def test_every_model_is_exact(name: str, optimizer: str) -> None:
    train = assert_exact(
        lambda: models.build(f"{models.SMALL[name]},optimizer={optimizer}"), make=partial(wrapping, None)
    )
    assert train.net.fitted.mismatches == 0
    assert train.net.fitted.peak <= train.net.fitted.plan.budget


@pytest.mark.parametrize("part", [72, 84, 96])
def test_what_lay_under_a_gradient_has_room_beside_it(part: int) -> None:
    """Temporaries of a convolution's backward may have the bytes of its results, but not of one that is handed on."""
    train = wrapping(f"{part}%", *models.build(models.SMALL["resnet"]))
    built = models.build(models.SMALL["resnet"])
    train = wrapping(str(train.net.fitted.plan.peak), *built)  # type: ignore[attr-defined]
    for _ in range(2):
        train(*built[3])  # a warning is an error here
    assert train.net.fitted.peak <= train.net.fitted.plan.budget  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["mlp", "resnet", "gpt", "hf-bert", "lstm-cell"])
def test_tight_budgets_are_exact_and_kept(name: str) -> None:
    def make(*built: Any) -> Any:
        for part in (50, 70, 90, 100):
            with contextlib.suppress(lowtide.BudgetError):
                least = wrapping(f"{part}%", *built).net.fitted.plan.peak  # type: ignore[attr-defined]
                return wrapping(str(least), *built)
        raise AssertionError("not even eager's peak is enough")

    train = assert_exact(lambda: models.build(models.SMALL[name]), make=make)
    net = train.net
    assert net.fitted.mismatches == 0
    assert net.fitted.peak <= net.fitted.plan.budget
    assert net.fitted.peak == pytest.approx(net.fitted.plan.peak, rel=0.005)


class Noisy(nn.Module):
    """Draws, has statistics, and returns more than one thing."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.norm = nn.BatchNorm1d(16)
        self.drop = nn.Dropout(0.3)
        self.second = nn.Linear(16, 4)

    def forward(self, x: Tensor, scale: float = 1.0) -> dict[str, Any]:
        hidden = self.drop(torch.relu(self.norm(self.first(x))))
        return {"out": self.second(hidden) * scale, "hidden": hidden, "counts": (hidden > 0).sum(), "name": "noisy"}


def noisy() -> tuple[Noisy, Noisy, Tensor]:
    """Two equal ones, and an input."""
    torch.manual_seed(0)
    model = Noisy()
    return model, copy.deepcopy(model), torch.randn(6, 8)


def wrap(model: nn.Module, *example: Any, budget: str | None = None) -> lowtide.Wrapped:
    return lowtide.wrap(model, example=example, budget=budget, time_limit=QUICK)


def grads(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def test_draws_of_the_loop_come_between_the_halves() -> None:
    model, mirror, x = noisy()
    net = wrap(mirror, x)
    states = []
    for one in (model, net):
        torch.manual_seed(1)
        for _ in range(4):
            found = one(x)
            loss = F.dropout(found["out"], 0.5).square().sum() + F.dropout(found["hidden"], 0.2).sum()
            loss.backward()
        states.append((loss.detach(), torch.get_rng_state(), found["counts"], found["name"]))
    assert all(same(a, b) for a, b in zip(*states, strict=True))
    assert_same(everything(model, None), everything(mirror, None))  # gradients of four steps, summed


def test_an_output_that_the_loss_leaves_out() -> None:
    model, mirror, x = noisy()
    net = wrap(mirror, x)
    for one in (model, net):
        torch.manual_seed(1)
        one(x)["out"].sum().backward()
    assert_same(everything(model, None), everything(mirror, None))


def test_two_forwards_before_their_backwards() -> None:
    model, mirror, x = noisy()
    net = wrap(mirror, x)
    for one in (model, net):
        torch.manual_seed(1)
        for _ in range(3):
            real, fake = one(x), one(x + 1)
            (real["out"].square().sum() + fake["out"].abs().sum()).backward()
    assert_same(everything(model, None), everything(mirror, None))
    assert net.fitted.mismatches == 0


def test_a_part_of_a_larger_model() -> None:
    model, mirror, x = noisy()
    before = nn.Linear(8, 8)
    other = copy.deepcopy(before)
    net = wrap(mirror, before(x))
    for first, second in ((before, model), (other, net)):
        torch.manual_seed(1)
        for _ in range(3):
            second(first(x))["out"].square().sum().backward()
    assert_same(grads(before), grads(other))
    assert_same(everything(model, None), everything(mirror, None))


def test_inputs_get_their_gradients() -> None:
    model, mirror, x = noisy()
    mine, other = x.clone().requires_grad_(), x.clone().requires_grad_()
    net = wrap(mirror, x)  # planned without; planned anew when it comes
    for one, leaf in ((model, mine), (net, other)):
        torch.manual_seed(1)
        one(leaf)["out"].square().sum().backward()
    assert mine.grad is not None
    assert other.grad is not None
    assert same(mine.grad, other.grad)


def test_other_shapes_arguments_and_modes_are_planned_when_they_come() -> None:
    model, mirror, x = noisy()
    net = wrap(mirror, x)
    for one in (model, net):
        torch.manual_seed(1)
        one(x[:3])["out"].sum().backward()
        one(x, scale=2.0)["out"].sum().backward()
        one(x, scale=3.0)["out"].sum().backward()
        one.eval()
        one(x)["out"].sum().backward()
        one.train()
        one(x)["out"].sum().backward()
    assert_same(everything(model, None), everything(mirror, None))


def test_without_gradients_it_is_the_model() -> None:
    model, mirror, x = noisy()
    net = wrap(mirror, x)
    with torch.no_grad():
        torch.manual_seed(1)
        expected = model(x)["out"]
        torch.manual_seed(1)
        found = net(x)["out"]
    assert same(expected, found)
    assert found.grad_fn is None


def test_to_all_others_it_is_the_model() -> None:
    model, mirror, x = noisy()
    mirror.eval()
    net = wrap(mirror, x)
    assert not net.training
    assert net.train() is net
    assert mirror.training
    assert mirror.drop.training
    assert net.state_dict().keys() == model.state_dict().keys()
    assert [id(p) for p in net.parameters()] == [id(p) for p in mirror.parameters()]
    assert net.second is mirror.second
    with pytest.raises(AttributeError, match="no_such_thing"):
        net.no_such_thing  # noqa: B018
    changed = {name: tensor + 1 for name, tensor in model.state_dict().items()}
    net.load_state_dict(changed)
    assert_same(changed, dict(mirror.state_dict()))
    assert net.double() is net
    assert all(parameter.dtype == torch.float64 for parameter in mirror.parameters())
    assert net(x.double())["out"].dtype == torch.float64


class Whole(nn.Module):
    """A model with another one as its part."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.part(x)["out"])
        return out


def test_it_can_be_a_part_of_a_model() -> None:
    model, mirror, x = noisy()
    eager = Whole(model)
    whole = Whole(wrap(mirror, x))
    whole.head.load_state_dict(eager.head.state_dict())
    seen: list[Any] = []
    whole.part.register_forward_hook(lambda *_: seen.append("part"))
    for one in (eager, whole):
        optimizer = torch.optim.AdamW(one.parameters())
        torch.manual_seed(1)
        for _ in range(3):
            optimizer.zero_grad()
            one(x).square().sum().backward()
            optimizer.step()
    assert_same(everything(eager, None), everything(whole, None))
    whole.eval()
    assert not mirror.training
    assert not mirror.norm.training
    assert seen == ["part"] * 3


class Odd(nn.Module):
    """Returns what a function makes of a layer, its output, and its input."""

    def __init__(self, ends: Callable[[nn.Linear, Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.ends = ends

    def forward(self, x: Tensor) -> Any:
        return self.ends(self.layer, self.layer(x), x)


@pytest.mark.parametrize(
    "ends",
    [
        pytest.param(lambda _, y, x: (y.view(4, 4, 4).transpose(0, 1)[1:], y, y[0]), id="views-of-views"),
        pytest.param(lambda _, y, x: (x, y, x.contiguous()), id="its-input"),
        pytest.param(lambda layer, y, x: (y, layer.weight), id="a-parameter"),
        pytest.param(lambda _, y, x: (y, y, y.detach()), id="one-thing-twice"),
        pytest.param(lambda _, y, x: y.relu_(), id="changed-in-place"),
        pytest.param(lambda _, y, x: y[:, :1].expand(-1, 8), id="expanded"),
        pytest.param(lambda _, y, x: y.to(torch.bfloat16), id="another-type"),
        pytest.param(lambda layer, y, x: F.linear(torch.tanh(y), layer.weight), id="tied"),
    ],
)
@pytest.mark.parametrize("source", [False, True])
def test_whatever_it_returns(ends: Callable[[nn.Linear, Tensor, Tensor], Any], source: bool) -> None:
    torch.manual_seed(0)
    model = Odd(ends)
    mirror = copy.deepcopy(model)
    inputs = [torch.randn(8, 8).requires_grad_(source)]
    inputs.append(inputs[0].detach().clone().requires_grad_(source))
    net = wrap(mirror, inputs[1])
    found: list[list[Tensor]] = [[], []]
    for number, (one, own) in enumerate(((model, model), (net, mirror))):
        optimizer = torch.optim.SGD(own.parameters(), lr=0.1)
        for _ in range(3):
            leaves = tree.flatten(one(inputs[number]))[0]
            loss = sum((leaf.float().square().sum() for leaf in leaves if leaf.requires_grad), torch.zeros(()))
            loss.backward()
            optimizer.step()
            found[number] += [leaf.detach().clone() for leaf in (*leaves, loss)]
    assert all(same(a, b) for a, b in zip(*found, strict=True))
    assert_same(everything(model, None), everything(mirror, None))
    assert same(inputs[0].grad, inputs[1].grad)
    assert net.fitted.mismatches == 0


def test_a_forward_without_a_backward_leaves_nothing_behind() -> None:
    _, mirror, x = noisy()
    net = wrap(mirror, x)
    for _ in range(3):
        net(x)["out"].sum().backward()
    held = POOL.held()
    assert held >= net.fitted.arena_bytes > 0
    gc.collect()  # what earlier steps left in cycles is not of these
    with lowtide.meter() as meter:
        for _ in range(5):
            found = net(x)
            del found
        gc.collect()
        assert meter.current == 0
    assert POOL.held() == held
    net(x)["out"].sum().backward()
    assert net.fitted.mismatches == 0


def test_what_the_backward_needs_must_not_change() -> None:
    _, mirror, x = noisy()
    net = wrap(mirror, x)
    loss = net(x)["out"].sum()
    with torch.no_grad():
        mirror.second.weight.add_(1.0)
    with pytest.raises(lowtide.UsageError, match=r"'second\.weight' was changed in place between forward and backward"):
        loss.backward()
    found = net(x)
    with torch.no_grad():
        found["hidden"].mul_(2.0)
    with pytest.raises(lowtide.UsageError, match="an output of the model was changed in place"):
        found["out"].sum().backward()
    found = net(x)
    with torch.no_grad():
        found["out"].mul_(2.0)  # nobody needs it again
    found["hidden"].sum().backward()


def test_a_second_backward_is_refused() -> None:
    _, mirror, x = noisy()
    net = wrap(mirror, x)
    loss = net(x)["out"].sum()
    loss.backward(retain_graph=True)
    with pytest.raises(lowtide.UsageError, match="has had its backward already"):
        loss.backward()
    net(x)["out"].sum().backward()


def test_an_independent_meter_agrees() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(256, 256), nn.GELU())))
    x = torch.randn(512, 256)
    net = wrap(model, x, budget="60%")
    gradient = torch.randn(512, 256)
    persistent = sum(parameter.nbytes for parameter in model.parameters()) + x.nbytes + gradient.nbytes
    for number in range(4):
        with lowtide.meter() as meter:
            out = net(x)
            out.backward(gradient)
            del out
        if number == 0:
            assert persistent + meter.peak <= net.fitted.plan.budget  # type: ignore[operator]
        else:  # the arena is there already
            assert persistent + net.fitted.arena_bytes + meter.peak <= net.fitted.plan.budget  # type: ignore[operator]
        model.zero_grad()
    assert net.fitted.peak == pytest.approx(net.fitted.plan.peak, rel=0.005)
    assert net.fitted.plan.overhead > 0
    assert "predicted peak" in net.fitted.report()


@pytest.mark.parametrize("make", [lambda x: x, lambda x: [x]])
def test_an_example_that_is_no_tuple(make: Callable[[Tensor], Any]) -> None:
    model, _, x = noisy()
    with pytest.raises(lowtide.UsageError, match="not a tuple or a mapping"):
        lowtide.wrap(model, example=make(x))


def test_what_can_not_be_wrapped_says_why() -> None:
    model, mirror, x = noisy()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    with pytest.raises(lowtide.CaptureError, match="nothing that the model returns requires a gradient"):
        wrap(model, x)
    with pytest.raises(lowtide.BudgetError) as caught:
        wrap(mirror, x, budget="1%")
    assert caught.value.least is not None
    assert wrap(mirror, x, budget=str(caught.value.least)).fitted.plan.peak <= caught.value.least
    net = wrap(mirror, x)
    with torch.autocast("cpu"), pytest.raises(lowtide.UsageError, match="autocast"):
        net(x)
    before = everything(mirror, None)
    net(x)["out"].sum().backward()
    assert before.keys() == everything(mirror, None).keys()


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = nn.LSTM(8, 16, 2, batch_first=True), nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x)[0])


@pytest.mark.parametrize("recurrent", [False, True])
def test_what_the_loop_holds_is_planned(recurrent: bool) -> None:
    """To let go of an output at the handover frees nothing: the loop has it."""
    torch.manual_seed(0)
    model = Recurrent() if recurrent else nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 10))
    x = torch.randn(4, 25, 8)
    net = lowtide.wrap(model, example=(x,), budget="least", time_limit=0.3)
    for _ in range(3):
        net(x).square().mean().backward()
        model.zero_grad()
    assert net.fitted.plan.budget is not None
    assert net.fitted.peak is not None
    assert net.fitted.peak <= net.fitted.plan.budget
