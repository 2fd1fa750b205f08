"""An edit of a twin between two steps, and the edits of values: any value of the program, changed by its type."""

from __future__ import annotations

import copy
import enum
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from lowtide.bench.trust.places import Place, places
from lowtide.bench.trust.twins import Twin

Undo = Callable[[], None]
Change = tuple[str, Callable[[Any, Twin], Any]]  # how, and what is kept afterwards, given what was
Mutation = tuple[str, Callable[[Any], Undo]]  # how, and what does it to a container
FACTOR = 1.25


@dataclass(frozen=True)
class Edit:
    """What is done to both twins, by path."""

    kind: str
    where: str
    how: str
    apply: Callable[[Twin], Undo] = field(compare=False)
    value: bool = False  # whether only a value changes: at least half of these must not be refused
    shared: bool = False  # whether doing it once does it for both twins

    def __str__(self) -> str:
        return f"{self.kind} {self.where} {self.how}"


def value_edits(twin: Twin) -> Iterator[Edit]:
    """Every value of the program, changed in every way that its type has."""
    for place in places(twin):
        value = place.get(twin)
        kind = _kind(place)
        shared = twin.shared and place.root in twin.modules
        plain = not isinstance(value, FunctionType | BuiltinFunctionType | type)
        for how, change in (*changes(value), *_siblings(place, value, twin)):
            yield Edit(kind, str(place), how, functools.partial(_put, place, change), plain, shared)
        for how, mutate in mutations(value):
            yield Edit(kind, str(place), how, functools.partial(_mutate, place, mutate), plain, shared)
        if twin.wrapped and len(place.links) == 1 and place.root == "model" and plain:
            through = Place("net", place.links)
            for how, change in changes(value):
                yield Edit("net", str(through), how, functools.partial(_put, through, change), plain)
        if place.links and place.links[-1].form in ("attribute", "item") and not isinstance(value, tuple):
            yield Edit(kind, str(place), "deleted", functools.partial(_delete, place), False, shared)


def _kind(place: Place) -> str:
    if any(link.key in ("param_groups", "defaults") for link in place.links):
        return "option"
    if any(link.form in ("cell", "default") for link in place.links):
        return "closure"
    if place.links[-1].form == "item":
        return "container"
    if place.root in ("model", "net"):
        return "attribute"
    return "global" if len(place.links) == 1 else "object"


def _put(place: Place, change: Callable[[Any, Twin], Any], twin: Twin) -> Undo:
    old = place.get(twin)
    place.put(twin, change(old, twin))
    return lambda: place.put(twin, old)


def _mutate(place: Place, mutate: Callable[[Any], Undo], twin: Twin) -> Undo:
    return mutate(place.get(twin))


def _delete(place: Place, twin: Twin) -> Undo:
    holder = place.above.get(twin)
    if isinstance(holder, list | dict):
        return _with(holder, lambda: place.delete(twin))
    if place.links[-1].key in getattr(holder, "__dict__", ()) and not isinstance(holder, type):
        return _with(vars(holder), lambda: place.delete(twin))
    old = place.get(twin)
    place.delete(twin)
    return lambda: place.put(twin, old)


def changes(value: Any) -> list[Change]:
    """What may stand in the place of a value, by its type."""
    match value:
        case bool():
            return [("flipped", lambda old, _: not old)]
        case enum.Enum():
            others = [member.name for member in type(value) if member is not value]
            return [(f"= {name}", lambda old, _, name=name: type(old)[name]) for name in others]  # type: ignore[misc]
        case int():
            return [
                ("+ 1", lambda old, _: old + 1),
                ("- 1", lambda old, _: old - 1),
                ("* 2", lambda old, _: old * 2),
                ("as a float", lambda old, _: float(old)),
                ("= None", lambda *_: None),
            ]
        case float():
            return [
                ("* 1.25", lambda old, _: old * 1.25),
                ("* 0.5", lambda old, _: old * 0.5),
                ("* 0.9", lambda old, _: old * 0.9),
                ("+ 0.125", lambda old, _: old + 0.125),
                ("= 0.0", lambda *_: 0.0),
                ("as an int", lambda old, _: int(old) if old == old and abs(old) < 1e9 else 7),
                ("as a tensor", lambda old, _: torch.tensor(old)),
                ("= None", lambda *_: None),
            ]
        case str():
            return [("reversed", lambda old, _: old[::-1]), ("= other", lambda *_: "other")]
        case None:
            return [("= 0.5", lambda *_: 0.5), ("= 1", lambda *_: 1)]
        case Tensor():
            return _tensors(value)
        case FunctionType() | BuiltinFunctionType():
            return [
                ("scaled", lambda old, _: _scaled(old)),
                ("wrapped", lambda old, _: functools.wraps(old)(lambda *args, **kwargs: old(*args, **kwargs))),
            ]
        case tuple():
            return [("reversed", lambda old, _: old if hasattr(old, "_fields") else old[::-1])]
        case list() | dict() | set():
            return [("replaced by an equal one", lambda old, _: copy.copy(old))]
        case _ if _is_data(value):
            return [("replaced by an equal one", lambda old, _: copy.copy(old))]
    return []


