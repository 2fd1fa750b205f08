"""What a program copies away and back: the caller's own tensors hold the last content at the end, bit for bit."""

from __future__ import annotations

import random
import re
from typing import Any

import pytest
import torch
from graphs import lay_out
from late import LATE
from repeats import inputs_away_and_back, updated_elsewhere
from twins import assert_exact

import lowtide
from lowtide import models
from lowtide.costs import declared
from lowtide.device import CPU
from lowtide.execute.places import Places
from lowtide.execute.slots import Slots
from lowtide.graph import Place
from lowtide.program import Copy, Free, Program, Run

NAMES = ["mlp", "unet", "lstm"]  # Adam's state, batch norm's buffers, a recurrent one


@pytest.mark.parametrize("place", ["host", "disk"])
@pytest.mark.parametrize("name", NAMES)
def test_inputs_that_went_away_before_their_update_train(name: str, place: Place) -> None:
    def program(graph: lowtide.Graph) -> lowtide.Program:
        made = inputs_away_and_back(graph, place)
        lowtide.check(graph, declared(graph), made)
        return made

    device = LATE if place == "host" else None
    assert_exact(lambda: models.build(models.SMALL[name]), steps=2, program=program, device=device)


@pytest.mark.parametrize("name", NAMES)
def test_updates_that_ran_in_the_arena_come_home(name: str) -> None:
    def program(graph: lowtide.Graph) -> lowtide.Program:
        made = lay_out(random.Random(0), graph, declared(graph), updated_elsewhere(graph))
        lowtide.check(graph, declared(graph), made)
        assert sum(isinstance(row, Copy) and row.at >= 0 for row in made.instructions) > 5
        return made

    assert_exact(lambda: models.build(models.SMALL[name]), steps=2, program=program, device=LATE)


def accumulating() -> tuple[Any, torch.nn.Module, Any, tuple[Any, ...]]:
    """A step that adds to gradients which stay."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))

    def step(model: torch.nn.Module, _: Any, x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    return step, model, None, (torch.randn(3, 4),)


def test_gradients_that_stay_are_added_to_in_the_callers_tensors() -> None:
    kept: list[tuple[torch.nn.Parameter, torch.Tensor]] = []

    def recipe() -> tuple[Any, torch.nn.Module, Any, tuple[Any, ...]]:
        made = accumulating()
        kept.extend((parameter, parameter.grad) for parameter in made[1].parameters() if parameter.grad is not None)
        return made

    for change in (lambda graph: inputs_away_and_back(graph, "host"), updated_elsewhere):
        kept.clear()

        def program(graph: lowtide.Graph, change: Any = change) -> lowtide.Program:
            made = lay_out(random.Random(0), graph, declared(graph), change(graph))
            lowtide.check(graph, declared(graph), made)
            assert any(graph.values[old].kind == "gradient" for pairs in graph.effects for _, old in pairs)
            return made

        assert_exact(recipe, steps=3, program=program, device=LATE)
        assert all(parameter.grad is gradient for parameter, gradient in kept)


def test_the_batch_may_be_a_part_of_something_larger() -> None:
    """What lies between its elements is not ours, and what nobody changed is not written."""
    data = torch.arange(48.0).reshape(4, 12)
    other = data.clone()

    def recipe() -> tuple[Any, torch.nn.Module, Any, tuple[Any, ...]]:
        step, model, _, _ = accumulating()
        for parameter in model.parameters():
            parameter.grad = None
        return step, model, None, (data[1:, 1:9:2],)

    def between(model: Any, _: Any) -> None:
        model.zero_grad()

    def program(graph: lowtide.Graph) -> lowtide.Program:
        return inputs_away_and_back(graph, "host")

    assert_exact(recipe, steps=2, program=program, between=between, device=LATE)
    assert torch.equal(data, other)


def shifted() -> tuple[Any, torch.nn.Module, Any, tuple[Any, ...]]:
    """A step that writes to its batch, which is a part of something larger."""
    torch.manual_seed(0)

    def step(model: torch.nn.Module, _: Any, x: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return model(x).sum()

    return step, torch.nn.Linear(4, 4), None, (torch.zeros(4, 12)[1:, 1:9:2],)


def test_only_the_elements_of_a_batch_are_written() -> None:
    step, model, _, example = shifted()
    captured = lowtide.capture(step, model, None, example)
    program = lay_out(random.Random(0), captured.graph, declared(captured.graph), updated_elsewhere(captured.graph))
    run = lowtide.execute(captured, program, device=LATE)
    data = torch.zeros(4, 12)
    run(data[1:, 1:9:2])
    assert data.sum() == 12
    assert (data[1:, 1:9:2] == 1).all()


@pytest.mark.parametrize("place", ["host", "disk"])
def test_a_tensor_comes_back_with_all_of_its_storage(place: Place) -> None:
    """A value is the content of a whole storage; views may see what its first tensor does not."""
    room = {place: Slots(8192, {7: 0, 8: 4096}, {7: 4096, 8: 4096})}
    places = Places(LATE if place == "host" else CPU, room)
    places.store(7, 3, place, torch.arange(10)[2:5], part=False)
    places.wait(3, place)
    found = places.load(3)
    places.wait(3, "device")
    assert found.tolist() == [2, 3, 4]
    assert found.as_strided((10,), (1,), 0).tolist() == list(range(10))
    places.store(8, 4, place, torch.arange(10)[2:9:3].expand(2, 3), part=True)
    places.wait(4, place)
    found = places.load(4)
    places.wait(4, "device")
    assert found.tolist() == [[2, 5, 8], [2, 5, 8]]
    assert (found.stride(), found.untyped_storage().nbytes()) == ((0, 3), 7 * 8)
    places.end()
    places.close()


def test_an_update_that_is_made_twice_is_held_once() -> None:
    def step(model: torch.nn.Module, _: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            y = x * 2
            y.add_(1)
            return y.sum()

    captured = lowtide.capture(step, torch.nn.Linear(1, 1), None, (torch.ones(4),))
    graph = captured.graph
    (double, add, total), ((new, old),) = range(3), graph.ops[1].updates
    rows = (Run(double), Run(add), Run(add, again=True), Free(old), Run(total), Free(new))
    program = Program(graph.fingerprint, rows)
    lowtide.check(graph, declared(graph), program)
    run = lowtide.execute(captured, program)
    assert run(torch.ones(4)) == 12
    made = set(re.findall(r"(t\d+) = ", run.source))
    gone = {name for names in re.findall(r"del (.*)", run.source) for name in names.split(", ")}
    returned = set(re.findall(r"t\d+", run.source.splitlines()[-1]))
    assert made == gone | returned
