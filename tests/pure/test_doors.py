"""What the planner's C++ is handed is looked at there: wrong numbers are refused, and nothing is read past its end.

`make sanitize` runs these with the sanitizers, which would see what is read all the same.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from graphs import make_costed

from lowtide.errors import LowtideError
from lowtide.plan import layout
from lowtide.plan.exact import Game, exact, least_peak
from lowtide.plan.exact import library as exact_library
from lowtide.plan.problem import Problem, ints, library, problem
from lowtide.plan.recompute import _Race, shave, tidy

CASES = 150
WORK = 20_000  # places that a search looks at
ODD = (-(2**63), -(2**40), -2, -1, 0, 1, 2, 3, 7, 64, 2**31, 2**46, 2**62, 2**63 - 1)

pytestmark = pytest.mark.skipif(library() is None, reason="there is no compiler")


def some_problem(chance: random.Random) -> Problem:
    kind = chance.choice(("graph", "step", "optional"))
    case = make_costed(kind, chance.randint(1, 12), chance.randrange(10_000))
    return problem(case.graph, case.costs)


def damaged(chance: random.Random, array: Any) -> Any:
    """A copy with another number, fewer numbers or more, or of another kind."""
    found = array.copy()
    kind = chance.randrange(8)
    if kind == 0:
        return found[: chance.randrange(len(found) + 1)]
    if kind == 1:
        return np.concatenate([found, found, np.zeros(1, found.dtype)])
    if kind == 2:
        return found.astype(np.float32)
    if kind == 3 and len(found) > 1:
        return np.repeat(found, 2)[::2]
    for _ in range(chance.randint(1, 3)):
        if len(found):
            odd = chance.choice(ODD)
            where = chance.randrange(len(found))
            if found.dtype == np.float64:
                found[where] = chance.choice((float("nan"), float("inf"), -1.0, 1e308, float(odd)))
            elif found.dtype == np.uint8:
                found[where] = odd & 255
            else:
                found[where] = odd
    return found


def some_sequence(chance: random.Random, ops: int) -> Any:
    length = chance.randint(0, 3 * ops + 2)
    found = np.array([chance.randrange(max(1, ops)) for _ in range(length)], np.int64)
    return damaged(chance, found) if chance.random() < 0.3 else found


def allowed(*works: Callable[[], object]) -> None:
    """Each of these is done, or refused in words."""
    for work in works:
        try:
            work()
        except LowtideError as error:
            assert "belong to no graph" in error.message or "no memory" in error.message  # noqa: PT017


@pytest.mark.parametrize("seed", range(CASES))
def test_damaged_problems(seed: int) -> None:
    chance = random.Random(seed)
    found = some_problem(chance)
    names = [field.name for field in fields(found) if isinstance(getattr(found, field.name), np.ndarray)]
    broken = chance.sample(names, chance.choice((0, 1, 1, 2)))
    found = replace(found, **{name: damaged(chance, getattr(found, name)) for name in broken})
    sequence = some_sequence(chance, len(found.graph.ops))
    budget = chance.choice((0, -5, 100, 10_000, 2**40))
    work = np.array([WORK], np.int64)

    def searched() -> object:
        race = _Race(found, budget, 0, 0.0, 1e300, seed, None)
        return race._search(sequence, WORK, 0)

    allowed(
        lambda: found.profile(sequence),
        lambda: shave(found, sequence, budget, batch=chance.choice((1, 4, 0, -1)), work=work),
        lambda: tidy(found, sequence, budget),
        searched,
    )


@pytest.mark.parametrize("seed", range(CASES))
def test_damaged_games(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    chance = random.Random(seed)
    found = some_problem(chance)
    usual = Game.struct

    def struct(self: Game) -> Any:
        made = usual(self)
        for _ in range(chance.choice((0, 1, 2))):
            name = chance.choice(made._fields_)[0]
            if name in ("moves", "items", "ops", "pairs", "words"):
                setattr(made, name, min(getattr(made, name), chance.choice(ODD)))
                continue
            row = chance.choice([array for array in self.arrays if array.size])
            flat = row.reshape(-1)
            flat[chance.randrange(flat.size)] = np.array(chance.choice(ODD), np.int64).astype(row.dtype)
        return made

    monkeypatch.setattr(Game, "struct", struct)
    budget = found.persistent + chance.choice((0, 1000, 10**9))
    allowed(
        lambda: exact(found, budget, limit=2000, seconds=0.2),
        lambda: least_peak(found, limit=2000, seconds=0.2),
    )


@pytest.mark.parametrize("seed", range(CASES))
def test_damaged_boxes(seed: int) -> None:
    chance = random.Random(seed)
    count = chance.randint(0, 12)
    first = np.array([chance.randrange(12) for _ in range(count)], np.int64)
    last = first + np.array([chance.randint(1, 6) for _ in range(count)], np.int64)
    nbytes = 64 * np.array([chance.randint(1, 20) for _ in range(count)], np.int64)
    rows = [first, last, nbytes]
    if chance.random() < 0.7:
        which = chance.randrange(3)
        rows[which] = damaged(chance, rows[which])
    if max(map(abs, map(int, rows[1].tolist())), default=0) > 2**30:
        rows[1] = last  # the times would be too many to try
    buffers = layout.Buffers(*rows)
    order = np.array(chance.sample(range(count), count), np.int64)
    order = damaged(chance, order) if chance.random() < 0.3 else order
    weight, blamed = np.ones(len(rows[2])), np.zeros(len(rows[2]), np.int64)
    weight = damaged(chance, weight) if chance.random() < 0.3 else weight
    height = chance.choice((0, 640, 6400, 2**40))
    allowed(
        lambda: layout.first_fit(buffers, order),
        lambda: layout.skyline(buffers, height, weight, blamed, steps=500),
    )


def test_what_is_no_op_of_the_graph_is_refused() -> None:
    found = some_problem(random.Random(1))
    for op in (-1, len(found.graph.ops), 2**40):
        with pytest.raises(LowtideError, match="belong to no graph"):
            found.profile(np.array([0, op], np.int64))


def test_a_maker_that_is_no_op_is_refused() -> None:
    found = some_problem(random.Random(2))
    maker = found.maker.copy()
    maker[0] = len(found.graph.ops)
    with pytest.raises(LowtideError, match="belong to no graph"):
        replace(found, maker=maker).profile(np.zeros(1, np.int64))


def test_a_game_of_too_many_states_or_words_is_refused() -> None:
    inner = exact_library()
    assert inner is not None
    game, answer, room = Game(some_problem(random.Random(3))), np.zeros(2, np.int64), np.zeros(64, np.int64)
    for words, limit in ((0, 10), (3, 10), (1 << 40, 10), (game.words, 1 << 40)):
        made = game.struct()
        made.words = words
        assert inner.lowtide_exact(made, 0, limit, 1.0, 0, ints(room), 64, ints(answer)) == -101
