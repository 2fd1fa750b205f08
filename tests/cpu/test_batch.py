"""Which batch size pays: the sizes that are said to fit do, larger ones do not, and files are resized."""

from __future__ import annotations

import dataclasses
import json
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn
from typer.testing import CliRunner

import lowtide
from lowtide import batch as batching
from lowtide import models
from lowtide.batch import Levers, Parts, batch_sizes, forward_of
from lowtide.batch.scale import Scale
from lowtide.choice import Away, Offload
from lowtide.cli import app
from lowtide.device import CPU, Device
from lowtide.errors import BudgetError, UsageError
from lowtide.measure import roofline, with_lanes
from lowtide.plan import as_eager, least
from lowtide.report import BatchReport
from lowtide.rewrite import EXACT, apply, with_narrow
from lowtide.rewrites import Allowed
from lowtide.sizes import Sizes

TARGET = "mlp:width=16,depth=3,features=8"
BUDGET = 40_000  # bytes
FILE = """
import torch
from torch import nn

def step(model, optimizer, x, y):
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss

def make():
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))
    return step, model, torch.optim.SGD(model.parameters(), lr=0.1), (torch.randn(4, 8), torch.arange(4) % 4)

def uneven():
    return step, *make()[1:3], (torch.randn(4, 8), torch.arange(3) % 4)
"""


class Scripted:
    """A device by whose clock steps take as long as they say, some of them because others have its cores."""

    def __init__(self, *steps: float) -> None:
        self.steps = iter(steps)
        self.now = self.waited = 0.0

    def step(self) -> None:
        seconds = next(self.steps)
        self.now += seconds
        self.waited += seconds if seconds > 1 else 0.0

    def device(self) -> Device:
        return dataclasses.replace(CPU, clock=lambda: self.now, delay=lambda: self.waited)


def eager_peak(batch: int) -> int:
    """Eager's peak at one size, straight from its own capture."""
    graph = with_narrow(lowtide.capture(*models.build(f"{TARGET},batch={batch}")).graph)
    return lowtide.simulate(graph, roofline(graph), as_eager(graph)).peak


