"""What asked for new captures so far: a number that changes often becomes an input, and a storm is an error."""

from __future__ import annotations

from collections import deque

from lowtide.errors import LowtideError
from lowtide.guards import Change, Place

STORM, WINDOW = 8, 100  # captures that one name may ask for within so many steps
AGAIN = 2  # changes of a number after which it is an input


class RestlessError(LowtideError):
    """Something that the step reads is another one at every step, and can't be an input of its program."""


class Changes:
    """The changes between the steps of one fitted step."""

    def __init__(self) -> None:
        self._steps = 0
        self._captures: dict[str, deque[int]] = {}
        self._places: dict[tuple[int, object], Place] = {}
        self._counts: dict[tuple[int, object], int] = {}

    @property
    def numbers(self) -> tuple[Place, ...]:
        """Those Python numbers that are to be inputs."""
        return tuple(self._places[key] for key, count in self._counts.items() if count >= AGAIN)

    def step(self) -> None:
        """A step begins."""
        self._steps += 1

    def note(self, change: Change) -> None:
        """A change asks for a new capture; too many by one name are refused."""
        if change.expected:
            return
        if change.place is not None:
            key = (id(change.place.holder), change.place.key)
            self._places[key] = change.place
            self._counts[key] = self._counts.get(key, 0) + 1
        times = self._captures.setdefault(change.name, deque())
        while times and times[0] <= self._steps - WINDOW:
            times.popleft()
        if len(times) >= STORM:
            raise RestlessError(
                f"{change.what}. It asked for {len(times)} new captures in the last {WINDOW} steps, and what it is "
                "used for can't be made an input of the program.",
                hint=f"use {change.name} only in arithmetic with tensors, pass it to the step as a tensor of the "
                "batch, or change it outside of the step and less often.",
            )
        times.append(self._steps)
