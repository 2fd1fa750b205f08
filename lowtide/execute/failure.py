"""What a step that failed half-way had done, so that nobody goes on with a model that is between two steps unawares."""

from __future__ import annotations

import torch

from lowtide.errors import LowtideError, StepError
from lowtide.execute.source import FILE
from lowtide.graph import Graph
from lowtide.program import Program, Run


def failed(graph: Graph, program: Program, reached: int, error: BaseException, state: bytes | None) -> None:
    """Raise an error that says how far the step came; an interruption only gets a note, and goes on as it is.

    `reached` is the instruction that ran, `state` what the generator had before the step: it is put back where the step
    has updated no parameter, so that it can be repeated.
    """
    if reached < 0 and isinstance(error, LowtideError):
        return  # it has its own words, and nothing was changed
    interrupted = not isinstance(error, Exception)
    written = _written(graph, program, reached + interrupted)
    parameters = tuple(dict.fromkeys(name for kind, name in written if kind in ("parameter", "state")))
    buffers = tuple(name for kind, name in written if kind == "buffer")
    gradients = tuple(name for kind, name in written if kind == "gradient")
    if state is not None and not parameters:
        torch.default_generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
    total = sum(graph.values[item.value].kind == "parameter" for item in graph.inputs)
    what = "No parameter and no optimizer state was changed"
    hint = "the step can be repeated."
    if gradients:
        hint = "clear the gradients before the step is repeated."
    if parameters:
        what = f"{len(parameters)} of {total} parameters were updated already"
        hint = "the model is between two steps: load the last checkpoint before going on."
    also = [f"{len(names)} {noun}" for names, noun in ((buffers, "buffers"), (gradients, "gradients")) if names]
    what += f"; {' and '.join(also)} were" if also else ""
    message = f"the step {'was interrupted' if interrupted else 'failed'} {_place(graph, program, reached)}"
    if interrupted:
        error.add_note(f"{message}. {what}: {hint}")
        return
    raise StepError(
        f"{message}: {type(error).__name__}: {_first_line(error)} {what}.",
        hint=hint,
        parameters=parameters,
        buffers=buffers,
    ) from error


def let_go(error: BaseException) -> None:
    """Free the tensors of a step that failed: its error holds the frame that they are in."""
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == FILE:
            trace.tb_frame.clear()
        trace = trace.tb_next


def _written(graph: Graph, program: Program, reached: int) -> list[tuple[str, str]]:
    """The kind and name of each input that the instructions before this one wrote to or, of a gradient, used up."""
    inputs = {item.value: item for item in graph.inputs}
    owner = {graph.values[value].storage: item for value, item in inputs.items()}
    found = []
    for instruction in program.instructions[: max(0, reached)]:
        if isinstance(instruction, Run) and not instruction.again:
            found += [owner[graph.values[old].storage] for _, old in graph.effects[instruction.op]]
    if reached >= 0:  # gradients that the step uses up belong to it from its start
        found += [item for item in inputs.values() if not item.stays]
    return list(dict.fromkeys((graph.values[item.value].kind, str(item.path[0])) for item in found))


def _place(graph: Graph, program: Program, reached: int) -> str:
    instruction = program.instructions[reached] if 0 <= reached < len(program.instructions) else None
    if not isinstance(instruction, Run):
        return "before its first op" if reached < 0 else "while a value was copied"
    op = graph.ops[instruction.op]
    where = ", ".join(filter(None, (op.module, op.source)))
    return f"at {op.name}" + (f" ({where})" if where else "")


def _first_line(error: BaseException) -> str:
    text = (str(error).strip().splitlines() or [""])[0].rstrip(".")
    return f"{text}."
