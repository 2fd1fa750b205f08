"""What was done to a captured step before it was planned: the names of rewrites, their settings, and what they keep."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, get_args

from lowtide.files.shapes import Misshapen, Shape, record, text, word

Exactness = Literal[
    "bitwise",  # every bit of every result is eager's
    "rounding",  # the same sums in another order: equal up to rounding
    "lossy",  # other numbers
]
EXACTNESS: tuple[Exactness, ...] = get_args(Exactness)  # from the most to the least
Setting = None | bool | int | float | str


@dataclass(frozen=True, slots=True)
class Rewrite:
    """A pass over a step, by name."""

    name: str
    setting: Setting = None  # what the pass is told: into how many chunks, for one; None: it takes nothing
    exactness: Exactness = "bitwise"

    def __str__(self) -> str:
        return self.name if self.setting is None else f"{self.name} {self.setting}"


@dataclass(frozen=True, slots=True)
class Change:
    """What one rewrite did to a graph; ops are told apart by their names, values by what they are."""

    rewrite: Rewrite
    ops_added: int  # ordinary ones
    ops_removed: int
    ops_offered: int  # optional ones
    values_added: int
    values_removed: int
    waiting: int = 0  # values that may wait in another place
    nbytes_moved: int = 0  # of inputs that live in another place now

    def __str__(self) -> str:
        parts = (
            (self.ops_added, "op added", "ops added"),
            (self.ops_removed, "op removed", "ops removed"),
            (self.ops_offered, "op offered", "ops offered"),
            (self.values_added, "value added", "values added"),
            (self.values_removed, "value removed", "values removed"),
            (self.waiting, "value may wait elsewhere", "values may wait elsewhere"),
            (self.nbytes_moved, "byte lives elsewhere", "bytes live elsewhere"),
        )
        said = ", ".join(f"{count:,} {one if count == 1 else more}" for count, one, more in parts if count)
        return f"{self.rewrite} ({self.rewrite.exactness}): {said or 'ops changed in their places'}"


def exactness(rewrites: Iterable[Rewrite]) -> Exactness:
    """What all of them together keep."""
    return max((one.exactness for one in rewrites), key=EXACTNESS.index, default="bitwise")


def encode_rewrite(rewrite: Rewrite) -> dict[str, Any]:
    """A rewrite as JSON."""
    return {"name": rewrite.name, "setting": rewrite.setting, "exactness": rewrite.exactness}


def _setting(data: Any) -> Setting:
    if data is None or type(data) in (bool, int, float, str):
        found: Setting = data
        return found
    raise Misshapen("a number, a text or nothing", data)


REWRITE: Shape = record({"name": text, "setting": _setting, "exactness": word(EXACTNESS)}, into=Rewrite)
