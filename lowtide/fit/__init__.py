"""The front door: a training step and a budget in, the same step within the budget out."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

from lowtide import report
from lowtide.capture import ONE_AT_A_TIME
from lowtide.capture.door import refuse_to_run
from lowtide.captured import Captured
from lowtide.changes import Changes
from lowtide.costs import Costs
from lowtide.errors import UsageError
from lowtide.execute import Batch, Key, StaleError
from lowtide.execute.timings import Timings
from lowtide.fit import forms
from lowtide.fit.kept import Kept
from lowtide.fit.make import WHOLE, Fit, Maker, Making, Manner
from lowtide.fit.moving import Moving, every_of
from lowtide.fit.plainly import Plainly
from lowtide.fit.pressure import Pressure
from lowtide.fit.ranks import of as of_ranks
from lowtide.fit.request import CostsFrom, PlanFrom, Request, Tell
from lowtide.fit.shards import local
from lowtide.graph import Place
from lowtide.guards import Change
from lowtide.page import Looks, page_of
from lowtide.plan import TIME_LIMIT
from lowtide.program import Plan, Program
from lowtide.rewrites import exactness
from lowtide.verify import ChangedVerifier, Verifier, announce, refuse_call
from lowtide.verify.copies import Copy

__all__ = ["CostsFrom", "Fit", "Fitted", "Manner", "PlanFrom", "Request", "Tell", "fit"]


class Fitted:
    """A training step that runs by its program; call it with a batch as you would call the step.

    `request` is what is asked, `example` the batch that it is planned for first, and `manner` how the step is captured
    and called, where that is not as a whole.
    """

    def __init__(self, request: Request, example: tuple[Any, ...], manner: Manner = WHOLE) -> None:
        refuse_to_run(request.model)
        self._request, self._manner = request, manner
        self._changes = Changes()
        self._ranks = of_ranks(request)  # that take its steps together
        self._maker = Maker(request, manner, self._ranks)
        self._kept = Kept[Pressure]()
        self._local = local(request)  # in which its steps are made and taken
        with self._local:
            made = self._maker.make(example)
            self._keep(Batch.of(example).key, made)
        self.verifier: Verifier | ChangedVerifier | None = None  # of the steps that run beside eager
        self._moving = Moving()

    def __call__(self, *batch: Any) -> Any:
        """One training step; returns what the step returns, detached."""
        self._changes.step()
        if self.verifier is not None and self.verifier.left:
            return self.verifier.check(batch, self._call, lambda: self._latest.runner)
        result = self._call(*batch)
        if self._moving.due(self.plan):
            self.give_back()  # so that the move has room
            self._moving.move(self._request.model)
        return result

    def _call(self, *batch: Any) -> Any:
        if self._ranks is None:
            return self._take(batch)
        self._ranks.step()
        try:
            with self._local:
                return self._take(batch)
        except BaseException as error:
            self._ranks.fail(error)
            raise

    def _take(self, batch: tuple[Any, ...]) -> Any:
        given = Batch.of(batch)
        change, result = self._take_known(given)
        if change is None:
            return result
        with ONE_AT_A_TIME:
            if self._ranks is None:  # what changed may have been the trace of another thread, which has ended
                change, result = self._take_known(given)
            if change is None:
                return result
            self._changes.note(change)
            self._request.say(f"{change.what}: the step is captured anew, within the same budget")
            together = self._ranks is not None and self._ranks.needs()
            made = self._maker.make(batch, self._changes.numbers, known=self._fits, together=together)
        one = self._keep(given.key, made)
        result = one.take(given)
        one.hold()
        return result

    def _take_known(self, given: Batch) -> tuple[Change | None, Any]:
        """What a step that is kept returns; or the first change because of which none can be taken."""
        change: Change | None = None  # with its error the frames that hold the batch would stay
        for one in self._kept.candidates(given.key):
            try:
                result = one.take(given)
            except StaleError as error:
                change = change or error.change
                continue
            self._kept.use(given.key, one)
            one.hold()
            return None, result
        assert change is not None
        return change, None

    def find(self, batch: Batch, suits: Callable[[Fit], bool], why: str) -> Fit:
        """A step for this batch that suits: one that is kept or, for the reason that is given, a new one."""
        one = next((one for one in self._kept if suits(one.fit)), None)
        if one is None:
            self._request.say(f"{why}: the step is captured anew")
            arguments = tuple(batch.structure.build(batch.leaves))
            one = self._keep(batch.key, self._maker.make(arguments, self._changes.numbers, known=self._fits))
        self._kept.use(batch.key, one)
        return one.fit

    def _keep(self, key: Key, made: Fit) -> Pressure:
        one = Pressure(made, self._maker)
        self._kept.use(key, one)
        return one

    @property
    def captured(self) -> Captured:
        """The step as data, as it last ran."""
        return self._latest.runner.captured

    @property
    def costs(self) -> Costs:
        """What its ops cost, as it last ran."""
        return self._latest.costs

    @property
    def plan(self) -> Plan:
        """What the program promises, as it last ran."""
        return self._latest.plan

    @property
    def chunks(self) -> int:
        """How many calls in time each recurrent layer is cut into, as it last ran; 1 without `rounding`."""
        return self._latest.chunks

    @property
    def program(self) -> Program:
        """The program, as it last ran."""
        return self._latest.runner.program

    @property
    def source(self) -> str:
        """The Python source of the program, as it last ran."""
        return self._latest.runner.source

    @property
    def timings(self) -> Timings:
        """What its steps took, and the ops in the first of them, as it last ran."""
        return self._latest.runner.timings

    @property
    def peak(self) -> int | None:
        """The most bytes that any step held, metered; None before the first, and where there is no meter."""
        return max((fit.runner.peak for fit in self._fits if fit.runner.peak is not None), default=None)

    @property
    def arena_bytes(self) -> int:
        """The bytes of the one block that holds what a step makes, between steps too; 0 where there is none."""
        return max(fit.runner.arena_bytes for fit in self._fits)

    @property
    def mismatches(self) -> int:
        """How many allocations of all steps did not come as they were planned; they went outside the arena."""
        return sum(fit.runner.mismatches for fit in self._fits)

    @property
    def makings(self) -> tuple[Making, ...]:
        """What it took to make each of its steps so far: the first, and those for other batches."""
        return tuple(self._maker.makings)

    def pack(self, *batch: Any) -> tuple[Any, ...]:
        """The batch as the step holds it: as bytes with `input8`, so that nobody need keep the floats, or as it is."""
        return forms.packed_batch(self.captured.graph, batch)

    def dense(self) -> AbstractContextManager[Any]:
        """A context with the plain model, as for an evaluation; says the bytes, and packs again what changed."""
        return forms.dense(self._request.model, self._request.say)

    def state_dict(self) -> dict[str, Any]:
        """What is there in parts: with the state_dict of model and optimizer, a run goes on to the bit."""
        return forms.state_of(self._request.model, self._request.optimizer) | self._moving.state()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Put back what `state_dict` returned, once a step has put model and optimizer into parts."""
        self._latest.runner.binding.wholes.settle()
        parts, steps = Moving.taken_apart(state)
        forms.load_state(self._request.model, self._request.optimizer, parts, moved=bool(every_of(self.plan)))
        self._moving.steps = steps

    def give_back(self) -> None:
        """Give the system the arena that waits for the next step, which maps it anew."""
        self._latest.runner.device.arenas.empty()

    def explain_guards(self) -> str:
        """What the program assumes about the world around it, one thing a line."""
        return "\n".join(self.captured.guards.explain())

    def verify(self, steps: int, *, tell: Tell | None = None) -> None:
        """Let the next steps run in eager PyTorch, too, on copies, and compare every bit; `tell` is told its price."""
        if self._ranks is not None:
            raise UsageError(
                "a step of several ranks can't run beside eager's: both would speak to the other ranks.",
                hint="compare two runs, with lowtide and without: parameters and losses are equal to the bit.",
            )
        if self._manner.alone is not None:
            raise UsageError(
                self._manner.alone,
                hint="give the whole step to lowtide.fit(step, model, optimizer, example=..., verify=3).",
            )
        fit, asked = self._latest, self._request
        persistent = fit.costs.persistent(self.captured.graph)
        refuse_call(steps)
        self.verifier = self._verifier(steps)
        announce(steps, peak=fit.plan.peak, eager_peak=fit.eager_peak, persistent=persistent, tell=tell or asked.tell)

    def _verifier(self, steps: int) -> Verifier | ChangedVerifier:
        asked = self._request
        if exactness(self.plan.rewrites) == "bitwise":
            return Verifier(asked.step, asked.model, asked.optimizer, steps)

        def captured(copied: Copy, batch: tuple[Any, ...]) -> Captured:
            theirs = replace(asked, step=copied.step, model=copied.model, optimizer=copied.optimizer)
            return self._manner.capture(theirs, batch, ())

        plainly = Plainly(captured, asked.allowed)
        return ChangedVerifier(asked.step, asked.model, asked.optimizer, steps, plainly, lambda: self.plan.rewrites)

    def report(
        self, html: str | os.PathLike[str] | None = None, *, looks: Looks | None = None, force: bool = False
    ) -> str:
        """What the plan does and what was measured, for a person; `html` is a file for a page of it, with much more.

        For the page other budgets and changes are planned, which takes some seconds; `looks` says how much of that.
        """
        fit = self._latest
        graph = self.captured.graph
        summary = report.summarize(graph, fit.costs, fit.plan, eager_peak=fit.eager_peak)
        if html is not None:
            self._write_page(html, looks, force)
        resident = sum(one.runner.away.resident for one in self._fits)
        measured = report.Measured(
            self.peak, self.arena_bytes, self.mismatches, len(self._kept), fit.runner.timings.step, resident
        )
        return report.show_fitted(summary, measured)

    def _write_page(self, path: str | os.PathLike[str], looks: Looks | None, force: bool) -> None:
        """A page of the step as it last ran."""
        report.refuse_page(path, force=force)
        fit, asked = self._latest, self._request
        name = type(asked.model).__name__
        heading = report.Heading(name, _optimizers(asked.optimizer), report.describe_costs(fit.costs))
        metered = report.Metered(peak=fit.runner.peak, seconds=fit.runner.timings.step)
        notes = [*self.captured.graph.notes, *fit.costs.notes]
        page = page_of(
            heading,
            self._maker.situation(fit),
            asked="" if asked.budget is None else str(asked.budget),
            metered=metered,
            looks=looks,
            notes=notes,
            tell=asked.say,
        )
        report.write_page(path, page.to_json(), kind="report", title=f"{name} · lowtide", force=force)

    @property
    def _fits(self) -> list[Fit]:
        """The step for each kind of batch that is kept, the latest first."""
        return [one.fit for one in self._kept]

    @property
    def _latest(self) -> Fit:
        return self._kept.latest.fit


