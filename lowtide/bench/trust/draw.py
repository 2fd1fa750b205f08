"""Which edit comes next: every family of edits by its weight, and in it every kind, place and change alike."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping

from lowtide.bench.trust.edits import Edit, value_edits
from lowtide.bench.trust.hooks import hook_edits
from lowtide.bench.trust.modules import module_edits
from lowtide.bench.trust.parameters import parameter_edits
from lowtide.bench.trust.twins import Twin
from lowtide.bench.trust.world import batch_edits, generator_edits, mode_edits, optimizer_edits

Family = Callable[[Twin], Iterator[Edit]]

FAMILIES: Mapping[Family, int] = {
    value_edits: 12,
    module_edits: 3,
    parameter_edits: 3,
    hook_edits: 2,
    optimizer_edits: 2,
    mode_edits: 1,
    batch_edits: 2,
    generator_edits: 1,
}


def every_edit(twin: Twin) -> Iterator[Edit]:
    """All that could be done to a twin as it is."""
    for family in FAMILIES:
        yield from family(twin)


def draw(twin: Twin, dice: random.Random, *, kind: str | None = None, where: str | None = None) -> Edit | None:
    """An edit, of one kind or at one place if asked for; None where there is none."""
    families = list(FAMILIES)
    if kind is None and where is None:
        able = {family: weight for family, weight in FAMILIES.items() if next(family(twin), None) is not None}
        families = dice.choices(list(able), list(able.values()))
    found = [edit for family in families for edit in family(twin)]
    found = [edit for edit in found if kind in (None, edit.kind) and where in (None, edit.where)]
    if not found:
        return None
    chosen = dice.choice(list(dict.fromkeys(edit.kind for edit in found)))
    found = [edit for edit in found if edit.kind == chosen]
    place = dice.choice(list(dict.fromkeys(edit.where for edit in found)))
    return dice.choice([edit for edit in found if edit.where == place])
