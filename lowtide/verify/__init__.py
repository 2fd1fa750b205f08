"""For people who do not want to believe us: steps that run beside eager PyTorch on copies, every bit compared."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from lowtide.budget import free_memory
from lowtide.errors import LowtideWarning, UsageError, VerifyError
from lowtide.execute import Runner
from lowtide.verify.blame import Blame, Eager, find_blame, repeated
from lowtide.verify.changed import ChangedVerifier
from lowtide.verify.compare import MISSING, Difference, Run, Tally, compare, generators, put_generators, variables_of
from lowtide.verify.copies import Copy

__all__ = ["ChangedVerifier", "Tally", "Verifier", "announce", "refuse_call"]

SHOWN = 5  # differences that an error lists
REACHES = "it reaches what it trains by another way than its arguments and the variables that it names itself."


def refuse_call(steps: Any) -> None:
    """Raise where so many steps can't be compared."""
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 0:
        raise UsageError(f"verify={steps!r} is no number of steps.", hint="verify=3 compares the first three.")


def announce(steps: int, *, peak: int, eager_peak: int, persistent: int, tell: Callable[[str], None] | None) -> None:
    """Say what verified steps need beside the budget, in bytes: eager's whole step, and one more copy to go back to.

    `peak` is that of the planned step. Raise where the machine does not have that much.
    """
    beside = eager_peak + persistent
    what = (
        f"the next {steps} steps run beside eager PyTorch: {beside:,} bytes above the budget, {eager_peak:,} for "
        f"eager's step on a copy and {persistent:,} for a copy to go back to"
    )
    need, free = beside + peak - persistent, free_memory()
    if need > free:
        raise UsageError(
            f"{what}. With the planned step that is {need:,} bytes, and {free:,} are free.",
            hint="verify with a smaller batch or model, or where there is more memory.",
        )
    if tell is not None:
        tell(what)
    else:
        warnings.warn(f"{what}.", LowtideWarning, stacklevel=4)


class Verifier:
    """Runs steps in eager PyTorch, too, on copies, and compares; where a bit differs it says which op is to blame.

    Variables that the step names are copied with it. What it does beyond them (files, prints, globals of other
    modules) happens twice.
    """

    def __init__(self, step: Callable[..., Any], model: torch.nn.Module, optimizer: Any, steps: int) -> None:
        refuse_call(steps)
        self._step, self._model, self._optimizer = step, model, optimizer
        self.left = steps  # that are still to be verified
        self.verified = 0  # steps that were the same to the bit
        self.tally = Tally()  # of the last of them

    def check(self, batch: tuple[Any, ...], run: Callable[..., Any], runner: Callable[[], Runner]) -> Any:
        """Take one step by `run`, compare it with eager's, and return its result; `runner` says what ran it."""
        before, states = self._copy(batch), generators()
        eager = self._copy(batch)
        expected = self._eager(eager, before, batch, states)
        put_generators(states)
        result = run(*batch)
        self.tally = Tally()
        if differences := compare(expected, self._run(batch, eager, result, generators()), self.tally):
            del result
            raise self._answer(differences, self._find(batch, runner(), expected, before, states))
        self.left -= 1
        self.verified += 1
        return result

    def _copy(self, batch: tuple[Any, ...]) -> Copy:
        return Copy(self._step, self._model, self._optimizer, batch)

    def _run(self, batch: tuple[Any, ...], copied: Copy, result: Any, states: Mapping[str, Any]) -> Run:
        """The caller's own objects as a run."""
        return Run(self._model, self._optimizer, batch, result, variables_of(copied, ours=False), states)

    def _eager(self, eager: Copy, before: Copy, batch: tuple[Any, ...], states: Mapping[str, Any]) -> Run:
        """The step in eager PyTorch on its copy, which must leave the caller's own objects alone."""
        try:
            result = eager.step(eager.model, eager.optimizer, *eager.batch)
        except Exception as error:
            before.restore()
            put_generators(states)
            raise VerifyError(
                f"eager PyTorch itself fails on this step: {type(error).__name__}: {error}",
                hint="a step that eager can't take can't be compared; nothing was changed.",
            ) from error
        touched = compare(_as_run(before, None, {}), self._run(batch, before, None, {}))
        if touched:
            before.restore()
            put_generators(states)
            raise UsageError(
                f"the step was given copies and changed {touched[0].name} of the real ones: {REACHES}",
                hint="use the model and the optimizer that the step is called with; without verify nothing is copied.",
            )
        return _as_run(eager, result, generators())

    def _find(
        self, batch: tuple[Any, ...], runner: Runner, expected: Run, before: Copy, states: Mapping[str, Any]
    ) -> Blame:
        """Run both again to find the first op that differs, and put everything back."""

        def back() -> None:
            before.restore()
            put_generators(states)

        try:
            back()
            runner.captured.prepare()  # state that eager would make at its first step, which no program has ops for
            logs = []
            for _ in range(2):
                put_generators(states)
                again = self._copy(batch)
                with Eager() as log:
                    result = again.step(again.model, again.optimizer, *again.batch)
                # State that was prepared for what eager does not train is no other result.
                changed = [
                    one for one in compare(expected, _as_run(again, result, generators())) if MISSING not in one.words
                ]
                if changed:
                    words = f"eager PyTorch, run again, gives other bits as well ({changed[0]}): it can't be repeated"
                    return Blame(None, words)
                del again, result
                logs.append(log.calls)
            return find_blame(runner, batch, repeated(*logs), back)
        except Exception as error:  # that something differs is known, and more important
            return Blame(None, f"which op is to blame could not be found: {type(error).__name__}: {error}")
        finally:
            back()

    def _answer(self, differences: Sequence[Difference], found: Blame) -> VerifyError:
        compared = self.tally.tensors + self.tally.others
        lines = [f"  {difference}" for difference in differences[:SHOWN]]
        lines += [f"  and {len(differences) - SHOWN} more"] if len(differences) > SHOWN else []
        return VerifyError(
            f"step {self.verified + 1} is not what eager PyTorch does: {len(differences)} of {compared:,} things "
            "differ.\n" + "\n".join(lines) + f"\n{found.words[0].upper()}{found.words[1:]}.",
            hint="everything is as it was before the step. This is a defect of lowtide, unless the step reads what "
            "changes by itself (the time, a file): please report it with these lines.",
            differing=tuple(difference.name for difference in differences),
            op=found.op,
        )


def _as_run(copied: Copy, result: Any, states: Mapping[str, Any]) -> Run:
    """A copy as a run."""
    return Run(copied.model, copied.optimizer, copied.batch, result, variables_of(copied, ours=True), states)
