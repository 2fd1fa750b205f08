"""A step with a turn in two halves: it runs up to there, the caller's code goes on, and comes back for the rest."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

import torch

from lowtide import kernels, private
from lowtide.errors import UsageError
from lowtide.execute.call import Call
from lowtide.execute.failure import let_go
from lowtide.execute.runner import Runner
from lowtide.graph import Graph
from lowtide.program import Program, Run


class Halves:
    """A captured step with a turn: call it with a batch for its first half."""

    def __init__(self, runner: Runner) -> None:
        graph = runner.captured.graph
        turn = next(op for op in graph.ops if op.target == kernels.TURN)
        self.runner = runner
        self.given = [graph.values[value].stride for value in turn.outputs if value is not None]
        self.inputs_again, self.outputs_again = _read_after_turn(graph, runner.program)

    def __call__(self, *batch: Any) -> Half:
        """The first half of a step on this batch."""
        return Half(self, batch)


class Half:
    """A step at its turn. It holds its arena until it is finished or closed, or nobody holds it any more."""

    _call: Call | None = None  # one that is not made yet, or was interrupted before, holds nothing
    _program: Generator[list[Any], list[Any], list[Any]] | None = None

    def __init__(self, halves: Halves, batch: tuple[Any, ...]) -> None:
        runner = halves.runner
        self.captured = runner.captured
        self.outputs: list[Any] = []  # what the step hands over
        self._halves = halves
        inputs = runner.binding.take(batch)
        needed = [(name, inputs[place]) for place, name in halves.inputs_again]
        self._call = call = runner.call()
        try:
            self._program = call.begin(runner.function, inputs)
            with torch.enable_grad(), private.below_autograd():
                self.outputs = next(self._program)
            call.hand_over()
        except BaseException as error:
            inputs.clear()
            self._failed(call, error)
            raise
        runner.binding.tell()
        needed += [("an output of the model", self.outputs[place]) for place in halves.outputs_again]
        self._needed = [(name, tensor, private.version_of(tensor)) for name, tensor in needed]

    def finish(self, given: Sequence[torch.Tensor]) -> Any:
        """The second half, with what the caller's code came back with; returns what the step returns."""
        runner, call = self._halves.runner, self._call
        if self._program is None or call is None:
            raise UsageError(
                "this step has had its backward already, or failed.",
                hint="what it held is gone: run the forward again. retain_graph does not keep it.",
            )
        if torch.is_autocast_enabled(torch.device(self.captured.graph.device).type):
            raise UsageError(
                "backward() is called under torch.autocast, which would change the ops of a wrapped model's backward.",
                hint="call backward() after the autocast block, as torch advises.",
            )
        self._unchanged()
        try:
            found = [_strided(tensor, stride) for tensor, stride in zip(given, self._halves.given, strict=True)]
            call.take_back(sum(tensor.nbytes for tensor in found))
            try:
                # A backward runs without gradients, and ops ask for that: nn.LSTM's keeps nothing for a backward then.
                with torch.enable_grad(), private.below_autograd():
                    self._program.send(found)
            except StopIteration as end:
                result = runner.binding.leave(end.value)
            self.close()
        except BaseException as error:
            self._failed(call, error)
            raise
        call.teach(runner.lessons)
        return result

    def close(self) -> None:
        """Let go of all that it holds."""
        program, self._program = self._program, None
        if program is not None:
            program.close()
        if self._call is not None:
            self._call.close()
        self.outputs = []
        self._needed = []

    def __del__(self) -> None:
        self.close()

    def _unchanged(self) -> None:
        """What the second half reads must be what the first half read, as autograd demands it, too."""
        for name, tensor, version in self._needed:
            if private.version_of(tensor) != version:
                raise UsageError(
                    f"{name} was changed in place between forward and backward, which needs it as it was.",
                    hint="make a new tensor instead (y = y + 1), or change it after backward().",
                )

    def _failed(self, call: Call, error: BaseException) -> None:
        let_go(error)
        self.close()
        call.fail(error)


def _strided(tensor: torch.Tensor, stride: tuple[int, ...]) -> torch.Tensor:
    """The tensor with these strides, as it was planned."""
    if tuple(tensor.stride()) == stride:
        return tensor
    return torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def _read_after_turn(graph: Graph, program: Program) -> tuple[list[tuple[int, str]], list[int]]:
    """Which inputs, by place and name, and which of what is handed over an instruction after the turn reads."""
    runs = [instruction for instruction in program.instructions if isinstance(instruction, Run)]
    place = next(number for number, run in enumerate(runs) if graph.ops[run.op].target == kernels.TURN)
    read = {value for run in runs[place + 1 :] for value in graph.reads_of(run.op, again=run.again)}
    inputs = [(number, graph.values[item.value]) for number, item in enumerate(graph.inputs) if item.value in read]
    _, *handed = graph.ops[runs[place].op].arguments()  # the first is the mark
    named = [(number, repr(value.name)) for number, value in inputs if value.kind != "scalar"]
    return named, [number for number, item in enumerate(handed) if item.value in read]
