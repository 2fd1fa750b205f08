"""Residual networks: of a thousand layers (Chen et al. 2016), and of fifty."""

from __future__ import annotations

from time import perf_counter

from lowtide.bench.classics.claim import Figure, Found, show, yes
from lowtide.bench.classics.duel import duel
from lowtide.capture import capture
from lowtide.costs import Costs
from lowtide.errors import BudgetError
from lowtide.fit import Fitted, fit
from lowtide.graph import Graph
from lowtide.measure import measure, roofline
from lowtide.models import build
from lowtide.peaks import resident
from lowtide.plan import TIME_LIMIT, plan
from lowtide.rewrite import with_narrow

DEEP = "resnet:stages=3-130-197-3"
TINY = "resnet:stages=2-3-3-2,width=8,classes=10"
GB = 10**9
MAPS, MAPS_OVERHEAD = 3 * GB, 0.30  # the step's own part
WHOLE, WHOLE_OVERHEAD = 7 * GB, 0.18  # with parameters, gradients and momentum
AIM = 6 * GB  # of the executed step
WAIT = 180.0  # seconds of capture, measuring and planning
LONG = 60.0  # seconds of search for a plan of a thousand layers
STEPS = 2  # the first one learns what its ops allocate, the second runs in its arena
ROUNDS = 7


