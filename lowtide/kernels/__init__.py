"""From the names that a graph keeps to what torch has behind them."""

from __future__ import annotations

import builtins
import operator
import re
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch

from lowtide.errors import ProgramError
from lowtide.graph.targets import refusal, unknown_constant
from lowtide.kernels import (
    attention,
    blocked,
    blocks,
    chains,
    collectives,
    expected,
    forms,
    grouped,
    norm_halves,
    sparse,
)
from lowtide.kernels.own import quicker
from lowtide.kernels.tried import Own
from lowtide.private import bare_kernel, base_name, dispatched, flop_registry, overload_name, schema

# What an op of a graph may take; what holds a storage, a stream or an object of C++ is none of it.
TAKEN = frozenset({"Tensor", "int", "bool", "float", "complex", "number", "str", "Device", "Generator"})

EXTREMES = ("max", "min")  # scalar ops that are functions of Python itself

# Where a step hands its outputs to code that is not in it, and goes on with the gradients that it comes back with. It
# writes to a mark and is a handover: it runs once, and all draws before it stay before it. What it reads besides,
# buffers that the step has updated, is there by then. What the other code holds from then on counts as written, too: to
# let go of it and make it again would free nothing. Generated code has no call for it: it yields.
HANDOVER = "lowtide.handover.default"
CHANNELS: Mapping[str, tuple[str, ...]] = {  # of ops whose tags do not say it
    HANDOVER: ("handover",),
    expected.EXPECT: ("check",),
    **dict.fromkeys(collectives.ONCE, (collectives.GROUP,)),
}
# What takes others, who are not there when it is measured, or ends the step.
UNMEASURED = frozenset(CHANNELS) | collectives.COLLECTIVES
FAMILIES = (
    blocked.FAMILY,
    attention.FAMILY,
    chains.FAMILY,
)  # of ops of ours that stand for torch's, and are tried against them
TRIED: Mapping[str, Own] = {one.target: one for family in FAMILIES for one in family.ops}
WITH_OUT = ("aten.", "lowtide.sparse", "lowtide.norm")  # how calls begin that may have an `out=`
_LIBRARY = torch.library.Library("lowtide", "DEF")
_LIBRARY.define(
    "handover(Tensor(a!) mark, Tensor[] outputs, Tensor[] others, Tensor(b!)[] held, int[] used, int[] strides)"
    " -> Tensor[]"
)
for one in TRIED.values():
    one.define(_LIBRARY)
blocks.define(_LIBRARY)
grouped.define(_LIBRARY)
norm_halves.define(_LIBRARY)
sparse.define(_LIBRARY)
collectives.define(_LIBRARY)
expected.define(_LIBRARY)


@torch.library.register_fake("lowtide::handover", lib=_LIBRARY)  # type: ignore[untyped-decorator]
def handover(
    mark: torch.Tensor,
    outputs: list[torch.Tensor],
    others: list[torch.Tensor],
    held: list[torch.Tensor],
    used: list[int],
    strides: list[int],
) -> list[torch.Tensor]:
    """The gradients of those outputs that have one, as far as their sizes go; `strides` are those of all, in a row."""
    steps = iter(strides)
    given = [outputs[place] for place in used]
    return [output.new_empty_strided(output.shape, [next(steps) for _ in output.shape]) for output in given]


@cache
def overload(target: str) -> Any:
    """The overload of torch.ops that a target names, such as `aten.mm.default`, if a graph may call it."""
    if (why := refusal(target)) is not None:
        raise ProgramError("no such", why)
    namespace, name, variant = target.split(".")
    try:
        found = getattr(getattr(getattr(torch.ops, namespace), name), variant)
    except (AttributeError, RuntimeError):
        found = None
    if not dispatched(found):
        raise ProgramError("no such", f"this torch has no op {target}")
    for argument in schema(found).arguments:
        if (kind := re.sub(r"Optional\[|List\[|\]", "", str(argument.type))) not in TAKEN:
            raise ProgramError("no such", f"{target} may not be called: it takes a {kind}")
    return found


def kernel(target: str, own: Callable[[str], Callable[..., Any] | None] = quicker) -> Any:
    """What the generated code calls for a target: torch's kernel, or our own that gives the same bits sooner."""
    namespace, _, name = target.partition(".")
    if namespace == "operator":
        if (why := refusal(target)) is not None:
            raise ProgramError("no such", why)
        return getattr(builtins if name in EXTREMES else operator, name)
    if target in TRIED:
        TRIED[target].ready()
    return own(target) or forms.called(target) or bare_kernel(overload(target))


def returns_one(target: str) -> bool:
    """Whether the call returns one thing rather than a tuple or a list."""
    if target.startswith("operator."):
        return True
    returns = schema(overload(target)).returns
    return len(returns) == 1 and str(returns[0].type) != "List[Tensor]"


def overwriter(target: str, *, itself: bool) -> tuple[Any, str | None] | None:
    """The overload that writes the one result of a call over an argument, and the name of its `out=`, if it has one.

    `itself` asks for the variant that overwrites its first argument, such as `relu_`; it needs no name.
    """
    namespace = (
        getattr(torch.ops, target.split(".")[0])
        if target.startswith(("aten.", "lowtide.sparse", "lowtide.norm"))
        else None
    )
    if namespace is None:
        return None
    functional = overload(target)
    arguments = [(a.name, str(a.type)) for a in schema(functional).arguments]
    if itself:
        packet = getattr(namespace, base_name(functional) + "_", None)
        variant = None if packet is None else getattr(packet, overload_name(functional), None)
        if variant is None or [(a.name, str(a.type)) for a in schema(variant).arguments] != arguments:
            return None
        return variant, None
    packet = getattr(namespace, base_name(functional))
    for name in packet.overloads():
        variant = getattr(packet, name)
        outs = [a for a in schema(variant).arguments if a.is_out]
        if len(outs) == 1 and [(a.name, str(a.type)) for a in schema(variant).arguments if not a.is_out] == arguments:
            return variant, outs[0].name
    return None


@cache
def functional(target: str) -> str | None:
    """The call that leaves its arguments alone and returns what this one writes over the first; None: there is none."""
    if target.startswith("operator."):
        return target
    found = overload(target)
    if not schema(found).is_mutable:
        return target
    namespace, name, variant = target.split(".")
    plain = getattr(getattr(torch.ops, namespace), name.removesuffix("_"), None)
    plain = getattr(plain, variant, None)
    if plain is None or not name.endswith("_") or schema(plain).is_mutable:
        return None
    same = [[(a.name, str(a.type)) for a in schema(one).arguments] for one in (found, plain)]
    return f"{namespace}.{name.removesuffix('_')}.{variant}" if same[0] == same[1] and returns_one(target) else None


def is_product(target: str) -> bool:
    """Whether the call mixes many elements into one, as matrix products, convolutions and attention do."""
    known = target.startswith("aten.") and overload(target).overloadpacket in flop_registry
    own = TRIED.get(target)
    return known or sparse.is_product(target) or (own is not None and own.operations is not None)


def made_of(target: str) -> str | None:
    """A digest of what an op of ours that stands for torch's is made of; None: it is none."""
    return next((family.made_of for family in FAMILIES if any(one.target == target for one in family.ops)), None)


def constant(family: str, name: str) -> Any:
    """A name of the tensor library."""
    if (why := unknown_constant(family, name)) is not None:
        raise ProgramError("no such", why)
    try:
        return torch.device(name) if family == "device" else getattr(torch, name)
    except (AttributeError, RuntimeError) as error:
        raise ProgramError("no such", f"this torch has no {family} {name}") from error
