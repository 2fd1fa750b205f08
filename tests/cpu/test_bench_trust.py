"""The campaign of edits judges right: equal steps, planted differences, errors of either twin, refusals."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lowtide.bench.trust import campaign, compare, draw, twins
from lowtide.bench.trust.edits import Edit
from lowtide.bench.trust.life import START, Judgement, Life
from lowtide.errors import UsageError


def never_fit(twin: twins.Twin, *_: Any, **__: Any) -> None:
    """Let the second twin train in eager, too: what the campaign says of it is then known beforehand."""


@pytest.fixture
def life(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Life]:
    """Twins of which neither goes through a door of lowtide."""
    monkeypatch.setattr("lowtide.bench.trust.life.enter", never_fit)
    return lambda program="settings", number=0: Life(program, "fit", number, tmp_path)


def edit_of(life: Life, text: str) -> Edit:
    return next(edit for edit in draw.every_edit(life.left) if str(edit) == text)


@pytest.mark.parametrize("program", twins.PROGRAMS)
def test_eager_is_equal_to_eager_whatever_is_edited(life: Callable[..., Life], program: str) -> None:
    dice = random.Random(program)
    number, done = 0, 0
    while done < 25:
        born, number = life(program, number), number + 1
        assert born.step().verdict == "equal"
        for _ in range(8):
            edit = draw.draw(born.left, dice)
            assert edit is not None
            judgement = born.edit(edit)
            assert judgement is None or judgement.verdict in ("equal", "raises"), (str(edit), judgement)
            if judgement is None or judgement.verdict == "raises":
                break
            done += 1
        born.end()


def test_an_edit_can_be_undone(life: Callable[..., Life]) -> None:
    born = life()
    before = compare.state(born.left, copied=True)
    for edit in draw.every_edit(born.left):
        if edit.kind not in ("generator", "mode", "hook"):  # torch itself leaves a mark of a hook
            try:
                undo = edit.apply(born.left)
            except Exception:
                born = life()
                continue
            undo()
            assert not compare.differences(before, compare.state(born.left)), str(edit)


def test_a_planted_difference_is_found(life: Callable[..., Life]) -> None:
    born = life()
    take = born.right.take
    born.right.take = lambda *batch: take(*batch) * 1.0000001
    assert born.step().verdict == "different"


def test_a_change_that_one_twin_does_not_see_is_found(life: Callable[..., Life]) -> None:
    born = life()
    born.left.modules["program"].SETTINGS["gain"] = 2.0
    judgement = born.step()
    assert judgement.verdict == "different"
    assert "program.SETTINGS[gain]" in judgement.detail or "differ" in judgement.detail


def test_twins_have_nothing_in_common(life: Callable[..., Life]) -> None:
    born = life()
    edit = edit_of(born, 'container program.SETTINGS["gain"] * 1.25')
    edit.apply(born.left)
    assert born.left.modules["program"].SETTINGS["gain"] == 1.875
    assert born.right.modules["program"].SETTINGS["gain"] == 1.5


@pytest.mark.parametrize(
    ("error", "verdict"),
    [(UsageError("no."), "refused"), (KeyError("bias"), "crash")],
)
def test_errors_of_lowtide_are_judged(life: Callable[..., Life], error: Exception, verdict: str) -> None:
    born = life()

    def fail(*_: Any) -> None:
        raise error

    born.right.take = fail
    assert born.step().verdict == verdict


def test_a_refused_step_that_changed_something_is_marked(life: Callable[..., Life]) -> None:
    born = life()

    def fail(*_: Any) -> None:
        with torch.no_grad():
            next(born.right.model.parameters()).add_(1)
        raise UsageError("too late.")

    born.right.take = fail
    assert born.step() == Judgement("refused", "UsageError: too late.", halfway=True)


def test_an_error_that_only_eager_raises_is_a_difference(life: Callable[..., Life]) -> None:
    born = life()
    del born.left.modules["program"].SETTINGS["gain"]
    assert born.step().verdict == "different"


def test_both_raising_the_same_is_no_fault(life: Callable[..., Life]) -> None:
    born = life()
    assert born.edit(edit_of(born, 'container program.SETTINGS["gain"] deleted')) == Judgement(
        "raises", "KeyError: 'gain'"
    )


def test_generators_are_compared(life: Callable[..., Life]) -> None:
    born = life()
    take = born.right.take

    def draw_more(*batch: Any) -> Any:
        result = take(*batch)
        random.random()
        return result

    born.right.take = draw_more
    judgement = born.step()
    assert judgement.verdict == "different"
    assert "the generator of random" in judgement.detail


def test_the_start_is_no_edit() -> None:
    assert not START.value


def test_shares_add_up() -> None:
    given = campaign.shares(campaign.orders(0, campaign.pairs(), None), 2000)
    assert sum(order.edits for order in given) == 2000
    assert {order.program for order in given} == set(campaign.WEIGHTS)


@pytest.mark.long
def test_a_small_campaign_finds_nothing_wrong() -> None:
    pairs = [("settings", "fit"), ("epochs", "fit"), ("layers", "wrap"), ("mlp", "fit")]
    found = campaign.run(campaign.orders(7, pairs, None), 40, 1, lambda *_: None)
    assert not found.failures
    assert not found.wrong, [campaign.command(one) for one in found.wrong]
    assert found.share >= campaign.FAIR
