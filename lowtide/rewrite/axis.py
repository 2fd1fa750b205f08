"""Two captures of a step, with more and with fewer examples, side by side: what has the examples in it, and where."""

from __future__ import annotations

import logging
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from lowtide.aten import OPAQUE
from lowtide.errors import CaptureError
from lowtide.graph import Arg, Graph, Op, Read
from lowtide.kernels.probe import (
    Behaviour,
    Counted,
    Grows,
    Link,
    Operand,
    Role,
    Size,
    Source,
    Trial,
    behaviour,
    operands,
)
from lowtide.resized import Resized
from lowtide.rewrite.merge import merged

PIECE = "~"  # in the name of an op that makes some of what another made: what follows says which
Template = tuple[tuple[Any, ...], tuple[tuple[str, Any], ...]]  # arguments of a call for any number of examples


class Coupled(Exception):
    """Why something can't run in parts."""


@dataclass(frozen=True)
class Sized:
    """A value for any number of examples."""

    shape: tuple[Size, ...]
    stride: tuple[Size, ...]
    dim: int  # the axis along which its examples are; -1: it has none


class Axis:
    """A graph whose values and arguments are known for any number of examples."""

    def __init__(self, graph: Graph, resized: Resized) -> None:
        self.graph, self.examples = graph, resized.examples
        self.other = resized.examples // 2 if resized.examples >= 4 else 2 * resized.examples
        logging.disable(logging.ERROR)  # torch logs what can't be traced; here that is an answer
        try:
            known, twin = merged(resized.graph), merged(resized.at(self.other))
        except CaptureError as error:
            raise Coupled(
                f"with {self.other} examples instead of {self.examples} there is no step: {error.message}"
            ) from error
        finally:
            logging.disable(logging.NOTSET)
        if [op.target for op in known.ops] != [op.target for op in twin.ops] or len(known.inputs) != len(twin.inputs):
            raise Coupled("the step calls other ops with other numbers of examples")
        self._twin = twin
        self._ops = {op.name: other for op, other in zip(known.ops, twin.ops, strict=True)}
        self._inputs = {
            (known.values[one.value].kind, one.path): other.value
            for one, other in zip(known.inputs, twin.inputs, strict=True)
        }
        self._templates: dict[int, Template] = {}
        self._outers: dict[int, int] = {}
        self.look()

    @cached_property
    def twins(self) -> dict[int, int]:
        """For each value the same one of the other capture; what no capture made has none."""
        graph = self.graph
        found = {one.value: self._inputs.get((graph.values[one.value].kind, one.path), -1) for one in graph.inputs}
        for op in graph.ops:
            other = self._twin_of(op)
            if other is not None and len(other.outputs) == len(op.outputs) and len(other.updates) == len(op.updates):
                pairs = [*zip(op.outputs, other.outputs, strict=True)]
                pairs += [(mine[0], its[0]) for mine, its in zip(op.updates, other.updates, strict=True)]
                found |= {mine: its for mine, its in pairs if mine is not None and its is not None}
        return {mine: its for mine, its in found.items() if its >= 0}

    @cached_property
    def sized(self) -> dict[int, Sized | None]:
        """For each value of both captures its sizes; None: it grows otherwise than with the examples."""
        return {mine: self._sized(mine, its) for mine, its in self.twins.items()}

    def dim(self, value: int) -> int:
        """The axis of a value; -1: it has none, or it is not known."""
        found = self.sized.get(value)
        return -1 if found is None else found.dim

    def outer(self, value: int) -> int:
        """In how many blocks along its axis the examples of a value repeat, as far as its maker tells."""
        return self._outers.get(value, 1)

    def note(self, op: int, found: Behaviour) -> None:
        """Remember how what a call makes is laid out."""
        item = self.graph.ops[op]
        for value, seen in zip((*item.outputs, *(new for new, _ in item.updates)), found.results, strict=True):
            if value is not None and seen is not None and seen.outer > 1:
                self._outers[value] = seen.outer

    def look(self) -> None:
        """Find out how all values are laid out, where the axis is not everywhere the first one."""
        if any(found is not None and found.dim > 0 for found in self.sized.values()):
            for op in self.graph.ordinary:
                if self.graph.ops[op].phase != "update" and self.carries(op) and not self.graph.ops[op].channels:
                    with suppress(Coupled):
                        self.note(op, self.behaviour(op, {}))

    def carries(self, op: int) -> bool:
        """Whether a call has the examples in what it reads, is told, or makes."""
        item = self.graph.ops[op]
        if any(self.sized.get(value, 0) is None or self.dim(value) >= 0 for value in (*item.reads, *item.makes)):
            return True
        if self._twin_of(item) is None:
            return False
        try:
            return self.template(op) != _plain(self.graph, item)
        except Coupled:
            return True

    def template(self, op: int) -> Template:
        """The arguments of a call for any number of examples."""
        if op not in self._templates:
            item = self.graph.ops[op]
            other = self._twin_of(item)
            if other is None:
                raise Coupled("it was put there by another rewrite")
            if len(item.args) != len(other.args) or [key for key, _ in item.kwargs] != [key for key, _ in other.kwargs]:
                raise Coupled("it is called otherwise with other numbers of examples")
            args = tuple(self._paired(one, two) for one, two in zip(item.args, other.args, strict=True))
            kwargs = tuple(
                (key, self._paired(one, two)) for (key, one), (_, two) in zip(item.kwargs, other.kwargs, strict=True)
            )
            self._templates[op] = args, kwargs
        return self._templates[op]

    def behaviour(self, op: int, roles: dict[int, Role]) -> Behaviour:
        """What a call does along the axis, given what its arguments are there; raises where it is coupled."""
        found = behaviour(self.trial(op, roles))
        if found is None:
            raise Coupled("its results for all examples are not made of those for some")
        return found

    def trial(self, op: int, roles: dict[int, Role]) -> Trial:
        """The call as the probe takes it."""
        item = self.graph.ops[op]
        args, kwargs = self.template(op)
        values = list(dict.fromkeys(one.place for one in operands((args, tuple(arg for _, arg in kwargs)))))
        places = {value: place for place, value in enumerate(values)}
        return Trial(
            item.target,
            _moved(args, places),
            tuple((key, _moved(arg, places)) for key, arg in kwargs),
            tuple(self._source(value, roles) for value in values),
            tuple(None if value is None else self._result(value) for value in item.outputs),
            tuple((places[old], self._result(new)) for new, old in item.updates),
        )

    def _twin_of(self, op: Op) -> Op | None:
        """The same call of the other capture; None: it was put there by a rewrite."""
        return self._ops.get(op.name.partition(PIECE)[0])

    def _result(self, value: int) -> int:
        found = self.sized.get(value)
        if found is None:
            raise Coupled("what it makes grows otherwise than with the examples")
        return found.dim

    def _source(self, value: int, roles: dict[int, Role]) -> Source:
        item, found = self.graph.values[value], self.sized.get(value)
        if item.kind == "scalar":
            return Source("scalar", item.dtype, (), ())
        if found is None:
            raise Coupled("what it reads grows otherwise than with the examples")
        maker = self.graph.maker[value]
        if maker >= 0 and self.graph.ops[maker].target in OPAQUE:
            output = self.graph.ops[maker].outputs.index(value)
            before = self.trial(maker, roles) if output == len(self.graph.ops[maker].outputs) - 1 else None
            return Source("axis", item.dtype, found.shape, found.stride, found.dim, 1, before, output)
        role = roles.get(value, "axis" if found.dim >= 0 else "same")
        return Source(role, item.dtype, found.shape, found.stride, found.dim, self.outer(value))

    def _sized(self, mine: int, its: int) -> Sized | None:
        one, two = self.graph.values[mine], self._twin.values[its]
        if len(one.shape) != len(two.shape) or one.dtype != two.dtype:
            return None
        shape = tuple(self._size(a, b) for a, b in zip(one.shape, two.shape, strict=True))
        stride = tuple(self._size(a, b) for a, b in zip(one.stride, two.stride, strict=True))
        dims = [place for place, size in enumerate(shape) if not isinstance(size, int)]
        if len(dims) > 1 or any(isinstance(size, Counted) for size in (*shape, *stride)):
            return None
        return Sized(shape, stride, dims[0] if dims else -1)

    def _size(self, one: Any, two: Any) -> Any:
        """A number of both captures as one that grows, or one that is counted otherwise."""
        if one == two and type(one) is type(two):
            return one
        whole = type(one) is int and type(two) is int
        if whole and not one % self.examples and one // self.examples * self.other == two:
            return Grows(one // self.examples)
        return Counted(one)

    def _paired(self, one: Arg, two: Arg) -> Any:
        """An argument of both captures as one for any number of examples."""
        match one, two:
            case Read(), Read():
                return Operand(one.value, self._chain(one.view, two.view))
            case tuple(), tuple():
                if len(one) != len(two):
                    raise Coupled("how much it reads depends on the number of examples")
                return tuple(self._paired(a, b) for a, b in zip(one, two, strict=True))
            case (Read() | tuple(), _) | (_, Read() | tuple()):
                raise Coupled("it is called otherwise with other numbers of examples")
            case _:
                return self._size(one, two)

    def _chain(self, one: int | None, two: int | None) -> tuple[Link, ...]:
        found: list[Link] = []
        while one is not None and two is not None:
            mine, its = self.graph.views[one], self._twin.views[two]
            if mine.target != its.target or len(mine.args) != len(its.args) or mine.item != its.item:
                raise Coupled("it sees what it reads otherwise with other numbers of examples")
            args = tuple(self._paired(a, b) for a, b in zip(mine.args, its.args, strict=True))
            if any(isinstance(arg, Counted) for arg in _flat(args)):
                raise Coupled("a size depends on the examples otherwise than in proportion")
            found.append(Link(mine.target, args, mine.item))
            one, two = mine.parent, its.parent
        if one is not None or two is not None:
            raise Coupled("it sees what it reads otherwise with other numbers of examples")
        return tuple(reversed(found))


def axis_of(graph: Graph, resized: Resized) -> Axis:
    """The axis of a graph, found out once; raises where there is none."""
    key = f"axis {graph.fingerprint}"
    if key not in resized.known:
        try:
            resized.known[key] = Axis(graph, resized)
        except Coupled as error:
            resized.known[key] = error
    found = resized.known[key]
    if isinstance(found, Coupled):
        raise found
    assert isinstance(found, Axis)
    return found


def _flat(arg: Any) -> list[Any]:
    return [leaf for item in arg for leaf in _flat(item)] if isinstance(arg, tuple) else [arg]


def _moved(arg: Any, places: dict[int, int]) -> Any:
    if isinstance(arg, Operand):
        return Operand(places[arg.place], arg.chain)
    return tuple(_moved(item, places) for item in arg) if isinstance(arg, tuple) else arg


def _plain(graph: Graph, op: Op) -> Template:
    """The template of a call that does not depend on the number of examples."""
    return _as_is(graph, op.args), tuple((key, _as_is(graph, arg)) for key, arg in op.kwargs)


def _as_is(graph: Graph, arg: Arg) -> Any:
    if isinstance(arg, Read):
        chain, view = [], arg.view
        while view is not None:
            item = graph.views[view]
            chain.append(Link(item.target, _as_is(graph, item.args), item.item))
            view = item.parent
        return Operand(arg.value, tuple(reversed(chain)))
    return tuple(_as_is(graph, item) for item in arg) if isinstance(arg, tuple) else arg