def deep_plan(small: bool) -> Found:
    """Plan a thousand layers for two budgets, with roofline costs."""
    target = f"{TINY},batch=4,size=64" if small else f"{DEEP},batch=32,size=224"
    begun = perf_counter()
    graph = with_narrow(capture(*build(target)).graph)
    captured = perf_counter()
    measure(graph, cache=False)
    measured = perf_counter()
    costs = roofline(graph)
    persistent = costs.persistent(graph)
    limit = TIME_LIMIT / 10 if small else LONG
    free = plan(graph, costs, time_limit=limit)
    budgets = (persistent + MAPS, WHOLE)
    if small:
        budgets = (persistent + (free.peak - persistent) // 2, persistent + (free.peak - persistent) * 3 // 4)
    maps, whole = (plan(graph, costs, budget, time_limit=limit) for budget in budgets)
    wait = measured - begun + max(maps.planning_seconds, whole.planning_seconds)
    chen = "48 -> 7 GB at +30%"
    return Found(
        (
            Figure("feature maps and gradients", maps.peak - persistent, "bytes", chen, most=budgets[0] - persistent),
            Figure("their overhead", maps.overhead, "overhead", chen, most=MAPS_OVERHEAD),
            Figure("the whole step", whole.peak, "bytes", chen, most=budgets[1]),
            Figure("its overhead", whole.overhead, "overhead", chen, most=WHOLE_OVERHEAD),
            Figure("without recomputation", free.peak - persistent, "bytes", "48 GB"),
            Figure("captured in", captured - begun, "seconds"),
            Figure("measured in", measured - captured, "seconds"),
            Figure("captured, measured and planned in", wait, "seconds", "2.5 h (HiRemate)", most=WAIT),
        )
    )


def deep_step(small: bool) -> Found:
    """Take full steps of a thousand layers at batch 32."""
    target = f"{TINY},batch=4,size=64" if small else f"{DEEP},batch=32,size=224"
    most: int | str = "60%" if small else WHOLE
    train, example, seconds = _fitted(target, "50%" if small else AIM, most, TIME_LIMIT / 10 if small else LONG)
    assert train.plan.budget is not None
    bar, aim = (train.plan.budget, train.plan.budget) if small else (WHOLE, AIM)
    resident.reset_peak()
    times = []
    for _ in range(STEPS):
        begun = perf_counter()
        train(*example)
        times.append(perf_counter() - begun)
    assert train.peak is not None
    return Found(
        (
            Figure("metered peak of the whole step", train.peak, "bytes", "7 GB planned (Chen)", most=bar),
            Figure(f"within the aim, {show(aim, 'bytes')}", float(train.peak <= aim), "yes"),
            Figure("planned overhead", train.plan.overhead, "overhead", "+30%"),
            Figure("its time, in the arena", times[-1], "seconds"),
            Figure("the first step's time", times[0], "seconds"),
            Figure("prepared in", seconds, "seconds"),
            Figure("resident, with Python and torch", resident.peak(), "bytes"),
        )
    )


def _fitted(target: str, aim: int | str, most: int | str, limit: float) -> tuple[Fitted, tuple[object, ...], float]:
    """The step within the aim, or within the most that it may have, its batch, and the seconds that it took."""
    step, model, optimizer, example = build(target)
    begun = perf_counter()
    try:
        train = fit(step, model, optimizer, example=example, budget=aim, time_limit=limit)
    except BudgetError:
        train = fit(step, model, optimizer, example=example, budget=most, time_limit=limit)
    return train, example, perf_counter() - begun


def deep_equal(small: bool) -> Found:
    """Hold a thousand layers against eager at a batch where eager fits."""
    target = f"{TINY},batch=2,size=64" if small else f"{DEEP},batch=2,size=224"
    part, limit = (2, TIME_LIMIT / 10) if small else (10, LONG)
    found = duel(target, lambda eager: eager.before + eager.own // part, rounds=0, time_limit=limit, apart=True)
    return Found(
        (
            yes("all that 5 steps change is eager's, bit for bit", found.equal),
            Figure("own part, against eager", found.less, "times", least=float(part)),
            Figure("metered peak", found.lowtide.peak, "bytes", most=found.budget),
            Figure("eager's", found.eager.peak, "bytes"),
        )
    )


def deep_small(small: bool) -> Found:
    """Race a thousand layers on small images against eager."""
    target = f"{TINY},batch=2,size=64" if small else f"{DEEP},batch=4,size=64"
    return _raced(target, part=2 if small else 7, most=None if small else 1.15, published="48 -> 7 GB at +30%")


def fifty(small: bool) -> Found:
    """Race ResNet-50 within a quarter of what eager's step adds."""
    target = f"{TINY},batch=4,size=64" if small else "resnet:batch=32,size=224"
    part, most = (2, None) if small else (4, 1.12)
    return _raced(target, part=part, most=most, published="15.06 -> 4.99 GB at +12% (MONeT)")


def _raced(target: str, *, part: int, most: float | None, published: str) -> Found:
    """Lowtide with a part of eager's own part, and its time; without a limit on that the race is short."""
    rounds, limit = (1, TIME_LIMIT / 10) if most is None else (ROUNDS, LONG)
    found = duel(target, lambda eager: eager.before + eager.own // part, rounds=rounds, time_limit=limit)
    return Found(
        (
            Figure("own part, against eager", found.less, "times", published, least=float(part)),
            Figure("time, of eager's", found.time_ratio, "time", published, most=most),
            yes("all that 5 steps change is eager's, bit for bit", found.equal),
            Figure("metered peak", found.lowtide.peak, "bytes", most=found.budget),
            Figure("eager's", found.eager.peak, "bytes"),
            Figure("planned overhead", found.overhead, "overhead"),
            Figure("a step", found.seconds, "seconds"),
            Figure("eager's", found.eager_seconds, "seconds"),
        )
    )


def sharing(small: bool) -> Found:
    """Plan ResNet-50 without recomputation, and hold it against a step that shares nothing."""
    target = f"{TINY},batch=4,size=64" if small else "resnet:batch=32,size=224"
    graph = capture(*build(target)).graph
    costs = roofline(graph)
    nothing = unshared(graph, costs)
    found = plan(graph, costs)
    shared = found.peak - costs.persistent(graph)
    return Found(
        (
            Figure("less than with nothing shared", nothing / shared, "times", "2 to 3 times (Chen)", least=2.6),
            Figure("nothing shared: all feature maps and gradients", nothing, "bytes", "9.87 GB"),
            Figure("shared: the own part of the plan", shared, "bytes", "3.71 GB"),
            Figure("planned overhead", found.overhead, "overhead", most=1e-6),
        )
    )


def unshared(graph: Graph, costs: Costs) -> int:
    """The bytes of all feature maps and their gradients, where each has memory of its own for the whole step.

    Gradients of parameters and what the update makes are left out, though the plan's own part has them.
    """
    lasting = graph.lasting_storages
    made = {
        value for op in graph.ordinary if graph.ops[op].phase in ("forward", "backward") for value in graph.makes[op]
    }
    kinds = ("activation", "activation gradient")
    maps = (value for value in made if graph.values[value].kind in kinds)
    return sum(costs.nbytes[value] for value in maps if graph.values[value].storage not in lasting)
