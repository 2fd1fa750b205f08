"""Steps are found by what the batch is: its key says all that a program assumes about it, and no more."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowtide
from lowtide.execute import Batch
from lowtide.execute.batch import key_of
from lowtide.execute.binding import Binding
from lowtide.fit.kept import KEPT, Kept


@dataclass
class Pair:
    x: Tensor
    name: str = "pair"


class Odd:
    """No tensor, and nothing that a key could hold."""

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Odd)


def image() -> Tensor:
    return torch.zeros(2, 3, 4, 4)


BATCHES: list[tuple[Any, ...]] = [
    (image(),),
    (image().to(memory_format=torch.channels_last),),
    (image()[:1, :, :1, :1],),
    (image()[:, :, ::2],),
    (image().double(),),
    (image().requires_grad_(),),
    ({"x": image(), "n": 3},),
    ({"x": image(), "n": True},),
    ({"x": image(), "n": 1.0},),
    ({"x": image(), "n": None},),
    (OrderedDict(x=image(), n=3),),
    ([image(), image()],),
    ((image(), image()),),
    (Pair(image()),),
    (Pair(image(), "other"),),
    (image(), Odd()),
]


def total(thing: Any) -> Tensor:
    if isinstance(thing, Tensor):
        return thing.detach().float().sum()
    parts = thing.values() if isinstance(thing, dict) else thing if isinstance(thing, tuple | list) else ()
    return sum(map(total, parts), torch.zeros(())) + (thing.x.sum() if isinstance(thing, Pair) else 0)


def step(model: nn.Module, optimizer: Any, *batch: Any) -> Tensor:
    optimizer.zero_grad()
    loss = model(total(batch).reshape(1, 1)).sum()
    loss.backward()
    optimizer.step()
    return loss


def taken(*batch: Any) -> lowtide.Captured:
    model = nn.Linear(1, 1)
    return lowtide.capture(step, model, torch.optim.SGD(model.parameters(), lr=0.1), batch)


@pytest.mark.parametrize("batch", BATCHES, ids=lambda batch: str(batch)[:12])
def test_the_key_of_a_capture_is_the_key_of_its_batch(batch: tuple[Any, ...]) -> None:
    assert key_of(taken(*batch)) == Batch.of(batch).key


def test_each_kind_of_batch_has_a_key_of_its_own() -> None:
    keys = [Batch.of(batch).key for batch in BATCHES]
    assert all((one == other) == (a == b) for a, one in enumerate(keys) for b, other in enumerate(keys))
    assert len(set(keys)) == len(BATCHES)


def test_strides_of_a_single_number_are_no_matter() -> None:
    assert Batch.of((torch.zeros(1, 4)[:, :1],)).key == Batch.of((torch.zeros(1, 1),)).key
    assert Batch.of((torch.zeros(2, 4)[:, :1],)).key != Batch.of((torch.zeros(2, 1),)).key


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_what_has_no_strides_has_a_key() -> None:
    assert Batch.of((torch.eye(3).to_sparse_csr(),)).key == Batch.of((torch.ones(2, 2).to_sparse_csr(),)).key


def test_what_a_key_can_not_hold_is_still_compared() -> None:
    binding = Binding(taken(image(), Odd()))
    assert not binding.settled
    binding.check(Batch.of((image(), Odd())))
    other = Odd()
    other.__class__ = type("Other", (Odd,), {})
    with pytest.raises(lowtide.BatchError):
        binding.check(Batch.of((image(), other)))


def test_only_steps_for_such_a_batch_are_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train = lowtide.fit(step_of, model, optimizer, example=(torch.ones(1, 4),), costs="roofline", time_limit=0)
    sizes = [1, 2, 3, 4, 5]
    for size in sizes:
        train(torch.ones(size, 4))
    asked: list[Binding] = []
    check = Binding.check
    monkeypatch.setattr(Binding, "check", lambda self, batch: (asked.append(self), check(self, batch))[1])
    for size in sizes:
        asked.clear()
        train(torch.ones(size, 4))
        assert asked == [train._fits[0].runner.binding]
    asked.clear()
    train(torch.ones(9, 4))  # the latest says what is different, twice: a trace of another thread may have ended
    assert len(asked) == 3


def step_of(model: nn.Module, optimizer: Any, x: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = model(x).square().sum()
    loss.backward()
    optimizer.step()
    return loss


def test_a_number_that_changes_is_an_input_also_where_shapes_alternate() -> None:
    scale = {"by": 1.0}

    def scaled(model: nn.Module, optimizer: Any, x: Tensor) -> Tensor:
        return step_of(model, optimizer, x * scale["by"])

    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    train = lowtide.fit(scaled, model, optimizer, example=(torch.ones(2, 4),), costs="roofline", time_limit=0)
    for number in range(12):
        scale["by"] = 1.0 + number
        before = [parameter.detach().clone() for parameter in model.parameters()]
        x = torch.ones(2 + number % 2, 4)
        loss = train(x)
        expected = nn.functional.linear(x * scale["by"], *before).square().sum()
        assert torch.equal(loss, expected)
    assert len(train._fits) <= 6


def test_the_latest_come_first_and_the_oldest_goes() -> None:
    kept = Kept[int]()
    for number in range(KEPT):
        kept.use((number % 7,), number)
    assert len(kept) == KEPT
    assert kept.candidates((0,)) == [*range(63, -1, -7)]
    kept.use((0,), 0)
    assert kept.candidates((0,)) == [0, *range(63, 0, -7)]
    assert [*kept][:2] == [0, 63]
    kept.use(("new",), 1000)  # and 1, which was used the longest ago, goes
    assert len(kept) == KEPT
    assert 1 not in kept.candidates((1,))
    assert kept.candidates(("unknown",)) == [1000]
    assert kept.latest == 1000
