"""Batches of the caller's own classes: what they have beside their items counts, and where they lie in memory."""

from __future__ import annotations

import threading
import types
from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from twins import same

import lowtide
from lowtide import tree

QUICK: dict[str, Any] = {"costs": "roofline", "time_limit": 0.2, "tell": lambda _: None}


@dataclass
class Later:
    x: Tensor
    w: Tensor | None = field(init=False, default=None)


@dataclass(frozen=True)
class Doubled:
    x: Tensor
    w: float = 1.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "x", 2 * self.x)


@dataclass(slots=True)
class Slots:
    x: Tensor
    w: float = field(init=False, default=1.0)


class Named(dict[str, Any]):
    w: Any


class Linked(dict[str, Any]):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.__dict__ = self

    w: Any


class Listed(list[Any]):
    w: Any


class Around(MutableMapping[str, Any]):
    def __init__(self, items: dict[str, Any]) -> None:
        self.items_ = dict(items)

    def __getitem__(self, key: str) -> Any:
        return self.items_[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self.items_[key] = value

    def __delitem__(self, key: str) -> None:
        del self.items_[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.items_)

    def __len__(self) -> int:
        return len(self.items_)


def later(x: Tensor, w: Any) -> Any:
    batch = Later(x)
    batch.w = w
    return batch


def slots(x: Tensor, w: Any) -> Any:
    batch = Slots(x)
    batch.w = w
    return batch


def with_attribute(kind: Any) -> Callable[[Tensor, Any], Any]:
    def make(x: Tensor, w: Any) -> Any:
        batch = kind([x]) if kind is Listed else kind(x=x)
        batch.w = w
        return batch

    return make


MADE: dict[str, Callable[[Tensor, Any], Any]] = {
    "later": later,
    "doubled": Doubled,
    "slots": slots,
    "named": with_attribute(Named),
    "linked": with_attribute(Linked),
    "listed": with_attribute(Listed),
    "around": lambda x, w: Around({"x": x, "w": w}),
    "proxy": lambda x, w: types.MappingProxyType({"x": x, "w": w}),
}


def step(model: nn.Module, optimizer: Any, batch: Any) -> Tensor:
    x = batch[0] if isinstance(batch, list) else batch["x"] if hasattr(batch, "keys") else batch.x
    w = batch.w if hasattr(batch, "w") else batch["w"]
    optimizer.zero_grad()
    loss = (model(x) * w).square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


@pytest.mark.parametrize("weight", [lambda k: 1.0 + k, lambda k: torch.linspace(0, 1 + k, 4)], ids=["number", "tensor"])
@pytest.mark.parametrize("name", MADE)
def test_what_a_batch_has_beside_its_items_is_read_anew(name: str, weight: Callable[[int], Any]) -> None:
    found = []
    for fitted in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(3, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        batches = [MADE[name](torch.randn(5, 3), weight(number % 2)) for number in range(4)]
        train = lambda batch: step(model, optimizer, batch)  # noqa: B023, E731
        if fitted:
            train = lowtide.fit(step, model, optimizer, example=(batches[0],), **QUICK)
        found.append([*map(train, batches), *model.parameters()])
        assert all(len(batch) for batch in batches if hasattr(batch, "__len__")), "the caller's batch stays as it is"
    assert all(same(one.detach(), other.detach()) for one, other in zip(*found, strict=True))


@pytest.mark.parametrize("name", MADE)
def test_objects_come_back_with_all_that_they_had(name: str) -> None:
    thing = MADE[name](torch.ones(2), 3.0)
    leaves, structure = tree.flatten(thing)
    built = structure.build(leaves)
    assert type(built) is type(thing)
    assert tree.flatten(built)[1] == structure
    assert [same(one, other) for one, other in zip(tree.flatten(built)[0], leaves, strict=True)] == [True] * len(leaves)


def test_zero_and_minus_zero_are_two_numbers() -> None:
    def divide(model: nn.Module, _: None, x: Tensor, number: float) -> Tensor:
        return 1 / (model(x) * number)

    model, x = nn.Linear(3, 4), torch.randn(5, 3)
    run = lowtide.fit(divide, model, None, example=(x, 0.0), **QUICK)
    for number in (0.0, -0.0, 0.0):
        assert same(run(x, number).detach(), divide(model, None, x, number).detach())


def test_a_batch_that_lies_where_the_step_writes_is_refused() -> None:
    def scaled(model: nn.Module, optimizer: Any, x: Tensor, other: Tensor) -> Tensor:
        x.mul_(2)
        optimizer.zero_grad()
        loss = (model(x) - other).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    model = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rows = torch.randn(9, 3)
    run = lowtide.fit(scaled, model, optimizer, example=(torch.randn(3, 3), torch.randn(3, 3)), **QUICK)
    run(rows[:3], rows[3:6])
    for other in (rows[:3], rows[2:5]):
        with pytest.raises(lowtide.UsageError, match=r"batch 1 shares memory with batch 0, .* in place"):
            run(rows[:3], other)
    with pytest.raises(lowtide.UsageError, match=r"batch 1 shares memory with weight"):
        run(rows[:3], model.weight.detach())
    run(rows[:3], model.weight.detach().clone())


class Settings:
    def __init__(self, w: float) -> None:
        self.w = w


class Both(dict[str, Any]):
    w: Any = 1.0


class BothListed(list[Any]):
    w: Any = 1.0


@dataclass
class Classed:
    x: Tensor
    w: ClassVar[Any] = 1.0


class Tupled(NamedTuple):
    x: Tensor
    w: Any = 1.0


class Scaled(Tupled):
    w = 1.0


@pytest.mark.parametrize("kind", [Both, BothListed, Classed, Scaled], ids=lambda kind: kind.__name__)
def test_what_the_class_of_a_batch_has_is_watched(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for fitted in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(3, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        batches = [kind([torch.randn(5, 3)]) if kind is BothListed else kind(x=torch.randn(5, 3)) for _ in range(4)]
        monkeypatch.setattr(kind, "w", 1.0)
        train = lambda batch: step(model, optimizer, batch)  # noqa: B023, E731
        if fitted:
            train = lowtide.fit(step, model, optimizer, example=(batches[0],), **QUICK)
        results = []
        for number, batch in enumerate(batches):
            monkeypatch.setattr(kind, "w", 1.0 + number % 2)
            results.append(train(batch))
        found.append([*results, *model.parameters()])
    assert all(same(one.detach(), other.detach()) for one, other in zip(*found, strict=True))


@pytest.mark.parametrize("kind", [Named, Listed])
def test_an_attribute_that_nobody_can_compare_is_refused_where_the_step_reads_it(kind: Any) -> None:
    def read(model: nn.Module, optimizer: Any, batch: Any) -> Tensor:
        weight = batch.settings.w if hasattr(batch, "settings") else 1.0
        return (model(batch[0] if isinstance(batch, list) else batch["x"]) * weight).sum()

    batch = with_attribute(kind)(torch.randn(5, 3), 1.0)
    batch.settings = Settings(2.0)
    with pytest.raises(lowtide.CaptureError, match="reads 'settings' of its batch, which the caller has put beside"):
        lowtide.fit(read, nn.Linear(3, 4), None, example=(batch,), **QUICK)
    model = nn.Linear(3, 4)
    run = lowtide.fit(step, model, torch.optim.SGD(model.parameters(), lr=0.1), example=(batch,), **QUICK)
    batch.settings = Settings(3.0)
    run(batch)
    assert len(run.makings) == 1, "what the step does not read does not matter"


@pytest.mark.parametrize("kind", [Named, Listed])
def test_a_batch_that_contains_itself_is_refused(kind: Any) -> None:
    batch = with_attribute(kind)(torch.randn(5, 3), 1.0)
    batch.me = batch
    with pytest.raises(lowtide.UsageError, match=r"a \w+ contains itself"):
        lowtide.fit(step, nn.Linear(3, 4), None, example=(batch,), **QUICK)


def test_memory_of_another_tensor_is_refused_and_its_own_is_not() -> None:
    def own(model: nn.Module, _: None, x: Tensor) -> Tensor:
        other = x * 2
        other.data += 1
        return model(other).sum()  # type: ignore[no-any-return]

    def another(model: nn.Module, _: None, x: Tensor) -> Tensor:
        other = x * 2
        other.data = x + 1
        return model(other).sum()  # type: ignore[no-any-return]

    model, x = nn.Linear(3, 4), torch.randn(5, 3)
    assert same(lowtide.fit(own, model, None, example=(x,), **QUICK)(x).detach(), own(model, None, x).detach())
    with pytest.raises(lowtide.CaptureError, match=r"puts another tensor in the place of a tensor's memory"):
        lowtide.fit(another, model, None, example=(x,), **QUICK)
    assert "data" not in vars(Tensor)


def test_models_of_several_threads_are_planned_one_after_another() -> None:
    """A trace puts guards around what all threads call, and module hooks that all of them see."""
    models = [nn.Sequential(nn.Linear(6, 20), nn.ReLU(), nn.Linear(20, 3)) for _ in range(4)]
    trained = []
    batches = torch.randn(4, 5, 6)  # drawn here: all threads draw from one generator

    def work(model: nn.Module) -> None:
        attached = lowtide.attach(model, **QUICK)
        for batch in batches:
            model(batch).sum().backward()
        trained.append(attached.calls)

    threads = [threading.Thread(target=work, args=(model,)) for model in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [dict(calls) for calls in trained] == [{"by a plan": 4}] * 4
    assert "numpy" not in vars(Tensor)
