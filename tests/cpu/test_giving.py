"""Gradients that autograd is given as they are made: its own sums and hooks, to the bit, and less held at a time."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from twins import assert_exact, assert_same, everything, same

import lowtide
from lowtide import allocator, models
from lowtide.allocator.arena import POOL
from lowtide.execute import departures
from lowtide.program import Run

QUICK: dict[str, Any] = {"costs": "roofline", "time_limit": 0.3}
WIDTH, LAYERS = 256, 8
GRADIENTS = LAYERS * (WIDTH + 1) * WIDTH * 4  # bytes


@pytest.fixture
def eagerly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small models stop, too."""
    monkeypatch.setattr(departures, "WORTH", 0)


def deep() -> nn.Module:
    layers = itertools.chain.from_iterable((nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(LAYERS))
    return nn.Sequential(*layers)


def twins(make: Callable[[], nn.Module] = deep) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    model = make()
    return model, copy.deepcopy(model)


def batch(number: int = 0) -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(number))


def through(door: str, model: nn.Module, *example: Any) -> Any:
    """The model as its loop calls it."""
    if door == "wrap":
        return lowtide.wrap(model, example=example, **QUICK)
    lowtide.attach(model, **QUICK)
    return model


def stops_of(net: Any) -> Any:
    fitted = net.fitted if isinstance(net, lowtide.Wrapped) else net.__dict__["_lowtide"].fitted
    return fitted._latest.runner


def attaching(step: Callable[..., Any], model: nn.Module, optimizer: Any, _: Any) -> Callable[..., Any]:
    lowtide.attach(model, **QUICK)
    return partial(step, model, optimizer)


@pytest.mark.usefixtures("eagerly")
@pytest.mark.parametrize("name", ["mlp", "resnet", "gpt", "lstm-cell", "hf-bert"])
def test_models_are_exact_with_stops(name: str) -> None:
    assert_exact(lambda: models.build(models.SMALL[name]), steps=3, make=attaching)


@pytest.mark.parametrize("door", ["wrap", "attach"])
def test_added_gradients_are_not_held_twice(door: str) -> None:
    """Backwards that add to gradients, then clipping: equal, with no more beside the gradients than torch holds."""
    model, mirror = twins()
    net = through(door, mirror, batch())
    peaks: dict[int, list[int]] = {}
    with allocator.meter():
        for one, called in ((model, model), (mirror, net)):
            optimizer = torch.optim.SGD(one.parameters(), lr=0.01, momentum=0.9)
            peaks[id(one)] = []
            for _ in range(3):
                called(batch()).pow(2).mean().backward()
                for number in (1, 2):
                    x = batch(number)
                    with allocator.meter() as meter:
                        called(x).pow(2).mean().backward()
                    peaks[id(one)].append(meter.peak)
                nn.utils.clip_grad_norm_(one.parameters(), 0.1)
                optimizer.step()
                optimizer.zero_grad()
    assert_same(everything(model, None), everything(mirror, None))
    assert len(stops_of(net).stops) >= LAYERS - 1
    assert max(peaks[id(mirror)][1:]) < 0.4 * GRADIENTS  # all of it, if they were given at the end
    assert max(peaks[id(mirror)][1:]) <= max(peaks[id(model)]) + 4 * batch().nbytes


@pytest.mark.parametrize("door", ["wrap", "attach"])
def test_an_optimizer_in_the_backward_frees_gradients(door: str) -> None:
    model, mirror = twins()
    net = through(door, mirror, batch())
    for one in (model, mirror):
        for parameter in one.parameters():
            update = torch.optim.SGD([parameter], lr=0.05, momentum=0.9)
            parameter.register_post_accumulate_grad_hook(partial(_updates, update))
    losses: list[list[Any]] = [[], []]
    peak = 0
    with allocator.meter():
        for found, called in zip(losses, (model, net), strict=True):
            for number in range(4):
                with allocator.meter() as meter:
                    loss = called(batch(number)).pow(2).mean()
                    loss.backward()
                found.append(loss.detach())
                peak = meter.peak
    assert all(same(one, other) for one, other in zip(*losses, strict=True))
    assert_same(everything(model, None), everything(mirror, None))
    assert peak < 0.4 * GRADIENTS


def _updates(update: torch.optim.Optimizer, _: Tensor) -> None:
    update.step()
    update.zero_grad()


@pytest.mark.usefixtures("eagerly")
def test_hooks_see_and_change_gradients_as_ever() -> None:
    found: list[dict[str, Any]] = []
    for number, model in enumerate(twins(Tied)):
        net = through("attach", model) if number else model
        seen: dict[str, Tensor] = {}  # autograd does not say which parameter is first
        model.first.bias.register_hook(lambda grad: grad * 2)
        model.first.weight.register_hook(partial(_sees, seen, "tied"))
        model.last.weight.register_hook(partial(_sees, seen, "last"))
        model.last.bias.register_post_accumulate_grad_hook(_triple)
        for step in range(3):
            net(batch(step)).pow(2).sum().backward()
        assert len(seen) == 6
        found.append({**everything(model, None), **seen})
    assert_same(*found)


