"""Steps verified beside eager: what is the same is said to be, and what differs is named and undone."""

from __future__ import annotations

import dataclasses
import json
import random
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from test_capture import plain, recipe
from torch import nn
from torch.nn import functional
from twins import assert_same, everything
from typer.testing import CliRunner

import lowtide
from lowtide import LowtideWarning, UsageError, VerifyError, kernels, models
from lowtide.cli import app
from lowtide.graph import Op
from lowtide.verify import Verifier
from lowtide.verify.blame import Eager, align
from lowtide.verify.compare import generators
from lowtide.verify.copies import Copy

Step = Callable[..., Any]


def cloned(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    """Everything as it is now."""
    found = everything(model, optimizer)
    return {key: item.clone() if isinstance(item, torch.Tensor) else item for key, item in found.items()}


def runner_of(
    step: Step, model: Any, optimizer: Any, example: Any, change: Callable[[Op], Op] = lambda op: op
) -> lowtide.Runner:
    """The step by a program, with some of its ops changed."""
    captured = lowtide.capture(step, model, optimizer, example)
    graph = dataclasses.replace(captured.graph, ops=tuple(map(change, captured.graph.ops)))
    return lowtide.execute(dataclasses.replace(captured, graph=graph), lowtide.keep_everything(graph))


def refused(runner: lowtide.Runner, step: Step, *words: str, error: type[Exception] = VerifyError) -> Any:
    """Verifying raises with these words, and leaves everything as it was."""
    model, optimizer = runner.captured.model, runner.captured.optimizer
    batch = recipe(plain)()[3]
    before, states = cloned(model, optimizer), generators()
    with pytest.raises(error) as caught:
        Verifier(step, model, optimizer, 1).check(batch, runner, lambda: runner)
    for word in words:
        assert word in str(caught.value), str(caught.value)
    assert_same(before, cloned(model, optimizer))
    after = generators()
    assert torch.equal(states["torch's generator"], after["torch's generator"])
    assert states["Python's random"] == after["Python's random"]
    assert str(states["numpy's generator"]) == str(after["numpy's generator"])
    return caught.value


# ------------------------------------------------------------------------------------------------- what is the same


@pytest.mark.parametrize("name", ["mlp", "resnet", "gpt", "lstm", "unet"])
def test_verified_steps_are_steps(name: str) -> None:
    step, model, optimizer, example = models.build(models.SMALL[name])
    runner = runner_of(step, model, optimizer, example)
    verifier = Verifier(step, model, optimizer, 2)
    torch.manual_seed(3)
    results = [verifier.check(example, runner, lambda: runner) for _ in range(2)]
    assert (verifier.left, verifier.verified) == (0, 2)
    assert verifier.tally.nbytes > sum(parameter.nbytes for parameter in model.parameters())

    mirrored_step, mirror, mirrored_optimizer, _ = models.build(models.SMALL[name])
    torch.manual_seed(3)
    expected = [mirrored_step(mirror, mirrored_optimizer, *example) for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(expected, results, strict=True))
    assert_same(everything(mirror, mirrored_optimizer), everything(model, optimizer))


@pytest.mark.parametrize("name", sorted(models.SMALL))
def test_each_op_of_a_captured_step_has_its_call_in_eager(name: str) -> None:
    if name.startswith("hf-"):
        pytest.importorskip("transformers")
    step, model, optimizer, example = models.build(models.SMALL[name])
    captured = lowtide.capture(step, model, optimizer, example)
    captured.prepare()
    with Eager() as log:
        step(model, optimizer, *example)
    targets = [op.target for op in captured.graph.ops if not op.target.startswith("operator.")]
    pairs, gap = align(targets, [call.target for call in log.calls])
    if name.startswith("hf-"):  # transformers looks whether it is traced, and does without a mask where it is not
        assert gap is not None
        assert len(pairs) > 0.9 * len(targets)
        assert pairs[-1] == (len(targets) - 1, len(log.calls) - 1)
    else:
        assert gap is None
        assert len(pairs) == len(targets)


def test_runs_that_part_meet_again() -> None:
    words = [f"op{number % 7}.{number}" for number in range(40)]
    other = [*words[:10], "new", "new", *words[14:30], "more", *words[30:], "last"]
    pairs, gap = align(words, other)
    assert gap == (10, 10)
    assert pairs == [(n, other.index(word)) for n, word in enumerate(words) if word in other]
    assert align(words, words) == ([(n, n) for n in range(40)], None)
    assert align(words, words[:30])[1] == (30, 30)
    assert align(words, ["alien"] * 50) == ([], (0, 0))


# --------------------------------------------------------------------------------------------------- what differs


def test_a_number_that_is_another_is_named_with_its_line() -> None:
    def step(model: Any, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return plain(model, optimizer, x * 0.75, y)

    def change(op: Op) -> Op:
        return dataclasses.replace(op, args=(op.args[0], 0.5)) if op.target == "aten.mul.Tensor" else op

    runner = runner_of(*recipe(step)(), change=change)
    line = f"test_verify.py:{step.__code__.co_firstlineno + 1}"
    words = "mul_0 (aten.mul.Tensor)", "forward", line, "argument 1 is 0.75 in eager and 0.5 in the program"
    error = refused(runner, step, "step 1 is not what eager PyTorch does", "the result: 1 of 1 elements", *words)
    assert error.op == "mul_0"
    assert "parameter '0.weight'" in error.differing
    assert "optimizer's 'momentum_buffer' of '0.weight'" in error.differing


def test_an_op_that_is_called_otherwise_is_named_with_its_module() -> None:
    def change(op: Op) -> Op:
        if op.target != "aten.addmm.default" or op.module != "2":
            return op
        return dataclasses.replace(op, kwargs=(("beta", 2),))

    runner = runner_of(*recipe(plain)(), change=change)
    refused(runner, plain, "addmm_1", "of '2'", "argument 3 is 1 in eager and 2 in the program")


def test_an_op_that_reads_something_else_is_named() -> None:
    def change(op: Op) -> Op:
        return dataclasses.replace(op, args=(op.args[1], op.args[0])) if op.target == "aten.sub.Tensor" else op

    def step(model: Any, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return plain(model, optimizer, x - model[0].weight[0], y)

    refused(
        runner_of(*recipe(step)(), change=change), step, "sub_0", "its argument 0", "has other contents than in eager"
    )


def test_a_kernel_that_does_something_else_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    real = kernels.kernel

    def wrong(target: str) -> Any:
        found = real(target)
        return (lambda *args: found(*args) + 1e-7) if target == "aten.tanh.default" else found

    wrong_one = wrong("aten.tanh.default")
    monkeypatch.setattr(
        kernels, "kernel", lambda target, *own: wrong_one if "aten.tanh." in target else real(target, *own)
    )
    runner = runner_of(*recipe(plain)())
    error = refused(
        runner, plain, "tanh_0 (aten.tanh.default), forward of '1'", "given the same", "elements, by at most"
    )
    assert error.op == "tanh_0"


def test_a_default_that_torch_leaves_out_is_an_argument_too() -> None:
    dropout = recipe(plain, lambda: nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 3)))

    def change(op: Op) -> Op:
        return dataclasses.replace(op, args=(op.args[0], 0.75)) if op.target == "aten.bernoulli_.float" else op

    words = "bernoulli__0", "of '1'", "argument 1 is 0.5 in eager and 0.75 in the program"
    refused(runner_of(*dropout(), change=change), plain, *words)


def test_a_model_with_other_parameters_than_the_program_trains() -> None:
    step, model, optimizer, example = recipe(plain, optimizer=torch.optim.AdamW)()
    runner = runner_of(step, model, optimizer, example)
    other = recipe(plain)()[1]
    verifier = Verifier(step, other, optimizer, 1)
    with pytest.raises(VerifyError) as caught:
        verifier.check(example, runner, lambda: runner)
    assert "can't be repeated" not in str(caught.value)
    assert "the gradient of '0.weight'" in caught.value.differing


def test_ops_that_eager_does_not_run_are_named() -> None:
    def step(model: Any, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return plain(model, optimizer, x.sin(), y)

    line = f"test_verify.py:{step.__code__.co_firstlineno + 1}"
    refused(runner_of(*recipe(plain)()), step, "addmm_0", "eager runs aten.sin.default there", line)


def test_buffers_that_differ_are_named() -> None:
    norm = recipe(plain, lambda: nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)))

    def change(op: Op) -> Op:
        if op.target != "aten.native_batch_norm.default":
            return op
        return dataclasses.replace(op, args=(*op.args[:6], 0.25, *op.args[7:]))

    error = refused(runner_of(*norm(), change=change), plain, "native_batch_norm_0", "argument 6 is 0.1")
    assert "buffer '1.running_mean'" in error.differing
    assert "parameter '0.weight'" not in error.differing


