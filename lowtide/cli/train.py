"""`lowtide train`: a training run by a program within a budget, or in eager PyTorch."""

from __future__ import annotations

import math
import signal
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import torch
import typer

from lowtide import allocator
from lowtide.choice import Leave, Offload
from lowtide.cli import checkpoint
from lowtide.cli.loop import Eager, Keeper, Log, run, show_number, show_rate, what_persists
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
from lowtide.cli.talk import answering, show, show_json, talk, telling, working
from lowtide.cli.target import Built, build
from lowtide.data import Source, source
from lowtide.errors import FileError, LowtideWarning, ProgramError, UsageError
from lowtide.fit import Fitted, fit
from lowtide.peaks import storage_bytes
from lowtide.plan import TIME_LIMIT
from lowtide.report import (
    Table,
    offloaded,
    show_bytes,
    show_difference,
    show_offloaded,
    show_overhead,
    show_rewrite,
    show_seconds,
)
from lowtide.rewrites import KEEPS, Allowed, encode_rewrite, exactness, read_allow
from lowtide.simulate import simulate

Row = tuple[str, str, str]
MOST = 2**32 - 1  # a seed that every generator takes


def _file(words: str) -> Any:
    return typer.Option(dir_okay=False, metavar="<file>", help=words, show_default=False)


@answering
def train(
    target: Target,
    steps: Annotated[int, typer.Option(min=1, help="How many steps, with those before --resume.")] = 20,
    budget: Annotated[str | None, typer.Option(metavar="<bytes>", help=BUDGET, show_default=False)] = None,
    plan: Annotated[Path | None, _file("Train by this saved plan, instead of a budget.")] = None,
    offload: OffloadTo = None,
    offload_budget: OffloadBudget = None,
    offload_dir: OffloadDir = None,
    allow: Allow = None,
    rounding: Rounding = False,
    time_limit: TimeLimit = TIME_LIMIT,
    eager: Annotated[bool, typer.Option("--eager", help="Train in eager PyTorch instead, to compare.")] = False,
    on: Annotated[
        str | None,
        typer.Option(
            "--data",
            metavar="<name>",
            help="What to train on: `lowtide data` lists it.",
            show_default="the example batch",
        ),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(min=0, max=MOST, help="Of the data and of the run.", show_default="0")
    ] = None,
    save: Annotated[Path | None, _file("Keep a checkpoint here.")] = None,
    every: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="<steps>", help="How often to save; at the end anyway.", show_default="once a minute"
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the checkpoint of another run.")] = False,
    resume: Annotated[Path | None, _file("Go on from this checkpoint, as if the run had never stopped.")] = None,
    as_json: Json = False,
) -> None:
    """Train a model within a budget, and keep checkpoints."""
    asked = read_offload(offload, offload_budget, offload_dir, planned=plan is not None)
    allowed = Leave(read_allow(allow, rounding)).allowed
    _refuse_calls(budget, plan, eager, asked, allowed, save, every, force, resume)
    session = _start(target, on, seed, steps, resume)
    with _noting(session.notes), allocator.meter() if eager and allocator.available() else nullcontext():
        step = Eager(session.built) if eager else _fitted(session, budget, plan, asked, time_limit, allowed)
        keeper = None
        if save is not None:
            checkpoint.make_room(save)
            keeper = Keeper(save, every, session.take)
            keeper.keep()
        _train(session, step, steps, keeper)
    if as_json:
        show_json({**_as_json(session, step), "steps": steps, "saved": None if save is None else str(save)})
        return
    own = budget is not None or plan is not None
    rows = [*_rows(session, step, asked=own), *([] if save is None else [("checkpoint", f"step {steps}", str(save))])]
    show(Table("lrw", rows, (), ("", "bold", "")))
    for note in session.notes:
        talk().print(f"note: {note}", markup=False, soft_wrap=True)


