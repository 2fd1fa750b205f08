"""Planning without a compiler: the same decisions as search.cpp, valid plans, one warning, no arena."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from graphs import Case, Costed, cases, costed, make_costed
from hypothesis import given, settings

from lowtide.check import check
from lowtide.errors import BudgetError, LowtideWarning
from lowtide.plan import compiled as compiling
from lowtide.plan import least, plain, plan
from lowtide.plan.exact import library as exact_library
from lowtide.plan.infeasible import floor
from lowtide.plan.layout import library as layout_library
from lowtide.plan.order import captured_order
from lowtide.plan.planning import BEST, METHODS, OFFLOAD, Planning
from lowtide.plan.problem import Ints, Problem, problem
from lowtide.plan.problem import library as search_library
from lowtide.plan.recompute import shave, tidy
from lowtide.plan.settings import SHAVING_PATIENCE
from lowtide.program import Plan

ROOT = Path(__file__).resolve().parents[2]
LIBRARIES = (search_library, exact_library, layout_library)
ENDLESS = 10**12  # places


@contextmanager
def no_compiler(*, quietly: bool = True) -> Iterator[None]:
    """A process in which nothing has been compiled, and nothing can be."""
    with (
        tempfile.TemporaryDirectory() as cache,  # what was compiled before would be taken, compiler or not
        mock.patch.dict(os.environ, CXX="/nonexistent", LOWTIDE_CACHE=cache),
        mock.patch.object(compiling, "_missing", []),
    ):
        for library in LIBRARIES:
            library.cache_clear()
        try:
            with warnings.catch_warnings():
                if quietly:
                    warnings.simplefilter("ignore", LowtideWarning)
                yield
        finally:
            for library in LIBRARIES:
                library.cache_clear()


def budgets(arrays: Problem, order: Ints) -> list[int]:
    high, low = arrays.peak(order), floor(arrays)[0]
    return [int(low + part * (high - low)) for part in (0.2, 0.5, 0.8)]


def plainly_shaved(arrays: Problem, sequence: Ints, budget: int, batch: int, penalty: float, work: int) -> Ints:
    return plain.shave(
        arrays,
        sequence,
        budget - arrays.persistent,
        batch=batch,
        penalty=penalty,
        weight=np.ones(len(arrays.nbytes)),
        smallest=0,
        most_seconds=SHAVING_PATIENCE * float(arrays.seconds.sum()),
        work=np.array([work]),
    )


@settings(max_examples=120, derandomize=True, deadline=None)
@given(costed(("graph", "step", "optional", "tree"), max_size=40))
def test_profile_shave_and_tidy_are_those_of_the_compiled_loops(case: Costed) -> None:
    arrays = problem(case.graph, case.costs)
    order = captured_order(case.graph)
    nothing_narrow = not arrays.rows
    for budget in budgets(arrays, order):
        for batch, penalty in ((1, 0.0), (4, 1.0)):
            shaved, peak = shave(arrays, order, budget, batch=batch, penalty=penalty)
            if nothing_narrow and peak <= budget:
                mine = plainly_shaved(arrays, order, budget, batch, penalty, ENDLESS)
                np.testing.assert_array_equal(mine, shaved)
            np.testing.assert_array_equal(plain.profile(arrays, shaved), arrays.profile(shaved))
            most = max(budget, peak)
            mine = plain.tidy(arrays, shaved, most - arrays.persistent, passes=4, work=np.array([ENDLESS]))
            np.testing.assert_array_equal(mine, tidy(arrays, shaved, most))


@settings(max_examples=100, derandomize=True, deadline=None)
@given(cases())
def test_a_stretch_of_a_step_has_the_profile_of_the_compiled_loops(case: Case) -> None:
    arrays = problem(case.graph, case.costs)
    order = captured_order(case.graph)
    for stretch in (order[:0], order[len(order) // 2 :], order[1:-1]):
        np.testing.assert_array_equal(plain.profile(arrays, stretch), arrays.profile(stretch))


def planned(planning: Planning, budget: int, method: str = BEST) -> Plan | int:
    """A plan, or the least budget that the error says can be planned."""
    try:
        return planning.within(budget, method)
    except BudgetError as error:
        return error.least or 0


@settings(max_examples=20, derandomize=True, deadline=None)
@given(cases())
def test_plans_are_valid_and_keep_their_budgets_or_errors_say_what_would_fit(case: Case) -> None:
    arrays = problem(case.graph, case.costs)
    order = captured_order(case.graph)
    with no_compiler():
        planning = Planning(case.graph, case.costs, time_limit=0.02)
        for budget in {*budgets(arrays, order), floor(arrays)[0], arrays.peak(order)}:
            found = planned(planning, budget)
            if isinstance(found, int):
                assert budget < found, "what is said to fit does"
                budget, found = found, planned(planning, found)
            assert isinstance(found, Plan)
            assert found.program.arena == 0
            assert found.peak == check(case.graph, case.costs, found.program, budget=budget)
            assert found.bound <= found.overhead + 1e-9


@pytest.mark.parametrize("seed", range(2))
def test_steps_are_hardly_slower_than_those_of_the_compiled_search(seed: int) -> None:
    case = make_costed("step", 120, seed)
    low, high = least(case.graph, case.costs).peak, plan(case.graph, case.costs).peak
    for part in (0.4, 0.7):
        budget = int(low + part * (high - low))
        best = plan(case.graph, case.costs, budget, time_limit=0.5)
        with no_compiler():
            one, again = (plan(case.graph, case.costs, budget, time_limit=0.5) for _ in range(2))
        assert one.program == again.program
        assert one.peak <= budget
        assert one.seconds <= 1.05 * best.seconds, (seed, budget)


def test_every_method_works() -> None:
    case = make_costed("step", 70, 1)
    high = plan(case.graph, case.costs).peak
    with no_compiler():
        planning = Planning(case.graph, case.costs, time_limit=0.02)
        low = planning.least().peak
        assert low < 0.95 * high
        for method in METHODS:
            if method == OFFLOAD:  # these graphs offer no copies; test_copies.py has some that do
                continue
            found = planned(planning, high, method)
            assert found == low if isinstance(found, int) else found.peak <= high


def test_shaving_ends_when_the_work_is_done() -> None:
    case = make_costed("step", 120, 2)
    arrays = problem(case.graph, case.costs)
    order = captured_order(case.graph)
    budget = budgets(arrays, order)[0]
    lengths = [
        len(
            plainly_shaved(
                arrays, order, budget, 1, 0.0, plain.PLAIN_PLACE * (plain.PLAIN_ROUND + 4 * len(order)) * rounds
            )
        )
        for rounds in (0, 3, 9)
    ]
    assert lengths[0] < lengths[1] < lengths[2]
    work = np.array([0])
    plain.tidy(arrays, order, budget, passes=1, work=work)
    assert work[0] < 0


SCRIPT = """
import sys
sys.path.insert(0, sys.argv[1])
from graphs import make_costed
from lowtide.check import check
from lowtide.plan import plan
case = make_costed("step", 100, 3)
most = plan(case.graph, case.costs).peak
for part in (0.9, 0.8):
    found = plan(case.graph, case.costs, int(part * most), time_limit=0.1)
    check(case.graph, case.costs, found.program, budget=int(part * most))
    print(found.overhead > 0, found.program.arena)
"""


def test_a_process_without_a_compiler_plans_and_warns_once(tmp_path: Path) -> None:
    environment = {**os.environ, "CXX": "/nonexistent/c++", "LOWTIDE_CACHE": str(tmp_path), "PYTHONPATH": str(ROOT)}
    arguments = [sys.executable, "-W", "always", "-c", SCRIPT, str(Path(__file__).parent)]
    result = subprocess.run(arguments, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout == "True 0\nTrue 0\n"
    assert result.stderr.count("LowtideWarning") == 1
    assert "the planner needs a C++ compiler, and $CXX names none: /nonexistent/c++." in result.stderr
    assert "hint: install a C++20 compiler" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_the_warning_is_one_that_can_be_caught() -> None:
    case = make_costed("step", 70, 0)
    with no_compiler(quietly=False), pytest.warns(LowtideWarning, match="made in plain Python instead") as caught:
        plan(case.graph, case.costs)
    assert len(caught) == 1
