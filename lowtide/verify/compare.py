"""Two runs of one step compared to the bit: results, model, optimizer, batch, variables and random generators."""

from __future__ import annotations

import hashlib
import pickle
import random
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import torch

from lowtide.packed import Packed
from lowtide.verify.copies import PLAIN, Copy, optimizers_of

REGISTRIES = ("_parameters", "_buffers", "_modules")  # of a module: compared under the names of what is in them
OPAQUE = (ModuleType, type, torch.nn.Module, torch.optim.Optimizer)  # or compared under names of their own
MISSING = "nothing"


@dataclass(frozen=True)
class Difference:
    """Something that is not the same in both runs."""

    name: str  # "parameter 'layers.0.weight'"
    words: str  # "512 of 4,096 elements, by at most 3.1e-05"

    def __str__(self) -> str:
        return f"{self.name}: {self.words}"


@dataclass(frozen=True)
class Run:
    """One run of a step: its objects, and what it returned."""

    model: torch.nn.Module
    optimizer: Any
    batch: tuple[Any, ...]
    result: Any
    variables: Mapping[str, Any]
    generators: Mapping[str, Any]


@dataclass
class Tally:
    """How much was compared."""

    tensors: int = 0
    nbytes: int = 0
    others: int = 0  # numbers, texts and generators


def generators() -> dict[str, Any]:
    """The states of the generators that a step may draw from."""
    return {
        "torch's generator": torch.default_generator.get_state(),
        "Python's random": random.getstate(),
        "numpy's generator": np.random.get_state(),
    }


def put_generators(states: Mapping[str, Any]) -> None:
    """Let the generators go on from these states."""
    torch.default_generator.set_state(states["torch's generator"])
    random.setstate(states["Python's random"])
    np.random.set_state(states["numpy's generator"])


def variables_of(copied: Copy, *, ours: bool) -> dict[str, Any]:
    """What the variables hold that the step names: the caller's, or those of the copy."""
    found: dict[str, Any] = {}
    for theirs, own in copied.variables:
        also = sum(known.partition(" ")[0] == repr(theirs.name) for known in found)  # of another function
        found[repr(theirs.name) + (f" ({also + 1})" if also else "")] = (own if ours else theirs).value
    return found


def compare(expected: Run, found: Run, tally: Tally | None = None) -> list[Difference]:
    """All that differs, in the order in which a person looks for it."""
    return list(_differences(dict(_things(expected)), dict(_things(found)), tally or Tally()))


def _differences(expected: dict[str, Any], found: dict[str, Any], tally: Tally) -> Iterator[Difference]:
    for name in {**expected, **found}:
        if name not in expected or name not in found:
            words = [_show(side[name]) if name in side else MISSING for side in (expected, found)]
            yield Difference(name, f"{words[0]} in eager, {words[1]} in lowtide")
        elif (words_ := differs(expected[name], found[name], tally)) is not None:
            yield Difference(name, words_)


def differs(expected: Any, found: Any, tally: Tally) -> str | None:
    """How two leaves differ, in words; None where they are the same to the bit."""
    if isinstance(expected, Packed) and isinstance(found, Packed):
        parts = expected.content.parts, found.content.parts
        if parts[0].keys() != parts[1].keys():
            return f"{', '.join(parts[0])} in eager, {', '.join(parts[1])} in lowtide"
        apart = ((name, differs(one, parts[1][name], tally)) for name, one in parts[0].items())
        return next((f"its {name}: {words}" for name, words in apart if words is not None), None)
    if isinstance(expected, torch.Tensor) and isinstance(found, torch.Tensor):
        tally.tensors += 1
        tally.nbytes += expected.nbytes
        return _tensors_differ(expected.detach(), found.detach())
    tally.others += 1
    if isinstance(expected, bytes) and isinstance(found, bytes):
        return None if expected == found else "not in the same state"
    if type(expected) is not type(found) or _bits(expected) != _bits(found):
        return f"{_show(expected)} in eager, {_show(found)} in lowtide"
    return None


def digest(tensor: torch.Tensor) -> bytes:
    """A digest of the elements; it takes no memory of torch's."""
    array = np.ascontiguousarray(_as_integers(tensor.detach()).numpy())
    return hashlib.blake2b(array.data if array.size else b"", digest_size=8).digest()


def _as_integers(tensor: torch.Tensor) -> torch.Tensor:
    """The same bytes in a dtype that numpy knows."""
    tensor = tensor.resolve_conj().resolve_neg() if tensor.is_complex() else tensor
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])