def _tensors(value: Tensor) -> list[Change]:
    found: list[Change] = [("replaced by an equal one", lambda old, _: old.detach().clone())]
    if value.dtype.is_floating_point:
        found += [
            ("replaced by another", lambda old, _: old.detach() * FACTOR + 0.125),
            ("in float64", lambda old, _: old.detach().double()),
            ("requires a gradient", lambda old, _: old.detach().clone().requires_grad_()),
        ]
    return [*found, ("= None", lambda *_: None)]


def _is_data(value: Any) -> bool:
    plain = hasattr(value, "__dict__") and not callable(value) and not isinstance(value, nn.Module)
    return plain and type(value).__module__.partition(".")[0] not in ("torch", "logging")


def _scaled(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, but for a factor of what it returns."""

    @functools.wraps(function)
    def scaled(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        number = isinstance(result, float) or (isinstance(result, Tensor) and result.is_floating_point())
        return result * FACTOR if number else result

    return scaled


def _siblings(place: Place, value: Any, twin: Twin) -> list[Change]:
    """Other functions of the program with the same signature."""
    if not isinstance(value, FunctionType):
        return []
    found: list[Change] = []
    for module, names in twin.modules.items():
        for name, other in list(vars(names).items()):
            if isinstance(other, FunctionType) and other is not value and _signature(other) == _signature(value):
                other_place = Place(module, ()).below("attribute", name)
                found.append((f"= {name}", lambda _, twin, at=other_place: at.get(twin)))  # type: ignore[misc]
    return found


def _signature(function: FunctionType) -> Any:
    parameters = inspect.signature(function).parameters.values()
    return [(parameter.kind, parameter.annotation) for parameter in parameters]


def mutations(value: Any) -> list[Mutation]:
    """What may be done to a container or a tensor in place."""
    match value:
        case list():
            found: list[Mutation] = [("cleared", lambda old: _with(old, old.clear))]
            if value:
                found += [
                    ("appended its last", lambda old: _with(old, lambda: old.append(old[-1]))),
                    ("popped", lambda old: _with(old, old.pop)),
                    ("reversed in place", lambda old: _with(old, old.reverse)),
                ]
            return found
        case dict() if all(isinstance(key, str) for key in value):
            found = [("given a new key", lambda old: _with(old, lambda: old.__setitem__("new", 1)))]
            return [*found, ("reordered", lambda old: _with(old, lambda: _reorder(old)))]
        case set():
            return [("given a new member", lambda old: _with(old, lambda: old.add(1)))]
        case Tensor() if value.dtype.is_floating_point and not isinstance(value, nn.Parameter):
            return [("* 1.25 in place", _scale_in_place)]
    return []


def _reorder(mapping: dict[str, Any]) -> None:
    first = next(iter(mapping), None)
    if first is not None:
        mapping[first] = mapping.pop(first)


def _with(container: Any, change: Callable[[], Any]) -> Undo:
    """Change a container in place; what undoes it."""
    old = copy.copy(container)
    change()

    def undo() -> None:
        container.clear()
        container.extend(old) if isinstance(container, list) else container.update(old)

    return undo


def _scale_in_place(tensor: Tensor) -> Undo:
    old = tensor.detach().clone()
    with torch.no_grad():
        tensor.mul_(FACTOR)

    def undo() -> None:
        with torch.no_grad():
            tensor.copy_(old)

    return undo


def remember(*things: Any) -> Undo:
    """What puts modules, optimizers and tensors back as they are now, in their own dicts."""
    undos = [_remember(thing) for thing in things]

    def undo() -> None:
        for one in reversed(undos):
            one()

    return undo


def _remember(thing: Any) -> Undo:
    if isinstance(thing, Tensor):
        data, gradient, needs = thing.data, thing.grad, thing.requires_grad
        values = data.clone()

        def undo_tensor() -> None:
            thing.data = data
            thing.data.copy_(values)
            thing.requires_grad_(needs)
            thing.grad = gradient

        return undo_tensor
    kind, attributes = type(thing), dict(vars(thing))
    inner = {key: copy.copy(part) for key, part in attributes.items() if isinstance(part, Mapping | list | set)}
    groups = [(group, dict(group), list(group["params"])) for group in attributes.get("param_groups", ())]

    def undo() -> None:
        thing.__class__ = kind
        vars(thing).clear()
        vars(thing).update(attributes)
        for key, old in inner.items():
            part = attributes[key]
            part.clear()
            part.extend(old) if isinstance(part, list) else part.update(old)
        for group, old, parameters in groups:
            group.clear()
            group.update(old)
            group["params"][:] = parameters

    return undo


def scale(result: Any) -> Any:
    """A result of a module, but for a factor."""
    return result * FACTOR if isinstance(result, Tensor) else result
