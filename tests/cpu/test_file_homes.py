"""Parameters and optimizer state that live in a file between steps: ordinary tensors, eager's bits, no pages kept."""

from __future__ import annotations

import copy
import dataclasses
import gc
import io
import os
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from graphs import captured as plainly
from graphs import lay_out, make_program
from late import LATE, poisoned
from test_witnesses import FILES, adam, normed
from twins import assert_exact, assert_same, everything, same

import lowtide
from lowtide import models
from lowtide.check import check
from lowtide.costs import declared
from lowtide.device import Device
from lowtide.device.disk import STAGING
from lowtide.device.homes import FileHomes
from lowtide.errors import ProgramError, StepError
from lowtide.graph import Graph, Kind, Place

AWAY: tuple[Kind, ...] = ("parameter", "state")


def elsewhere(graph: Graph, place: Place = "disk", kinds: tuple[Kind, ...] = AWAY) -> Graph:
    """The graph with inputs of these kinds at home in another place."""
    inputs = tuple(
        dataclasses.replace(item, home=place) if graph.values[item.value].kind in kinds else item
        for item in graph.inputs
    )
    homes = {graph.values[item.value].storage: item.home for item in inputs}
    outputs = tuple(
        dataclasses.replace(output, home=homes.get(graph.values[output.value].storage, "device"))
        for output in graph.outputs
    )
    return dataclasses.replace(graph, inputs=inputs, outputs=outputs)


def streamed(graph: Graph) -> lowtide.Program:
    program = lay_out(Random(0), graph, declared(graph), plainly(graph))
    check(graph, declared(graph), program)
    return program


def runner(name: str = "mlp", **options: Any) -> tuple[Any, Any, Any, tuple[Any, ...]]:
    step, model, optimizer, example = models.build(models.SMALL[name])
    captured = lowtide.capture(step, model, optimizer, example)
    captured = dataclasses.replace(captured, graph=elsewhere(captured.graph))
    return lowtide.execute(captured, streamed(captured.graph), **options), model, optimizer, example


