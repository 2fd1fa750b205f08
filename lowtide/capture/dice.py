"""Draws of Python's and numpy's generators while a step is traced: real ones, each written down with its line.

A number that is drawn as a float becomes an input of the program: it is drawn before each step, and comparisons of it
choose the program. Everything else that is drawn is a constant: the program is for this outcome only.
"""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import numpy

from lowtide import private
from lowtide.capture.origin import user_line
from lowtide.capture.recorder import Recorder
from lowtide.errors import CaptureError
from lowtide.graph import Input
from lowtide.guards import MISSING, Draw

HINT = "draw it before the step, and pass it to the step as part of its batch."
PRIMITIVES = ("random", "getrandbits", "_randbelow")  # of Python's generator: all others call these
SETTERS = ("seed", "set_state", "get_state", "setstate", "getstate", "get_bit_generator", "set_bit_generator")


class Dice:
    """The draws of one step."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.draws: list[Draw] = []
        self.inputs: list[Input] = []
        self.rolling = False
        self.thread = threading.get_ident()

    @contextlib.contextmanager
    def followed(self) -> Iterator[None]:
        """A context in which draws are written down; afterwards the generators are as they were."""
        python, legacy = private.python_generator(), private.numpy_generator()
        states = python.getstate(), legacy.get_state()
        kept = [(numpy.random, name, function) for name, function in _legacy().items()]
        kept += [(random, "random", random.random), (random, "getrandbits", random.getrandbits)]
        try:
            for name in PRIMITIVES:
                rolled = self._rolled("random", name, getattr(python, name))
                setattr(python, name, rolled)
                if hasattr(random, name):
                    setattr(random, name, rolled)
            for name, function in _legacy().items():
                setattr(numpy.random, name, self._rolled("numpy.random", name, function))
            yield
            self._account(states)
        finally:
            for home, name, function in kept:
                setattr(home, name, function)
            for name in PRIMITIVES:
                vars(python).pop(name, None)
            python.setstate(states[0])
            legacy.set_state(states[1])

    def stand_in(self, value: Any) -> Any:
        """What stands for a function that draws, where code has it under a name of its own; None for all others."""
        if hasattr(type(value), "__getattr__"):  # it may answer to any name
            return None
        owner, name = getattr(value, "__self__", None), getattr(value, "__name__", "")
        if owner is private.python_generator() and name in PRIMITIVES:
            return getattr(owner, name)
        if owner is private.numpy_generator() and name in _legacy(bound=False):
            return getattr(numpy.random, name)
        return None

    def _rolled(self, generator: str, method: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def roll(*args: Any, **kwargs: Any) -> Any:
            source = user_line()
            if self.rolling or threading.get_ident() != self.thread:  # a draw that calls others is one draw
                return function(*args, **kwargs)
            if method == "shuffle":
                _refuse(f"{source}: the step shuffles by {generator}.shuffle, which can't be followed.")
            self.rolling = True
            try:
                value = function(*args, **kwargs)
            finally:
                self.rolling = False
            number, symbolic = len(self.draws), isinstance(value, float)
            draw = Draw(generator, method, args, tuple(kwargs.items()), MISSING if symbolic else value, source)
            self.draws.append(draw)
            if not symbolic:
                return value.copy() if isinstance(value, numpy.ndarray) else value
            given, scalar = self.recorder.add_scalar_input(f"{generator}.{method}", float(value), ("draw", number))
            self.inputs.append(Input(given, ("draw", number)))
            return scalar

        return roll

    def _account(self, states: tuple[Any, Any]) -> None:
        """Refuse draws that were not seen, and generators that were seeded: a replay must end where the step did."""
        python, legacy = private.python_generator(), private.numpy_generator()
        after = python.getstate(), str(legacy.get_state())
        one, other = random.Random(), numpy.random.RandomState()
        one.setstate(states[0])
        other.set_state(states[1])
        for draw in self.draws:
            getattr(one if draw.generator == "random" else other, draw.method)(*draw.args, **dict(draw.kwargs))
        if (one.getstate(), str(other.get_state())) != after:
            seen = ", ".join(dict.fromkeys(draw.source for draw in self.draws)) or "none was seen"
            _refuse(f"the step draws from Python's or numpy's generator in a way that can't be followed ({seen}).")


def _legacy(*, bound: bool = True) -> dict[str, Any]:
    """The functions of numpy.random that draw from its global generator."""
    generator = private.numpy_generator()
    names = (name for name in dir(generator) if not name.startswith("_") and name not in SETTERS)
    found = {name: getattr(numpy.random, name, None) for name in names}
    return {name: item for name, item in found.items() if not bound or getattr(item, "__self__", None) is generator}


def _refuse(message: str) -> NoReturn:
    raise CaptureError(message, hint=HINT)
