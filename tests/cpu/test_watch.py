"""What changes in place on the caller's tensors is seen before the step, by the C++ that compares them and without."""

from __future__ import annotations

import copy
import gc
import importlib
import sys
import weakref
from collections.abc import Callable
from types import CellType
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from twins import assert_same, everything

import lowtide
from lowtide.execute import StaleError
from lowtide.execute.batch import Batch
from lowtide.execute.binding import Binding
from lowtide.guards import MISSING, Entry, Place
from lowtide.watch import quick, tensors
from lowtide.watch.memory import overlap, spans

CALLERS = importlib.import_module("lowtide.execute.tensors")
X, Y = torch.randn(6, 8, generator=torch.Generator().manual_seed(3)), torch.arange(6) % 4


class Net(nn.Module):
    """A buffer that is written to, and one that each step replaces."""

    def __init__(self, average: bool) -> None:
        super().__init__()
        self.one, self.two, self.norm, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)
        if average:
            self.register_buffer("average", torch.zeros(8))
        self.average_kept = average

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.norm(self.two(torch.tanh(self.one(x)))))
        if self.average_kept:
            self.average = self.average * 0.9 + x.detach().mean(0) * 0.1
        return self.head(x)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


class Case:
    """A model, its optimizer and a fitted step that has run."""

    def __init__(self, average: bool = False) -> None:
        torch.manual_seed(0)
        self.model = Net(average)
        self.model.one.weight.register_hook(lambda gradient: gradient).remove()  # leaves an empty register behind
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.fitted = lowtide.fit(
            step, self.model, self.optimizer, example=(X, Y), budget="1GiB", costs="roofline", time_limit=0.1
        )
        self.fitted(X, Y)
        self.bindings = [(CALLERS.library(), Binding(self.fitted.captured)), (None, Binding(self.fitted.captured))]
        for _ in range(2):
            for compiled in (True, False):
                self.look(compiled)

    def look(self, compiled: bool = True) -> None:
        """All that is done before the first op of a step, with the C++ that compares tensors or without."""
        library, binding = self.bindings[0 if compiled else 1]
        with mock.patch.object(CALLERS, "library", return_value=library):
            binding.take(Batch.of((X, Y)))

    def state(self, key: str = "exp_avg") -> Tensor:
        found: Tensor = self.optimizer.state[self.model.head.weight][key]
        return found