def test_the_largest_batches_and_the_one_to_use() -> None:
    found = batch_sizes(
        lambda count: Parts(*models.build(f"{TARGET},batch={count}")),
        BUDGET,
        price=roofline,
        time_limit=0.2,
        real=False,
    )
    largest = found.largest["eager"]
    assert largest is not None
    assert eager_peak(largest) <= BUDGET
    assert eager_peak(largest + max(1, largest // 8)) > BUDGET
    assert found.largest["plan"] is not None
    assert found.largest["plan"] >= (found.largest["sharing"] or 0) >= largest
    for size in found.points:
        assert size.eager.fits == (size.batch <= largest), size
        assert size.plan is not None
        assert size.plan.peak <= BUDGET
        assert size.plan.seconds >= size.eager.seconds * (1 - 1e-9)
        assert size.eager.peak == eager_peak(size.batch)
    rates = {size.batch: size.batch / size.plan.seconds for size in found.points if size.plan is not None}
    assert found.knee == min(batch for batch, rate in rates.items() if rate >= 0.95 * max(rates.values()))


def test_the_command_resizes_the_example_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "program.py"
    path.write_text(FILE)
    call = ["batch", f"{path}:make", "--budget", "60kB", "--costs", "roofline", "--time-limit", "0.1"]
    ended = CliRunner().invoke(app, [*call, "--json"])
    assert ended.exit_code == 0, ended.output
    data = json.loads(ended.stdout)
    assert data["largest_batch"]["eager"] <= data["largest_batch"]["plan"]
    assert data["knee"] in [point["batch"] for point in data["points"]]
    shown = CliRunner().invoke(app, call)
    assert f"Use a batch of {data['knee']}" in shown.stdout


def test_forwards_alone_are_those_of_the_model_in_eval_with_what_the_step_calls_it_with(tmp_path: Path) -> None:
    path = tmp_path / "program.py"
    path.write_text(FILE)
    call = ["batch", f"{path}:make", "--forward", "--budget", "60kB", "--costs", "roofline", "--time-limit", "0.1"]
    ended = CliRunner().invoke(app, [*call, "--json"])
    assert ended.exit_code == 0, ended.output
    data = json.loads(ended.stdout)
    for size in data["points"]:
        held = 4 * (8 * 32 + 32 + 32 * 4 + 4 + 8 * size["batch"])  # parameters and the batch
        assert size["eager"]["peak"] == held + 2 * 4 * 32 * size["batch"], "a layer and its ReLU"
        assert size["plan"]["peak"] < size["eager"]["peak"] or size["batch"] == 1
    assert "Throughput of forwards against batch size" in CliRunner().invoke(app, call).stdout


def test_a_forward_is_found_in_its_step_and_draws_nothing() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    seen = []

    def step(model: nn.Module, optimizer: Any, x: Tensor) -> Tensor:
        try:
            return model(torch.rand_like(x) + x).sum()  # type: ignore[no-any-return]
        finally:
            seen.append(len(x))

    before = torch.get_rng_state()
    found = forward_of(Parts(step, model, None, (torch.ones(3, 4),)))
    assert torch.equal(torch.get_rng_state(), before)
    (given,), named = found.example
    assert (seen, given.shape, named) == ([3], (3, 4), {})
    out = found.step(found.model, found.optimizer, *found.example)
    assert torch.equal(out, model[0](given))
    assert not out.requires_grad
    assert not model._forward_pre_hooks


def test_a_step_that_never_calls_its_model_has_no_forward() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    with pytest.raises(UsageError, match="never calls the Sequential as a whole"):
        forward_of(Parts(lambda model, optimizer, x: model[0](x), model, None, (torch.ones(3, 4),)))


def test_a_budget_that_no_batch_fits_is_answered_as_plan_answers_it() -> None:
    ended = CliRunner().invoke(app, ["batch", TARGET, "--budget", "1kB", "--costs", "roofline", "--json"])
    assert ended.exit_code == BudgetError.exit_code
    words = " ".join(ended.stderr.split())
    assert "no batch fits 1,000 bytes" in words
    needs = int(words.split("a batch of 1 needs ")[1].split()[0].replace(",", ""))
    call = ["batch", TARGET, "--costs", "roofline", "--time-limit", "0.1", "--json", "--budget"]
    assert CliRunner().invoke(app, [*call, str(needs)]).exit_code == 0
    assert CliRunner().invoke(app, [*call, str(needs - 1)]).exit_code == BudgetError.exit_code


def test_sizes_between_measured_ones_have_the_bytes_of_their_own_capture() -> None:
    scale = Scale(lambda count: Parts(*models.build(f"{TARGET},batch={count}")), BUDGET, roofline, print)
    scale.measure()
    assert len(scale.steps) > 1
    for batch in (scale.steps[0] + 1, scale.steps[-1] - 1, 3 * scale.steps[-1]):
        _, costs = scale.at(batch)
        captured = with_narrow(lowtide.capture(*models.build(f"{TARGET},batch={batch}")).graph)
        assert costs.nbytes == roofline(captured).nbytes


@pytest.mark.parametrize("slope", [1.0, 1.3, 0.8])
@pytest.mark.parametrize("budget", [100, 999, 40_000, 300_000])
def test_the_largest_batch_is_found_in_few_tries(slope: float, budget: int) -> None:
    scale = Scale(lambda _: pytest.fail("nothing is built"), budget, roofline, lambda _: None)
    scale.measured = dict.fromkeys((1, 4, 16))  # type: ignore[assignment]
    tries: list[int] = []

    def peak(batch: int) -> int:
        tries.append(batch)
        return round(50 + 7 * batch**slope)

    found = scale.largest("a line", peak)
    assert found is not None
    assert peak(found) <= budget
    assert peak(found + max(1, found // 16)) > budget
    assert len(tries) < 24
    scale.budget = 55
    assert scale.largest("nothing", peak) is None


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (["{}:uneven", "--budget", "1MiB"], "tensors of 3, 4 rows"),
        (["{}:make", "--budget", "50%"], "another one for each batch size"),
    ],
)
def test_what_has_no_batch_sizes_is_refused(call: list[str], words: str, tmp_path: Path) -> None:
    path = tmp_path / "program.py"
    path.write_text(FILE)
    ended = CliRunner().invoke(app, ["batch", *(word.format(path) for word in call), "--costs", "roofline"])
    assert ended.exit_code == UsageError.exit_code
    assert words in " ".join(ended.stderr.split())


OFFLOADED = "mlp:width=512,depth=3,features=64,optimizer=adam"


def test_with_a_place_to_go_to_larger_batches_fit_and_none_is_slower() -> None:
    """Each way is planned anew, from the capture of its own size: what is said to fit does."""
    budget = 10_500_000

    def sizes(levers: Levers) -> Sizes:
        make = lambda count: Parts(*models.build(f"{OFFLOADED},batch={count}"))  # noqa: E731
        return batch_sizes(make, budget, price=with_disk, time_limit=0.1, levers=levers, real=False)

    with_disk = lambda graph: with_lanes(graph, roofline(graph))  # noqa: E731
    plain, both = sizes(Levers()), sizes(Levers(Offload("disk")))
    assert list(plain.largest) == ["eager", "sharing", "plan"]
    assert list(both.largest) == ["eager", "sharing", "recompute", "offload", "both", "plan"]
    assert both.largest["recompute"] == plain.largest["plan"]
    most = both.largest["plan"]
    assert most is not None
    assert most == both.largest["both"] > (plain.largest["plan"] or 0)
    captured = lowtide.capture(*models.build(f"{OFFLOADED},batch={most}")).graph
    away = Away("disk")
    moved = apply(captured, (*EXACT, *away.rewrites(max(away.homes(captured))))).graph
    assert least(moved, with_disk(moved)).peak <= budget * 1.01
    assert least(with_narrow(captured), roofline(with_narrow(captured))).peak > budget
    last = both.points[-1]
    assert last.plan is not None
    assert any(one.startswith("homes") for one in last.plan.rewrites)
    seconds = {size.batch: size.plan.seconds for size in plain.points if size.plan is not None}
    for size in both.points:
        if size.batch in seconds:
            assert size.plan is not None
            assert size.plan.seconds <= seconds[size.batch] * (1 + 1e-9)


def test_what_is_allowed_makes_larger_batches_fit_and_is_used_only_there() -> None:
    target = "gpt:layers=1,width=16,heads=2,context=16,vocabulary=512,dropout=0"
    found = batch_sizes(
        lambda count: Parts(*models.build(f"{target},batch={count}")),
        700_000,
        price=roofline,
        time_limit=0.1,
        levers=Levers(allowed=Allowed(named=(("chunked-loss", None),))),
        real=False,
    )
    largest = found.largest
    assert list(largest) == ["eager", "sharing", "recompute", "chunked-loss", "plan"]
    exact = largest["recompute"] or 0
    assert largest["plan"] == largest["chunked-loss"]
    assert (largest["plan"] or 0) > exact
    for point in found.to_json()["points"]:
        allowed = any(one.startswith("chunked-loss") for one in point["plan"]["rewrites"])
        assert allowed == (point["batch"] > exact), point
    page = Console(width=120, file=StringIO())
    page.print(BatchReport(target, "roofline", found))
    assert "the same up to rounding" in page.file.getvalue()  # type: ignore[attr-defined]


def test_words_of_offload_that_do_not_go_together_are_refused() -> None:
    call = ["batch", TARGET, "--budget", "1MiB", "--costs", "roofline"]
    for more, words in (
        (["--offload", "moon"], "there is no place 'moon'"),
        (["--offload-budget", "1GiB"], "without offload"),
        (["--allow", "magic"], "there is no 'magic'"),
    ):
        ended = CliRunner().invoke(app, [*call, *more])
        assert ended.exit_code == UsageError.exit_code
        assert words in " ".join(ended.stderr.split())


def test_real_steps_that_learn_or_share_their_cores_do_not_count() -> None:
    script = Scripted(*[0.9] * batching.WARM_UPS, 5.0, 0.30, 7.0, 0.40, 0.35)
    assert batching._median(script.step, script.device()) == pytest.approx(0.35)
    busy = Scripted(*[0.9] * batching.WARM_UPS, *[5.0] * batching.STEPS[1])
    assert batching._median(busy.step, busy.device()) == pytest.approx(5.0)


def test_what_real_steps_say_counts_at_its_own_size_and_in_part_between() -> None:
    def never(_: object) -> Any:
        raise AssertionError

    curve = batching._Curve(Scale(never, BUDGET, never, never, sizes=(1, 4, 16)), 0.0, Levers())
    found = [curve._more((1.0, 2.0, 0.5), size) for size in (1, 2, 4, 8, 16, 64)]
    assert found == pytest.approx([1.0, 2**0.5, 2.0, 1.0, 0.5, 0.5])