def _refuse_calls(
    budget: str | None,
    plan: Path | None,
    eager: bool,
    asked: Offload,
    allowed: Allowed,
    save: Path | None,
    every: int | None,
    force: bool,
    resume: Path | None,
) -> None:
    """Raise where the options do not go together, before anything is built, captured or measured."""
    if budget is not None:
        refuse_early(budget)
        if plan is not None:
            raise UsageError("a saved plan has its own budget.", hint="pass --plan or --budget, not both.")
    if eager and (budget is not None or plan is not None):
        raise UsageError("eager PyTorch keeps to no budget.", hint="leave out --eager, or --budget and --plan.")
    if eager and asked != Offload():
        raise UsageError("eager PyTorch offloads nothing.", hint="leave out --eager or --offload.")
    if eager and allowed:
        raise UsageError("eager PyTorch is as it is.", hint="leave out --eager, or --allow and --rounding.")
    if save is None and (every is not None or force):
        raise UsageError("nothing is saved.", hint="--every and --force go with --save FILE.")
    again = resume is not None and save is not None and save.resolve() == resume.resolve()
    if save is not None and save.exists() and not again and not force:
        raise UsageError(f"{save} exists already.", hint=f"--resume {save} goes on with it, --force overwrites it.")


@dataclass(frozen=True)
class Session:
    """What is trained, on what, and how far it is."""

    target: str
    seed: int
    built: Built
    data: Source | None  # None: the example batch again and again
    log: Log
    resumed: int | None  # steps that were taken before
    notes: list[str] = field(default_factory=list)

    def batch(self, number: int) -> tuple[Any, ...]:
        """The batch of this step, counted from 0."""
        return self.built.example if self.data is None else self.data(number)

    def take(self) -> checkpoint.Checkpoint:
        """All that the rest of the run depends on."""
        name = None if self.data is None else self.data.name
        model, optimizer = self.built.model, self.built.optimizer
        return checkpoint.take(self.target, name, self.seed, self.log.losses, model, optimizer)


def _start(target: str, on: str | None, seed: int | None, steps: int, resume: Path | None) -> Session:
    """Build the target, and put it where the checkpoint was."""
    found = None
    if resume is not None:
        found = checkpoint.read(resume)
        found.check(resume, target=target, data=on, seed=seed, steps=steps)
        on, seed = found.data, found.seed
    seed = seed or 0
    torch.manual_seed(seed)
    with working("building the model"):
        built = build(target)
        batches = None if on is None else source(on, target, built.example, seed=seed)
    if found is None:
        return Session(target, seed, built, batches, Log([]), None)
    found.restore(built.model, built.optimizer)
    session = Session(target, seed, built, batches, Log(list(found.losses)), found.step)
    if found.made_with != checkpoint.made_with():
        session.notes.append(f"{resume} was made with {found.made_with}; here the bits may be others.")
    return session


def _fitted(
    session: Session, budget: str | None, plan: Path | None, asked: Offload, time_limit: float, allowed: Allowed
) -> Fitted:
    """The step as a program."""
    step, model, optimizer, example = session.built
    with telling("capturing the step") as tell:
        try:
            fitted = fit(
                step,
                model,
                optimizer,
                example=example,
                budget=budget,
                plan=plan,
                time_limit=time_limit,
                tell=tell,
                offload=asked.place,
                offload_budget=asked.budget,
                offload_dir=asked.folder,
                allow=str(allowed) or None,
            )
        except ProgramError as error:
            if plan is None:
                raise
            raise FileError(
                f"{plan} does not hold with these costs: {error.message.splitlines()[0]}",
                hint="it was planned with others, on another machine or with --costs roofline: plan again.",
            ) from error
    if not fitted.captured.graph.ops:
        raise UsageError(
            f"the step of {session.target} calls no op of torch.", hint="a training step computes something."
        )
    if plan is not None and fitted.plan.peak != (here := _predicted(fitted)):
        then = show_bytes(fitted.plan.peak)
        session.notes.append(f"planned with other costs: a peak of {then}, here {show_bytes(here)}.")
    return fitted


@contextmanager
def _noting(notes: list[str]) -> Iterator[None]:
    """Let warnings of lowtide be notes."""
    with warnings.catch_warnings():
        warnings.simplefilter("always", LowtideWarning)
        shown = warnings.showwarning

        def note(message: Warning | str, category: type[Warning], *where: Any, **options: Any) -> None:
            if issubclass(category, LowtideWarning):
                notes.append(str(message))
            else:
                shown(message, category, *where, **options)

        warnings.showwarning = note
        yield


def _train(session: Session, step: Eager | Fitted, steps: int, keeper: Keeper | None) -> None:
    """Take the steps; a run that is interrupted says how to go on, and ends here."""
    budget = None if step.plan is None else step.plan.budget
    try:
        ended = run(step, session.batch, steps, session.log, limit=budget, keeper=keeper)
    except KeyboardInterrupt:
        ended = signal.SIGINT
    if ended:
        if keeper is None:
            words = f"step {len(session.log.losses)} of {steps} was the last, nothing is saved."
        else:
            words = f"step {keeper.held} of {steps} is saved; go on with --resume {keeper.path}"
        talk().print(f"interrupted: {words}", markup=False, soft_wrap=True)
        raise typer.Exit(128 + ended)