@pytest.fixture(params=["compiled", "plain"])
def case(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Case:
    """With the C++ that compares tensors, or without."""
    if request.param == "plain":
        monkeypatch.setattr(CALLERS, "library", lambda: None)
    elif tensors.library() is None:
        pytest.skip("there is no compiler")
    return Case()


class Other(nn.Parameter):
    """A class that a parameter may come to have."""


def other_sizes(case: Case) -> None:
    case.model.head.weight.data = torch.zeros(4, 9)


def other_strides(case: Case) -> None:
    case.model.one.weight.data = case.model.one.weight.data.t()


def other_dtype(case: Case) -> None:
    case.model.head.weight.data = case.model.head.weight.data.double()


def set_elsewhere(case: Case) -> None:
    with torch.no_grad():
        case.model.head.weight.set_(torch.zeros(3, 8))


def resized(case: Case) -> None:
    case.model.norm.running_mean.resize_(16)


def resized_to_less(case: Case) -> None:
    case.model.norm.running_mean.resize_(4)


def transposed(case: Case) -> None:
    with torch.no_grad():
        case.model.one.weight.t_()


def frozen(case: Case) -> None:
    case.model.two.bias.requires_grad_(False)


def thawed(case: Case) -> None:
    case.model.norm.running_mean.requires_grad_(True)


def hooked(case: Case) -> None:
    case.model.head.bias.register_hook(lambda gradient: gradient * 2)


def hooked_again(case: Case) -> None:
    case.model.one.weight.register_hook(lambda gradient: gradient * 2)


def hooked_afterwards(case: Case) -> None:
    case.model.head.bias.register_post_accumulate_grad_hook(lambda parameter: None)


def with_gradient(case: Case) -> None:
    case.model.two.weight.grad = torch.ones(8, 8)


def same_memory(case: Case) -> None:
    case.model.two.weight.data = case.model.one.weight.data


def same_memory_in_part(case: Case) -> None:
    memory = torch.zeros(100)
    case.model.one.weight.data, case.model.two.weight.data = memory[:64].view(8, 8), memory[36:].view(8, 8)


def other_class(case: Case) -> None:
    case.model.head.weight.__class__ = Other


def swapped(case: Case) -> None:
    torch.utils.swap_tensors(case.model.head.weight, nn.Parameter(torch.zeros(2, 8)))


def conjugated(case: Case) -> None:
    case.model.norm.running_mean.data = torch.zeros(8, dtype=torch.complex64).conj().imag


def replaced_buffer(case: Case) -> None:
    case.model.norm.running_var = torch.ones(8, dtype=torch.float64)


def deleted_state(case: Case) -> None:
    del case.optimizer.state[case.model.head.weight]["exp_avg"]


def no_tensor_in_state(case: Case) -> None:
    case.optimizer.state[case.model.head.weight]["step"] = 3.0


def other_state_sizes(case: Case) -> None:
    case.optimizer.state[case.model.head.weight]["exp_avg"] = torch.zeros(8, 4)


def state_elsewhere(case: Case) -> None:
    case.state().data = torch.zeros(2, 2)


def state_resized(case: Case) -> None:
    case.state("exp_avg_sq").resize_(2, 2)


def state_transposed(case: Case) -> None:
    case.optimizer.state[case.model.one.weight]["exp_avg"].t_()


def state_of_another_dtype(case: Case) -> None:
    case.state("step").data = torch.tensor(3.0, dtype=torch.float64)


def state_that_trains(case: Case) -> None:
    case.state().requires_grad_(True)


EDITS: list[Callable[[Case], None]] = [
    *(other_sizes, other_strides, other_dtype, set_elsewhere, resized, resized_to_less, transposed, frozen, thawed),
    *(hooked, hooked_again, hooked_afterwards, with_gradient, same_memory, same_memory_in_part, other_class, swapped),
    *(conjugated, replaced_buffer, deleted_state, no_tensor_in_state, other_state_sizes, state_elsewhere),
    *(state_resized, state_transposed, state_of_another_dtype, state_that_trains),
]


@pytest.mark.parametrize("edit", EDITS, ids=lambda edit: edit.__name__)
def test_what_changes_in_place_is_seen_before_the_step(edit: Callable[[Case], None]) -> None:
    case = Case()
    edit(case)
    for compiled in (True, False) * 2:  # and again, as long as it is so
        with pytest.raises(StaleError):
            case.look(compiled)


def move(case: Case) -> None:
    for tensor in case.model.state_dict().values():
        tensor.data = tensor.data.clone()
    for parameter in case.model.parameters():
        parameter.data = parameter.data.clone()


def load(case: Case) -> None:
    case.optimizer.load_state_dict(copy.deepcopy(case.optimizer.state_dict()))


def forget(case: Case) -> None:
    case.optimizer.state.clear()


def reorder(case: Case) -> None:
    state = case.optimizer.state
    for parameter in reversed(list(state)):
        state[parameter] = dict(reversed(state.pop(parameter).items()))


def double(case: Case) -> None:
    for entries in case.optimizer.state.values():
        entries["exp_avg"] = entries["exp_avg"] * 2


@pytest.mark.parametrize("edit", [move, load, forget, reorder, double], ids=lambda edit: edit.__name__)
def test_what_lies_elsewhere_is_found(case: Case, edit: Callable[[Case], None]) -> None:
    other = Case()
    for _ in range(2):
        edit(case)
        edit(other)
        for _ in range(2):
            found, expected = case.fitted(X, Y), step(other.model, other.optimizer, X, Y)
            assert torch.equal(found, expected)
            assert_same(everything(other.model, other.optimizer), everything(case.model, case.optimizer))
    assert len(case.fitted._fits) == 1


@pytest.mark.skipif(tensors.library() is None, reason="there is no compiler")
def test_buffers_that_steps_replace_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    case, other = Case(average=True), Case(average=True)
    looked = 0

    def count(tensor: Tensor) -> Any:
        nonlocal looked
        looked += 1
        return tensors.kind_of(tensor)

    monkeypatch.setattr(CALLERS, "kind_of", count)
    for _ in range(3):
        case.look()
    assert looked == 3  # all others are as they were, which is known without looking at them
    assert torch.equal(case.fitted(X, Y), step(other.model, other.optimizer, X, Y))
    assert_same(everything(other.model, other.optimizer), everything(case.model, case.optimizer))
    case.model.average = case.model.one.weight.data[3]
    with pytest.raises(StaleError, match="share memory"):
        case.look()
    for wrong in (torch.zeros(8, dtype=torch.float64), torch.zeros(9), None):
        case.model.average = wrong
        with pytest.raises(StaleError):
            case.look()
    case.model.average = torch.zeros(8)
    case.look()


def test_state_that_was_replaced_is_let_go(case: Case) -> None:
    case.fitted(X, Y)
    gone = weakref.ref(case.state())
    load(case)
    gc.collect()
    assert gone() is None


def test_spans_that_overlap() -> None:
    memory = torch.zeros(40)
    apart = {"one": memory[:10], "two": memory[10:30].view(4, 5).t(), "three": memory[30:31], "none": memory[5:5]}
    assert overlap(spans(apart)) is None
    assert overlap(spans({**apart, "over": memory[29:31]})) is not None
    assert overlap(spans({"wide": memory[::20], "inside": memory[10:12]})) == (
        "wide",
        "inside",
    )  # by its outermost bytes


class _Slotted:
    __slots__ = ("one",)

    @property
    def broken(self) -> int:
        """A property that fails otherwise than by having nothing."""
        raise ZeroDivisionError


@pytest.mark.parametrize("compiled", [True, False])
def test_the_quick_comparison_sees_attributes_cells_and_lists(compiled: bool) -> None:
    held, cell, items, empty = _Slotted(), CellType(3.5), [X, Y], CellType()
    held.one = X
    entries = [
        Entry(Place(step, "__code__", "code"), step.__code__),
        Entry(Place(held, "one", "attribute"), X),
        Entry(Place(held, "two", "nothing"), MISSING),
        Entry(Place(cell, None, "cell"), cell.cell_contents),
        Entry(Place(empty, None, "empty"), MISSING),
    ]
    library = quick._library() if compiled else None
    assert (library is not None) == compiled
    with mock.patch.object(quick, "_library", return_value=library):
        watched = quick.Quick(entries, lists=[(items, items)])
    assert watched.same()
    references = [sys.getrefcount(one) for one in (X, held, step.__code__)]
    assert all(watched.same() for _ in range(50))
    assert [sys.getrefcount(one) for one in (X, held, step.__code__)] == references

    def other(change: Callable[[], object], back: Callable[[], object]) -> None:
        change()
        assert not watched.same()
        back()
        assert watched.same()

    content = cell.cell_contents
    other(lambda: setattr(held, "one", Y), lambda: setattr(held, "one", X))
    other(lambda: delattr(held, "one"), lambda: setattr(held, "one", X))
    other(lambda: setattr(cell, "cell_contents", 4.5), lambda: setattr(cell, "cell_contents", content))
    other(lambda: setattr(empty, "cell_contents", 4.5), lambda: delattr(empty, "cell_contents"))
    other(lambda: items.append(X), lambda: items.pop())
    other(lambda: items.reverse(), lambda: items.reverse())
    with mock.patch.object(quick, "_library", return_value=library), pytest.raises(ZeroDivisionError):
        quick.Quick([Entry(Place(held, "broken", "broken"), 1)]).same()


def test_groups_options_and_members_are_seen_after_a_quick_look() -> None:
    case = Case()
    group = case.optimizer.param_groups[0]
    case.look()
    eps = group["eps"]
    group["eps"] = eps * 2
    with pytest.raises(StaleError, match="'eps' of parameter group 0"):
        case.look()
    group["eps"] = float(repr(eps))  # equal, and another object
    case.look()
    case.look()
    group["params"].reverse()
    with pytest.raises(StaleError, match="other parameters"):
        case.look()
    group["params"].reverse()
    case.look()
    case.optimizer.param_groups[0] = {**group, "amsgrad": True}
    with pytest.raises(StaleError, match="'amsgrad' of parameter group 0"):
        case.look()
    case.optimizer.param_groups[0] = dict(group)
    case.look()