def _optimizers(optimizer: Any) -> str:
    """The optimizers as a person calls them."""
    found = optimizer if isinstance(optimizer, tuple | list) else () if optimizer is None else (optimizer,)
    return ", ".join(type(one).__name__ for one in found) or "no optimizer"


def fit(
    step: Callable[..., Any],
    model: Any,
    optimizer: Any = None,
    *,
    example: tuple[Any, ...],
    budget: int | str | None = None,
    plan: PlanFrom | None = None,
    time_limit: float = TIME_LIMIT,
    tell: Tell | None = None,
    costs: CostsFrom = "measured",
    offload: Place | None = None,
    offload_budget: int | str | None = None,
    offload_dir: str | os.PathLike[str] | None = None,
    allow: str | Iterable[str] | None = None,
    rounding: bool = False,
    verify: int = 0,
) -> Fitted:
    """Return `step` as a step that does the same arithmetic and never holds more than the budget.

    Results equal eager's to the bit, unless `allow` says otherwise.

    - `step`: the function to call, as `step(model, optimizer, *batch)`; what it returns, the fitted step returns.
    - `model`, `optimizer`: what it trains, and with what: an optimizer, a tuple of them, or None.
    - `example`: a batch, the arguments after the optimizer. Batches of other shapes are planned when they come, within
      the same budget.
    - `budget`: the peak of the whole step in bytes, "2GiB", or "50%": what persists between steps and half of what
      eager's step adds to it; "least": as few bytes as can be planned with all that is allowed, for each shape. Without
      one it is what is free on the machine.
    - `plan`: in place of a budget, a plan of this step, or the file that it was saved to.
    - `time_limit`: seconds of planning at most; a step that takes little time is planned in less.
    - `tell`: is told, in one line each, what happens before the first step and when another batch is planned. Without
      one, what takes longer than two seconds is said on stderr.
    - `costs`: "roofline" estimates the ops instead of measuring them: quicker to fit, but what they hold inside is
      unknown, and the budget may be missed.
    - `offload`: "disk" lets values wait in a file where that is quicker than to make them again; and where the budget
      asks for it, optimizer state and parameters live there between steps, as ordinary tensors. The budget is of the
      memory that is left.
    - `offload_budget`: the bytes that may be there, "20GiB"; most of what is free by default.
    - `offload_dir`: the folder of the file, which has no name and is gone with the process.
    - `allow`: what may change the bits, each only where it is needed: "rounding" (what gives the same results up to
      rounding: the batch, the loss or large ops in parts, layers of an nn.LSTM cut in time), "lossy" (less precision,
      fewer numbers, too), or names: "chunked-loss", "sparse:0.3", "weights16,state8". `report()` says what was used.
    - `rounding`: short for `allow="rounding"`.
    - `verify`: so many first steps also run in eager PyTorch, on copies, and every bit is compared; that needs eager's
      memory beside the budget, which is said first. A difference is a VerifyError that names what differs and the
      first op that does, and the step is undone. With `allow`, the same rewritten step is what every bit is compared
      with, run without a plan, and how far eager is from it is known then.
    """
    refuse_call(verify)
    request = Request(
        step,
        model,
        optimizer,
        budget=budget,
        plan=plan,
        time_limit=time_limit,
        costs=costs,
        offload=offload,
        offload_budget=offload_budget,
        offload_dir=offload_dir,
        allow=allow,
        rounding=rounding,
        tell=tell,
    )
    fitted = Fitted(request, example)
    if verify:
        fitted.verify(verify)
    return fitted
