"""The process of one contestant: `python -m lowtide.bench.racer TARGET WAY AMOUNT SECONDS`.

AMOUNT is a budget in bytes or a fraction, SECONDS the time for the search of a plan. It builds the target and prepares,
then takes commands, a line each, and answers each with a line of JSON. Whatever else is printed is talk.
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import torch

from lowtide import allocator, tree
from lowtide.allocator.arena import POOL
from lowtide.bench.peers import COMPILERS, checkpoint_blocks, compiled
from lowtide.capture import capture
from lowtide.cli.target import Built, build
from lowtide.errors import BudgetError, LowtideError
from lowtide.fit import Fitted, fit
from lowtide.measure import measure
from lowtide.peaks import storage_bytes
from lowtide.plan import as_eager, least
from lowtide.rewrite import with_narrow
from lowtide.simulate import simulate

SEED = 1234
STEPS = 5  # that are compared with eager's, and warm up

Answer = dict[str, Any]


@dataclass(frozen=True)
class Prepared:
    """A contestant at the start."""

    built: Built
    run: Callable[[], Any]  # one training step
    fitted: Fitted | None = None
    told: Answer = field(default_factory=dict)  # what is known before the first step


def prepare(target: str, way: str, amount: str, seconds: float) -> Prepared:
    """Build the target, and make of its step what the contestant makes of it."""
    built = build(target)
    step, model, optimizer, example = built
    if way == "lowtide":
        start = perf_counter()
        fitted = fit(step, model, optimizer, example=example, budget=int(amount), time_limit=seconds)
        told = {"prepare_seconds": perf_counter() - start}
        return Prepared(built, lambda: fitted(*example), fitted, told)
    net: Any = model
    if way == "checkpoint":
        checkpoint_blocks(target.partition(":")[0], model)
    elif way in COMPILERS:
        net = compiled(model, way, float(amount))
    return Prepared(built, lambda: step(net, optimizer, *example))


def survey(target: str) -> Answer:
    """What the budgets of a target are parts of, in bytes, and the seconds that it took to know it."""
    built = build(target)
    start = perf_counter()
    graph = with_narrow(capture(*built).graph)
    captured = perf_counter()
    costs = measure(graph)
    measured = perf_counter()
    found = least(graph, costs)
    return {
        "persistent": costs.persistent(graph),
        "eager_peak": simulate(graph, costs, as_eager(graph)).peak,
        "least": found.peak,
        "ops": len(graph.ordinary),
        "capture_seconds": captured - start,
        "measure_seconds": measured - captured,
        "least_seconds": perf_counter() - measured,
    }


def warm_up(contestant: Prepared) -> Answer:
    """Take the first steps, from the same random state in every process; a digest of all that they changed."""
    torch.manual_seed(SEED)
    seconds, results = [], []
    for _ in range(STEPS):
        start = perf_counter()
        results.append(contestant.run())
        seconds.append(perf_counter() - start)
    found = digest([*tree.flatten(results)[0], *everything(contestant.built), torch.get_rng_state()])
    return {**_promised(contestant.fitted), "digest": found, "warm_up_seconds": seconds}


def _promised(fitted: Fitted | None) -> Answer:
    """What the plan says, after the first steps, which may have led to a tighter one."""
    if fitted is None:
        return {}
    plan = fitted.plan
    return {
        "predicted_peak": plan.peak,
        "overhead": plan.overhead,
        "bound": plan.bound,
        "planning_seconds": plan.planning_seconds,
    }


def step(contestant: Prepared, count: int) -> Answer:
    """The seconds of a step, by so many at once."""
    start = perf_counter()
    for _ in range(count):
        contestant.run()
    return {"seconds": (perf_counter() - start) / count}


def meter(contestant: Prepared) -> Answer:
    """The peak of a step in bytes, with what was there before it.

    An arena was made by the first steps, where no meter saw it: its bytes are added. The outer meter makes the blocks
    of one step known, so that the inner one sees them go.
    """
    gc.collect()
    with allocator.meter():
        contestant.run()
        before = storage_bytes([*everything(contestant.built), *tree.flatten(contestant.built.example)[0]])
        arena = POOL.held()
        with allocator.meter() as inner:
            contestant.run()
    return {
        "before": before,
        "arena_bytes": arena,
        "metered_peak": before + arena + inner.peak,
        "mismatches": None if contestant.fitted is None else contestant.fitted.mismatches,
    }


def everything(built: Built) -> Iterator[Any]:
    """All that a step may change: parameters, gradients, buffers and optimizer state, always in the same order."""
    for parameter in built.model.parameters():
        yield parameter
        yield parameter.grad
    yield from built.model.buffers()
    if built.optimizer is not None:
        for group in built.optimizer.param_groups:
            for parameter in group["params"]:
                state = built.optimizer.state.get(parameter, {})
                yield from (state[key] for key in sorted(state))


def digest(leaves: Iterable[Any]) -> str:
    """The SHA-256 of tensors, bit for bit, and of other things as they are written."""
    found = hashlib.sha256()
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            found.update(f"{leaf.dtype} {tuple(leaf.shape)}".encode())
            found.update(leaf.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        else:
            found.update(repr(leaf).encode())
    return found.hexdigest()


def answer(contestant: Prepared, line: str) -> Answer:
    """What a command asks for."""
    word, _, number = line.partition(" ")
    match word:
        case "warm-up":
            return warm_up(contestant)
        case "step":
            return step(contestant, int(number))
        case "meter":
            return meter(contestant)
    raise ValueError(f"there is no command {line!r}")


def main() -> None:
    """Prepare, then answer commands until the input ends or one of them fails."""
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)  # compilers print, too

        def tell(what: Answer) -> None:
            print(json.dumps(what), file=answers, flush=True)

        target, way, amount, seconds = sys.argv[1:]
        try:
            if way == "survey":
                tell(survey(target))
                return
            contestant = prepare(target, way, amount, float(seconds))
            tell(contestant.told)
            for line in sys.stdin:
                tell(answer(contestant, line.strip()))
        except Exception as error:
            tell({"error": _reason(error), "infeasible": isinstance(error, BudgetError)})


def _reason(error: Exception) -> str:
    """What went wrong, in a line."""
    if isinstance(error, LowtideError):
        return error.message
    return " ".join([f"{type(error).__name__}:", *str(error).splitlines()[:1]])


if __name__ == "__main__":
    main()
