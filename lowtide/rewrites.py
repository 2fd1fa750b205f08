"""What was done to a captured step before it was planned: the names of rewrites, their settings, and what they keep."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from lowtide.errors import UsageError
from lowtide.files.shapes import Absent, Misshapen, Shape, amount, flag, maybe, record, text, word

Exactness = Literal[
    "bitwise",  # every bit of every result is eager's
    "rounding",  # the same sums in another order: equal up to rounding
    "lossy",  # other numbers
]
EXACTNESS: tuple[Exactness, ...] = get_args(Exactness)  # from the most to the least
KEEPS: Mapping[Exactness, str] = {
    "bitwise": "every bit is eager's",
    "rounding": "the same up to rounding",
    "lossy": "other numbers than eager's",
}
Setting = None | bool | int | float | str
ROUNDING = ("chunks", "chunked-loss", "split", "microbatch")  # what the tier "rounding" allows
# What the tier "lossy" allows besides, in the order in which it is taken: each only where no plan without it fits.
LOSSY_ORDER = ("input8", "activations16", "weights16", "state8", "activations8", "batch-statistics", "sparse")
FORMS = frozenset({"sparse", "weights16", "state8"})  # of these, what changes how the caller's tensors are stored
STORED = FORMS | {"input8"}  # what changes the bytes that are there between steps
PART = re.compile(r"_part\d+$")
BY_NAME = ("activations4",)  # lossy ones that no tier allows
TIERS: tuple[Exactness, ...] = ("rounding", "lossy")


@dataclass(frozen=True, slots=True)
class Rewrite:
    """A pass over a step, by name."""

    name: str
    setting: Setting = None  # what the pass is told: into how many chunks, for one; None: it takes nothing
    exactness: Exactness = "bitwise"
    error: float | None = field(default=None, compare=False)  # measured, of the gradient's norm; None: not measured
    tried: bool = False  # whether calls of ours stand for torch's, which a trial on the machine must allow

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


def name_part(name: str, number: int) -> str:
    """The name of an op as it is written for one part of the examples."""
    return f"{name}_part{number}"


def is_for_a_part(name: str) -> bool:
    """Whether an op of this name is written once for each part."""
    return PART.search(name) is not None


def exactness(rewrites: Iterable[Rewrite]) -> Exactness:
    """What all of them together keep."""
    return max((one.exactness for one in rewrites), key=EXACTNESS.index, default="bitwise")


def has_tried(rewrites: Iterable[Rewrite]) -> bool:
    """Whether calls of ours stand for torch's, which a trial on this machine must allow."""
    return any(one.tried for one in rewrites)


@dataclass(frozen=True, slots=True)
class Allowed:
    """What may be done to a step that changes its bits: a tier, and names; and what may not be done to it at all."""

    tier: Exactness = "bitwise"  # all of this tier and of those before it
    named: tuple[tuple[str, Setting], ...] = ()  # names that allow only themselves, or give a setting
    refused: tuple[str, ...] = ()  # names of a tier, or of what is done without leave where it keeps every bit

    def __bool__(self) -> bool:
        return self.tier != "bitwise" or bool(self.named)

    def __contains__(self, name: object) -> bool:
        if name in self.refused:
            return False
        tiers = ((), ROUNDING, ROUNDING + LOSSY_ORDER)
        return name in tiers[EXACTNESS.index(self.tier)] or name in dict(self.named)

    def __str__(self) -> str:
        tier = () if self.tier == "bitwise" else (self.tier,)
        named = (name if said is None else f"{name}:{said}" for name, said in self.named)
        return ",".join((*tier, *named, *(f"-{name}" for name in self.refused)))

    def setting(self, name: str) -> Setting:
        """The setting that was named; None: the search finds one."""
        return dict(self.named).get(name)

    @property
    def milder(self) -> Allowed:
        """The same without what loses more than rounding."""
        named = tuple((name, said) for name, said in self.named if name in ROUNDING)
        return replace(self, tier=min(self.tier, "rounding", key=EXACTNESS.index), named=named)

    @property
    def lossy(self) -> tuple[str, ...]:
        """The lossy ones that are allowed, in the order in which they are taken."""
        return tuple(name for name in (*LOSSY_ORDER, *BY_NAME) if name in self)


NOTHING = Allowed()  # every bit stays


def read_allow(allow: str | Iterable[str] | None, rounding: bool = False) -> Allowed:
    """What is allowed, as it is written: a tier, names, `name:setting`, `-name`; `rounding` is short for that tier."""
    words = [] if allow is None else allow.split(",") if isinstance(allow, str) else list(allow)
    tier: Exactness = "rounding" if rounding else "bitwise"
    named: dict[str, Setting] = {}
    refused: list[str] = []
    for written in words:
        if not isinstance(written, str):
            raise UsageError(f"allow is made of words, not of {written!r}.", hint='write allow="rounding".')
        name, _, setting = written.strip().replace("=", ":", 1).partition(":")
        if name in TIERS and not setting:
            tier = max(tier, TIERS[TIERS.index(name)], key=EXACTNESS.index)
        elif name.startswith("-") and not setting:
            refused.append(name[1:])
        elif name in (*ROUNDING, *LOSSY_ORDER, *BY_NAME):
            named[name] = _number(setting) if setting else None
        else:
            known = ", ".join((*TIERS, *ROUNDING, *LOSSY_ORDER, *BY_NAME))
            raise UsageError(f"there is no {written.strip()!r} that could be allowed.", hint=f"there are {known}.")
    if both := sorted(named.keys() & set(refused)):
        raise UsageError(
            f"{', '.join(both)} is both allowed and refused.", hint="write it once, with a minus or without."
        )
    return Allowed(tier, tuple(named.items()), tuple(dict.fromkeys(refused)))


def _number(written: str) -> Setting:
    """A setting: a number where it is one, else the word."""
    for kind in (int, float):
        try:
            return kind(written)
        except ValueError:
            continue
    return written


def encode_rewrite(rewrite: Rewrite) -> dict[str, Any]:
    """A rewrite as JSON."""
    data = {"name": rewrite.name, "setting": rewrite.setting, "exactness": rewrite.exactness}
    return (
        data | ({} if rewrite.error is None else {"error": rewrite.error}) | ({"tried": True} if rewrite.tried else {})
    )


def _setting(data: Any) -> Setting:
    if data is None or type(data) in (bool, int, float, str):
        found: Setting = data
        return found
    raise Misshapen("a number, a text or nothing", data)


REWRITE: Shape = record(
    {
        "name": text,
        "setting": _setting,
        "exactness": word(EXACTNESS),
        "error": Absent(maybe(amount), None),
        "tried": Absent(flag, False),
    },
    into=Rewrite,
)
