"""Repeated ops: a model that is checkpointed already is planned as if it were not.

torch.utils.checkpoint runs a part of the forward again in the backward, and a captured step has both runs. Values are
numbered: two have one number if the same call made them from arguments of the same numbers, so their bits are equal.
An op of the backward that makes what an op of the forward makes goes, and its readers read the forward's. What to keep
and what to make again is then for the plan to say. Every bit stays what it was:

- Draws and ops that update what outlives the step stay. A batch norm that runs again updates its statistics again, as
  it does in eager; only its outputs are read from the first one, and it runs as soon as it can.
- A draw that repeats an earlier one is a copy of it (`capture/draws.py`); its readers read the draw itself.
- Second runs of `lowtide.recompute` stay: someone chose them by hand.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from lowtide.graph import Arg, Graph, Op, Output, Read, Value

Key = tuple[object, ...]
Place = tuple[int, int]  # of an op in the order: its own number and 0, or the op that it follows and its own number

CLONE, COPY = "aten.clone.default", "aten.copy_.default"


@dataclass
class _Found:
    """What repeats in a graph."""

    stand: dict[int, int] = field(default_factory=dict)  # value -> the value of the forward with the same bits
    gone: set[int] = field(default_factory=set)  # ops
    echoes: dict[int, int] = field(default_factory=dict)  # op that stays for its updates alone -> what it repeats


def merged(graph: Graph) -> Graph:
    """The graph without the ops of the backward that repeat ops of the forward; the same graph if there are none."""
    kept: set[int] = set()
    while True:
        found = _repeated(graph, kept)
        # What another op writes over must be there to be written over.
        needed = {
            graph.maker[old]
            for index, op in enumerate(graph.ops)
            if index not in found.gone
            for _, old in op.updates
            if old in found.stand
        }
        if not needed - kept:
            break
        kept |= needed
    if not found.gone and not found.echoes:
        return graph
    found.gone |= _idle(graph, found)
    return _without(graph, found)


def _repeated(graph: Graph, kept: set[int]) -> _Found:
    """Number the values, and find what repeats; ops that are `kept` go on as they are."""
    found = _Found()
    number = list(range(len(graph.values)))
    known: dict[Key, int] = {}
    for index, op in enumerate(graph.ops):
        if op.phase == "update" or op.channels or op.optional or op.forgotten:
            continue
        if graph.effects[index] and not op.detachable:
            continue
        copied = _copied(graph, index) if op.phase == "backward" else None
        if copied is not None:
            number[op.makes[0]] = number[copied]
            if index not in kept:
                found.stand[op.makes[0]] = found.stand.get(copied, copied)
                found.gone.add(index)
            continue
        key = _key(graph, index, number)
        first = known.get(key)
        if first is None:
            if op.phase == "forward":
                known[key] = index
            continue
        lasting = {new for new, _ in graph.effects[index]}
        pairs = [(mine, theirs) for mine, theirs in _pairs(op, graph.ops[first]) if mine not in lasting]
        if not all(_alike(graph.values[mine], graph.values[theirs]) for mine, theirs in pairs):
            continue
        for mine, theirs in pairs:
            number[mine] = number[theirs]
        if op.phase == "backward" and index not in kept:
            found.stand.update(pairs)
            if lasting:
                found.echoes[index] = first
            else:
                found.gone.add(index)
    return found


def _copied(graph: Graph, index: int) -> int | None:
    """The draw that this op copies whole, as one does that repeats it; None for all other ops."""
    op = graph.ops[index]
    if op.target == COPY:
        target, source = op.args[0], op.args[1]
    elif op.target == CLONE:
        target, source = None, op.args[0]
    else:
        return None
    if len(op.makes) != 1 or op.kwargs or not isinstance(source, Read) or source.view is not None:
        return None
    if isinstance(target, Read) and target.view is not None:
        return None
    maker = graph.maker[source.value]
    drawn = maker >= 0 and graph.ops[maker].random and not graph.effects[maker]
    return source.value if drawn and _alike(graph.values[source.value], graph.values[op.makes[0]]) else None


def _key(graph: Graph, index: int, number: list[int]) -> Key:
    """What an op computes: equal for ops that make the same bits. What a batch norm updates has no say in it."""
    op = graph.ops[index]
    left = {old for _, old in graph.effects[index]}

    def plain(arg: Arg) -> object:
        if isinstance(arg, Read):
            return "updated" if arg.value in left else (number[arg.value], arg.view)
        if isinstance(arg, tuple):
            return tuple(map(plain, arg))
        return type(arg).__name__, repr(arg)  # 1, 1.0 and True are equal, and so are zeros of either sign

    made = tuple(value is None for value in op.outputs)
    updated = tuple((number[old] if old not in left else "updated") for _, old in op.updates)
    return op.target, plain(op.args), tuple((name, plain(arg)) for name, arg in op.kwargs), made, updated


def _pairs(op: Op, first: Op) -> Iterator[tuple[int, int]]:
    """What an op makes, beside what the first one makes in the same place."""
    yield from zip(op.makes, first.makes, strict=True)


def _alike(one: Value, other: Value) -> bool:
    return (one.dtype, one.shape, one.stride, one.nbytes) == (other.dtype, other.shape, other.stride, other.nbytes)


def _idle(graph: Graph, found: _Found) -> set[int]:
    """Ops whose results were read, and now by nobody."""
    idle: set[int] = set()
    wanted = {found.stand.get(output.value, output.value) for output in graph.outputs}
    for index in reversed(graph.ordinary):
        op = graph.ops[index]
        if index in found.gone:
            continue
        read = any(graph.readers[value] for value in op.makes)
        free = op.phase == "backward" and not op.channels and not op.forgotten and not graph.effects[index]
        if free and read and not wanted & set(op.makes):
            idle.add(index)
        else:
            wanted |= {found.stand.get(value, value) for value in (*op.reads, *(old for _, old in op.updates))}
    return idle


def _without(graph: Graph, found: _Found) -> Graph:
    """The graph without what is gone, its values numbered anew, and echoes as early as they can run."""
    places = _places(graph, found)
    order = sorted(places, key=lambda index: places[index])
    ops = [graph.ops[index] for index in order]
    made = {value for op in ops for value in op.makes} | {item.value for item in graph.inputs}
    renamed = {value: place for place, value in enumerate(sorted(made))}
    stands = {value: found.stand.get(value, value) for value in range(len(graph.values))}
    seen = {value: renamed[one] for value, one in stands.items() if one in renamed}
    new_ops = []
    for index, op in zip(order, ops, strict=True):
        phase = graph.ops[places[index][0]].phase
        new_ops.append(_renamed(replace(op, phase=phase), seen, renamed))
    ends = _ends(graph, found, places, order, new_ops, renamed)
    values = [replace(graph.values[value], eager_end=ends[renamed[value]]) for value in sorted(made)]
    return replace(
        graph,
        ops=tuple(new_ops),
        values=tuple(values),
        inputs=tuple(replace(item, value=renamed[item.value]) for item in graph.inputs),
        outputs=tuple(Output(seen[item.value], item.role, item.path, item.view) for item in graph.outputs),
    )


def _places(graph: Graph, found: _Found) -> dict[int, Place]:
    """Where each op that is left comes in the order: echoes right after the last op that they must wait for."""
    places: dict[int, Place] = {}
    for index in graph.ordinary:
        if index in found.gone:
            continue
        places[index] = (index, 0)
        if index in found.echoes:
            reads = [found.stand.get(value, value) for value in graph.reads[index]]
            before = {graph.maker[value] for value in reads} | {found.echoes[index]}
            before |= {reader for _, old in graph.effects[index] for reader in graph.readers[old]}
            latest = max(places[other] for other in before - {-1, index} if other in places)
            places[index] = (latest[0], index)
    return places


def _renamed(op: Op, seen: dict[int, int], renamed: dict[int, int]) -> Op:
    def plain(arg: Arg) -> Arg:
        if isinstance(arg, Read):
            return Read(seen[arg.value], arg.view)
        return tuple(map(plain, arg)) if isinstance(arg, tuple) else arg

    return replace(
        op,
        args=tuple(map(plain, op.args)),
        kwargs=tuple((name, plain(arg)) for name, arg in op.kwargs),
        outputs=tuple(None if value is None else renamed[value] for value in op.outputs),
        updates=tuple((renamed[new], seen[old]) for new, old in op.updates),
    )


def _ends(
    graph: Graph,
    found: _Found,
    places: dict[int, Place],
    order: list[int],
    ops: list[Op],
    renamed: dict[int, int],
) -> list[int]:
    """Where eager would let go of each value, had it no second runs: after the last of those that are one now."""
    ends = [-1] * len(renamed)
    never: set[int] = set()
    sorted_places = [places[index] for index in order]
    for value, item in enumerate(graph.values):
        one = renamed.get(found.stand.get(value, value))
        if one is None:
            continue
        if item.eager_end < 0:
            never.add(one)
        else:
            ends[one] = max(ends[one], bisect_right(sorted_places, (item.eager_end, len(graph.ops))) - 1)
    for index, op in enumerate(ops):
        for value in (*op.reads, *op.makes):
            ends[value] = max(ends[value], index)
    return [-1 if value in never else end for value, end in enumerate(ends)]
