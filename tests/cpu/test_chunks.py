"""nn.LSTM cut in time: the same up to rounding, with bits where torch has them, and a budget it cannot reach whole."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from typer.testing import CliRunner

import lowtide
from lowtide import models
from lowtide.aten import RECURRENT
from lowtide.check import check
from lowtide.choice import Away, Effort, Leave, choose
from lowtide.cli import app
from lowtide.costs import Costs, declared
from lowtide.errors import BudgetError, FileError, UsageError
from lowtide.models.recurrent import gru, lstm
from lowtide.plan import as_eager, keep_everything
from lowtide.plan import least as least_plan
from lowtide.program import Plan, Program, Run
from lowtide.rewrite import cut, longest, with_narrow
from lowtide.rewrites import Allowed

CLOSE = 5e-6  # of the largest entry: how far a gradient of weights may be from eager's
LENGTH = 11  # time steps: not a multiple of the chunks


class Layers(nn.Module):
    """An nn.LSTM between two linear layers; the loss reads its last state too, if asked to."""

    def __init__(self, *, ends: bool = False, **options: Any) -> None:
        super().__init__()
        self.ends, self.first = ends, options.get("batch_first", False)
        self.before = nn.Linear(6, 8)
        self.layers = nn.LSTM(8, 12, **options)
        self.after = nn.Linear(12 * (2 if options.get("bidirectional") else 1), 3)

    def forward(self, x: Tensor, state: tuple[Tensor, Tensor] | None = None) -> Tensor:
        made = self.before(x.transpose(0, 1) if self.first else x)
        result, (hidden, cell) = self.layers(made, state)
        loss: Tensor = self.after(result).square().mean()
        return loss + hidden.sum() + cell.square().sum() if self.ends else loss


class EncoderDecoder(nn.Module):
    """Two nn.LSTMs: the second reads the results of the first, starts from its last state, and so needs all of it."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.LSTM(6, 12), nn.LSTM(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        result, state = self.one(x)
        decoded, _ = self.other(result, state)
        loss: Tensor = (decoded * result).sum()
        return loss


