"""Draws of random numbers while a step is traced, and those that repeat earlier ones.

A step may put the generator back and draw again, as `torch.utils.checkpoint` does: the same numbers come out. Stand-ins
draw nothing, so the real generator is free to say where the step is: every place in the sequence of draws gets a seed
of its own, and the seed that a call finds tells its place. Among stand-ins torch's own functions for the state would
read and write what is not there; while a step is traced they are ours.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from lowtide.capture.origin import user_line
from lowtide.errors import CaptureError
from lowtide.graph import Arg, Op, Read
from lowtide.private import base_name, without_modes

# Comparisons with a number, and what draws from [0, 1).
COMPARED = {f"aten.{name}.Scalar": getattr(operator, name) for name in ("lt", "le", "gt", "ge")}
DRAWN = ("aten.rand.default", "aten.rand_like.default")
SEEDS = 0x10_71DE << 32  # of the first place; people choose others


@dataclass(frozen=True)
class _Draw:
    """What was drawn at one place."""

    what: Hashable  # the call, as far as the numbers depend on it; None: they depend on the contents of tensors, too
    read: Read  # how its numbers are read


class Draws:
    """The draws of one step."""

    def __init__(self) -> None:
        self._draws: list[_Draw] = []

    @contextmanager
    def followed(self) -> Iterator[None]:
        """A context in which the generator tells the place, and the step may ask for its state and put it back."""
        homes = (torch, torch.random)
        kept = [(home, name, getattr(home, name)) for home in homes for name in ("get_rng_state", "set_rng_state")]
        try:
            for home in homes:
                home.get_rng_state, home.set_rng_state = _get_state, _set_state  # type: ignore[attr-defined]
            _go(0)
            yield
        finally:
            for home, name, function in kept:
                setattr(home, name, function)

    def before(self, what: Hashable | None) -> Read | None:
        """Call this before a draw: how the same numbers are read that were drawn before; None: they are new."""
        place = self._here()
        if place == len(self._draws):
            return None
        if what is None or self._draws[place].what != what:
            _refuse("puts the random generator back and draws something else than before")
        _go(place + 1)
        return self._draws[place].read

    def add(self, what: Hashable | None, read: Read) -> None:
        """Call this after a draw whose numbers are new."""
        self._draws.append(_Draw(what, read))
        _go(len(self._draws))

    def end(self) -> None:
        """Call this when the step is done."""
        if self._here() != len(self._draws):
            _refuse("puts the random generator back and leaves it there")

    def _here(self) -> int:
        place = torch.default_generator.initial_seed() - SEEDS
        if 0 <= place <= len(self._draws):
            return place
        _refuse("seeds the random generator, or gives it a state from elsewhere")


def drawn(
    func: Any,
    plain_args: tuple[Any, ...],
    plain_kwargs: dict[str, Any],
    args: tuple[Arg, ...],
    kwargs: tuple[tuple[str, Arg], ...],
    written: list[torch.Tensor],
) -> Hashable | None:
    """What a call draws: equal for calls that draw the same from the same state, None where tensors have a say."""
    what: list[Hashable] = [str(func)]
    named = [(str(place), plain, arg) for place, (plain, arg) in enumerate(zip(plain_args, args, strict=True))]
    named += [(key, plain_kwargs[key], arg) for key, arg in kwargs]
    for name, plain, arg in named:
        if not isinstance(plain, torch.Tensor):
            what.append((name, arg))
        elif base_name(func).endswith("_like") or any(plain is item for item in written):  # only its size counts
            what.append((name, tuple(plain.shape), tuple(plain.stride()), plain.dtype))
        else:
            return None
    return tuple(what)


def foregone(ops: list[Op], read: Read) -> bool | None:
    """The answer to a comparison of torch.rand, in [0, 1), with a number that is not inside; None for all others.

    Models that can leave out layers at random ask at each layer, also where they never do.
    """

    def maker(value: int) -> Op | None:
        return next((op for op in reversed(ops) if value in op.outputs), None)

    asked = maker(read.value)
    if asked is None or asked.target not in COMPARED:
        return None
    drawn, limit = asked.args
    source = maker(drawn.value) if isinstance(drawn, Read) else None
    if source is None or source.target not in DRAWN or not isinstance(limit, (int, float)) or 0 < limit < 1:
        return None
    answers = {COMPARED[asked.target](number, limit) for number in (0.0, 0.5)}  # zero may be drawn, one may not
    return answers.pop() if len(answers) == 1 else None


def _go(place: int) -> None:
    torch.default_generator.manual_seed(SEEDS + place)


def _get_state() -> torch.Tensor:
    with without_modes():
        return torch.default_generator.get_state()


def _set_state(new_state: torch.Tensor) -> None:
    with without_modes():
        torch.default_generator.set_state(new_state)


def _refuse(what: str) -> NoReturn:
    raise CaptureError(
        f"{user_line() or 'the step'}: the step {what}, which lowtide can't follow.",
        hint="do it outside of the step (torch.manual_seed, set_rng_state, fork_rng); "
        "torch.utils.checkpoint may stay where its draws do not depend on tensors.",
    )
