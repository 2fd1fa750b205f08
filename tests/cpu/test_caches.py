"""Functions whose answers are kept (functools.lru_cache, cache, cached_property), called by a step: as in eager."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from twins import assert_same, everything

import lowtide
from lowtide.capture.caches import remember
from lowtide.errors import CaptureError

CACHES: dict[str, Callable[[Any], Any]] = {
    "lru_cache": functools.lru_cache,
    "cache": functools.cache,
    "room for two": functools.lru_cache(maxsize=2),
    "typed": functools.lru_cache(typed=True),
}
OPTIONS: dict[str, Any] = {"budget": "1GiB", "costs": "roofline", "time_limit": 0.1}
X, Y = torch.randn(6, 12, generator=torch.Generator().manual_seed(3)), torch.arange(6) % 4


class Program:
    """A model that scales its logits by what a cached function answers."""

    def __init__(self, cache: Callable[[Any], Any], kind: str) -> None:
        self.gain, self.calls = [1.5], [0]
        gain, calls = self.gain, self.calls

        @cache
        def answer(count: int, *, shift: float = 0.0) -> Any:
            calls[0] += 1
            if kind == "tensor":
                return torch.arange(4.0) * gain[0] + shift
            return torch.rand(4) + count if kind == "draw" else gain[0] * count + shift

        class Net(nn.Sequential):
            def forward(self, x: Tensor) -> Tensor:
                return super().forward(x) * answer(2, shift=0.5) * answer(3)

        torch.manual_seed(0)
        self.answer, self.model = answer, Net(nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 4))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.net: Any = self.model
        self.take: Callable[[], Any] = lambda: step(self.net, self.optimizer, X, Y)

    def fit(self) -> None:
        """Let lowtide take the steps."""
        fitted = lowtide.fit(step, self.model, self.optimizer, example=(X, Y), **OPTIONS)
        self.take = lambda: fitted(X, Y)

    def wrap(self) -> None:
        """Let lowtide run the model."""
        self.net = lowtide.wrap(self.model, example=(X,), **OPTIONS)

    def state(self) -> dict[str, Any]:
        """All that can be compared."""
        kept = {"kept": self.answer.cache_info().currsize, "calls": self.calls[0], "draws": torch.get_rng_state()}
        return {**everything(self.model, self.optimizer), **kept}


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def both(one: Program, other: Program) -> None:
    """One step of both, from the same generator; everything must be equal."""
    before = torch.get_rng_state()
    expected, state = one.take(), one.state()
    torch.set_rng_state(before)
    found = other.take()
    assert torch.equal(expected, found)
    assert_same(state, other.state())


@pytest.mark.parametrize("kind", ["number", "tensor", "draw"])
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("door", ["fit", "wrap"])
def test_a_cached_function_is_called_as_often_as_in_eager(door: str, cache: str, kind: str) -> None:
    eager, ours = Program(CACHES[cache], kind), Program(CACHES[cache], kind)
    if door == "wrap" and kind != "number":
        with pytest.raises(CaptureError, match=r"keeps or prints what it computes .*what answer keeps") as caught:
            ours.wrap()
        assert "once before" in str(caught.value)
        assert ours.answer.cache_info().currsize == 0
        return
    ours.fit() if door == "fit" else ours.wrap()
    assert ours.answer.cache_info().currsize == 0
    assert ours.calls == [0]
    for program in (eager, ours):
        program.gain[0] = 2.5  # between the capture and the first step: it is the first step that calls
    for edit in (None, "gain", None, "clear", None, "more", None):
        for program in (eager, ours):
            if edit == "gain":
                program.gain[0] *= 3.0  # which what is kept does not see
            elif edit == "clear":
                program.answer.cache_clear()
            elif edit == "more":
                program.gain[0] = 0.25
                program.answer.cache_clear()
                torch.manual_seed(4)
                program.answer(3)
        both(eager, ours)
    for kept, expected in ((ours.answer(3), eager.answer(3)), (ours.answer(2, shift=0.5), eager.answer(2, shift=0.5))):
        assert type(kept) is type(expected)
        assert torch.equal(torch.as_tensor(kept), torch.as_tensor(expected))


def test_what_was_kept_before_the_fit_is_taken_and_stays() -> None:
    eager, ours = Program(functools.cache, "tensor"), Program(functools.cache, "tensor")
    for program in (eager, ours):
        program.answer(3)
        program.answer(2, shift=0.5)
    kept = ours.answer(3)
    ours.wrap()
    for _ in range(3):
        both(eager, ours)
    assert ours.answer(3) is kept


def test_a_cache_without_room_is_refused() -> None:
    program = Program(functools.lru_cache(maxsize=1), "number")
    program.answer(7)
    with pytest.raises(CaptureError, match="more arguments than its lru_cache"):
        program.fit()


def test_what_cannot_be_kept_is_refused() -> None:
    weights: list[Tensor] = []

    @functools.cache
    def total() -> Tensor:
        return weights[0].sum()

    @functools.cache
    def of_tensor(tensor: Tensor) -> Tensor:
        return tensor * 2

    def keeps_history(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y) + total()
        loss.backward()
        return loss

    def takes_tensors(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(of_tensor(x)), y)
        loss.backward()
        return loss

    model = nn.Linear(12, 4)
    weights.append(model.weight)
    for function, words in ((keeps_history, "a part of this step's backward"), (takes_tensors, "takes tensors")):
        with pytest.raises(CaptureError, match=words):
            lowtide.fit(function, model, None, example=(X, Y), **OPTIONS)
    assert total.cache_info().currsize == of_tensor.cache_info().currsize == 0


@pytest.mark.parametrize("cache", CACHES)
def test_an_answer_is_known_without_a_call(cache: str) -> None:
    calls = []

    @CACHES[cache]
    def function(one: Any, *others: Any, named: Any = None, more: Any = None) -> Any:
        return calls.append((one, others, named, more))

    code = function.__wrapped__.__code__
    answer = ["an answer"]
    for args, kwargs in ((((1, 2),), {}), ((1, "x"), {"named": 3, "more": 4}), ((1.5,), {"more": 4})):
        remember(function, args, kwargs, answer)
        assert function(*args, **kwargs) is answer
    assert not calls
    assert function.__wrapped__.__code__ is code


def test_a_cached_property() -> None:
    class Net(nn.Linear):
        scale = 1.5

        @functools.cached_property
        def gain(self) -> float:
            return self.scale * 2

        @functools.cached_property
        def table(self) -> Tensor:
            return torch.arange(4.0) * self.scale

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.gain + self.table

    def make() -> tuple[Any, Any]:
        torch.manual_seed(0)
        model = Net(12, 4)
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    (mirror, mirrored), (model, optimizer) = make(), make()
    fitted = lowtide.fit(step, model, optimizer, example=(X, Y), **OPTIONS)
    assert not {"gain", "table"} & set(vars(model))
    for number in range(5):
        for one in (mirror, model):
            if number:
                one.scale = 1.5 + number  # seen only where nothing is kept
            if number == 3:
                del one.gain, one.table
        assert torch.equal(step(mirror, mirrored, X, Y), fitted(X, Y))
        assert_same(everything(mirror, mirrored), everything(model, optimizer))
        assert mirror.gain == model.gain
        assert torch.equal(mirror.table, model.table)
