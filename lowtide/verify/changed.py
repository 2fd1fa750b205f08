"""Steps that are changed by leave: their plan beside the same changed step run plainly, every bit, and beside eager's.

Both run on copies that are made before the first step and go through all of them. A plan must not change a bit of what
the changed step computes. How far that is from eager's is said; where only the rounding may differ, it has a bound.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from lowtide.errors import UsageError, VerifyError
from lowtide.packed import Packed
from lowtide.rewrites import Rewrite, exactness
from lowtide.verify.compare import Run, Tally, compare, generators, put_generators, variables_of
from lowtide.verify.copies import Copy

ROUNDING = 1e-4  # of the gradient's norm: sums in another order are off by a hundredth of that
SHOWN = 5  # differences that an error lists

Rewrites = tuple[Rewrite, ...]
# Takes a step with these rewrites on a copy; returns its result and, where that can be known before, the part of the
# gradient's norm by which its gradient is off.
Plainly = Callable[[Copy, tuple[Any, ...], Rewrites], tuple[Any, float | None]]


class ChangedVerifier:
    """Runs changed steps plainly on one copy and in eager PyTorch on another, and compares."""

    def __init__(
        self,
        step: Callable[..., Any],
        model: torch.nn.Module,
        optimizer: Any,
        steps: int,
        plainly: Plainly,
        rewrites: Callable[[], Rewrites],
    ) -> None:
        if any(isinstance(one, Packed) for one in model.parameters()):
            raise UsageError(
                "the model is stored in another form already: it can't be copied as it was before its first step.",
                hint="verify from the first step on: fit(..., verify=3).",
            )
        self._step, self._model, self._optimizer = step, model, optimizer
        self._plainly, self._rewrites = plainly, rewrites
        self._copies: tuple[Copy, ...] = ()  # that take the changed step, and eager's
        self.left = steps  # that are still to be verified
        self.verified = 0  # steps that were those of the changed step to the bit
        self.tally = Tally()  # of the last of them
        self.error: float | None = None  # the part of the gradient's norm by which it is off eager's, in the first step
        self.off: float | None = None  # the part of eager's first update by which the first update is off

    def check(self, batch: tuple[Any, ...], run: Callable[..., Any], runner: object = None) -> Any:
        """Take one step by `run`, compare it with the same changed step run plainly, and return its result."""
        first, states = not self._copies, generators()
        if first:
            self._copies = tuple(Copy(self._step, self._model, self._optimizer, batch) for _ in range(2))
        plain, eager = self._copies
        given = copy.deepcopy(batch)
        before = [one.detach().clone() for one in eager.model.parameters()] if first else []
        if first:
            eager.step(eager.model, eager.optimizer, *copy.deepcopy(batch))
            put_generators(states)
        result = run(*batch)
        after = generators()
        put_generators(states)
        expected, error = self._plainly(plain, given, self._rewrites())
        found = Run(self._model, self._optimizer, batch, result, variables_of(plain, ours=False), after)
        wanted = Run(plain.model, plain.optimizer, given, expected, variables_of(plain, ours=True), generators())
        put_generators(after)
        self.tally = Tally()
        if differences := compare(wanted, found, self.tally):
            lines = [f"  {difference}" for difference in differences[:SHOWN]]
            raise self._failed(
                f"is not what its rewritten step does without a plan: {len(differences)} things differ.",
                *lines,
                differing=tuple(difference.name for difference in differences),
            )
        if first:
            self.error = error
            self.off = _off(before, [*eager.model.parameters()], self._model.parameters())
            if error is not None and exactness(self._rewrites()) == "rounding" and not error <= ROUNDING:
                raise self._failed(f"has a gradient that is off eager's by {error:.1e} of its norm: no rounding is.")
        self.left -= 1
        self.verified += 1
        return result

    def _failed(self, words: str, *lines: str, differing: Sequence[str] = ()) -> VerifyError:
        return VerifyError(
            "\n".join((f"step {self.verified + 1} {words}", *lines)),
            hint="the step was taken. This is a defect of lowtide, unless the step reads what changes by itself "
            "(the time, a file): please report it with these lines.",
            differing=tuple(differing),
        )


def _off(before: Sequence[torch.Tensor], eager: Sequence[torch.Tensor], found: Iterable[torch.Tensor]) -> float:
    """The norm of what parameters differ by, as a part of the norm of eager's update."""
    off = sum(
        float((one.detach() - other.detach()).double().square().sum()) for one, other in zip(found, eager, strict=True)
    )
    norm = sum(float((one.detach() - old).double().square().sum()) for one, old in zip(eager, before, strict=True))
    return math.sqrt(off / norm) if norm else math.sqrt(off)
