"""A step with a handover in two halves: it runs up to there, the caller's code goes on, and comes back for the rest."""

from __future__ import annotations

import random
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy
import torch

from lowtide import kernels, private
from lowtide.captured import Captured, Slot
from lowtide.ending import Ending
from lowtide.errors import UsageError
from lowtide.execute.batch import Batch
from lowtide.execute.call import Call
from lowtide.execute.failure import let_go
from lowtide.execute.runner import Runner
from lowtide.execute.stale import StaleError
from lowtide.graph import Graph, Read
from lowtide.guards import MISSING, Place
from lowtide.program import Instruction, Program, Run

OUTPUT = "an output of the model"
NO_BATCH = Batch.of(())
SMALL = 2**20  # bytes of buffers that a forward updates: so much is kept beside every step, to run its forward again


class Halves:
    """A captured step with a handover: run it on a batch for its first half."""

    def __init__(self, runner: Runner) -> None:
        graph = runner.captured.graph
        self.runner = runner
        self.handover = next(number for number, op in enumerate(graph.ops) if op.target == kernels.HANDOVER)
        made = graph.ops[self.handover].outputs
        self.given_bytes = sum(graph.values[value].nbytes for value in made if value is not None)
        at = next(k for k, one in enumerate(runner.program.instructions) if _runs(one, self.handover))
        self.inputs_again = _inputs_read_after(graph, runner.program, at)
        self.outputs_again = _handed_read_after(graph, runner.program, at)
        self.read_later = [_inputs_read_after(graph, runner.program, stop.instruction) for stop in runner.stops]
        self.written = _written_before_handover(graph, self.handover)
        self.large = sum(graph.values[graph.inputs[place].value].nbytes for place in self.written) > SMALL
        self.proven = False  # gradients came back as it is planned
        self.rebound = _rebound(runner.captured, self.handover)
        runner.binding.told = True

    def __call__(self, batch: Batch) -> Half:
        """The first half of a step on this batch."""
        return Half(self, batch)

    def fits(self, batch: Batch) -> bool:
        """Whether this step is the one for a batch, and for the world as it is."""
        try:
            self.runner.binding.check(batch)
        except StaleError:
            return False
        return True

    def inputs_like(self, before: Half) -> list[Any]:
        """What the program is given, where another program has run the same forward."""
        captured, known = self.runner.captured, before.inputs
        found = []
        for item, key in zip(captured.graph.inputs, _keys(captured), strict=True):
            if captured.graph.values[item.value].kind == "constant":
                found.append(captured.constants[int(item.path[0])])
            else:  # a number that is new here was a constant there, and is as it was
                found.append(known[key] if key in known else self.runner.binding.given(item.path))
        return found


@dataclass
class _Held:
    """What a half holds of memory: it may be closed again, where that was interrupted."""

    call: Call
    program: Generator[list[Any], list[Any] | None, list[Any]] | None = None

    def close(self) -> None:
        if self.program is not None:
            self.program.close()
            self.program = None
        self.call.close()


