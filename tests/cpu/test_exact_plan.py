"""Small real steps: the planner against the exact one, which proves what the least seconds are."""

from __future__ import annotations

from functools import cache

import pytest

from lowtide import models
from lowtide.capture import capture
from lowtide.check import check
from lowtide.errors import BudgetError
from lowtide.measure import roofline
from lowtide.plan import plan
from lowtide.plan.emit import emit
from lowtide.plan.exact import Exact, exact
from lowtide.plan.order import captured_order, early_updates
from lowtide.plan.pebble import Board, least, one_shot
from lowtide.plan.problem import Problem, problem

CHAIN = "tanh-chain:length=5,width=64,batch=16"
TARGETS = (CHAIN, models.SMALL["tanh-chain"], models.SMALL["mlp"], models.SMALL["lstm"])
PARTS = (0.95, 0.9, 0.8, 0.6, 0.4, 0.2)  # of what the step adds with early updates


@cache
def arrays(target: str) -> Problem:
    """The step with roofline costs."""
    graph = capture(*models.build(target)).graph
    return problem(graph, roofline(graph))


def budget_of(step: Problem, part: float) -> int:
    return step.persistent + int(part * (step.peak(early_updates(step.graph)) - step.persistent))


@cache
def truth(target: str, part: float) -> Exact:
    step = arrays(target)
    return exact(step, budget_of(step, part))


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("target", TARGETS)
def test_the_exact_planner_proves_the_optimum_of_small_steps(target: str, part: float) -> None:
    step, found = arrays(target), truth(target, part)
    assert found.proven
    if found.sequence is None:
        return
    program = emit(step, found.sequence)
    assert check(step.graph, step.costs, program, budget=budget_of(step, part)) == step.peak(found.sequence)
    tighter = [truth(target, other) for other in PARTS if other < part]
    assert all(found.bound_seconds <= other.bound_seconds + 1e-12 for other in tighter)


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("target", TARGETS)
def test_no_plan_is_quicker_than_the_exact_one(target: str, part: float) -> None:
    step, found = arrays(target), truth(target, part)
    try:
        made = plan(step.graph, step.costs, budget_of(step, part), time_limit=0.1)
    except BudgetError:
        return
    assert made.seconds >= found.bound_seconds - 1e-12


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("target", TARGETS)
def test_plans_of_small_steps_are_optimal(target: str, part: float) -> None:
    step, found = arrays(target), truth(target, part)
    if found.sequence is None:
        with pytest.raises(BudgetError):
            plan(step.graph, step.costs, budget_of(step, part), time_limit=0.1)
        return
    made = plan(step.graph, step.costs, budget_of(step, part), time_limit=0.3)
    assert made.seconds == pytest.approx(found.bound_seconds)
    assert made.bound_seconds <= found.bound_seconds * (1 + 1e-9)


@pytest.mark.parametrize("name", ["mlp", "lstm", "gru", "unet", "resnet", "gpt"])
def test_one_shot_orders_of_real_steps_are_valid_and_near_their_bound(name: str) -> None:
    step = arrays(models.SMALL[name])
    early = early_updates(step.graph)
    order = one_shot(step, early)
    assert sorted(order) == list(captured_order(step.graph))
    assert check(step.graph, step.costs, emit(step, order)) == step.peak(order) <= step.peak(early)
    bound = step.persistent + least(Board(step, early))
    assert bound <= step.peak(order) <= bound + 0.2 * (bound - step.persistent)
