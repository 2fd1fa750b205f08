"""A contestant of a race in this process: one of its own takes seconds to start, and answers the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lowtide.bench import racer
from lowtide.bench.peers import Contestant
from lowtide.bench.race import PATIENCE, Answer, Retired
from lowtide.errors import BudgetError


class Here:
    """Stands in for `Racer`: prepared in this process, it answers and retires as one of its own does."""

    def __init__(self, target: str, contestant: Contestant, *, time_limit: float, patience: float = PATIENCE) -> None:
        self.contestant, self.patience = contestant, patience
        amount = contestant.budget if contestant.fraction is None else contestant.fraction
        self._prepared: racer.Prepared | None = None
        if contestant.way == "survey":
            self.told = _answered(lambda: racer.survey(target))
        else:
            self._prepared = _answered(lambda: racer.prepare(target, contestant.way, str(amount), time_limit))
            self.told = self._prepared.told

    def ask(self, command: str) -> Answer:
        """What a command asks for."""
        prepared = self._prepared
        assert prepared is not None
        found: Answer = _answered(lambda: racer.answer(prepared, command))
        if command == "meter" and prepared.fitted is None:  # the arena is of another contestant
            found["metered_peak"] -= found["arena_bytes"]
            found["arena_bytes"] = 0
        return found

    def end(self) -> None:
        """Let go of the step."""
        self._prepared = None


def _answered(work: Callable[[], Any]) -> Any:
    try:
        return work()
    except Exception as error:
        raise Retired(racer._reason(error), infeasible=isinstance(error, BudgetError)) from error
