"""What `functools.lru_cache` and `cache` keep of a step: looked at before, undone, and remembered after each step.

Eager calls such a function once and takes its answer at every later step. So the answers that were there are assumed
by the program. One that the step adds is an effect: it is put there after the step, with the numbers of that step, and
the next step, which finds it there, is captured anew.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any, NoReturn

import torch

from lowtide import private
from lowtide.errors import CaptureError
from lowtide.guards import MISSING, Entry, Place

CACHED = type(functools.cache(lambda: None))


class Cache:
    """A cached function, and what it knew before the step."""

    def __init__(self, function: Any, name: str) -> None:
        self.function, self.name = function, name
        self.kept, self.answers = private.cached_answers(function)
        self.before, self.calls = dict(self.kept), _calls(function)

    def entries(self) -> Iterator[Entry]:
        """What the step assumes of it, if it calls it: what was known, and what was not."""
        if _calls(self.function) != self.calls:
            for key in {**self.before, **self.kept}:
                if self._tensors(key):
                    continue  # another tensor is another key, and nobody finds this one again
                yield Entry(Place(self.kept, key, f"what {self.name} keeps"), self.before.get(key, MISSING))

    def added(self, given: Callable[[torch.Tensor], bool]) -> Iterator[tuple[Callable[[Any], None], Any]]:
        """What it answered for the first time, and what lets it know that again; refused where nothing can.

        What it made of a tensor that is not given to the step, but made by it, nobody asks for again.
        """
        _, answers = private.cached_answers(self.function)
        if self._lost(answers):
            raise CaptureError(
                f"the step calls {self.name} with more arguments than its lru_cache has room for, or clears it.",
                hint="give it room by functools.lru_cache(maxsize=None), or call it before the step.",
            )
        for key, answer in answers.items():
            if key in self.before:
                continue
            tensors = self._tensors(key)
            if any(map(given, tensors)):
                self._refuse("takes tensors that the step is given")
            if tensors:
                continue
            args, kwargs = private.cached_arguments(self.function, key)
            if not isinstance(self.function.__wrapped__, FunctionType):
                self._refuse("is no function of Python's own")
            if isinstance(answer, torch.Tensor) and answer.requires_grad:
                self._refuse("returns a part of this step's backward")
            named = {name: _number(one) for name, one in kwargs.items()}
            yield functools.partial(remember, self.function, tuple(map(_number, args)), named), answer

    def undo(self) -> None:
        """Let it forget what the step added; where that took the room of others, all of it."""
        kept, answers = private.cached_answers(self.function)
        if self._lost(answers):
            self.function.cache_clear()
        for key in [key for key in kept if key not in self.before]:
            del kept[key]

    def _lost(self, answers: dict[Any, Any]) -> bool:
        return any(
            answers.get(key, MISSING) is not answer and not self._tensors(key) for key, answer in self.answers.items()
        )

    def _tensors(self, key: Any) -> list[torch.Tensor]:
        """The tensors among the arguments of an answer."""
        args, kwargs = private.cached_arguments(self.function, key)
        return [one for one in (*args, *kwargs.values()) if isinstance(one, torch.Tensor)]

    def _refuse(self, why: str) -> NoReturn:
        raise CaptureError(
            f"the step calls {self.name}, whose answers are kept (lru_cache), and which {why}.",
            hint="call the function itself in the step, without a cache.",
        )


def remember(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], answer: Any) -> None:
    """Let a cached function know an answer, without calling what it is a cache of."""
    inside = function.__wrapped__
    code = inside.__code__
    inside.__code__ = _NOTHING.replace(co_consts=(answer,), co_freevars=code.co_freevars)
    try:
        function(*args, **kwargs)
    finally:
        inside.__code__ = code


_NOTHING = (lambda *args, **kwargs: None).__code__


def _number(argument: Any) -> Any:
    """A number of the caller that is an input: as it is now, for the program is for this one, by which it looked."""
    return argument.node.hint if isinstance(argument, torch.SymFloat) else argument


def _calls(function: Any) -> tuple[int, int]:
    info = function.cache_info()
    return info.hits, info.misses
