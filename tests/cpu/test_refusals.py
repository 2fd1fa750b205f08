"""What cannot be captured is refused, with the user's line and what to do, before anything is changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_capture import plain, recipe
from torch import nn
from torch.nn import functional
from twins import assert_same, everything

import lowtide
from lowtide import CaptureError

Step = Callable[..., Any]


def assert_refused(build: Callable[[], Any], *words: str) -> None:
    """Capturing raises an error with these words, and leaves everything as it was."""
    step, model, optimizer, example = build()
    before = {key: item.clone() for key, item in everything(model, optimizer).items() if item is not None}
    gradients = [parameter.grad for parameter in model.parameters()]
    attributes = [dict(module.__dict__) for module in model.modules()]
    options = [dict(group) for group in optimizer.param_groups] if hasattr(optimizer, "param_groups") else []
    generator = torch.get_rng_state()
    with pytest.raises(CaptureError) as caught:
        lowtide.capture(step, model, optimizer, example)
    for word in words:
        assert word in str(caught.value), str(caught.value)
    assert "hint: " in str(caught.value)
    after = {key: item for key, item in everything(model, optimizer).items() if item is not None}
    assert_same(before, after)
    assert [parameter.grad for parameter in model.parameters()] == gradients
    assert [dict(module.__dict__) for module in model.modules()] == attributes
    assert torch.equal(generator, torch.get_rng_state())
    if options:
        assert options == optimizer.param_groups
    assert not torch.nn.modules.module._global_forward_hooks


def decides_by_tensor(model: nn.Module, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    if x.sum() > 0:
        x = x * 2
    return plain(model, optimizer, x, y)


def decides_by_loss(model: nn.Module, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    loss = plain(model, optimizer, x, y)
    if loss.item() < 3.0:
        loss = loss * 2
    return loss


def counts(model: nn.Module, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return plain(model, optimizer, x * int((x > 0).sum()), y)


def selects(model: nn.Module, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return plain(model, optimizer, x, y) + x[x > 0].sum()


def leaves_torch(model: nn.Module, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return plain(model, optimizer, torch.from_numpy(x.numpy()), y)


@pytest.mark.parametrize(
    ("step", "word"),
    [
        (decides_by_tensor, "contents of a tensor"),
        (decides_by_loss, "depends on the data"),
        (counts, "contents of a tensor"),
        (selects, "depends on the data"),
        (leaves_torch, "failed while it was traced"),
    ],
)
def test_steps_that_depend_on_the_data(step: Step, word: str) -> None:
    line = f"test_refusals.py:{step.__code__.co_firstlineno + 1}"
    if step is decides_by_loss:
        line = f"test_refusals.py:{step.__code__.co_firstlineno + 2}"
    assert_refused(recipe(step), word, line)


def test_a_step_that_keeps_tensors() -> None:
    def step(model: Any, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = plain(model, optimizer, x + getattr(model, "memory", 0.0), y)
        model.memory = x.mean()
        return loss

    def build() -> Any:
        _, model, optimizer, example = recipe(plain)()
        model.memory = torch.zeros(())
        return step, model, optimizer, example

    assert_refused(build, "memory", "next step")


def test_a_step_that_uses_tensors_of_an_earlier_step() -> None:
    def build() -> Any:
        _, model, optimizer, example = recipe(plain)()
        hidden = model(example[0]).sum()

        def step(model: Any, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return plain(model, optimizer, x + hidden, y)

        return step, model, optimizer, example

    assert_refused(build, "earlier step", "test_refusals.py")


def test_a_parameter_that_is_replaced() -> None:
    def step(model: Any, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        model[0].weight = nn.Parameter(model[0].weight.detach() * 2)
        return plain(model, optimizer, x, y)

    assert_refused(recipe(step), "0.weight", "in place")


def test_two_devices() -> None:
    def build() -> Any:
        step, model, optimizer, (x, y) = recipe(plain)()
        return step, model, optimizer, (x.to("meta"), y)

    assert_refused(build, "2 devices", "meta", "cpu")


def test_wrapper_subclasses() -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    def build() -> Any:
        step, model, optimizer, (x, y) = recipe(plain)()
        return step, model, optimizer, (TwoTensor(x, x.clone()), y)

    assert_refused(build, "TwoTensor", "subclass")


def test_sparse_tensors() -> None:
    def build() -> Any:
        step, model, optimizer, (x, y) = recipe(plain)()
        return step, model, optimizer, (x.to_sparse(), y)

    assert_refused(build, "sparse")


def test_a_batch_with_a_history() -> None:
    def build() -> Any:
        step, model, optimizer, (x, y) = recipe(plain)()
        return step, model, optimizer, (x.requires_grad_() * 2, y)

    assert_refused(build, "history", "detach")


def test_training_what_nobody_owns() -> None:
    stranger = nn.Linear(6, 6)

    def step(model: Any, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return plain(model, optimizer, stranger(x), y)

    assert_refused(recipe(step), "neither in the model nor in the optimizer", "test_refusals.py")
    assert stranger.weight.grad is None


def test_hooks_on_parameters() -> None:
    def build() -> Any:
        step, model, optimizer, example = recipe(plain)()
        model[0].weight.register_hook(lambda gradient: gradient * 2)
        return step, model, optimizer, example

    assert_refused(build, "0.weight", "hook")


def test_generators_of_their_own() -> None:
    generator = torch.Generator()

    def step(model: Any, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return plain(model, optimizer, x + torch.rand(6, generator=generator), y)

    assert_refused(recipe(step), "Generator", "test_refusals.py")


def test_schedulers_inside_the_step() -> None:
    def build() -> Any:
        _, model, optimizer, example = recipe(plain)()
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)

        def step(model: Any, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            loss = plain(model, optimizer, x, y)
            optimizer.param_groups[0]["lr"] = 0.05
            return loss

        del scheduler
        return step, model, optimizer, example

    assert_refused(build, "lr", "scheduler")


@pytest.mark.parametrize(
    ("optimizer", "words"),
    [
        (lambda p: torch.optim.LBFGS(p), ("LBFGS", "number of times")),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.5), ("dampening", "first step")),
        (lambda p: torch.optim.AdamW(p, lr=0.1, fused=True), ("fused",)),
        (lambda p: torch.optim.Adam(p, lr=torch.tensor(0.1)), ("tensor as learning rate",)),
        (lambda p: "adam", ("str", "torch.optim")),
    ],
)
def test_optimizers_that_cannot_be_captured(optimizer: Any, words: tuple[str, ...]) -> None:
    if optimizer(iter([nn.Parameter(torch.ones(1))])) == "adam":
        step, model, _, example = recipe(plain)()
        with pytest.raises(CaptureError, match=r"not a torch.optim.Optimizer"):
            lowtide.capture(step, model, "adam", example)
        return
    assert_refused(recipe(plain, optimizer=optimizer), *words)


def test_errors_of_the_step_itself_are_shown() -> None:
    def step(model: Any, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(model(x) @ torch.ones(7, 7), y)

    assert_refused(recipe(step), "failed while it was traced", "test_refusals.py", "[5, 3] X [7, 7]")


def test_wrong_arguments() -> None:
    step, model, optimizer, example = recipe(plain)()
    with pytest.raises(CaptureError, match="not a tuple"):
        lowtide.capture(step, model, optimizer, list(example))  # type: ignore[arg-type]
    with pytest.raises(CaptureError, match=r"not a torch.nn.Module"):
        lowtide.capture(step, "model", optimizer, example)  # type: ignore[arg-type]
    with pytest.raises(lowtide.BudgetError, match="no plan found within 1,000 bytes"):
        lowtide.fit(step, model, optimizer, example=example, budget=1000)
