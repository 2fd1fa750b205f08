"""The first op of a step whose arguments or results are not eager's.

Eager's step runs once more, and all that its calls see and leave is noted as digests, in order. Then the program runs
once more with kernels that note the same, and the two are held against each other op by op, in the program's order.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import FunctionType
from typing import Any

import torch

from lowtide import kernels, private
from lowtide.capture.origin import user_line
from lowtide.execute import Runner
from lowtide.graph import Graph, Op, Read
from lowtide.program import Run
from lowtide.verify.compare import digest

aten = torch.ops.aten
NUMBERS = (bool, int, float, complex, str)
WINDOW, ALIKE = 200, 6  # ops: how far apart two runs may be before they meet again, and for how long they must agree
LIFTED = "aten.clone.default"  # what a graph has for a tensor that is made from Python's numbers
REPEATED = ("aten.clone.default", "aten.copy_.default")  # what a graph has in the place of numbers drawn a second time


@dataclass(frozen=True)
class Call:
    """One call of a kernel, as it was when it was done."""

    target: str
    arguments: tuple[Any, ...]  # digests of tensors, numbers as they are, None for all else
    results: tuple[bytes | None, ...]
    line: str  # of the user


@dataclass(frozen=True)
class Blame:
    """Where a step first does something else than eager."""

    op: str | None  # its name in the graph
    words: str


class Eager(private.TorchDispatchMode):
    """Notes the calls of eager's step that a captured step has as ops."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[Call] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if _is_composite(func):
            with self:
                return func.decompose(*args, **kwargs)
        result = func(*args, **kwargs)
        if func.namespace in ("prim", "profiler"):
            return result
        if func is aten._local_scalar_dense.default:
            if args[0].dtype.is_floating_point:
                self._note(func, args, kwargs, [])
            return result
        results = list(result) if isinstance(result, tuple | list) else [result]
        if func is aten.lift_fresh.default:
            given = _values(_arranged(aten.clone.default, args, {}))
            self.calls.append(Call(LIFTED, given, (digest(result),), user_line()))
        elif _writes(func) or not _is_view(args, results):
            self._note(func, args, kwargs, results)
        return result

    def _note(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], results: list[Any]) -> None:
        target = f"{func.namespace}.{private.base_name(func)}.{private.overload_name(func)}"
        given = _values(_arranged(func, args, kwargs))
        self.calls.append(Call(target, given, _digests(results), user_line()))


def find_blame(runner: Runner, batch: tuple[Any, ...], calls: Sequence[Call], back: Callable[[], None]) -> Blame:
    """Find where the program of a runner first leaves eager's calls; `back` puts everything back before it runs."""
    graph = runner.captured.graph
    ops = [op for op in graph.ordinary if not graph.ops[op].target.startswith("operator.")]
    pairs, gap = align([graph.ops[op].target for op in ops], [call.target for call in calls])
    eagers = {ops[place]: calls[other] for place, other in pairs}
    back()
    noted: list[tuple[int, Call]] = []
    failure = ""
    with _noting(runner, noted):
        try:
            runner(*batch)
        except Exception as error:
            failure = f" (run again, the step failed: {type(error).__name__}: {error})"
    differing = ((op, _differ(graph, op, eagers[op], call)) for op, call in noted if op in eagers)
    first, words = next(((op, words) for op, words in differing if words is not None), (None, ""))
    other = None if gap is None else _other_ops(graph, ops[gap[0] :], calls[gap[1] :])
    if first is None:
        return other or Blame(None, f"run again, op by op, no op differs{failure}: it is what stands around the ops")
    item = graph.ops[first]
    if other is not None and gap is not None and ops.index(first) >= gap[0]:
        return Blame(other.op, f"{other.words}. Of the ops that both have, the first one is {_place(item)}: {words}")
    return Blame(item.name, f"the first op that differs is {_place(item)}: {words}")