class Draws(nn.Module):
    """Two draws between two nn.LSTMs, of which only the first has to wait for the chunks of both."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.LSTM(6, 6), nn.LSTM(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        result, _ = self.one(x)
        dropped = functional.dropout(result, 0.3) * functional.dropout(x, 0.6)
        again, _ = self.other(result)
        loss: Tensor = (dropped * again).sum()
        return loss


def step(model: nn.Module, optimizer: Any, *batch: Any) -> Tensor:
    """Loss and gradients."""
    loss: Tensor = model(*batch)
    loss.backward()
    return loss


def frozen() -> nn.Module:
    """Layers of which some weights do not train, and nothing before them."""
    model = Layers(num_layers=2)
    model.before.requires_grad_(False)
    model.layers.weight_hh_l0.requires_grad_(False)
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "one layer": lambda: Layers(),
    "three layers": lambda: Layers(num_layers=3),
    "batch first": lambda: Layers(num_layers=2, batch_first=True),
    "last states": lambda: Layers(num_layers=2, ends=True),
    "both directions": lambda: Layers(num_layers=2, bidirectional=True, ends=True),
    "dropout": lambda: Layers(num_layers=3, dropout=0.4),
    "no biases": lambda: Layers(num_layers=2, bias=False, bidirectional=True),
    "frozen": frozen,
    "encoder and decoder": EncoderDecoder,
    "draws": Draws,
}


def sequences() -> Tensor:
    return torch.randn(LENGTH, 4, 6, generator=torch.Generator().manual_seed(0))


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: item.grad for name, item in model.named_parameters() if item.grad is not None}


def recurrent(model: nn.Module) -> set[str]:
    return {
        f"{name}.{one}"
        for name, m in model.named_modules()
        if isinstance(m, nn.LSTM)
        for one, _ in m.named_parameters()
    }


@cache
def alone() -> bool:
    """Whether torch computes a time step the same way however many others are in the call; not on every processor."""
    chance = torch.Generator().manual_seed(0)
    for size, hidden, spans in product((6, 8, 12, 24), (6, 12), (range(0, LENGTH, 6), range(LENGTH))):
        layer, x = nn.LSTM(size, hidden), torch.randn(LENGTH, 4, size, generator=chance)
        given = torch.randn(LENGTH, 4, hidden, generator=chance)
        whole, parts = x.clone().requires_grad_(), x.clone().requires_grad_()
        expected, _ = layer(whole)
        expected.backward(given)
        state, found = None, []
        for part in parts.split([end - start for start, end in pairwise([*spans, LENGTH])]):
            result, state = layer(part, state)
            found.append(result)
        torch.cat(found).backward(given)
        if not torch.equal(expected, torch.cat(found)) or not torch.equal(whole.grad, parts.grad):
            return False
    return True


def assert_near(expected: Tensor, found: Tensor, name: str, *, rounded: bool) -> None:
    """The same bits, or close where rounding is allowed or torch itself rounds otherwise."""
    if rounded or not alone():
        assert (expected - found).abs().max() <= CLOSE * expected.abs().max(), name
    else:
        assert torch.equal(expected, found), name


def assert_close(model: nn.Module, mirror: nn.Module) -> None:
    """The bits of every gradient but those of the recurrent weights, which are close."""
    expected, found = gradients(model), gradients(mirror)
    assert expected.keys() == found.keys()
    weights = recurrent(model)
    for name, gradient in expected.items():
        assert_near(gradient, found[name], name, rounded=name in weights)


def train_cut(make: Callable[[], nn.Module], batch: tuple[Any, ...], chunks: int) -> lowtide.Graph:
    """One step in eager PyTorch and one by the cut graph, compared; the cut graph."""
    torch.manual_seed(0)
    model = make()
    torch.manual_seed(0)
    mirror = make()
    captured = lowtide.capture(step, mirror, None, batch)
    graph = cut(captured.graph, chunks)
    check(graph, declared(graph), keep_everything(graph))
    eager = as_eager(graph)
    over = {run.op: run.over for run in eager.instructions if isinstance(run, Run)}  # autograd's sums, too
    check(graph, replace(declared(graph), in_place=tuple(over.get(op, ()) for op in range(len(graph.ops)))), eager)
    train = lowtide.execute(replace(captured, graph=graph), keep_everything(graph))
    torch.manual_seed(1)
    expected = step(model, None, *batch)
    torch.manual_seed(1)
    assert_near(expected.detach(), train(*batch), "loss", rounded=False)
    assert_close(model, mirror)
    return graph


@pytest.mark.parametrize("chunks", [2, 4, 64])
@pytest.mark.parametrize("name", MODELS)
def test_bits(name: str, chunks: int) -> None:
    graph = train_cut(MODELS[name], (sequences(),), chunks)
    calls = [graph.values[op.outputs[0] or 0].shape[0] for op in graph.ops if op.target in RECURRENT]
    assert max(calls) == -(-LENGTH // chunks)
    assert sum(calls) % (2 * LENGTH) == 0


def test_a_state_that_is_given() -> None:
    state = tuple(torch.randn(4, 4, 12, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2))
    train_cut(lambda: Layers(num_layers=2, bidirectional=True), (sequences(), state), 3)


def test_layers_take_turns() -> None:
    captured = lowtide.capture(step, Layers(num_layers=3), None, (sequences(),))
    graph = cut(captured.graph, 4)
    calls = [op.name for op in graph.ops if op.target in RECURRENT]
    forward = [f"mkldnn_rnn_layer_{layer}_chunk{chunk}" for chunk in range(4) for layer in range(3)]
    backward = [f"mkldnn_rnn_layer_backward_{layer}_chunk{chunk}" for chunk in (3, 2, 1, 0) for layer in range(3)]
    assert calls == forward + backward
    joined = [op for op in graph.ops if op.target == "aten.cat.default"]
    assert len(joined) == 2  # the results of the last layer, and the gradient of what the first one read
    assert len({op.name for op in graph.ops}) == len(graph.ops)


def test_what_cannot_be_cut_is_left_alone() -> None:
    def twice(model: nn.Module, optimizer: Any, x: Tensor) -> Tensor:
        loss: Tensor = model(x)
        loss.backward(retain_graph=True)
        loss.backward()
        return loss

    graph = lowtide.capture(twice, Layers(), None, (sequences(),)).graph
    assert longest(graph) == 0
    assert cut(graph, 4) is graph
    graph = lowtide.capture(step, Layers(), None, (sequences(),)).graph
    assert longest(graph) == LENGTH
    assert cut(graph, 1) is graph
    packed = [
        replace(op, args=(*op.args[:8], (4,) * LENGTH, *op.args[9:])) if op.target in RECURRENT else op
        for op in graph.ops
    ]
    assert longest(replace(graph, ops=tuple(packed))) == 0


def test_gru_is_small_ops_already() -> None:
    recipe = gru(layers=1, width=8, length=6, vocabulary=5, batch=2)
    graph = lowtide.capture(recipe.step, recipe.model, sgd(recipe.model), recipe.example).graph
    gates = [op for op in graph.ops if op.target == "aten.sigmoid_.default"]
    assert len(gates) == 2 * 6  # two gates at each of six time steps
    assert longest(graph) == 0


# In fit


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.5, momentum=0.9)


def language() -> tuple[Any, nn.Module, Any, tuple[Any, ...]]:
    """A small language model whose memory is the workspace of its layers."""
    torch.manual_seed(0)
    recipe = lstm(layers=2, width=64, length=32, vocabulary=16, batch=16)
    return recipe.step, recipe.model, sgd(recipe.model), recipe.example


@pytest.fixture(scope="module")
def least() -> int:
    """The least peak of the language model whose layers are whole, in bytes."""
    graph = with_narrow(lowtide.capture(*language()).graph)
    return least_plan(graph, lowtide.measure(graph)).peak


def test_a_budget_that_only_chunks_fit(least: int, tmp_path: Path) -> None:
    budget = int(0.6 * least)
    step_, model, optimizer, example = language()
    with pytest.raises(BudgetError, match="rounding=True"):
        lowtide.fit(step_, model, optimizer, example=example, budget=budget, time_limit=0.3)
    mirrored_step, mirror, mirrored_optimizer, _ = language()
    train = lowtide.fit(
        mirrored_step, mirror, mirrored_optimizer, example=example, budget=budget, time_limit=0.3, rounding=True
    )
    assert train.chunks > 1
    assert "the same up to rounding" in train.report()
    for number in range(5):
        expected, found = step_(model, optimizer, *example), train(*example)
        assert torch.allclose(expected, found, rtol=1e-5), (number, expected, found)
        assert number or torch.equal(expected, found)  # the first has the bits of eager's
    assert train.peak is not None
    assert train.peak <= budget
    assert abs(train.peak - train.plan.peak) <= 0.005 * train.plan.peak
    assert train.mismatches == 0

    train.plan.save(tmp_path / "plan")
    again = lowtide.fit(*language()[:3], example=example, plan=tmp_path / "plan", rounding=True)
    assert (again.chunks, again.program) == (train.chunks, train.program)
    with pytest.raises(FileError, match="rounding"):
        lowtide.fit(*language()[:3], example=example, plan=tmp_path / "plan")


def test_layers_stay_whole_where_nothing_must_run_twice(least: int) -> None:
    step_, model, optimizer, example = language()
    train = lowtide.fit(step_, model, optimizer, example=example, budget=3 * least, time_limit=0.3, rounding=True)
    assert train.chunks == 1
    assert "rounding" not in train.report()


@pytest.mark.parametrize(("seconds", "chunks"), [((9, 8, 7), 4), ((9, 7, 8), 2), ((9, 8.95, 8.95), 1), ((5, 4, 4), 1)])
def test_the_quickest_plan_is_chosen(seconds: tuple[float, ...], chunks: int) -> None:
    """A step takes 5 seconds if nothing runs twice; one that does is left only for more than a hundredth."""
    graph = lowtide.capture(step, Layers(), None, (torch.randn(16, 2, 6),)).graph
    asked: list[float] = []

    def price(graph: lowtide.Graph) -> Costs:
        return replace(declared(graph), seconds=(0.0,) * len(graph.ops))

    def search(graph: lowtide.Graph, costs: Costs, eager_peak: int, effort: Effort) -> Plan:
        asked.append(seconds[len(asked)])
        return Plan(Program(graph.fingerprint, ()), 1, 1, asked[-1], 5.0, 5.0, 1, 0.0)

    chosen = choose(graph, price, search, leave=Leave(Allowed("rounding")))
    assert chosen.chunks == chunks
    assert chosen.plan.program.graph == chosen.graph.fingerprint == with_narrow(cut(graph, chunks)).fingerprint
    asked.clear()
    assert choose(graph, price, search).chunks == len(asked) == 1


@pytest.mark.parametrize("fails", [False, True])
def test_searches_share_the_time(fails: bool) -> None:
    """However many homes are tried, all searches for them together have no more than the time limit."""
    step, model, optimizer, example = models.build("gpt:layers=2,width=64,heads=2,context=32,batch=2,optimizer=adam")
    graph = lowtide.capture(step, model, optimizer, example).graph
    parts: list[float] = []

    def search(graph: lowtide.Graph, costs: Costs, eager_peak: int, effort: Effort) -> Plan:
        parts.append(effort.part)
        if fails and len(parts) == 1:
            raise BudgetError("nothing fits", least=1)
        return Plan(Program(graph.fingerprint, ()), 1, 1, 9.0 / len(parts), 1.0, 1.0, 1, 0.0)

    choose(graph, declared, search, away=Away("disk"))
    assert len(parts) == 5
    assert parts[0] == 1
    assert sum(parts[1:]) <= 1 + 1e-9


def test_a_budget_that_nothing_fits(least: int) -> None:
    step_, model, optimizer, example = language()
    with pytest.raises(BudgetError) as raised:
        lowtide.fit(step_, model, optimizer, example=example, budget=10_000, time_limit=0.3, rounding=True)
    assert raised.value.least is not None
    assert raised.value.least < 0.6 * least
    wide = lstm(layers=1, width=8, length=16, vocabulary=4096, batch=4)
    with pytest.raises(BudgetError) as raised:  # the logits need most, whatever is cut
        lowtide.fit(wide.step, wide.model, sgd(wide.model), example=wide.example, budget=10_000, time_limit=0.3)
    assert "rounding" not in str(raised.value)


# On the command line


def test_commands(least: int, tmp_path: Path) -> None:
    target = "lstm:layers=2,width=64,length=32,vocabulary=16,batch=16"
    budget, file = str(int(0.6 * least)), str(tmp_path / "plan")
    refused = CliRunner().invoke(app, ["plan", target, "--budget", budget, "--time-limit", "0.3"])
    assert refused.exit_code == BudgetError.exit_code
    assert "--rounding" in refused.output
    options = ["--rounding", "--time-limit", "0.3", "--json"]
    planned = json_of("plan", target, "--budget", budget, *options, "--out", file)
    assert planned["chunks"] > 1
    assert planned["predicted_peak"] <= planned["budget"] < least
    assert planned["least_feasible"] <= planned["predicted_peak"]
    assert any("up to rounding" in note for note in planned["notes"])
    assert json_of("plan", target, "--load", file, "--rounding", "--json")["chunks"] == planned["chunks"]
    trained = json_of("train", target, "--plan", file, "--steps", "2", *options)
    assert (trained["chunks"], trained["budget"]) == (planned["chunks"], planned["budget"])
    assert trained["metered_peak"] <= trained["budget"]
    wrong = CliRunner().invoke(app, ["train", target, "--eager", "--rounding"])
    assert wrong.exit_code == UsageError.exit_code


def json_of(*arguments: str) -> dict[str, Any]:
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found
