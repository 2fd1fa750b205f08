"""What is asked of the front door, checked once."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from typing import Any, Literal, get_args

from lowtide.budget import read_budget
from lowtide.choice import Leave, Offload
from lowtide.errors import UsageError
from lowtide.graph import Place
from lowtide.plan import TIME_LIMIT
from lowtide.program import Plan
from lowtide.progress import Spoken
from lowtide.rewrites import Allowed, read_allow

Tell = Callable[[str], None]
CostsFrom = Literal["measured", "roofline"]
PlanFrom = Plan | str | os.PathLike[str]  # a plan, or the file that it was saved to


@dataclass(frozen=True)
class Request:
    """A step and what is wanted of it; a wrong one is refused before anything is captured."""

    step: Callable[..., Any]
    model: Any
    optimizer: Any = None  # None, one, or a tuple of them
    _: KW_ONLY
    budget: int | str | None = None  # bytes of the whole step, "2GiB", "50%" or "least"; None: what is free
    plan: PlanFrom | None = None  # in place of a budget
    time_limit: float = TIME_LIMIT  # seconds of planning
    costs: CostsFrom = "measured"
    offload: Place | None = None  # where values, state and parameters may go that the budget has no room for
    offload_budget: int | str | None = None  # bytes that may be there; None: most of what is free there
    offload_dir: str | os.PathLike[str] | None = None  # the folder of the file, where the place is the disk
    allow: str | Iterable[str] | None = None  # what may change the bits: a tier or names; None: nothing
    rounding: bool = False  # short for the tier "rounding"
    beside: int = 0  # bytes that the caller holds within a budget of bytes: an optimizer's state
    tell: Tell | None = None  # is told, a line each, what happens before steps; None: stderr, of what takes long

    def __post_init__(self) -> None:
        if self.budget is not None and self.plan is not None:
            raise UsageError("a plan has its own budget.", hint="give a budget or a plan, not both.")
        if self.costs not in get_args(CostsFrom):
            known = ", ".join(get_args(CostsFrom))
            raise UsageError(f"costs={self.costs!r} is unknown.", hint=f"choose one of {known}.")
        if isinstance(self.budget, str):
            read_budget(self.budget, persistent=1, eager_peak=1, least=lambda: 1)
        self.places.refuse(planned=self.plan is not None)
        Leave(self.allowed)

    @cached_property
    def allowed(self) -> Allowed:
        """What may change the bits."""
        return read_allow(self.allow, self.rounding)

    @property
    def places(self) -> Offload:
        """Where values, state and parameters may go."""
        return Offload(self.offload, self.offload_budget, self.offload_dir)

    @cached_property
    def aloud(self) -> AbstractContextManager[object]:
        """In which it is said on stderr what takes longer than two seconds, where nobody asked to be told."""
        return Spoken("lowtide: fitting the step") if self.tell is None else nullcontext()

    def say(self, line: str) -> None:
        """Tell whoever wants to know."""
        if self.tell is not None:
            self.tell(line)
        elif isinstance(self.aloud, Spoken):
            self.aloud.news = line
