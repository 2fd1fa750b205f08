"""What a step does besides computing: what it stores in Python objects, prints and logs, to be done after each step."""

from __future__ import annotations

import builtins
import contextlib
import logging
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from lowtide import private
from lowtide.capture.follow import Follower, is_user_file
from lowtide.capture.world import World
from lowtide.errors import CaptureError
from lowtide.guards import Effect, Guards, Place
from lowtide.private import FakeTensor
from lowtide.tree import flatten

NUMBERS = (int, float, torch.SymFloat)


@dataclass(frozen=True)
class Done:
    """The effects of a step, with what each leaves behind."""

    effects: tuple[Effect, ...]
    values: list[Any]
    counted: tuple[Place, ...]  # numbers that the step reads and changes


class Deeds:
    """Follows what one step does."""

    def __init__(self, world: World, follower: Follower) -> None:
        self.world, self.follower = world, follower
        self.calls: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = []

    @contextlib.contextmanager
    def followed(self) -> Iterator[None]:
        """A context in which what user code prints and logs is written down, and not yet done."""
        printed, logged = builtins.print, private.logged()

        thread = threading.get_ident()  # others go on beside it

        def note_print(*args: Any, **kwargs: Any) -> None:
            if threading.get_ident() == thread and _from_user():
                self.calls.append((printed, args, kwargs))
            else:
                printed(*args, **kwargs)

        def note_log(logger: logging.Logger, level: int, message: object, args: Any, **kwargs: Any) -> None:
            if threading.get_ident() != thread or logger.name.partition(".")[0] == "torch":
                logged(logger, level, message, args, **kwargs)
            else:
                self.calls.append((logger.log, (level, message, *args), {}))

        def refuse_text(number: torch.SymFloat, _: str) -> str:
            return repr(number)  # which is refused

        builtins.print = note_print
        torch.SymFloat.__format__ = refuse_text  # type: ignore[assignment, method-assign]
        private.log_by(note_log)
        try:
            yield
        finally:
            builtins.print = printed
            del torch.SymFloat.__format__
            private.log_by(logged)

    def done(self, registries: set[int], guards: Guards, given: Callable[[Any], bool]) -> Done:
        """All effects; `registries` are mappings of parameters and buffers, which have their own place in a graph.

        `given` says whether a tensor comes from outside of the step.
        """
        read = {(id(entry.place.holder), entry.place.key): entry.value for entry in guards.entries}
        effects: list[Effect] = []
        values: list[Any] = []
        counted: list[Place] = []
        for effect, value in self.world.effects():
            place = effect.place
            if id(place.holder) in registries:
                continue
            self._refuse_odd(effect, value, read)
            was = read.get((id(place.holder), place.key))
            if effect.how == "put" and _number(was) and _number(value):
                counted.append(place)
            effects.append(effect)
            values.append(value)
        for cache in self.world.caches.values():
            for remember, answer in cache.added(given):
                effects.append(Effect("call", Place(remember, None, f"what {cache.name} keeps")))
                values.append(((answer,), {}))
                self._refuse_objects(answer, effects[-1].place.name, "")
        for function, args, kwargs in self.calls:
            effects.append(Effect("call", Place(function, None, f"a call of {function.__name__}")))
            values.append((args, kwargs))
            self._refuse_objects(values[-1], effects[-1].place.name, "")
        return Done(tuple(effects), values, tuple(counted))

    def _refuse_odd(self, effect: Effect, value: Any, read: dict[tuple[int, Any], Any]) -> None:
        """Refuse what can't be put in its place after a step: objects around tensors, and what the next step reads."""
        place = effect.place
        where = self.follower.stores.get(("attribute", place.key)) or self.follower.stores.get(("global", place.key))
        at = f"{where}: " if where else ""
        self._refuse_objects(value, place.name, at)
        if (id(place.holder), place.key) in read and any(map(_tensor, flatten(value)[0])):
            raise CaptureError(
                f"{at}the step keeps a tensor in {place.name!r} for the next step.",
                hint="register it as a buffer and write to it in place, or pass it in and return it.",
            )

    def _refuse_objects(self, value: Any, name: str, at: str) -> None:
        for leaf in flatten(value)[0]:
            module = isinstance(leaf, torch.nn.Module) and id(leaf) not in self.world.seen
            if module or (not isinstance(leaf, torch.Tensor) and _hides_tensor(leaf, self.world)):
                raise CaptureError(
                    f"{at}the step puts a {type(leaf).__name__} with tensors in it into {name!r}.",
                    hint="return the tensors from the step, and put them there after it.",
                )


def _from_user() -> bool:
    """Whether the caller of our caller is user code."""
    return is_user_file(sys._getframe(2).f_code.co_filename)


def _number(value: Any) -> bool:
    return isinstance(value, NUMBERS) and not isinstance(value, bool)


def _tensor(leaf: Any) -> bool:
    return isinstance(leaf, FakeTensor) and not isinstance(leaf, torch.nn.Parameter)


def _hides_tensor(leaf: Any, world: World) -> bool:
    """Whether an object that the step made has a stand-in or a number of the running step inside."""
    if id(leaf) in world.seen or isinstance(leaf, (type, torch.SymFloat)):
        return False
    inside = World()
    inside.see(leaf, "")
    symbolic = (torch.SymFloat, FakeTensor)
    parts = (item for held in inside.held.values() for item in _parts(held.before))
    return any(isinstance(item, symbolic) for item in parts)


def _parts(before: Any) -> Iterator[Any]:
    if isinstance(before, dict):
        yield from before.values()
    elif isinstance(before, (list, set)):
        yield from before
    else:
        yield before