def test_gradients_that_are_not_left_are_named() -> None:
    def step(model: Any, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    error = refused(runner_of(*recipe(plain)()), step, "things differ")
    assert "the gradient of '0.weight'" in error.differing


def test_what_a_step_does_to_variables_is_compared() -> None:
    losses: list[float] = []

    def step(model: Any, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = plain(model, optimizer, x, y)
        losses.append(1.0)
        model.steps = getattr(model, "steps", 0) + 1
        return loss

    error = refused(runner_of(*recipe(plain)()), step, "no op differs")
    assert "the length of variable 'losses'" in error.differing
    assert "attribute 'steps'" in error.differing
    assert losses == []


@pytest.mark.parametrize("draw", [random.random, random.gauss, np.random.rand, lambda: torch.rand(1)])
def test_generators_are_compared(draw: Callable[[], Any]) -> None:
    def step(model: Any, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        draw(0, 1) if draw == random.gauss else draw()
        return plain(model, optimizer, x, y)

    error = refused(runner_of(*recipe(plain)()), step, "1 of ")
    assert len(error.differing) == 1
    assert error.differing[0] in ("Python's random", "numpy's generator", "torch's generator")


def test_an_op_that_can_not_be_found_hides_no_difference() -> None:
    runner = runner_of(*recipe(plain)())
    captured, batch = runner.captured, recipe(plain)()[3]
    verifier = Verifier(plain, captured.model, captured.optimizer, 1)
    with pytest.raises(VerifyError, match=r"the result: 1 of 1 elements(.|\n)*could not be found"):
        verifier.check(batch, lambda *_: torch.zeros(()), lambda: None)  # type: ignore[arg-type,return-value]


def test_a_second_verified_step_after_one_that_differed() -> None:
    runner = runner_of(*recipe(plain)())
    captured, batch = runner.captured, recipe(plain)()[3]
    verifier = Verifier(plain, captured.model, captured.optimizer, 2)
    with pytest.raises(VerifyError):
        verifier.check(batch, lambda *_: torch.zeros(()), lambda: runner)
    verifier.check(batch, runner, lambda: runner)
    assert (verifier.left, verifier.verified) == (1, 1)


# ---------------------------------------------------------------------------------------- what can't be compared


def test_a_step_that_fails_in_eager() -> None:
    runner = runner_of(*recipe(plain)())

    def step(model: Any, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return plain(model, optimizer, x, y)

    refused(runner, step, "eager PyTorch itself fails", "does not require grad")


def test_a_step_that_can_not_be_repeated() -> None:
    count = [0]
    table = {"next": lambda: count.append(0) or len(count)}  # out of reach of a copy

    def step(model: Any, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return plain(model, optimizer, x * table["next"](), y)

    refused(runner_of(*recipe(plain)()), step, "it can't be repeated")


def test_a_step_that_reaches_the_real_model_behind_our_back() -> None:
    runner = runner_of(*recipe(plain)())
    captured = runner.captured
    table = {"model": lambda: captured.model, "optimizer": lambda: captured.optimizer}

    def step(model: Any, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return plain(table["model"](), table["optimizer"](), x, y)

    refused(runner, step, "was given copies", "of the real ones", error=UsageError)


def test_closures_over_the_model_are_followed() -> None:
    _, model, optimizer, example = recipe(plain)()

    def step(_: Any, __: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return plain(model, optimizer, x, y)

    runner = runner_of(plain, model, optimizer, example)
    verifier = Verifier(step, model, optimizer, 1)
    verifier.check(example, runner, lambda: runner)
    assert verifier.verified == 1


history: list[float] = []
weight = threading.Lock()  # `model.weight` below is no use of it


def remember(model: nn.Module, number: float) -> None:
    assert model[0].weight is not None
    history.append(number)


def test_globals_of_the_step_and_of_what_it_calls_are_followed() -> None:
    def step(model: Any, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        remember(model, 1.0)
        return plain(model, optimizer, x, y)

    error = refused(runner_of(*recipe(plain)()), step, "1 in eager, 0 in lowtide")
    assert error.differing == ("the length of variable 'history'", "variable 'history' 0")
    assert history == []


def test_a_model_that_can_not_be_copied() -> None:
    runner = runner_of(*recipe(plain)())
    runner.captured.model.lock = threading.Lock()
    with pytest.raises(UsageError, match="can't be copied") as caught:
        Verifier(plain, runner.captured.model, runner.captured.optimizer, 1).check((), runner, lambda: runner)
    assert "deepcopy" in str(caught.value)


# ------------------------------------------------------------------------------------------------------------ copies


def test_a_copy_is_whole_and_leads_back() -> None:
    step, model, _, (x, y) = recipe(plain, lambda: nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6)))()
    model[2].weight = model[0].weight  # tied
    model.view = nn.Parameter(model[0].bias.data[1:3])  # and one that shares its storage
    model.history = {"seen": [1, 2]}
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    functional.cross_entropy(model(x), y).backward()
    before, objects = cloned(model, optimizer), {key: id(item) for key, item in everything(model, optimizer).items()}
    copied = Copy(step, model, optimizer, (x, y))

    twin = copied.model
    assert_same(before, cloned(twin, copied.optimizer))
    assert {id(parameter) for group in copied.optimizer.param_groups for parameter in group["params"]} == {
        id(parameter) for parameter in twin.parameters()
    }
    assert twin[2].weight is twin[0].weight
    assert twin.view.data_ptr() == twin[0].bias[1:].data_ptr()
    places = [
        {item.data_ptr() for item in everything(*one).values() if item is not None}
        for one in ((model, optimizer), (twin, copied.optimizer))
    ]
    assert not places[0] & places[1]

    model.history["seen"].append(3)
    model.history["new"] = 1
    model[1].running_mean = torch.zeros(6)
    for _ in range(2):
        step(model, optimizer, x, y)
    optimizer.param_groups[0]["lr"] = 0.5
    optimizer.state = optimizer.state.copy()
    copied.restore()
    assert_same(before, cloned(model, optimizer))
    kept = {key: id(item) for key, item in everything(model, optimizer).items() if not key.startswith("model ")}
    assert kept == {key: item for key, item in objects.items() if key in kept}
    assert model.history == {"seen": [1, 2]}
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert not optimizer.state


def test_numbers_are_compared_to_the_bit() -> None:
    from lowtide.verify.compare import Tally, differs

    nan = float("nan")
    assert differs(nan, nan, Tally()) is None
    assert differs(0.0, -0.0, Tally()) is not None
    assert differs(torch.tensor([nan, 1.0]), torch.tensor([nan, 1.0]), Tally()) is None
    assert differs(torch.tensor([0.0]), torch.tensor([-0.0]), Tally()) == "1 of 1 elements, by at most 0"
    assert "int64" in str(differs(torch.tensor([1.0]), torch.tensor([1]), Tally()))
    assert differs(1, True, Tally()) == "1 in eager, True in lowtide"


# -------------------------------------------------------------------------------------------------- the front door


def test_a_fitted_step_says_what_it_needs_and_is_verified() -> None:
    step, model, optimizer, example = models.build(models.SMALL["gpt"])
    told: list[str] = []
    train = lowtide.fit(step, model, optimizer, example=example, budget="60%", time_limit=0, tell=told.append, verify=2)
    eager_peak, persistent = train._fits[0].eager_peak, train.costs.persistent(train.captured.graph)
    assert told[-1].startswith(
        f"the next 2 steps run beside eager PyTorch: {eager_peak + persistent:,} bytes above the budget"
    )
    shorter = tuple(leaf[:1] for leaf in example)
    for batch in (example, shorter, example):  # another shape is planned, and verified, too
        train(*batch)
    assert train.verifier is not None
    assert (train.verifier.verified, train.verifier.left) == (2, 0)
    assert train.peak is None or train.peak <= train.plan.budget  # eager's step beside it is not the step's


def test_a_fitted_step_that_differs_is_undone() -> None:
    step, model, optimizer, example = recipe(plain)()
    with pytest.warns(LowtideWarning, match="the next 1 steps run beside eager PyTorch"):
        train = lowtide.fit(step, model, optimizer, example=example, costs="roofline", time_limit=0, verify=1)
    runner, before = train._fits[0].runner, cloned(model, optimizer)
    function = runner.function
    runner.function = lambda *args: [output * 0 for output in function(*args)]
    with pytest.raises(VerifyError, match="the result: 1 of 1 elements"):
        train(*example)
    assert_same(before, cloned(model, optimizer))
    runner.function = function
    train(*example)
    assert train.verifier is not None
    assert train.verifier.verified == 1


def test_a_wrapped_model_says_that_it_can_not_be_verified() -> None:
    _, model, _, (x, _) = recipe(plain)()
    net = lowtide.wrap(model, example=(x,), costs="roofline", time_limit=0)
    with pytest.raises(UsageError, match=r"can't be verified(.|\n)*lowtide.fit"):
        net.fitted.verify(3)


def test_wrong_calls_of_verify(monkeypatch: pytest.MonkeyPatch) -> None:
    step, model, optimizer, example = recipe(plain)()
    for number in (-1, True, 0.5, "3"):
        with pytest.raises(UsageError, match="no number of steps"):
            lowtide.fit(step, model, optimizer, example=example, verify=number)  # type: ignore[arg-type]
    monkeypatch.setattr("lowtide.verify.free_memory", lambda: 1000)
    with pytest.raises(UsageError, match="and 1,000 are free"):
        lowtide.fit(step, model, optimizer, example=example, costs="roofline", time_limit=0, budget="1MiB", verify=1)


# ------------------------------------------------------------------------------------------------ the command line

PLAIN = {"COLUMNS": "100", "NO_COLOR": "1", "TERM": "dumb"}


def test_the_command_says_that_steps_are_equal() -> None:
    call = ["verify", models.SMALL["gpt"], "--steps", "2", "--budget", "60%", "--time-limit", "0"]
    done = CliRunner().invoke(app, call, env=PLAIN)
    assert done.exit_code == 0, done.output
    assert "2 of 2 steps" in done.stdout
    assert "note: the next 2 steps run beside eager PyTorch" in done.stderr
    found = json.loads(CliRunner().invoke(app, [*call, "--json", "--data", "austen"], env=PLAIN).stdout)
    assert found["equal"] is True
    assert found["verified"] == found["steps"] == 2
    assert (found["differing"], found["op"], found["message"]) == ([], None, None)
    assert found["metered_peak"] <= found["budget"]


def test_the_command_ends_with_a_code_of_its_own_where_a_bit_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    real = kernels.kernel
    target = "aten.native_layer_norm.default"

    def wrong(*args: Any) -> Any:
        first, *others = real(target)(*args)
        return first + 1e-6, *others

    monkeypatch.setattr(kernels, "kernel", lambda name, *own: wrong if name == target else real(name, *own))
    call = ["verify", models.SMALL["gpt"], "--steps", "1", "--budget", "80%", "--time-limit", "0", "--json"]
    done = CliRunner().invoke(app, call, env=PLAIN)
    assert done.exit_code == VerifyError.exit_code == 5
    assert "error: step 1 is not what eager PyTorch does" in done.stderr
    assert f"The first op that differs is native_layer_norm_0 ({target}), forward of" in done.stderr, done.stderr
    found = json.loads(done.stdout)
    assert (found["equal"], found["verified"], found["op"]) == (False, 0, "native_layer_norm_0")
    assert "parameter 'tokens.weight'" in found["differing"]
