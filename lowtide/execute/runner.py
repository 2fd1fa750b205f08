"""A captured step that runs by its program, in one arena."""

from __future__ import annotations

import os
import warnings
from array import array
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any

from lowtide import device as devices
from lowtide import private
from lowtide.allocator import AllocatorUnavailable
from lowtide.allocator.arena import ArenaError, Step, Stepping, Tape
from lowtide.budget import allowance
from lowtide.captured import Captured
from lowtide.device import Device, Homes, Store
from lowtide.errors import LowtideWarning
from lowtide.execute.binding import Binding
from lowtide.execute.failure import failed, let_go
from lowtide.execute.places import Places
from lowtide.execute.slots import slots
from lowtide.execute.source import generate
from lowtide.execute.tape import places, temporaries
from lowtide.graph import Place
from lowtide.program import Program

LESSONS = 3  # steps at most that learn: the first one may allocate for good, as a warm-up does


class Runner:
    """A captured step that runs by its program: call it with a batch.

    The first call allocates as eager does, no more at a time than the plan says, and learns what each op allocates;
    the others run in the arena. Without our allocator all of them are like the first.
    """

    def __init__(
        self,
        captured: Captured,
        program: Program,
        nbytes: Sequence[int] | None = None,
        *,
        folder: str | os.PathLike[str] | None = None,
        device: Device | None = None,
    ) -> None:
        self.captured = captured
        self.program = program
        self.device = device or devices.of(captured.graph.device)
        self.folder = folder  # for the file of what is copied to the disk
        self.insists = False  # on memory: without what its arena needs it raises an ArenaError, and has run nothing
        self.beside = 0  # bytes that libraries will take beside the step, if it insists
        self.peak: int | None = None  # bytes of the whole step, metered: the most of all steps
        self.most: int | None = None  # bytes: the metered ones or, after a step that learned, what the next will hold
        self.mismatches = 0  # allocations of all steps that did not follow the plan
        self.temporaries: dict[int, tuple[int, int]] = {}  # op -> bytes: one piece, and here and there in the heap
        self._nbytes = nbytes if nbytes is not None else [value.nbytes for value in captured.graph.values]
        here = [item.value for item in captured.graph.inputs if item.home == "device"]
        self._before = sum(self._nbytes[value] for value in here)  # bytes, as the plan counts them
        self._slots = slots(captured.graph, program, self._nbytes)
        self._away = [(n, item) for n, item in enumerate(captured.graph.inputs) if item.home != "device"]
        for place in {*self._slots, *(item.home for _, item in self._away)}:
            devices.refuse_place(self.device, place)
        self._homes: dict[Place, Homes] = {}  # where inputs live that are elsewhere between steps
        self._places: list[Places] = []  # that no step uses now
        self._binding = Binding(captured)
        self._function, self.source = generate(captured.graph, program, self.device)
        self._cursor = array("q", [0])
        self._state: bytes | None = None  # of the generator before the step
        self._tape: Tape | None = None
        self._lessons = LESSONS
        if self.arena_bytes:
            self.device.arenas.expect(self, self.arena_bytes)
        elif program.arena and (error := self.device.missing()) is not None:
            _without_arena(error.message, error.hint)

    @property
    def staging(self) -> int:
        """The bytes of the device's memory that copies to other places and back go through; 0 without copies."""
        return self.device.staging if self._slots or self._away else 0

    @property
    def arena_bytes(self) -> int:
        """The bytes of the arena that the steps run in; 0 where there is none."""
        return self.program.arena if self._arranged() else 0

    def __call__(self, *batch: Any) -> Any:
        """One training step on this batch; returns what the step returns, detached."""
        inputs = self._inputs(batch)
        before = self._cursor[0] = len(self.program.instructions)
        self._state = None
        stack = ExitStack()
        try:
            with stack:
                context = self._arrange(stack, self._cursor)
                with private.below_autograd():
                    outputs = self._begin(inputs, stack, self._cursor)
            result = self._binding.leave(outputs)
        except BaseException as error:
            stack.close()  # an interruption may come before the `with` does it
            inputs.clear()
            let_go(error)
            reached = self._cursor[0] if self._cursor[0] < before else -1
            failed(self.captured.graph, self.program, reached, error, self._state)
            raise
        if context is not None:
            self._learn(context.step)
        return result

    def _arranged(self) -> bool:
        return self.device.missing() is None

    def _inputs(self, batch: tuple[Any, ...]) -> list[Any]:
        """What the program is given, if it fits this batch and the model."""
        leaves = self._binding.check(batch)
        self.captured.prepare()
        return self._binding.inputs(leaves)

    def _arrange(self, stack: ExitStack, cursor: array[int]) -> Stepping | None:
        """Let what this thread allocates go where it is planned, until the stack ends; None where that can't be."""
        if not self._arranged():
            return None
        arena = None
        if self._tape is not None and self.program.arena:
            try:
                arena = stack.enter_context(self.device.arenas.borrow(self.program.arena))
            except ArenaError as error:
                if self.insists:
                    raise
                # What is alive at a time, which is less, may still fit.
                _without_arena(error.message, error.hint, metered=True)
                self._tape = None
        if self._tape is None:
            self.device.arenas.empty()  # a step that learns needs the memory
            if self.insists:
                self._look_for_room()
        context = self.device.stepping(cursor, self._tape, arena)
        stack.callback(context.end)  # an interruption may come before the next line is done
        try:
            stack.enter_context(context)
        except AllocatorUnavailable as error:
            _without_arena(error.message, error.hint)
            return None
        return context

    def _look_for_room(self) -> None:
        """Raise an ArenaError where the limits of this process leave too little for the step."""
        left, adds = allowance(), self.program.arena
        if left is not None and left < adds + self.beside:
            raise ArenaError(
                f"the limits of this process leave it {left:,} bytes; the step takes {adds:,} of them, and libraries "
                f"may take {self.beside:,} beside it.",
                hint="give a smaller budget, or a larger limit.",
                short=adds + self.beside - left,
            )

    def _begin(self, inputs: list[Any], stack: ExitStack, cursor: array[int]) -> Any:
        """Call the program."""
        generator = self.device.generator()
        if self.captured.graph.random:
            self._state = generator.get_state().numpy().tobytes()  # as Python's own, for the tensor has gone by then
        homes = self._locate(inputs)
        away = stack.enter_context(self._borrow_places())
        away.begin(homes)
        self._binding.take_gradients()
        return self._function(inputs, generator, away, cursor)

    def _locate(self, inputs: list[Any]) -> list[tuple[int, int, Place, Any, Store, int]]:
        """Where the inputs are that live elsewhere; those that are on the device still move there."""
        found = []
        for place in dict.fromkeys(item.home for _, item in self._away):
            mine = [(inputs[n], item.value) for n, item in self._away if item.home == place]
            if place not in self._homes:
                self._homes[place] = self.device.homes[place](self.folder)
            located = self._homes[place].locate([tensor for tensor, _ in mine])
            for (tensor, value), (store, offset) in zip(mine, located, strict=True):
                found.append((value, self.captured.graph.values[value].storage, place, tensor, store, offset))
        return found

    @contextmanager
    def _borrow_places(self) -> Iterator[Places]:
        """The stores of what is copied away, for one step; they are opened once, and room is taken for all of it."""
        found = self._places.pop() if self._places else None
        if found is None or found.process != os.getpid():
            found = Places(self.device, self._slots, self.folder)
        try:
            yield found
        finally:
            found.end()
            self._places.append(found)

    def _learn(self, step: Step) -> None:
        """After a step: note its peak, or make the tape of what it allocated."""
        if self._tape is not None:
            self.mismatches += step.mismatches
            peak = self._before + self.staging + self.program.arena + step.outside
            if step.mismatches and self._lessons:
                self._tape = None  # the next step learns again, and shows whether the plan is to blame
                self.peak = max(self.peak or 0, peak)
            else:
                self._note(peak)
            return
        self._lessons = max(0, self._lessons - 1)
        found = places(self.captured.graph, self.program, self._nbytes, step.events)
        self.temporaries = temporaries(self.captured.graph, self.program, self._nbytes, step.events)
        try:
            self._tape = Tape(found.start, found.nbytes, found.offset)
        except ArenaError:  # the step is done all the same; the next one learns again
            return
        if all(item.stays for item in self.captured.graph.inputs):  # else something went that we did not see come
            before = self._before + self.staging
            self._note(before + step.outside)
            self.most = max(self.most or 0, before + self.program.arena + found.outside)

    def _note(self, peak: int) -> None:
        self.peak = max(self.peak or 0, peak)
        self.most = max(self.most or 0, peak)


def execute(
    captured: Captured,
    program: Program,
    nbytes: Sequence[int] | None = None,
    *,
    folder: str | os.PathLike[str] | None = None,
    device: Device | None = None,
) -> Runner:
    """Make a callable of a captured step and a program for its graph.

    `nbytes` is for each value what the plan counted with, where that is not what the graph declares; `folder` is where
    the file is made for what the program copies to the disk; `device` stands in for the one that the graph names.
    """
    return Runner(captured, program, nbytes, folder=folder, device=device)


@cache
def _without_arena(why: str, hint: str | None, *, metered: bool = False) -> None:
    """Say, once, that steps run without an arena."""
    how = "" if metered else ", and unmetered"
    warnings.warn(
        f"steps run without an arena{how}: {why} They hold no more at a time than planned, but the heap may need more, "
        f"and they are slower.\nhint: {hint}",
        LowtideWarning,
        stacklevel=2,
    )