class Half:
    """A step at its handover. It holds its arena until it is finished or closed, or nobody holds it any more."""

    _held: _Held | None = None  # one that is not made yet holds nothing
    inputs: dict[tuple[Any, ...], Any]  # what it was given
    _places: list[tuple[Place, Any]]  # where it put something into Python objects, and what was there before

    def __init__(self, halves: Halves, batch: Batch, *, before: Half | None = None) -> None:
        runner = halves.runner
        self.captured, self.batch = runner.captured, batch
        self.outputs: list[Any] = []  # what the step hands over
        self.halves = halves
        self._dice = (random.getstate(), numpy.random.get_state()) if self.captured.guards.draws else None
        inputs = runner.binding.take(batch) if before is None else halves.inputs_like(before)
        self.inputs = dict(zip(_keys(self.captured), inputs, strict=True))
        kept = () if halves.large and halves.proven else halves.written
        self._written = [(inputs[place], inputs[place].detach().clone()) for place in kept]
        needed = [(name, inputs[place]) for place, name in halves.inputs_again]
        call = runner.call()
        self._held = held = _Held(call)
        self._ending = Ending(self, held.close)
        try:
            held.program = program = call.begin(runner.function, inputs)
            with torch.enable_grad(), private.below_autograd():
                self.outputs = _taken(next(program))
            self._state = call.hand_over()  # of the generator before the step
        except BaseException as error:
            inputs.clear()
            self._failed(call, error)
            raise
        self._places = [] if before is None else before._places
        if before is None:
            effects = [effect for effect in self.captured.effects if effect.how in ("put", "delete")]
            self._places = [(effect.place, effect.place.get()) for effect in effects]
            for slot, place in halves.rebound:
                slot.holder[slot.key] = self.outputs[place]
            runner.binding.tell()
        needed += [(name, self.outputs[place]) for place, name in halves.outputs_again]
        self._needed = [(name, tensor, private.version_of(tensor)) for name, tensor in needed]
        self._stops = 0  # how often outputs have left
        given = [pair for place, pair in enumerate(self.inputs.items()) if place not in halves.written]
        tensors = [(repr(key[0]), found) for key, found in given if isinstance(found, torch.Tensor)]
        self._given = [(name, tensor, private.version_of(tensor)) for name, tensor in tensors]

    def pass_on(self) -> list[Any]:
        """What the step hands over, of which no more is known here from now on than its form."""
        found, self.outputs = self.outputs, [torch.empty_like(one, device="meta") for one in self.outputs]
        return found

    @property
    def holds(self) -> int:
        """The bytes that it holds, of what it made."""
        return 0 if self._held is None else self._held.call.holds

    @property
    def done(self) -> bool:
        """Whether it was finished or closed."""
        return self._held is None or self._held.program is None

    @property
    def stopped(self) -> bool:
        """Whether outputs have left, and the rest is still to come."""
        return not self.done and self._stops > 0

    @contextmanager
    def rewound(self) -> Iterator[None]:
        """A context in which gradients are on, and generators and what it put into Python objects as before it."""
        now = random.getstate(), numpy.random.get_state()
        left = [(place, place.get()) for place, _ in self._places]
        try:
            _put(self._places)
            if self._dice is not None:
                random.setstate(self._dice[0])
                numpy.random.set_state(self._dice[1])
            with torch.enable_grad():
                yield
        finally:
            _put(left)
            if self._dice is not None:
                random.setstate(now[0])
                numpy.random.set_state(now[1])

    def again(self, halves: Halves) -> Half:
        """The same half by another program, in place of this one; all that it changes is left as it is now."""
        self._unchanged(self._given)
        if len(self._written) < len(self.halves.written):
            raise UsageError(
                "the loss uses the model's outputs otherwise than before, so the forward would have to run again, but "
                "it has updated large buffers, and what they were before is gone.",
                hint="call the model again: the next call is planned for this use of its outputs.",
            )
        inputs, written, state, batch = self.inputs, self._written, self._state, self.batch
        now = [tensor.detach().clone() for tensor, _ in written]
        drawn = torch.get_rng_state()
        self.close()
        self.inputs = inputs
        try:
            _fill((tensor for tensor, _ in written), (content for _, content in written))
            if state is not None:
                torch.set_rng_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
            return Half(halves, batch, before=self)
        finally:
            _fill((tensor for tensor, _ in written), now)
            torch.set_rng_state(drawn)
            self.inputs = {}

    def go_on(self, given: Sequence[torch.Tensor] | None) -> dict[int, torch.Tensor]:
        """The second half, with what the caller's code came back with, up to where outputs leave; None: from there on.

        Returns those outputs by place, at the end all others, and is done then.
        """
        held = self._held
        call, program = (None, None) if held is None else (held.call, held.program)
        if call is None or program is None:
            raise UsageError(
                "this step has had its backward already, or failed.",
                hint="what it held is gone: run the forward again. retain_graph does not keep it; a step that goes "
                "back twice works with lowtide.fit.",
            )
        self.refuse_autocast()
        self._unchanged(self._needed)
        try:
            call.take_back(0 if given is None else self.halves.given_bytes)
            try:
                # A backward runs without gradients, and ops ask for that: nn.LSTM's keeps nothing for a backward then.
                with torch.enable_grad(), private.below_autograd():
                    left = program.send(None if given is None else list(given))
            except StopIteration as end:
                return self._end(call, end.value)
            call.hand_over()
            found = dict(zip(self.halves.runner.stops[self._stops].outputs, _taken(left), strict=True))
            later = {name for _, name in self.halves.read_later[self._stops]}
            handed = {name for _, name in self.halves.outputs_again}
            self._needed = [row for row in self._needed if row[0] in later | handed]
            self._stops += 1
        except BaseException as error:
            self._failed(call, error)
            raise
        return found

    def _end(self, call: Call, outputs: Sequence[Any]) -> dict[int, torch.Tensor]:
        runner = self.halves.runner
        runner.binding.leave(outputs)
        self.halves.proven = True
        self.close()
        call.teach(runner.lessons)
        return {place: output for place, output in enumerate(outputs) if output is not None}

    def refuse_autocast(self) -> None:
        """Raise where the second half would run under autocast."""
        if torch.is_autocast_enabled(torch.device(self.captured.graph.device).type):
            raise UsageError(
                "backward() is called under torch.autocast, which would change the ops of a planned backward.",
                hint="call backward() after the autocast block, as torch advises.",
            )

    def close(self) -> None:
        """Let go of all that it holds."""
        if self._held is not None:
            self._held.close()
            self._ending.call_off()
        self.outputs = []
        self._needed, self._given, self._written, self.inputs = [], [], [], {}
        self.batch = NO_BATCH  # a loss that is kept leads here, and would keep the batch

    @staticmethod
    def _unchanged(needed: Sequence[tuple[str, torch.Tensor, int]]) -> None:
        """What the second half reads must be what the first half read, as autograd demands it, too."""
        for name, tensor, version in needed:
            if private.version_of(tensor) != version:
                raise UsageError(
                    f"{name} was changed in place between forward and backward, which needs it as it was.",
                    hint="make a new tensor instead (y = y + 1), or change it after backward(). Where another forward "
                    "of the model changed it (a buffer), call backward() before that, or give the whole step to "
                    "lowtide.fit.",
                )

    def _failed(self, call: Call, error: BaseException) -> None:
        let_go(error)
        self.close()
        call.fail(error)