def test_a_hook_that_changes_the_sum_of_a_tied_weight_is_refused() -> None:
    _, model = twins(Tied)
    lowtide.attach(model, **QUICK)
    model.first.weight.register_hook(lambda grad: grad * 2)
    with pytest.raises(lowtide.UsageError, match="has a hook that changes its gradient"):
        model(batch()).sum().backward()


def _sees(seen: dict[str, Tensor], name: str, gradient: Tensor) -> None:
    seen[f"{name} {sum(key.startswith(name) for key in seen)}"] = gradient.clone()


def _triple(one: Tensor) -> None:
    assert one.grad is not None
    one.grad.mul_(3)


class Tied(nn.Module):
    """Uses one weight twice, and has one that it does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 8)
        self.unused = nn.Parameter(torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(F.linear(torch.relu(self.first(x)), self.first.weight)))  # type: ignore[no-any-return]


def test_some_gradients_alone_leave_nothing_behind() -> None:
    model, mirror = twins()
    net = through("wrap", mirror, batch())
    for _ in range(3):
        for places in ([-2, -1], [0], [1, 6]):
            wanted = [[[*one.parameters()][place] for place in places] for one in (model, mirror)]
            x, z = (batch().requires_grad_() for _ in range(2))
            expected = torch.autograd.grad(model(x).sum(), [*wanted[0], x])
            found = torch.autograd.grad(net(z).sum(), [*wanted[1], z])
            assert all(map(same, expected, found))
            loss = net(batch()).sum()
            assert net._loop.outstanding[0] == 1
            torch.autograd.grad(loss, wanted[1])
            assert net._loop.outstanding == (0, 0)
    assert all(one.grad is None for one in mirror.parameters())


def test_gradients_from_elsewhere_are_added() -> None:
    """A penalty on weights, and two calls in one backward."""
    model, mirror = twins()
    net = through("wrap", mirror, batch())
    for _ in range(3):
        for called, one in ((model, model), (net, mirror)):
            penalty = sum(parameter.pow(2).sum() for parameter in one.parameters())
            (called(batch(1)).sum() + penalty).backward()
            (called(batch(2)).sum() + called(batch(3)).pow(2).sum()).backward()
    assert_same(everything(model, None), everything(mirror, None))


def test_what_is_still_read_must_not_be_changed_by_a_hook() -> None:
    """Torch refuses it, too: its own nodes have saved the weight."""
    for number, model in enumerate(twins()):
        net = through("attach", model) if number else model

        def halve(_: Tensor, model: nn.Module = model) -> None:
            with torch.no_grad():
                model.get_submodule("4").weight.mul_(0.5)

        handle = model.get_submodule(str(2 * LAYERS - 2)).weight.register_post_accumulate_grad_hook(halve)
        kind = (RuntimeError, lowtide.UsageError)[number]
        with pytest.raises(kind, match=r"inplace operation|changed in place between forward and backward"):
            net(batch()).sum().backward()
        handle.remove()
        model.zero_grad()
        net(batch()).sum().backward()


def test_a_hook_that_fails_leaves_nothing_behind() -> None:
    model, mirror = twins()
    net = through("wrap", mirror, batch())
    for _ in range(2):
        net(batch()).sum().backward()

    def fail(_: Tensor) -> None:
        raise KeyError("mine")

    handle = mirror.get_submodule("8").weight.register_post_accumulate_grad_hook(fail)
    loss = net(batch()).sum()
    with pytest.raises(KeyError, match="mine"):
        loss.backward()
    handle.remove()
    mirror.zero_grad()
    for called in (model, net):
        called(batch()).sum().backward()
    assert_same(everything(model, None), everything(mirror, None))
    assert net._loop.outstanding == (0, 0)
    assert POOL.held() == net.fitted.arena_bytes


@pytest.mark.usefixtures("eagerly")
@pytest.mark.parametrize("name", ["mlp", "gpt"])
def test_nothing_is_read_after_it_left(name: str) -> None:
    """Neither a gradient nor its parameter, which a hook may update."""
    step, model, optimizer, example = models.build(models.SMALL[name])
    attaching(step, model, optimizer, example)(*example)
    runner = stops_of(model)
    graph, instructions = runner.captured.graph, runner.program.instructions
    homes = {item.path[0]: graph.values[item.value].storage for item in graph.inputs}
    assert runner.stops
    for stop in runner.stops:
        runs = [one for one in instructions[stop.instruction + 1 :] if isinstance(one, Run)]
        read = {graph.values[value].storage for run in runs for value in graph.ops[run.op].reads}
        for one in runner.captured.leaving:
            if one.output in stop.outputs:
                assert graph.values[graph.outputs[one.output].value].storage not in read
                assert homes.get(one.parameter, -1) not in read
