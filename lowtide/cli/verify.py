"""`lowtide verify`: steps within a budget beside eager PyTorch, every bit compared."""

from __future__ import annotations

from typing import Annotated, Any

import torch
import typer

from lowtide.choice import Leave, Offload
from lowtide.cli.plan import (
    BUDGET,
    Allow,
    OffloadBudget,
    OffloadDir,
    OffloadTo,
    Rounding,
    TimeLimit,
    read_offload,
    refuse_early,
)
from lowtide.cli.profile import Json, Target, common, promised
from lowtide.cli.talk import answering, counting, show, show_json, talk, telling, working
from lowtide.cli.target import Built, build
from lowtide.data import source
from lowtide.errors import VerifyError
from lowtide.fit import Fitted, fit
from lowtide.plan import TIME_LIMIT
from lowtide.program import Run
from lowtide.report import Table, show_bytes
from lowtide.rewrites import Allowed, Rewrite, encode_rewrite, read_allow
from lowtide.simulate import simulate
from lowtide.verify import ChangedVerifier

COMPARED = "results, parameters, buffers, gradients, optimizer state, generators, Python's variables"


@answering
def verify(
    target: Target,
    steps: Annotated[int, typer.Option(min=1, help="How many steps to compare.")] = 3,
    budget: Annotated[str, typer.Option(metavar="<bytes>", help=BUDGET)] = "50%",
    on: Annotated[
        str | None,
        typer.Option(
            "--data",
            metavar="<name>",
            help="What to train on: `lowtide data` lists it.",
            show_default="the example batch",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Of the data and of the run.")] = 0,
    offload: OffloadTo = None,
    offload_budget: OffloadBudget = None,
    offload_dir: OffloadDir = None,
    allow: Allow = None,
    rounding: Rounding = False,
    time_limit: TimeLimit = TIME_LIMIT,
    as_json: Json = False,
) -> None:
    """Take steps beside eager PyTorch, and compare every bit; what is allowed, beside itself without a plan."""
    refuse_early(budget)
    allowed = Leave(read_allow(allow, rounding)).allowed
    places = read_offload(offload, offload_budget, offload_dir)
    torch.manual_seed(seed)
    with working("building the model"):
        built = build(target)
        batches = None if on is None else source(on, target, built.example, seed=seed)
    fitted = _fitted(built, budget, places, allowed, time_limit)
    fitted.verify(steps, tell=lambda words: talk().print(f"note: {words}", markup=False, soft_wrap=True))
    try:
        with counting("verifying steps", patience=0) as progress:
            for number in range(steps):
                progress(number, steps)
                fitted(*(built.example if batches is None else batches(number)))
    except VerifyError as error:
        if as_json:
            show_json(_as_json(target, steps, fitted, error))
        raise
    if as_json:
        show_json(_as_json(target, steps, fitted, None))
        return
    assert fitted.verifier is not None
    tally = fitted.verifier.tally
    peak = "-" if fitted.peak is None else show_bytes(fitted.peak)
    runs = sum(isinstance(instruction, Run) for instruction in fitted.program.instructions)
    rows = [
        ("equal", f"{steps} of {steps} steps", f"to the bit, with {_twin(fitted)}"),
        *_apart(fitted),
        ("compared", f"{tally.tensors + tally.others:,} things", COMPARED),
        ("of them tensors", f"{tally.tensors:,}", f"{show_bytes(tally.nbytes)} a step"),
        ("budget", show_bytes(fitted.plan.budget or 0), ""),
        ("metered peak", peak, "of the program; eager ran beside it"),
        ("runs", f"{runs:,}", f"of {len(fitted.captured.graph.ordinary):,} ops"),
    ]
    show(Table("lrw", rows, (), ("", "bold", "")))


def _fitted(built: Built, budget: str, places: Offload, allowed: Allowed, time_limit: float) -> Fitted:
    step, model, optimizer, example = built
    with telling("capturing the step") as tell:
        return fit(
            step,
            model,
            optimizer,
            example=example,
            budget=budget,
            time_limit=time_limit,
            offload=places.place,
            offload_budget=places.budget,
            offload_dir=places.folder,
            allow=str(allowed) or None,
            tell=tell,
        )


def _twin(fitted: Fitted) -> str:
    """What the steps were compared with."""
    if not isinstance(fitted.verifier, ChangedVerifier):
        return "eager PyTorch"
    return f"the step after {', '.join(map(str, _changing(fitted)))}, run without a plan"


def _changing(fitted: Fitted) -> list[Rewrite]:
    return [one for one in fitted.plan.rewrites if one.exactness != "bitwise"]


def _apart(fitted: Fitted) -> list[tuple[str, str, str]]:
    """How far the steps are from eager's, where they are allowed to be."""
    found = fitted.verifier
    if not isinstance(found, ChangedVerifier):
        return []
    stated = ", ".join(f"{one.name} {one.error:.1e}" for one in _changing(fitted) if one.error is not None)
    error = [] if found.error is None else [("gradient", f"{found.error:.1e}", "of its norm off eager's, first step")]
    off = [] if found.off is None else [("update", f"{found.off:.1e}", "of its norm off eager's, first step")]
    return [*error, *off, *([("stated error", stated, "of the gradient, each alone")] if stated else [])]


def _as_json(target: str, steps: int, fitted: Fitted, error: VerifyError | None) -> dict[str, Any]:
    verifier, graph = fitted.verifier, fitted.captured.graph
    assert verifier is not None
    predicted = simulate(graph, fitted.costs, fitted.program).peak
    return {
        "target": target,
        **common(persistent=fitted.costs.persistent(graph), predicted=predicted, metered=fitted.peak),
        **promised(fitted.plan),
        "steps": steps,
        "verified": verifier.verified,
        "equal": error is None,
        "tensors": verifier.tally.tensors,
        "bytes": verifier.tally.nbytes,
        "others": verifier.tally.others,
        "rewrites": [encode_rewrite(one) for one in _changing(fitted)],
        "gradient_error": verifier.error if isinstance(verifier, ChangedVerifier) else 0.0,
        "update_off": verifier.off if isinstance(verifier, ChangedVerifier) else 0.0,
        "differing": [] if error is None else list(error.differing),
        "op": None if error is None else error.op,
        "message": None if error is None else error.message,
    }
