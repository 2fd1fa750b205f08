"""What is said, and what is true, after a step that failed half-way; and halves that were never whole."""

from __future__ import annotations

import copy
import gc
import sys
from typing import Any

import pytest
import torch
from probes import Probe, acting, classify
from torch import Tensor, nn
from twins import assert_same, everything

import lowtide
from lowtide import allocator
from lowtide.allocator.arena import POOL, Arena, Tape
from lowtide.execute.failure import _written
from lowtide.execute.halves import Half
from lowtide.kernels import own
from lowtide.program import Run

QUICK = 0.2  # seconds of planning


def boom(_: Tensor) -> None:
    raise ValueError("boom")


def normalized(*, before: bool) -> tuple[Any, nn.Module, Any, tuple[Tensor, Tensor]]:
    """A step with a batch norm before its probe, or after it."""
    torch.manual_seed(3)
    norm = nn.BatchNorm1d(32)
    model = nn.Sequential(nn.Linear(16, 32), norm if before else nn.Identity(), Probe(), nn.Dropout(0.3))
    model.append(nn.Identity() if before else norm).append(nn.Linear(32, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return classify, model, optimizer, (torch.randn(24, 16), torch.randint(5, (24,)))


def fitted(recipe: Any) -> tuple[lowtide.Fitted, Any, Any]:
    step, model, optimizer, example = recipe
    train = lowtide.fit(step, model, optimizer, example=example, budget="1MiB", time_limit=QUICK, costs="roofline")
    return train, model, optimizer


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("warm", [0, 2])
def test_buffers_that_were_changed_are_named(before: bool, warm: int) -> None:
    recipe = normalized(before=before)
    train, model, optimizer = fitted(recipe)
    example = recipe[-1]
    for _ in range(warm):
        train(*example)
    held, state = copy.deepcopy(everything(model, optimizer)), torch.get_rng_state()
    with pytest.raises(lowtide.StepError) as caught, acting(middle=boom):
        train(*example)
    now, error = everything(model, optimizer), caught.value
    changed = {key for key, item in now.items() if isinstance(item, Tensor) and not torch.equal(item, held[key])}
    assert torch.equal(state, torch.get_rng_state())
    assert error.parameters == ()
    assert len(changed) == len(error.buffers)
    assert all(any(name in str(key) for key in changed) for name in error.buffers)
    if before:
        assert {name.partition(".")[2] for name in error.buffers} >= {"running_mean", "running_var"}
        assert f"; {len(changed)} buffers were (" in str(error)
        assert all(name in str(error) for name in error.buffers)
        assert "put the buffers back" in str(error.hint)
    else:
        assert changed == set()
        assert error.hint == "the step can be repeated."


def test_an_op_that_may_have_failed_between_two_writes_counts() -> None:
    """Batch norm writes two statistics, and may lack the memory for its result before, between or after them."""
    train, _, _ = fitted(normalized(before=True))
    runner = train._fits[0].runner
    graph, program = runner.captured.graph, runner.program
    targets = [graph.ops[item.op].target if isinstance(item, Run) else "" for item in program.instructions]
    reached = targets.index("aten.native_batch_norm.default")
    written = _written(graph, program, reached, between=False)
    assert {("buffer", "1.running_mean"), ("buffer", "1.running_var")} <= set(written)
    assert not {kind for kind, _ in written} & {"parameter", "state"}
    reached = next(number for number, target in enumerate(targets) if "add_" in target and number > reached)
    assert not {"parameter"} & {kind for kind, _ in _written(graph, program, reached, between=False)}


def test_a_half_that_was_never_made_is_let_go_in_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    unheard: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", unheard.append)
    with pytest.raises(TypeError):
        Half()  # type: ignore[call-arg]
    with pytest.raises(AttributeError):
        Half(None, ())  # type: ignore[arg-type]
    Half.__new__(Half).close()
    gc.collect()
    assert unheard == []


class Tagger(nn.Module):
    """A bidirectional LSTM between two layers."""

    def __init__(self, layers: int = 2, dropout: float = 0.0) -> None:
        super().__init__()
        self.inside = nn.Embedding(50, 32)
        self.recurrent = nn.LSTM(32, 64, layers, batch_first=True, bidirectional=True, dropout=dropout)
        self.out = nn.Linear(128, 50)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.out(self.recurrent(self.inside(x))[0])
        return found


@pytest.mark.parametrize("budget", ["60%", "50%"])
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_an_lstm_runs_again_in_its_backward(budget: str, dropout: float) -> None:
    torch.manual_seed(0)
    model = Tagger(dropout=dropout)
    twin, x, y = copy.deepcopy(model), torch.randint(50, (8, 30)), torch.randint(50, (8, 30))
    net = lowtide.wrap(twin, example=(x,), budget=budget, time_limit=0.5)
    for seed in range(3):
        for one, called in ((model, model), (twin, net)):
            torch.manual_seed(seed)
            nn.functional.cross_entropy(called(x).flatten(0, 1), y.flatten()).backward()
            assert one.out.weight.grad is not None
        assert_same(everything(model, None), everything(twin, None))


def test_a_backward_under_autocast_is_refused() -> None:
    model, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)), torch.randn(4, 8)
    net = lowtide.wrap(model, example=(x,), time_limit=QUICK)
    loss = net(x).sum()
    with torch.autocast("cpu"), pytest.raises(lowtide.UsageError, match=r"under torch\.autocast"):
        loss.backward()
    loss.backward()
    assert model[0].weight.grad is not None
    assert not allocator.installed()


def test_there_may_be_more_than_64_arenas() -> None:
    arenas = [Arena(5000) for _ in range(200)]
    spots = {arena.handle for arena in arenas}
    assert len(spots) == 200
    for arena in arenas:
        arena.close()
    assert POOL.held() == 0


@pytest.mark.parametrize("start", [[0, 2, 1, 3], [1, 2, 3], [0, 1, 99], [0, -1, 3]])
def test_a_tape_that_is_none_is_refused(start: list[int]) -> None:
    with pytest.raises(lowtide.LowtideError):
        Tape(start, [16, 16, 16], [0, 64, 128])


def test_statistics_of_the_wrong_size_are_eagers_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """What nobody has noticed until then is refused by the kernel: nothing is written past the end."""
    monkeypatch.setattr(own, "LEAST", 1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.Flatten(), nn.LazyLinear(5))
    example = torch.randn(4, 3, 10, 10), torch.randint(5, (4,))
    model(example[0])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train = lowtide.fit(classify, model, optimizer, example=example, time_limit=QUICK, costs="roofline")
    train(*example)
    model[1].running_mean = torch.zeros(3)
    with pytest.raises((lowtide.LowtideError, RuntimeError)):
        train(*example)
