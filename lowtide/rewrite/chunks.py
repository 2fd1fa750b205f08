"""Recurrent layers cut in time, so that a workspace is that of a few time steps: the same up to rounding.

On the processor torch runs each layer and direction of an nn.LSTM over all time steps in one call; its workspace, which
the backward needs, is about fifteen times as large as its result. `cut` makes several calls of it, over some time steps
each: every one hands its state to the next, and a program may run any of them again. The gradients of weights and
biases are added up chunk by chunk, which rounds otherwise: their entries differ by a few millionths of the largest one
at most. The results, the states and the gradients of both keep their bits where a time step is computed in the same way
however many others are in its call: so with AVX-512. Without it (tried with AVX2) they are the same up to rounding.

nn.GRU needs none of this: torch takes it apart into small ops of each time step, which every plan can run again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from lowtide.aten import LSTM, LSTM_BACKWARD, SELECT
from lowtide.graph import Arg, Graph, Op, Read, View
from lowtide.rewrite.editor import Editor

# Places of arguments; both calls start with what they read, four weights, and the state before.
READ, STATE = 0, slice(5, 7)
PACKED, TRAINS, ARGUMENTS = 8, 15, 16  # of the forward: sizes of packed sequences, whether it trains, how many
RESULT, STATE_AFTER = 7, slice(8, 10)  # of the backward: what the forward made
GRADIENT, STATE_GRADIENT, OPTIONS, WORKSPACE = 10, slice(11, 13), slice(13, 22), 22
# Places of the backward's results: gradients of what was read, of the weights, and of the state before.
WEIGHTS, STATE_BEFORE = slice(1, 5), slice(5, 7)

SHORTEST = 4  # time steps of a chunk: with fewer, a call has more to do around its time steps than with them

Weights = tuple[int | None, ...]  # a value for each result of the backward that is a gradient of weights


def cut(graph: Graph, chunks: int) -> Graph:
    """The graph with every recurrent layer cut in time into so many calls, or fewer where there are fewer time steps.

    It is for graphs without optional ops. Layers that feed each other take turns, so that between them only a chunk is
    there. What is put together of chunks is what somebody else reads as a whole. A note says what was cut; layers that
    cannot be are left as they are. Without any the graph is returned as it is.
    """
    if len(graph.ordinary) < len(graph.ops):
        raise ValueError("a graph is cut before it gets optional ops")
    layers, whole = _layers(graph, chunks)
    if not layers:
        return graph
    writer = _Writer(graph, layers)
    for layer in layers:
        writer.forward(layer)
    for layer in sorted(layers, key=lambda layer: layer.backward):
        if layer.backward >= 0:
            writer.backward(layer)
    most = max(len(layer.spans) for layer in layers)
    done = f"recurrent layers are cut in time into {most} chunks: gradients of weights are the same up to rounding."
    return replace(writer.editor.reordered(), notes=(*graph.notes, done, *whole))


def longest(graph: Graph) -> int:
    """The time steps of the longest recurrent layer that can be cut; 0 where there is none."""
    layers, _ = _layers(graph, 2)
    return max((layer.spans[-1][1] for layer in layers), default=0)


def counts(graph: Graph) -> list[int]:
    """Into how many chunks the layers may be cut: 2, 4, 8, ... as long as a chunk has a few time steps."""
    time_steps, found = longest(graph), [2]
    while found[-1] * SHORTEST <= time_steps:
        found.append(2 * found[-1])
    return found[:-1]


@dataclass(frozen=True)
class _Layer:
    """One layer in one direction: its calls, and the time steps that it is cut into."""

    forward: int  # op
    backward: int  # op; -1: there is none
    spans: tuple[tuple[int, int], ...]  # from one time step up to another, in the order of time
    order: tuple[int, ...]  # of the spans, as the forward runs them


def _layers(graph: Graph, chunks: int) -> tuple[list[_Layer], list[str]]:
    """The layers that are cut, in the order of their forwards, and a note for each that is left whole for a reason."""
    layers, notes = [], []
    for index, op in enumerate(graph.ops):
        if op.target != LSTM:
            continue
        why = _why_not(graph, index)
        if why:
            notes.append(f"{op.name} ({op.module}) is not cut in time: {why}.")
            continue
        time_steps = graph.values[op.outputs[0] or 0].shape[0]
        length = math.ceil(time_steps / max(1, chunks))
        spans = tuple((start, min(time_steps, start + length)) for start in range(0, time_steps, length))
        if len(spans) > 1:
            order = tuple(range(len(spans)))
            backward = next(iter(graph.readers[op.outputs[3] or 0]), -1)
            layers.append(_Layer(index, backward, spans, order[::-1] if op.args[7] else order))
    return layers, notes


def _why_not(graph: Graph, forward: int) -> str:
    """Why a layer cannot be cut; empty where it can."""
    op = graph.ops[forward]
    if len(op.args) != ARGUMENTS or op.kwargs or op.updates or len(op.outputs) != 4 or None in op.outputs:
        return "it is called in another way than nn.LSTM calls it"
    if op.args[PACKED] != ():
        return "its sequences are packed"
    if not op.args[TRAINS]:
        return "it keeps no workspace"
    result, after, cell, workspace = (Read(value) for value in op.outputs if value is not None)
    made = graph.values[result.value]
    if len(made.shape) != 3 or made.stride != _contiguous(made.shape):
        return "its result is not laid out time step after time step"
    readers = graph.readers[workspace.value]
    if len(readers) > 1 or workspace.value in graph.required:
        return "its workspace is read more than once"
    for index in readers:
        user = graph.ops[index]
        same = user.target == LSTM_BACKWARD and len(user.args) == WORKSPACE + 1 and not user.kwargs
        same = same and user.args[: STATE.stop] == op.args[: STATE.stop]
        if not same or user.args[RESULT : STATE_AFTER.stop] != (result, after, cell) or user.args[-1] != workspace:
            return "its backward reads something else than it made"
        if len(user.outputs) != 7 or any(user.outputs[place] is None for place in (0, 5, 6)):
            return "its backward makes something else than gradients"
        gradient = graph.values[user.outputs[0] or 0]
        if len(gradient.shape) != 3 or gradient.stride != _contiguous(gradient.shape):
            return "its gradient is not laid out time step after time step"
    return ""


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(shape[place + 1 :]) for place in range(len(shape)))


@dataclass(frozen=True)
class _Saved:
    """What the backward of a chunk needs of its forward, besides what that read and made for others."""

    before: tuple[Arg, ...]  # the state: hidden, cell
    after: tuple[Arg, ...]
    workspace: int


class _Writer:
    """Writes the graph with the layers cut."""

    def __init__(self, graph: Graph, layers: list[_Layer]) -> None:
        self.graph, self.layers = graph, layers
        self.editor = Editor(graph)
        self.calls = {layer.forward for layer in layers} | {layer.backward for layer in layers}
        for call in self.calls - {-1}:
            self.editor.take_out(call)
        self.anchor = _anchors(graph, sorted(layer.forward for layer in layers), READ)
        self.anchor |= _anchors(graph, sorted(layer.backward for layer in layers if layer.backward >= 0), GRADIENT)
        self.saved: dict[tuple[int, int], _Saved] = {}  # forward and span -> what is saved
        self.parts: dict[int, tuple[int, ...]] = {}  # result, or gradient of what was read -> its chunks in time
        for layer in layers:
            for call in (layer.forward, layer.backward):
                if call >= 0 and (value := graph.ops[call].outputs[0]) is not None:
                    self.parts[value] = tuple(self.like(value) for _ in layer.spans)
        self.whole = {value for value in self.parts if self._others(value)}
        # What is there as a whole in the backward anyway is read there by slices: its chunks need not be kept as well.
        self.late = {v for v in self.whole if any(graph.ops[op].phase != "forward" for op in self._others(v))}

    def forward(self, layer: _Layer) -> None:
        """The calls of a layer over its chunks, each from the state that the one before left."""
        call = layer.forward
        op = self.graph.ops[call]
        result, hidden, cell, workspace = (value for value in op.outputs if value is not None)
        state: tuple[Arg, ...] = op.args[STATE]
        for step, chunk in enumerate(layer.order):
            last = chunk == layer.order[-1]
            after = (hidden, cell) if last else (self.like(hidden), self.like(cell))
            work = self.like(workspace, name=f"{op.name} workspace")
            args = (self.part(op.args[READ], layer, chunk), *op.args[1 : STATE.start], *state, *op.args[STATE.stop :])
            outputs = (self.parts[result][chunk], *after, work)
            self.put(call, step, replace(op, name=f"{op.name}_chunk{chunk}", args=args, outputs=outputs))
            before, state = state, (Read(after[0]), Read(after[1]))
            if not last:  # both in one value, which is all that is kept of them
                both = self.like(hidden, name="state")
                self.simple(call, step, "stack.default", (state,), both)
                state = tuple(Read(both, self.editor.view(View(None, SELECT, (0, place)))) for place in (0, 1))
            self.saved[call, chunk] = _Saved(before, state, work)
        self.join(call, layer, result)

    def backward(self, layer: _Layer) -> None:
        """The same in the other direction; the gradients of the weights are added up."""
        call = layer.backward
        op = self.graph.ops[call]
        gradient, before = op.outputs[0], op.outputs[STATE_BEFORE]
        assert gradient is not None
        passed: tuple[Arg, ...] = op.args[STATE_GRADIENT]
        total: Weights = ()
        for step, chunk in enumerate(reversed(layer.order)):
            last = chunk == layer.order[0]
            saved = self.saved[layer.forward, chunk]
            weights = tuple(None if value is None else self.like(value) for value in op.outputs[WEIGHTS])
            states = before if last else tuple(None if value is None else self.like(value) for value in before)
            args = (
                self.part(op.args[READ], layer, chunk, late=True),
                *op.args[1 : STATE.start],
                *saved.before,
                self.part(op.args[RESULT], layer, chunk, late=True),
                *saved.after,
                self.part(op.args[GRADIENT], layer, chunk),
                *passed,
                *op.args[OPTIONS],
                Read(saved.workspace),
            )
            outputs = (self.parts[gradient][chunk], *weights, *states)
            self.put(call, step, replace(op, name=f"{op.name}_chunk{chunk}", args=args, outputs=outputs))
            passed = tuple(None if value is None else Read(value) for value in states)
            total = self.add(call, step, total, weights, last=last) if step else weights
        self.join(call, layer, gradient)

    def add(self, call: int, step: int, total: Weights, more: Weights, *, last: bool) -> Weights:
        """Add gradients of weights to those so far, as far as somebody wants them."""
        sums: list[int | None] = []
        for value, one, other in zip(self.graph.ops[call].outputs[WEIGHTS], total, more, strict=True):
            if value is None or one is None or other is None or not self._wanted(value):
                sums.append(None)
                continue
            made = value if last else self.like(value)
            self.simple(call, step, "add.Tensor", (Read(one), Read(other)), made)
            sums.append(made)
        return tuple(sums)

    def join(self, call: int, layer: _Layer, value: int) -> None:
        """Put a value together, if anybody reads it as a whole."""
        if value in self.whole:
            parts = tuple(Read(part) for part in self.parts[value])
            self.simple(call, len(layer.order), "cat.default", (parts, 0), value)

    def part(self, arg: Arg, layer: _Layer, chunk: int, *, late: bool = False) -> Arg:
        """A chunk of an argument: one that was made as such, or a slice of the whole."""
        if not isinstance(arg, Read):
            return arg
        if arg.view is None and arg.value in self.parts and not (late and arg.value in self.late):
            return Read(self.parts[arg.value][chunk])
        return Read(arg.value, self.editor.view(View(arg.view, "aten.slice.Tensor", (0, *layer.spans[chunk]))))

    def like(self, value: int, name: str = "") -> int:
        """A new value like this one; its sizes are those of the call that makes it."""
        item = self.editor.values[value]
        return self.editor.value(replace(item, name=name or item.name))

    def simple(self, call: int, step: int, name: str, args: tuple[Arg, ...], made: int) -> None:
        """A plain call of one result, as a part of this one."""
        op = self.graph.ops[call]
        number = len(self.editor.placed)
        plain = Op(f"{op.name}_{name.split('.')[0]}_{number}", f"aten.{name}", args, outputs=(made,))
        self.put(call, step, replace(plain, phase=op.phase, module=op.module, source=op.source))

    def put(self, call: int, step: int, op: Op) -> None:
        """Add an op that does a part of this call."""
        self.editor.put(self.anchor[call], step, call, op)

    def _others(self, value: int) -> list[int]:
        """The ops that read a value as a whole; -1 for who takes it from the step."""
        places = {READ, RESULT, GRADIENT}
        found = [-1] if value in self.graph.required else []
        for index in self.graph.readers[value]:
            op = self.graph.ops[index]
            taken = sum(place in places and arg == Read(value) for place, arg in enumerate(op.args))
            if index not in self.calls or taken < sum(read.value == value for read in op.arguments()):
                found.append(index)
        return found

    def _wanted(self, value: int) -> bool:
        return bool(self.graph.readers[value]) or value in self.graph.required


def _anchors(graph: Graph, calls: list[int], place: int) -> dict[int, int]:
    """For each call the last one of its stack, in which each reads here what the one before made."""
    maker = {graph.ops[call].outputs[0]: call for call in calls}
    bottom: dict[int, int] = {}
    for call in calls:
        arg = graph.ops[call].args[place]
        below = maker.get(arg.value) if isinstance(arg, Read) and arg.view is None else None
        bottom[call] = call if below is None else bottom[below]
    top = {bottom[call]: call for call in calls}
    return {call: top[bottom[call]] for call in calls}