def _as_json(session: Session, step: Eager | Fitted) -> dict[str, Any]:
    losses, built = session.log.losses, session.built
    if isinstance(step, Eager):
        persistent = storage_bytes(what_persists(built, built.example))
        promise = {**common(persistent=persistent, predicted=0, metered=step.peak), "predicted_peak": None}
        notes = session.notes
    else:
        graph = step.captured.graph
        persistent = step.costs.persistent(graph) - step.costs.elsewhere(graph)
        promise = common(persistent=persistent, predicted=_predicted(step), metered=step.peak)
        promise |= promised(step.plan) | {"chunks": step.chunks}
        promise["rewrites"] = [encode_rewrite(one) for one in step.plan.rewrites]
        promise["offloaded"] = [asdict(item) for item in offloaded(graph, step.costs, step.program)]
        notes = [*graph.notes, *session.notes]
    return {
        "target": session.target,
        **promise,
        "eager": isinstance(step, Eager),
        "first_loss": _finite(losses[0]),
        "last_loss": _finite(losses[-1]),
        "losses": [_finite(loss) for loss in losses],
        "steps_per_second": session.log.rate,
        "arena_bytes": step.arena_bytes,
        "mismatches": step.mismatches,
        "data": None if session.data is None else session.data.name,
        "seed": session.seed,
        "resumed_from": session.resumed,
        "notes": notes,
    }


def _rows(session: Session, step: Eager | Fitted, *, asked: bool) -> Iterator[Row]:
    """What came of the run, for a person."""
    losses, data = session.log.losses, session.data
    before = "" if session.resumed is None else f", {session.resumed} of them before"
    yield "loss", _change(losses[:1], losses[-1:]), f"over {len(losses)} steps{before}"
    tenth = len(losses) // 10
    if data is None:
        yield "data", "example", "one batch again and again"
    else:
        if tenth > 1:
            yield "mean loss", _change(losses[:tenth], losses[-tenth:]), f"of the first and the last {tenth} steps"
        yield "data", data.name, data.description.removeprefix(f"{data.name}: ")
    yield "steps a second", show_rate(session.log.rate), "in eager PyTorch" if isinstance(step, Eager) else ""
    off = "" if step.peak is not None else "it cannot be metered here"
    if isinstance(step, Fitted):
        bound, seconds = show_overhead(step.plan.bound), show_seconds(step.plan.planning_seconds)
        yield "overhead", show_overhead(step.plan.overhead), f"predicted; the bound is {bound}"
        if changing := [one for one in step.plan.rewrites if one.exactness != "bitwise"]:
            yield "rewritten", ", ".join(map(show_rewrite, changing)), KEEPS[exactness(changing)]
        if step.plan.budget is not None:
            yield "budget", show_bytes(step.plan.budget), f"{'' if asked else 'what is free; '}planned in {seconds}"
        predicted = _predicted(step)
        yield "predicted peak", show_bytes(predicted), ""
        if step.peak is not None:
            off = f"the prediction is off by {show_difference(step.peak, predicted)}"
        yield from show_offloaded(offloaded(step.captured.graph, step.costs, step.program))
    yield "metered peak", "-" if step.peak is None else show_bytes(step.peak), off
    if step.arena_bytes:
        yield "arena", show_bytes(step.arena_bytes), "of it, in one block"
    if step.mismatches:
        yield "mismatches", f"{step.mismatches:,}", "allocations that did not come as planned"


def _predicted(fitted: Fitted) -> int:
    """The peak of the program, with the costs of this machine."""
    staging = fitted.costs.staging if fitted.program.copies else 0
    return staging + simulate(fitted.captured.graph, fitted.costs, fitted.program).peak


def _change(first: Sequence[float | None], last: Sequence[float | None]) -> str:
    """The mean of the first losses and of the last ones."""
    return " -> ".join(show_number(fmean(part) if part else None) for part in map(_numbers, (first, last)))


def _numbers(losses: Sequence[float | None]) -> list[float]:
    return [loss for loss in losses if loss is not None]


def _finite(number: float | None) -> float | None:
    return number if number is not None and math.isfinite(number) else None
