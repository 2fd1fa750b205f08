"""Long runs with many shapes, other threads that allocate, and workers: nothing grows, strays or differs."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import pytest
import torch

from lowtide import UsageError
from lowtide.bench import soak as soaks
from lowtide.bench.cli.limited import SOAKED

GOOD = soaks.Soaked(
    steps=1000,
    shapes=20,
    budget=100,
    peak=100,
    resident=(0, 50, 60, 50 + soaks.GROWTH),
    files=(5, 9, 9, 9),
    mismatches=0,
    checkpoints=32,
    differing=(),
    beside=1,
    spoilt=0,
)


@pytest.mark.long
def test_a_thousand_steps_of_twenty_shapes_beside_threads_and_workers() -> None:
    found = soaks.soak(SOAKED[0], steps=1000, shapes=20, time_limit=0)
    assert found.ok, found
    assert found.checkpoints == 32


def test_some_steps_beside_threads_and_forked_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    batches = soaks._batches
    monkeypatch.setattr(soaks, "_batches", lambda cuts, start: batches(cuts, "fork"))
    found = soaks.soak(SOAKED[0], steps=32, shapes=2, time_limit=0)
    assert found.differing == ()
    assert found.mismatches == found.spoilt == 0
    assert found.beside > 0
    assert found.files[1:] == found.files[1:2] * 3


@pytest.mark.parametrize(
    "change",
    [
        {"resident": (0, 49, 60, 50 + soaks.GROWTH)},
        {"files": (5, 9, 9, 10)},
        {"mismatches": 1},
        {"differing": (125,)},
        {"spoilt": 1},
        {"peak": 101},
    ],
)
def test_a_run_that_grows_strays_or_differs_is_not_ok(change: dict[str, Any]) -> None:
    assert GOOD.ok
    assert not dataclasses.replace(GOOD, **change).ok


def test_batches_are_the_same_for_whoever_asks_and_see_every_shape() -> None:
    example = (torch.arange(128).reshape(4, 32), torch.arange(128).reshape(4, 32))
    whole, later = soaks.Cuts(example, 20, 0, 40), soaks.Cuts(example, 20, 25, 40)
    assert all(torch.equal(one, other) for one, other in zip(whole[30], later[5], strict=True))
    assert len({whole[number][0].shape for number in range(20)}) == 20
    with pytest.raises(UsageError, match="can't be cut"):
        soaks.Cuts(example, 33, 0, 1)
    with pytest.raises(UsageError, match="too few"):
        soaks.soak(SOAKED[0], steps=16)


def test_threads_rest_where_they_are_told_to() -> None:
    neighbours = soaks.Neighbours()
    with neighbours.alive():
        for _ in range(3):
            with neighbours.resting():
                before = neighbours.nbytes
                time.sleep(0.05)
                assert neighbours.nbytes == before
            deadline = time.monotonic() + 10
            while neighbours.nbytes == before and time.monotonic() < deadline:
                time.sleep(0.01)
            assert neighbours.nbytes > before
    assert neighbours.spoilt == 0