def _tensors_differ(expected: torch.Tensor, found: torch.Tensor) -> str | None:
    if (expected.shape, expected.dtype) != (found.shape, found.dtype):
        return f"{_show(expected)} in eager, {_show(found)} in lowtide"
    apart = _as_integers(expected) != _as_integers(found)
    count = int(apart.sum())
    if not count:
        return None
    wide = torch.complex128 if expected.is_complex() else torch.float64
    most = float((expected.to(wide) - found.to(wide)).abs().nan_to_num(torch.inf).max())
    return f"{count:,} of {expected.numel():,} elements, by at most {most:.3g}"


def _bits(thing: Any) -> Any:
    if isinstance(thing, float):
        return struct.pack("d", thing)
    if isinstance(thing, complex):
        return struct.pack("dd", thing.real, thing.imag)
    return thing


def _show(thing: Any) -> str:
    if isinstance(thing, torch.Tensor):
        return f"{str(thing.dtype).removeprefix('torch.')}[{'x'.join(map(str, thing.shape))}]"
    text = repr(thing)
    return text if len(text) <= 60 else f"{text[:57]}..."


# ------------------------------------------------------------------------------------ what there is, under its names


def _things(run: Run) -> Iterator[tuple[str, Any]]:
    """Everything that a step may change or return, as leaves with names for a person."""
    yield from _leaves("the result", run.result)
    names = dict[int, str]()
    for name, parameter in run.model.named_parameters():
        names[id(parameter)] = name
        yield f"parameter {name!r}", parameter
        yield f"the gradient of {name!r}", parameter.grad
    for name, buffer in run.model.named_buffers():
        yield f"buffer {name!r}", buffer
    for title, optimizer in optimizers_of(run.optimizer):
        yield from _optimizer_things(title, optimizer, names)
    yield from _leaves("batch", run.batch)
    for name, module in run.model.named_modules():
        for key, attribute in vars(module).items():
            if key not in REGISTRIES:
                yield from _leaves(f"attribute {f'{name}.{key}' if name else key!r}", attribute)
    for name, value in run.variables.items():
        yield from _leaves(f"variable {name}", value)
    for name, state in run.generators.items():
        yield name, state if isinstance(state, torch.Tensor) else pickle.dumps(state)


def _optimizer_things(title: str, optimizer: torch.optim.Optimizer, names: dict[int, str]) -> Iterator[tuple[str, Any]]:
    for number, group in enumerate(optimizer.param_groups):
        for key, option in group.items():
            if key != "params":
                yield from _leaves(f"{title}'s {key!r} of parameter group {number}", option)
        for place, parameter in enumerate(group["params"]):
            name = names.get(id(parameter))
            if name is None:
                yield f"{title}'s parameter {number}.{place}", parameter
                yield f"the gradient of {title}'s parameter {number}.{place}", parameter.grad
            for key, item in (optimizer.state.get(parameter) or {}).items():
                yield from _leaves(f"{title}'s {key!r} of {name or f'parameter {number}.{place}'!r}", item)


def _leaves(name: str, thing: Any, seen: set[int] | None = None) -> Iterator[tuple[str, Any]]:
    """The tensors, numbers and texts in a thing, each container once; what is opaque is left out."""
    seen = set() if seen is None else seen
    if isinstance(thing, (torch.Tensor, *PLAIN)):
        yield name, thing
        return
    if id(thing) in seen:
        return
    seen.add(id(thing))
    if isinstance(thing, np.ndarray | np.generic) and thing.dtype != object:
        yield name, thing.tobytes()
    elif isinstance(thing, torch.Generator):
        yield name, thing.get_state()
    elif isinstance(thing, set | frozenset):
        yield name, tuple(sorted(map(repr, thing)))
    else:
        if isinstance(thing, Mapping | list | tuple):
            yield f"the length of {name}", len(thing)
        for key, item in _parts(thing):
            yield from _leaves(f"{name} {key!r}", item, seen)


def _parts(thing: Any) -> Iterator[tuple[Any, Any]]:
    """What is in a container, a dataclass, or an object with attributes of its own."""
    if isinstance(thing, list | tuple):
        yield from enumerate(thing)
    elif isinstance(thing, Mapping):
        yield from ((key, item) for key, item in thing.items() if isinstance(key, PLAIN))
    elif not isinstance(thing, OPAQUE) and not callable(thing):
        yield from ((key, item) for key, item in getattr(thing, "__dict__", {}).items() if isinstance(key, str))