def _taken(left: list[Any]) -> list[Any]:
    """What a program has yielded; it holds the list."""
    found = [*left]
    left.clear()
    return found


def _keys(captured: Captured) -> list[tuple[Any, ...]]:
    """What each input is known by, in every program of one model: its path, or for a number where it is kept."""
    numbers = captured.guards.numbers
    paths = [item.path for item in captured.graph.inputs]
    places = [numbers[int(path[1])] if path[0] == "number" else None for path in paths]
    return [path if at is None else (id(at.holder), at.key) for path, at in zip(paths, places, strict=True)]


def _put(contents: Sequence[tuple[Place, Any]]) -> None:
    """Put these into their places; MISSING: leave nothing there."""
    for place, content in contents:
        if content is not MISSING:
            place.set(content)
        elif place.get() is not MISSING:
            place.delete()


def _fill(tensors: Iterable[torch.Tensor], contents: Iterable[torch.Tensor]) -> None:
    """Write contents to tensors, unseen by autograd, which would take it for a change by the caller."""
    for tensor, content in zip(tensors, contents, strict=True):
        with torch.no_grad(), private.preserving_version(tensor):
            tensor.copy_(content)


def _written_before_handover(graph: Graph, handover: int) -> list[int]:
    """The inputs, by place, that the first half writes to."""
    storages = {graph.values[new].storage for op in graph.ops[:handover] for new, _ in op.updates}
    return [place for place, item in enumerate(graph.inputs) if graph.values[item.value].storage in storages]


def _handed(graph: Graph, handover: int) -> list[Read]:
    """What is handed over, as the code after the handover reads it."""
    op = graph.ops[handover]
    after = {old: new for new, old in op.updates}
    lists = (arg for arg in op.args[1:3] if isinstance(arg, tuple))  # outputs and others
    reads = (item for items in lists for item in items if isinstance(item, Read))
    return [Read(after.get(read.value, read.value), read.view) for read in reads]


def _rebound(captured: Captured, handover: int) -> list[tuple[Slot, int]]:
    """The buffers in whose place the step puts another tensor, and which of what is handed over that is."""
    graph = captured.graph
    handed = _handed(graph, handover)
    outputs = [output for output in graph.outputs if output.role == "buffer"]
    return [(captured.slots[str(one.path[0])], handed.index(Read(one.value, one.view))) for one in outputs]


def _runs(instruction: Instruction, op: int) -> bool:
    return isinstance(instruction, Run) and instruction.op == op


def _read_after(graph: Graph, program: Program, instruction: int) -> set[int]:
    """The values that are read after an instruction."""
    runs = (one for one in program.instructions[instruction + 1 :] if isinstance(one, Run))
    return {value for run in runs for value in graph.reads_of(run.op, again=run.again)}


def _inputs_read_after(graph: Graph, program: Program, instruction: int) -> list[tuple[int, str]]:
    """Which inputs, by place and name, are read after an instruction."""
    read = _read_after(graph, program, instruction)
    found = [(number, graph.values[item.value]) for number, item in enumerate(graph.inputs) if item.value in read]
    return [(number, repr(value.name)) for number, value in found if value.kind != "scalar"]


def _handed_read_after(graph: Graph, program: Program, handover: int) -> list[tuple[int, str]]:
    """Which of what is handed over, by place and name, is read after the instruction that does it."""
    read, run = _read_after(graph, program, handover), program.instructions[handover]
    assert isinstance(run, Run)
    buffers = {graph.values[item.value].storage: repr(graph.values[item.value].name) for item in graph.inputs}
    handed = [(number, item.value) for number, item in enumerate(_handed(graph, run.op))]
    return [(number, buffers.get(graph.values[value].storage, OUTPUT)) for number, value in handed if value in read]