def repeated(calls: Sequence[Call], again: Sequence[Call]) -> list[Call]:
    """What two runs of eager have in common; what is in memory that an op leaves as it found it is None."""
    return [
        replace(
            call,
            arguments=_common(call.arguments, other.arguments),
            results=() if "empty" in call.target else _common(call.results, other.results),
        )
        for call, other in zip(calls, again, strict=False)
    ]


def _common(one: Sequence[Any], other: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(mine if mine == theirs else None for mine, theirs in zip(one, other, strict=False))


def _other_ops(graph: Graph, ops: Sequence[int], calls: Sequence[Call]) -> Blame:
    """What to say where eager runs other ops."""
    eager = f"runs {calls[0].target} there, from {calls[0].line}" if calls else "is at its end there"
    if not ops:
        return Blame(None, f"the captured step has come to its end, and eager {eager}")
    item = graph.ops[ops[0]]
    return Blame(item.name, f"the first op that differs is {_place(item)}: eager {eager}")


def align(ops: Sequence[str], calls: Sequence[str]) -> tuple[list[tuple[int, int]], tuple[int, int] | None]:
    """Which op is which call, by their targets in order, and the places at which one has what the other has not."""
    pairs: list[tuple[int, int]] = []
    gap: tuple[int, int] | None = None
    here, there = 0, 0
    while here < len(ops) and there < len(calls):
        if ops[here] in (calls[there], *REPEATED):
            pairs.append((here, there))
            here, there = here + 1, there + 1
            continue
        gap = gap or (here, there)
        found = _meet(ops, calls, here, there)
        if found is None:
            return pairs, gap
        here, there = found
    if gap is None and (here < len(ops) or there < len(calls)):
        gap = here, there
    return pairs, gap


def _meet(ops: Sequence[str], calls: Sequence[str], here: int, there: int) -> tuple[int, int] | None:
    """The nearest places from which on both have the same for a while."""
    for skipped in range(1, WINDOW):
        for mine in range(skipped + 1):
            one, other = here + mine, there + skipped - mine
            if one + ALIKE <= len(ops) and ops[one : one + ALIKE] == calls[other : other + ALIKE]:
                return one, other
    return None


def _place(op: Op) -> str:
    where = [op.phase, f"of {op.module!r}" if op.module else "", f"at {op.source}" if op.source else ""]
    return f"{op.name} ({op.target}), {' '.join(filter(None, where))}"


# --------------------------------------------------------------------------------------------- one call beside another


def _differ(graph: Graph, op: int, eager: Call, ours: Call) -> str | None:
    """How a call of the program differs from eager's, in words."""
    item = graph.ops[op]
    if item.target == eager.target:
        pairs = list(enumerate(zip(eager.arguments, ours.arguments, strict=True)))
        other = [(place, pair) for place, pair in pairs if None not in pair and pair[0] != pair[1]]
        for place, (expected, found) in other:
            if isinstance(expected, NUMBERS) or isinstance(found, NUMBERS):
                return f"its argument {place} is {expected!r} in eager and {found!r} in the program"
        for place, _ in other:
            return f"its argument {place}{_named(graph, item, place)} has other contents than in eager"
    for place, value in enumerate(item.outputs):
        if value is None or place >= min(len(eager.results), len(ours.results)):
            continue
        if None not in (pair := (eager.results[place], ours.results[place])) and pair[0] != pair[1]:
            return "it is given the same and returns something else"
    return None


def _named(graph: Graph, op: Op, place: int) -> str:
    """The name of an argument, where it is an input of the step."""
    value = getattr(_arranged(kernels.overload(op.target), op.args, dict(op.kwargs))[place], "value", None)
    if value is None or graph.maker[value] >= 0:
        return ""
    return f", the {graph.values[value].kind} {graph.values[value].name!r},"


def _arranged(overload: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """The arguments of a call in the order of its schema; torch leaves out those that are at their defaults."""
    schema = private.schema(overload).arguments
    rest = schema[len(args) :]
    return [*args[: len(schema)], *(kwargs.get(item.name, item.default_value) for item in rest)]


def _values(arguments: Sequence[Any]) -> tuple[Any, ...]:
    """Arguments as they can be compared; lists of tensors are one digest."""
    return tuple(_value(argument) for argument in arguments)


def _value(argument: Any) -> Any:
    if isinstance(argument, torch.Tensor):
        return digest(argument)
    if isinstance(argument, list | tuple):
        return tuple(map(_value, argument))
    return argument if isinstance(argument, NUMBERS) else None


def _digests(results: Sequence[Any]) -> tuple[bytes | None, ...]:
    return tuple(digest(item) if isinstance(item, torch.Tensor) else None for item in results)


def _is_view(args: tuple[Any, ...], results: list[Any]) -> bool:
    """Whether a call made nothing: no tensor, or views of its first argument only."""
    tensors = [item for item in results if isinstance(item, torch.Tensor)]
    if not tensors or not args or not isinstance(args[0], torch.Tensor):
        return not tensors
    home = private.storage_key(args[0])
    return len(tensors) == len(results) and all(private.storage_key(item) == home for item in tensors)


def _writes(func: Any) -> bool:
    return any(item.alias_info is not None and item.alias_info.is_write for item in private.schema(func).arguments)


def _is_composite(func: Any) -> bool:
    """Whether torch runs a call as other calls."""
    has = private.has_kernel
    own = has(func.name(), "CPU") or has(func.name(), "CompositeExplicitAutograd")
    return has(func.name(), "CompositeImplicitAutograd") and not own


# -------------------------------------------------------------------------------------------------- the program's calls


@contextmanager
def _noting(runner: Runner, noted: list[tuple[int, Call]]) -> Iterator[None]:
    """Let the next step of a runner note its calls; where it puts what it makes stays as it is."""
    function, graph = runner.function, runner.captured.graph
    assert isinstance(function, FunctionType)
    program = runner.program.instructions
    accepted = {op: _kernels(item) for op, item in enumerate(graph.ops) if not item.target.startswith("operator.")}

    def noting(kernel: Any, cursor: array[int]) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            instruction = program[cursor[0]] if cursor[0] < len(program) else None
            if not isinstance(instruction, Run) or kernel not in accepted.get(instruction.op, ()):
                return kernel(*args, **kwargs)
            op = graph.ops[instruction.op]
            given = _arranged(kernels.overload(op.target), args, kwargs)
            before = _values(given)  # a result may take the place of an argument
            result = kernel(*args, **kwargs)
            written, after = _written(op), _values(given)
            seen = tuple(after[place] if place in written else before[place] for place in range(len(given)))
            results = [result] if not isinstance(result, tuple | list) else list(result)
            noted.append((instruction.op, Call(op.target, seen, _digests(results), op.source)))
            return result

        return call

    def watched(inputs: list[Any], generator: Any, places: Any, cursor: array[int]) -> Any:
        names = {
            name: noting(thing, cursor) if _is_kernel(name, thing) else thing
            for name, thing in function.__globals__.items()
        }
        noted_function = FunctionType(function.__code__, names, function.__name__, None, function.__closure__)
        return noted_function(inputs, generator, places, cursor)

    runner.function = watched
    try:
        yield
    finally:
        runner.function = function


def _written(op: Op) -> set[int]:
    """The places of the arguments that an op writes to, as eager does."""
    old = {value for _, value in op.updates}
    found = set()
    for place, argument in enumerate(_arranged(kernels.overload(op.target), op.args, dict(op.kwargs))):
        items = argument if isinstance(argument, tuple) else (argument,)
        if any(isinstance(item, Read) and item.value in old for item in items):
            found.add(place)
    return found


def _is_kernel(name: str, thing: Any) -> bool:
    return name.startswith("k") and name[1:].isdigit() and callable(thing) and not isinstance(thing, type)


def _kernels(op: Op) -> list[Any]:
    """What a program may call for an op."""
    found = [kernels.kernel(op.target)]
    for itself in (True, False):
        other = kernels.overwriter(op.target, itself=itself)
        found += [] if other is None else [private.bare_kernel(other[0])]
    return found
