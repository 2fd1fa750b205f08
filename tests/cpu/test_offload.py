"""Offload by the front door: steps with values, state and parameters in a file are eager's, within their budget."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import importlib
import io
import json
import os
import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from late import LATE, poisoned
from twins import assert_exact, everything, same
from typer.testing import CliRunner

import lowtide
from lowtide import allocator, device, kernels, models
from lowtide.candidates import Prices
from lowtide.cli import app
from lowtide.costs import Costs, Lane, lanes
from lowtide.device import cpu, disk
from lowtide.device.homes import lives_in_file
from lowtide.device.mounts import is_memory
from lowtide.errors import BudgetError, LowtideError, PlaceError, UsageError
from lowtide.fit import Fitted, make
from lowtide.graph import Graph, Place
from lowtide.measure import with_lanes
from lowtide.plan import least
from lowtide.program import Copy
from lowtide.rewrite import apply, offload

pages, prices, rows, homes = (
    importlib.import_module(f"lowtide.{name}")
    for name in ("cli.profile", "measure.lanes", "rewrite.offload", "execute.away")
)
PIECE = 2**15  # bytes: what copies go through is small beside these models
RATE = 1e11  # bytes a second: copies are quick, so that plans have many
TARGETS = {
    "mlp": "mlp:width=256,depth=6,features=64,batch=256,optimizer=adam",
    "gpt": "gpt:layers=2,width=64,heads=2,context=32,vocabulary=256,batch=8,optimizer=adam",
    "resnet": "resnet:stages=1-1-1-1,width=8,batch=4,size=64,classes=10",
    "lstm": "lstm:layers=2,width=64,length=16,vocabulary=256,batch=16,optimizer=adam",
}
MEASURED = {"mlp", "resnet", "lstm"}  # whose temporaries an estimate does not know


@pytest.fixture(autouse=True)
def _quick_copies_of_small_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "SMALLEST", 2**12)
    monkeypatch.setattr(disk, "PIECE", PIECE)
    monkeypatch.setattr(disk, "STAGING", 2 * PIECE)
    monkeypatch.setitem(device.DEVICES, "cpu", dataclasses.replace(device.CPU, staging=2 * PIECE))

    def quick(graph: Graph) -> Costs:
        return dataclasses.replace(lowtide.roofline(graph), lanes=lanes([("disk", RATE), ("host", RATE)]))

    def measured(_: Any, place: Place, **__: Any) -> tuple[Lane, ...]:
        return lanes([(place, RATE)])

    monkeypatch.setattr(make, "roofline", quick)
    monkeypatch.setattr(pages, "roofline", quick)
    monkeypatch.setattr(prices, "measure_lanes", measured)


def recipe(name: str) -> Callable[[], Any]:
    return lambda: models.build(TARGETS[name])


def costs_for(name: str) -> Any:
    return "measured" if name in MEASURED else "roofline"


@dataclasses.dataclass(frozen=True)
class Frame:
    """The bytes of a step without offload."""

    persistent: int
    least: int
    most: int

    @property
    def between(self) -> int:
        """A budget that recomputation can keep, too."""
        return (self.least + self.most) // 2

    @property
    def below(self) -> int:
        """A budget that nothing can keep without offload: a part of what persists is elsewhere."""
        return self.least - self.persistent // 3


@cache
def frame(name: str) -> Frame:
    step, model, optimizer, example = recipe(name)()
    train = lowtide.fit(step, model, optimizer, example=example, costs=costs_for(name), time_limit=0.1)
    graph = train.captured.graph
    return Frame(train.costs.persistent(graph), least(graph, train.costs).peak, train.plan.peak)


def fitting(name: str, within: int | None, **options: Any) -> Callable[..., Fitted]:
    """Makes a fitted step, with offload to the disk where nothing else is said."""

    def fitted(step: Any, model: Any, optimizer: Any, example: tuple[Any, ...]) -> Fitted:
        asked = {"budget": within, "offload": "disk", "costs": costs_for(name), "time_limit": 0.2, **options}
        return lowtide.fit(step, model, optimizer, example=example, **asked)

    return fitted


def fresh(name: str, budget: int, **options: Any) -> tuple[Fitted, Any, Any, tuple[Any, ...]]:
    step, model, optimizer, example = recipe(name)()
    return fitting(name, budget, **options)(step, model, optimizer, example), model, optimizer, example


def copied_away(train: Fitted) -> list[int]:
    return [row.value for row in train.program.instructions if isinstance(row, Copy) and row.to != "device"]


def living(train: Fitted) -> int:
    return train.costs.elsewhere(train.captured.graph)


# ------------------------------------------------------------------------------------------------------------ the bits


@pytest.mark.parametrize("part", ["between", "below"])
@pytest.mark.parametrize("name", TARGETS)
def test_steps_are_eagers_within_the_budget(name: str, part: str) -> None:
    budget = getattr(frame(name), part)
    train = assert_exact(recipe(name), steps=4, make=fitting(name, budget))
    assert train.peak == train.plan.peak <= budget
    assert train.mismatches == 0
    if part == "below":
        with pytest.raises(BudgetError):
            fresh(name, budget, offload=None)
        assert living(train) > 0
    if (name, part) != ("lstm", "between"):  # which has few values, and none of them long idle
        assert copied_away(train)


def test_state_is_made_where_it_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first step never has all of the optimizer's state in memory: that of one parameter, then it moves."""
    monkeypatch.setattr(homes, "SMALL", 2**12)
    train, _, optimizer, example = fresh("mlp", int(0.6 * frame("mlp").persistent))
    with allocator.meter() as meter:
        train(*example)
    state = [item for one in optimizer.state.values() for item in one.values() if isinstance(item, torch.Tensor)]
    large = [tensor for tensor in state if tensor.nbytes > 2**12]
    assert large
    assert all(map(lives_in_file, large))
    assert meter.peak < sum(tensor.nbytes for tensor in state)