def halve(model: torch.nn.Module, optimizer: Any) -> None:
    """What an owner may do between steps."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
        for state in optimizer.state.values():
            for item in state.values():
                if torch.is_tensor(item) and item.dim():
                    item.add_(0.25)


@pytest.mark.parametrize("name", ["mlp", "gpt", "resnet"])
@pytest.mark.parametrize("device", [None, LATE])
def test_steps_are_eagers_and_see_what_their_owner_writes(name: str, device: Device | None) -> None:
    train = assert_exact(
        lambda: models.build(models.SMALL[name]),
        steps=4,
        change=elsewhere,
        program=streamed,
        between=halve,
        device=device,
    )
    assert train.mismatches == 0
    graph = train.captured.graph
    assert any(item.home == "disk" for item in graph.inputs)
    if name != "resnet":  # declared costs know nothing of what is inside a convolution
        assert train.peak == train.staging + check(graph, declared(graph), train.program)
    if device is None:
        (homes,) = train.away._homes.values()
        assert isinstance(homes, FileHomes)
        assert train.staging == STAGING


@pytest.mark.parametrize("recipe", [normed, adam])
def test_random_programs_with_homes_elsewhere_are_eagers(recipe: Any) -> None:
    for seed in range(4):
        random = Random(seed)

        def program(graph: Graph, random: Random = random) -> lowtide.Program:
            costs = declared(graph)
            made = lay_out(random, graph, costs, make_program(random, graph, costs, wild=0.1))
            check(graph, costs, made)
            return made

        for device in (LATE, FILES):
            with poisoned():
                assert_exact(recipe, steps=2, change=elsewhere, program=program, device=device)


def test_between_steps_they_are_ordinary_tensors() -> None:
    train, model, optimizer, example = runner()
    names = dict(model.named_parameters())
    train(*example)
    train(*example)
    assert all(parameter is names[name] for name, parameter in model.named_parameters())
    assert all(parameter.requires_grad and parameter.is_leaf for parameter in model.parameters())
    before = {key: copy.deepcopy(item) for key, item in everything(model, optimizer).items()}
    file = io.BytesIO()
    torch.save((model.state_dict(), optimizer.state_dict()), file)
    file.seek(0)
    weights, state = torch.load(file, weights_only=True)
    train(*example)
    assert any(not same(before[key], item) for key, item in everything(model, optimizer).items())
    model.load_state_dict(weights)
    optimizer.load_state_dict(state)
    assert_same(before, everything(model, optimizer))
    twin = copy.deepcopy(model)
    assert all(torch.equal(a, b) for a, b in zip(twin.parameters(), model.parameters(), strict=True))
    with torch.no_grad():
        assert torch.equal(twin(example[0]), model(example[0]))


def test_pages_are_given_back_when_a_step_begins() -> None:
    model = torch.nn.Linear(1024, 1024, bias=False)
    homes = FileHomes()
    expected = model.weight.detach().clone()
    homes.locate([model.weight])
    assert homes.resident() <= STAGING
    assert torch.equal(model.weight, expected)
    with torch.no_grad():
        model.weight.add_(1)
    assert homes.resident() >= expected.nbytes
    homes.locate([model.weight])
    assert homes.resident() == 0
    assert torch.equal(model.weight, expected + 1)


def test_they_come_back_to_memory_as_the_same_objects() -> None:
    train, model, _, example = runner()
    train(*example)
    (homes,) = train.away._homes.values()
    before = {name: (id(item), item.detach().clone()) for name, item in model.named_parameters()}
    homes.put_back()
    assert all(
        (id(item), True) == (before[n][0], torch.equal(item, before[n][1])) for n, item in model.named_parameters()
    )
    addresses = {item.data_ptr() for item in model.parameters()}
    train(*example)  # and move again
    assert addresses.isdisjoint({item.data_ptr() for item in model.parameters()})


def test_another_step_finds_them_in_their_file() -> None:
    train, model, _, example = runner()
    train(*example)
    addresses = [item.data_ptr() for item in model.parameters()]
    other = lowtide.execute(train.captured, train.program)
    files = len(os.listdir("/proc/self/fd"))
    del train
    gc.collect()
    other(*example)
    assert [item.data_ptr() for item in model.parameters()] == addresses
    assert len(os.listdir("/proc/self/fd")) <= files + 4


def test_a_copy_home_that_failed_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    train, model, optimizer, example = runner()
    train(*example)
    before = {key: copy.deepcopy(item) for key, item in everything(model, optimizer).items()}
    usual, calls = os.pwrite, [0]

    def failing(*args: Any) -> int:
        calls[0] += 1
        if calls[0] == 2:
            raise OSError(5, "Input/output error")
        return usual(*args)

    monkeypatch.setattr(os, "pwrite", failing)
    with pytest.raises(StepError, match="while values were copied") as caught:
        train(*example)
    monkeypatch.undo()
    after = everything(model, optimizer)
    changed = {key for key in before if not same(before[key], after[key])}
    assert 0 < len(caught.value.parameters) < len(train.captured.slots)
    for key in changed:
        assert key.startswith(("state", "gradient")) or key.removeprefix("model ") in caught.value.parameters, key
    assert "load the last checkpoint" in str(caught.value.hint)


def test_a_result_elsewhere_is_refused_in_words() -> None:
    step, model, optimizer, example = models.build(models.SMALL["mlp"])
    captured = lowtide.capture(step, model, optimizer, example)
    graph = captured.graph
    outputs = tuple(dataclasses.replace(o, home="disk") if o.role == "result" else o for o in graph.outputs)
    graph = dataclasses.replace(graph, outputs=outputs)
    with pytest.raises(ProgramError, match="only what becomes of an input"):
        lowtide.execute(dataclasses.replace(captured, graph=graph), plainly(graph))


def test_nothing_is_left_in_the_folder(tmp_path: Path) -> None:
    train, _, _, example = runner(folder=tmp_path)
    train(*example)
    assert os.listdir(tmp_path) == []
