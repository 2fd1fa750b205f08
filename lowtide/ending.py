"""What is done once nobody holds something any more.

Python runs `__del__`, and the callbacks of weak references, wherever the last reference goes, and drops what is raised
there: a Ctrl-C that comes meanwhile, or came while C++ ran before it, would be lost. Here it is raised after the
action, in the code that runs then; and where the holder let go by itself, no code runs at all.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

from lowtide import native

SOURCE = Path(__file__).with_suffix(".cpp")
SIGNATURES: native.Signatures = {"lowtide_end": ([ctypes.py_object, ctypes.py_object], None)}

Action = Callable[[], object]

_waiting: dict[Ending, Action] = {}  # what is to be done; a weak reference that goes with its object would not call


class Ending:
    """Calls the action once nobody holds the holder, unless it was called off; again, where that was interrupted."""

    def __init__(self, holder: object, action: Action) -> None:
        self._take = partial(_waiting.pop, self, None)
        self._watch = weakref.ref(holder, partial(_undisturbed(), self._take))
        _waiting[self] = action

    @property
    def alive(self) -> bool:
        """Whether the action is still to come."""
        return self in _waiting

    def __call__(self) -> None:
        """Do it now, if it was not done yet."""
        _undisturbed()(self._take, None)

    def call_off(self) -> None:
        """There is nothing to be done any more."""
        self._take()


@cache
def _undisturbed() -> Callable[[Callable[[], Action | None], object], object]:
    """Takes an action and calls it, and leaves no interruption unheard; without a compiler, one may be."""
    try:
        library = native.interpreted(native.library(SOURCE, SIGNATURES, what="lowtide's ending"), SIGNATURES)
    except native.NativeUnavailable:  # the arena has said so
        return _disturbed
    found: Callable[[Callable[[], Action | None], object], object] = library.lowtide_end
    return found


def _disturbed(take: Callable[[], Action | None], _: object) -> None:
    if (action := take()) is not None:
        action()