def test_a_budget_below_what_stays_trains() -> None:
    persistent = frame("mlp").persistent
    train = assert_exact(recipe("mlp"), steps=3, make=fitting("mlp", int(0.8 * persistent)))
    assert train.peak == train.plan.peak <= 0.8 * persistent
    assert train.costs.persistent(train.captured.graph) == persistent
    assert living(train) > 0.2 * persistent


@pytest.mark.parametrize("part", ["between", "below"])
@pytest.mark.parametrize("name", ["mlp", "gpt", "resnet"])
def test_late_copies_and_poisoned_bytes_change_nothing(name: str, part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    budget = getattr(frame(name), part)
    monkeypatch.setitem(device.DEVICES, "cpu", LATE)
    with poisoned():
        train = assert_exact(recipe(name), steps=4, make=fitting(name, budget, offload="host"))
    assert train.peak == train.plan.peak <= budget
    assert copied_away(train)
    assert (living(train) > 0) == (part == "below")


# ------------------------------------------------------------------------------------------------------- between steps


def write(model: torch.nn.Module, optimizer: Any) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
        for state in optimizer.state.values():
            for item in state.values():
                if torch.is_tensor(item) and item.dim():
                    item.add_(0.25)


def save_and_load(model: torch.nn.Module, optimizer: Any) -> None:
    file = io.BytesIO()
    torch.save((model.state_dict(), optimizer.state_dict()), file)
    write(model, optimizer)
    file.seek(0)
    weights, state = torch.load(file, weights_only=True)
    model.load_state_dict(weights)
    optimizer.load_state_dict(state)


def evaluate(model: torch.nn.Module, _: Any) -> None:
    *_, (x, *_) = recipe("gpt")()
    with torch.no_grad():
        model.eval()
        model(x)
        model.train()


def replace(model: torch.nn.Module, _: Any) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.data = parameter.detach() * 0.75


@pytest.mark.parametrize("between", [write, save_and_load, evaluate, replace])
def test_the_next_step_sees_what_its_owner_did(between: Any) -> None:
    budget = frame("gpt").below
    train = assert_exact(recipe("gpt"), steps=3, make=fitting("gpt", budget), between=between)
    assert living(train) > 0
    assert train.peak == train.plan.peak <= budget


def _open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_thirty_steps_do_not_grow() -> None:
    train, _, _, example = fresh("gpt", frame("gpt").below)
    for _ in range(3):
        train(*example)

    def held() -> tuple[Any, ...]:
        away = train._latest.runner.away
        stores = [store.nbytes for places in away._places for store in places.stores.values()]
        homes = [home.disk.nbytes for home in away._homes.values()]  # type: ignore[attr-defined]
        return train.peak, stores, homes, _open_files()

    before = held()
    for _ in range(30):
        train(*example)
    assert held() == before
    assert train.mismatches == 0
    assert train._latest.runner.away.resident <= 2 * PIECE


# --------------------------------------------------------------------------------------------------------- other plans


@pytest.mark.parametrize("part", ["between", "below"])
def test_a_saved_plan_trains_as_its_own(part: str, tmp_path: Path) -> None:
    budget = getattr(frame("gpt"), part)
    train, *_ = fresh("gpt", budget)
    train.plan.save(tmp_path / "plan")
    again = assert_exact(
        recipe("gpt"),
        steps=3,
        make=fitting("gpt", None, offload=None, plan=tmp_path / "plan", offload_dir=tmp_path),
    )
    assert again.plan == train.plan
    assert again.peak == train.plan.peak
    assert os.listdir(tmp_path) == ["plan"]


def test_a_batch_of_another_shape_keeps_the_budget() -> None:
    budget = frame("gpt").below
    *_, (x, y) = recipe("gpt")()
    train = assert_exact(
        recipe("gpt"), make=fitting("gpt", budget), batches=[(x, y), (x[:5], y[:5]), (x, y), (x[:5], y[:5])]
    )
    assert len(train._kept) == 2
    assert train.peak <= budget
    assert train.plan.budget == budget
    assert living(train) > 0


def test_steps_can_run_beside_eager() -> None:
    train, _, _, example = fresh("gpt", frame("gpt").below, verify=2, tell=lambda _: None)
    for _ in range(3):
        train(*example)
    assert train.verifier is not None
    assert train.verifier.verified == 2


# ---------------------------------------------------------------------------------------------------- a wrapped model


class Blocks(torch.nn.Module):
    """A model with dropout and batch norm, whose activations are larger than its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.BatchNorm1d(64), torch.nn.Tanh(), torch.nn.Dropout())
            for _ in range(8)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def in_a_loop() -> Any:
    torch.manual_seed(0)
    model = Blocks()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    x, y = torch.randn(2, 512, 64)

    def step(net: Any, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = torch.nn.functional.mse_loss(net(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step, model, optimizer, (x, y)


def wrapping(place: Place, budget: int) -> Callable[..., Any]:
    def make(step: Any, model: Any, optimizer: Any, example: tuple[Any, ...]) -> Any:
        net = lowtide.wrap(model, example=example[:1], budget=budget, offload=place, time_limit=0.2)

        def train(*batch: Any) -> Any:
            return step(net, optimizer, *batch)

        train.net = net  # type: ignore[attr-defined]
        return train

    return make


@pytest.mark.parametrize("place", ["disk", "host"])
def test_values_of_a_wrapped_model_wait_across_the_handover(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = wrapping("disk", 2**30)(*in_a_loop()).net.fitted
    graph = plain.captured.graph
    budget = (least(graph, plain.costs).peak + plain.plan.peak) // 2
    if place == "host":
        monkeypatch.setitem(device.DEVICES, "cpu", LATE)
    with poisoned() if place == "host" else contextlib.nullcontext():
        train = assert_exact(in_a_loop, steps=4, make=wrapping(place, budget))
    fitted = train.net.fitted
    assert fitted.peak == fitted.plan.peak <= budget
    assert copied_away(fitted)
    assert living(fitted) == 0
    rows = fitted.program.instructions
    handover = next(
        n for n, row in enumerate(rows) if hasattr(row, "op") and graph.ops[row.op].target == kernels.HANDOVER
    )
    sent = {row.value for row in rows[:handover] if isinstance(row, Copy) and row.to == place}
    assert sent & {row.value for row in rows[handover:] if isinstance(row, Copy) and row.to == "device"}
    assert "waits on the" in fitted.report()


@pytest.mark.filterwarnings("ignore:2 forwards of the model wait")
def test_two_forwards_of_a_wrapped_model_have_files_of_their_own() -> None:
    plain = wrapping("disk", 2**30)(*in_a_loop()).net.fitted
    budget = (least(plain.captured.graph, plain.costs).peak + plain.plan.peak) // 2

    def twice(wrapped: bool) -> list[torch.Tensor]:
        step, model, optimizer, (x, y) = in_a_loop()
        net = wrapping("disk", budget)(step, model, optimizer, (x, y)).net if wrapped else model
        torch.manual_seed(1)
        found = [step(net, optimizer, x, y) for _ in range(2)]
        for _ in range(3):
            one, other = net(x), net(y)
            net(x)  # has no backward
            (other * x).sum().backward()
            (one * y).sum().backward()
            optimizer.step()
            found += [parameter.grad.clone() for parameter in model.parameters()]
            optimizer.zero_grad()
        return [*found, *model.state_dict().values()]

    assert all(same(a, b) for a, b in zip(twice(False), twice(True), strict=True))


# -------------------------------------------------------------------------------------------------- what may go wrong


@contextlib.contextmanager
def unharmed(model: torch.nn.Module, optimizer: Any) -> Iterator[None]:
    """What is inside the `with` changes neither the model nor its optimizer nor the generator."""
    before = {key: item.clone() for key, item in everything(model, optimizer).items() if torch.is_tensor(item)}
    state, addresses = torch.get_rng_state(), [parameter.data_ptr() for parameter in model.parameters()]
    yield
    assert all(same(before[key], everything(model, optimizer)[key]) for key in before)
    assert [parameter.data_ptr() for parameter in model.parameters()] == addresses
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("how", ["free", "asked"])
def test_too_little_room_elsewhere_is_an_error_before_anything_changed(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, model, optimizer, example = recipe("gpt")()
    budget = frame("gpt").below
    if how == "free":
        monkeypatch.setattr(cpu, "free_bytes", lambda _: 8192)
    options = {"offload_budget": "8KiB"} if how == "asked" else {}
    with unharmed(model, optimizer), pytest.raises(BudgetError, match="no plan found within") as caught:
        fitting("gpt", budget, **options)(step, model, optimizer, example)
    assert caught.value.least is not None
    assert caught.value.least > budget


def test_a_disk_that_fills_up_is_an_error_before_the_step(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    train, model, optimizer, example = fresh("gpt", frame("gpt").below, offload_dir=tmp_path)
    with monkeypatch.context() as patch, unharmed(model, optimizer):
        patch.setattr(disk.os, "posix_fallocate", full)
        with pytest.raises(PlaceError, match=r"No space left on device; [0-9,]+ bytes are free"):
            train(*example)
    train(*example)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"offload": "tape"}, UsageError, r"no place 'tape'.*\n.*\"disk\""),
        ({"offload": "host"}, UsageError, r"the host is the device itself.*\n.*\"disk\""),
        ({"offload_budget": "50%"}, UsageError, r"in bytes"),
        ({"offload_budget": "many"}, UsageError, r"'many' is no budget"),
        ({"offload_budget": 0}, UsageError, r"leaves no bytes"),
        ({"offload_dir": "/nowhere/at/all"}, PlaceError, r"is not a folder"),
        ({"offload": None, "offload_dir": "."}, UsageError, r"given without offload"),
        ({"offload": None, "offload_budget": "1GiB"}, UsageError, r"given without offload"),
        ({"budget": None, "plan": "a.plan"}, UsageError, r"a saved plan has its own"),
    ],
)
def test_wrong_words_are_refused(options: dict[str, Any], error: type[LowtideError], words: str) -> None:
    step, model, optimizer, example = models.build(models.SMALL["mlp"])
    with unharmed(model, optimizer), pytest.raises(error) as caught:
        fitting("gpt", 2**30, **options)(step, model, optimizer, example)
    assert re.search(words, str(caught.value)), str(caught.value)


def test_a_folder_in_memory_is_no_disk() -> None:
    shared = Path("/dev/shm")
    if not is_memory(shared):
        pytest.skip("/dev/shm is on a disk here")
    with pytest.raises(PlaceError, match="is in memory, not on a disk"):
        fresh("gpt", 2**30, offload_dir=shared)


# ------------------------------------------------------------------------------------------------- what is said of it


def test_a_report_says_what_is_elsewhere() -> None:
    train, _, _, example = fresh("gpt", frame("gpt").below)
    train(*example)
    graph, nbytes = train.captured.graph, train.costs.nbytes
    (found,) = lowtide.report.offloaded(graph, train.costs, train.program)
    away = copied_away(train)
    assert found.out == sum(nbytes[value] for value in away)
    assert found.values == len({value for value in away if graph.home[value] == "device"})
    assert 0 < found.living == living(train)
    assert found.staging == 2 * PIECE
    text = train.report()
    assert "lives on the disk" in text
    assert "staging" in text
    assert "pages in memory" in text
    persistent = train.costs.persistent(graph) - living(train)
    assert f"{lowtide.report.show_bytes(persistent)} persists between steps" in text


def _run(*arguments: str) -> Any:
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "120", "NO_COLOR": "1"})
    assert result.exit_code == 0, result.output
    return result


def test_the_command_line_plans_loads_and_trains(tmp_path: Path) -> None:
    target, budget, file = TARGETS["gpt"], str(frame("gpt").between), str(tmp_path / "gpt.plan")
    options = ("--costs", "roofline", "--time-limit", "0.2")
    asked = ("--budget", budget, "--offload", "disk", "--offload-budget", "1GiB", "--offload-dir", str(tmp_path))
    planned = json.loads(_run("plan", target, *asked, *options, "--out", file, "--json").stdout)
    (there,) = planned["offloaded"]
    assert there["place"] == "disk"
    assert there["values"] > 0
    assert planned["predicted_peak"] <= int(budget)
    assert planned["least_feasible"] < frame("gpt").least
    loaded = json.loads(_run("plan", target, "--load", file, *options, "--json").stdout)
    assert loaded["offloaded"] == planned["offloaded"]
    assert loaded["predicted_peak"] == planned["predicted_peak"]
    assert not [note for note in loaded["notes"] if "other costs" in note]
    shown = _run("plan", target, "--load", file, *options).stdout
    assert "waits on the disk" in shown
    step, model, optimizer, example = recipe("gpt")()
    train = fitting("gpt", None, offload=None, plan=file)(step, model, optimizer, example)
    value = copied_away(train)[0]
    told = json.loads(_run("plan", target, "--load", file, *options, "--explain", f"%{value}", "--json").stdout)
    (one,) = told["explained"]
    assert one["verdict"] == "offloaded"
    assert any("copied to the disk, and back before" in sentence for sentence in one["sentences"])
    assert len(one["made"]) == 1
    by_budget, eager = (
        json.loads(_run("train", target, "--steps", "3", *more, "--json").stdout)
        for more in ((*asked, "--time-limit", "0.2"), ("--eager",))
    )
    assert by_budget["losses"] == eager["losses"]
    assert by_budget["metered_peak"] == by_budget["predicted_peak"] <= int(budget)


def test_prices_with_copies_are_asked_for_beside_those_without() -> None:
    graph = lowtide.capture(*recipe("mlp")()).graph
    waiting = apply(graph, offload("disk")).graph
    price = Prices(lambda one: with_lanes(one, lowtide.roofline(one)))
    assert waiting.fingerprint == graph.fingerprint
    assert [price(one).staging for one in (graph, waiting, graph)] == [0, 2 * PIECE, 0]
    assert [price.glance(one).staging for one in (waiting, graph)] == [2 * PIECE, 0]


def test_a_curve_goes_lower_with_offload() -> None:
    options = ("--points", "3", "--no-classics", "--costs", "roofline", "--time-limit", "0.1", "--json")
    without, with_ = (
        json.loads(_run("curve", TARGETS["gpt"], *more, *options).stdout) for more in ((), ("--offload", "disk"))
    )
    assert with_["least_feasible"] < without["least_feasible"]


def test_an_error_names_what_fits_with_offload() -> None:
    """The bytes of its hint are a budget that really can be kept, and less than without."""
    step, model, optimizer, example = recipe("gpt")()
    asked: dict[str, Any] = {"example": example, "costs": "roofline", "time_limit": 0.2}
    with pytest.raises(BudgetError, match="no plan found") as caught:
        lowtide.fit(step, model, optimizer, budget=frame("gpt").below, **asked)
    found = re.search(r'with offload="disk" \(--offload disk\) ([\d,]+) bytes can be planned', caught.value.hint or "")
    assert found is not None
    named = int(found[1].replace(",", ""))
    assert caught.value.least is not None
    assert named < caught.value.least
    train = lowtide.fit(step, model, optimizer, budget=named, offload="disk", **asked)
    train(*example)
    assert train.peak is not None
    assert train.peak <= named
    with pytest.raises(BudgetError) as caught:
        lowtide.fit(step, model, optimizer, budget=1000, offload="disk", **asked)
    assert "with offload" not in (caught.value.hint or "")


def test_verify_takes_offload_on_the_command_line() -> None:
    budget, target = frame("mlp").below, TARGETS["mlp"]
    options = ["--budget", str(budget), "--steps", "1", "--time-limit", "0.2"]
    assert CliRunner().invoke(app, ["verify", target, *options]).exit_code == 3
    result = CliRunner().invoke(app, ["verify", target, *options, "--offload", "disk", "--json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["equal"]
    strange = CliRunner().invoke(app, ["verify", target, *options, "--offload", "moon"])
    assert strange.exit_code == 2
